"""Looking into checkpoints without the objects that they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.errors import NotFoundError
from phalanx.runtime.formatting import shown
from phalanx.train.checkpoints.checkpoint import open_checkpoint
from phalanx.train.checkpoints.directories import is_checkpoint
from phalanx.train.checkpoints.state import latest_checkpoint, path_of

__all__ = ["CheckpointReader", "list_variables", "load_checkpoint", "load_variable"]


class CheckpointReader:
    """Reads arrays of a checkpoint by name; made by `load_checkpoint`.

    Args:
        path: the directory of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._saved = open_checkpoint(path)

    def get_tensor(self, tensor_str: str) -> np.ndarray[Any, Any]:
        """An array."""
        self._check(tensor_str)
        return self._saved.read(tensor_str)

    def has_tensor(self, tensor_str: str) -> bool:
        """Whether there is an array with this name."""
        return tensor_str in self._saved.entries

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """The shapes of all arrays, by name."""
        return {name: list(entry.shape) for name, entry in sorted(self._saved.entries.items())}

    def get_variable_to_dtype_map(self) -> dict[str, Any]:
        """The dtypes of all arrays, by name."""
        return {n: jnp.dtype(entry.dtype) for n, entry in sorted(self._saved.entries.items())}

    def verify(self) -> None:
        """Read everything, and raise a `px.errors.DataLossError` that names what is damaged."""
        for name in self._saved.entries:
            self._saved.verify(name)

    def _check(self, name: str) -> None:
        if name not in self._saved.entries:
            raise NotFoundError(
                f"The checkpoint has no such array; it has {sorted(self._saved.entries)}. "
                f"Received: {shown(name)}"
            )


def load_checkpoint(ckpt_dir_or_file: str) -> CheckpointReader:
    """A reader of a checkpoint, or of the newest one of a directory.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = px.train.Checkpoint(w=px.Variable([1.0, 2.0])).save(f"{folder}/ckpt")
        ...     reader = px.train.load_checkpoint(folder)
        ...     reader.verify()
        ...     reader.get_tensor("w").tolist(), reader.has_tensor("b")
        ([1.0, 2.0], False)
    """
    path = path_of(ckpt_dir_or_file)
    if not is_checkpoint(path):
        path = Path(latest_checkpoint(str(path)) or path)
    return CheckpointReader(path)


def load_variable(ckpt_dir_or_file: str, name: str) -> np.ndarray[Any, Any]:
    """An array of a checkpoint, or of the newest one of a directory.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = px.train.Checkpoint(w=px.Variable([1.0, 2.0])).save(f"{folder}/ckpt")
        ...     px.train.load_variable(path, "w").tolist()
        [1.0, 2.0]
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: str) -> list[tuple[str, list[int]]]:
    """The names and shapes of the arrays in a checkpoint, or in the newest one of a directory.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = px.train.Checkpoint(w=px.Variable([1.0, 2.0])).save(f"{folder}/ckpt")
        ...     px.train.list_variables(folder)
        [('save_counter', []), ('w', [2])]
    """
    return list(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())
