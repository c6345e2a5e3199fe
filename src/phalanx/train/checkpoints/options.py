"""`CheckpointOptions`: how a checkpoint is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = ["CheckpointOptions", "as_options"]

FORMATS = ("phalanx", "orbax")


@dataclass(frozen=True)
class CheckpointOptions:
    """How a checkpoint is written.

    Args:
        experimental_io_device: of TensorFlow; means nothing here.
        experimental_enable_async_checkpoint: an older name of `enable_async`.
        experimental_write_callbacks: called when a checkpoint is there, with its path if they take an
            argument.
        enable_async: whether `save` returns at once, and the checkpoint is written in another thread.
            It has the values of this moment, and training goes on. A failure is raised by the next
            call of `save`, `sync` or `restore`.
        format: "phalanx", or "orbax", which other tools read and which needs ``phalanx[orbax]``.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> w = px.Variable(1.0)
        >>> checkpoint = px.train.Checkpoint(w=w)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     options = px.train.CheckpointOptions(enable_async=True)
        ...     path = checkpoint.save(f"{folder}/ckpt", options)
        ...     _ = w.assign(2.0)
        ...     checkpoint.sync()
        ...     float(px.train.load_variable(path, "w"))
        1.0
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[..., Any]] | None = None
    enable_async: bool = False
    format: str = "phalanx"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InvalidValueError(
                f"`format` must be one of {', '.join(FORMATS)}. Received: {shown(self.format)}"
            )
        for callback in self.experimental_write_callbacks or ():
            if not callable(callback):
                raise InvalidTypeError(
                    f"`experimental_write_callbacks` must be functions. Received: {shown(callback)}"
                )

    @property
    def is_async(self) -> bool:
        """Whether `save` returns at once."""
        return self.enable_async or self.experimental_enable_async_checkpoint


def as_options(given: Any) -> CheckpointOptions:
    """Options that the user gave, or the usual ones."""
    if given is None:
        return CheckpointOptions()
    if not isinstance(given, CheckpointOptions):
        raise InvalidTypeError(
            f"`options` must be px.train.CheckpointOptions or None. Received: {shown(given)}"
        )
    return given
