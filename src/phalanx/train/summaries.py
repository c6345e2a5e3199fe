"""Summaries: numbers, images and texts of a program for TensorBoard, from eager and compiled code.

In replicas the first one writes, and of several workers the first one: the others compute the same.
Compiled code writes when it runs, not when it is traced.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax import lax

from phalanx.collectives import groups
from phalanx.core import context as ctx
from phalanx.core.name_scopes import in_scope
from phalanx.core.replica_context import index_of, is_compiled
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer
from phalanx.runtime.placement import REPLICA_AXIS
from phalanx.train import event_files
from phalanx.train.event_files import EventFile


class Recording(NamedTuple):
    """Which writer summaries go to, at which step, and whether they are recorded."""

    writer: SummaryWriter | None = None
    step: Any = None
    condition: Any = True


_recording: ContextVar[Recording] = ContextVar("recording", default=Recording())  # noqa: B039


@contextlib.contextmanager
def _with(**changes: Any) -> Iterator[None]:
    before = _recording.set(_recording.get()._replace(**changes))
    try:
        yield
    finally:
        _recording.reset(before)


class SummaryWriter:
    """Writes summaries to a directory; `create_file_writer` makes it.

    Use it as a context manager, or ``with writer.as_default():``. Of the workers of a job only the
    first one writes.
    """

    def __init__(self, file: EventFile | None) -> None:
        self._file = file

    def __repr__(self) -> str:
        where = "nowhere" if self._file is None else shown(self._file.logdir)
        return f"<px.summary writer to {where}>"

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[Self]:
        """Make this the writer that summaries go to, with a step for those that name none."""
        changes = {"writer": self} | ({} if step is None else {"step": step})
        try:
            with _with(**changes):
                yield self
        finally:
            if not compat.is_staging():
                self.flush()

    def set_as_default(self, step: Any = None) -> None:
        """Make this the writer of all summaries that follow."""
        changes = {"writer": self} | ({} if step is None else {"step": step})
        _recording.set(_recording.get()._replace(**changes))

    def init(self) -> None:
        """Nothing to do: a writer is ready when it is made."""

    def add(self, step: int, value: bytes) -> None:
        """Write one value, unless this is another worker than the first."""
        if self._file is not None and _writes():
            self._file.add(step, value)

    def flush(self) -> None:
        """Have all summaries in the file, also those of compiled code that is still running."""
        jax.effects_barrier()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        jax.effects_barrier()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        self._scope = self.as_default()
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)
        self.close()


def _writes() -> bool:
    """Whether this process is the one that writes files."""
    return not groups.is_initialized() or groups.world().rank == 0


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
) -> SummaryWriter:
    """A writer of event files, which TensorBoard shows.

    Args:
        logdir: the directory.
        max_queue: how many summaries are kept before they are written; 10 by default.
        flush_millis: accepted for ported code; `max_queue` and `flush` say when to write.
        filename_suffix: what the name of the file ends with.
        name: accepted for ported code.

    Examples:
        >>> import phalanx as px, tempfile, os
        >>> logs = tempfile.mkdtemp()
        >>> with px.summary.create_file_writer(logs).as_default(step=3):
        ...     px.summary.scalar("loss", 0.5)
        True
        >>> [name.split(".")[2] for name in os.listdir(logs)]
        ['tfevents']
    """
    if not isinstance(logdir, str | os.PathLike):
        raise InvalidTypeError(f"logdir must be a path. Received: {shown(logdir)}")
    del flush_millis, name
    most = 10 if max_queue is None else check_integer(max_queue, "max_queue", 1, 2**31 - 1)
    return SummaryWriter(EventFile(logdir, filename_suffix or ".v2", most))


def create_noop_writer() -> SummaryWriter:
    """A writer that writes nothing."""
    return SummaryWriter(None)


def flush(writer: SummaryWriter | None = None) -> None:
    """Have all summaries of a writer in its file; of the default one if none is given."""
    chosen = writer or _recording.get().writer
    if chosen is not None:
        chosen.flush()


@contextlib.contextmanager
def record_if(condition: Any) -> Iterator[None]:
    """Record summaries only if a condition holds: a bool, an array, or a function that gives one.

    Examples:
        >>> import phalanx as px
        >>> with px.summary.create_noop_writer().as_default(step=0), px.summary.record_if(False):
        ...     px.summary.should_record_summaries()
        False
    """
    with _with(condition=condition):
        yield


def should_record_summaries() -> Any:
    """Whether summaries are recorded here: there is a writer, and `record_if` does not say no."""
    _, _, condition = now = _recording.get()
    if now.writer is None:
        return False
    found = condition() if callable(condition) else condition
    return found if compat.is_tracer(found) else bool(_plain(found))


def set_step(step: Any) -> None:
    """Set the step of summaries that name none: a number, or a variable that counts."""
    _recording.set(_recording.get()._replace(step=step))


def get_step() -> Any:
    """The step of summaries that name none."""
    return _recording.get().step


# -- what is written ------------------------------------------------------------------------------


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """Write a number.

    Args:
        name: what TensorBoard calls it; parts are divided by slashes.
        data: the number.
        step: an integer, or a variable that counts; what `as_default` or `set_step` said by default.
        description: a text about it.

    Returns:
        Whether it was recorded.
    """
    return _record(
        name, data, step, functools.partial(event_files.scalar_value, description=description)
    )


def image(
    name: str, data: Any, step: Any = None, max_outputs: int = 3, description: str | None = None
) -> Any:
    """Write images: an array [batch, height, width, channels] of bytes, or of numbers from 0 to 1."""
    most = check_integer(max_outputs, "max_outputs", 0, 2**31 - 1)
    make = functools.partial(event_files.image_value, max_outputs=most, description=description)
    return _record(name, data, step, make)


def histogram(
    name: str, data: Any, step: Any = None, buckets: int | None = None, description: str | None = None
) -> Any:
    """Write how the elements of an array are distributed, in 30 intervals or in `buckets`."""
    count = None if buckets is None else check_integer(buckets, "buckets", 0, 2**20)
    make = functools.partial(event_files.histogram_value, buckets=count, description=description)
    return _record(name, data, step, make)


def text(name: str, data: Any, step: Any = None, description: str | None = None) -> Any:
    """Write a text, or an array of texts, in Markdown."""
    return _record(name, data, step, functools.partial(event_files.text_value, description=description))


def _record(name: str, data: Any, step: Any, make: Callable[[str, Any], bytes]) -> Any:
    if not isinstance(name, str) or not name:
        raise InvalidTypeError(f"A summary needs a name. Received: {shown(name)}")
    writer, usual, _ = _recording.get()
    chosen = usual if step is None else step
    recorded = should_record_summaries()
    if writer is None or (not compat.is_tracer(recorded) and not recorded):
        return False
    if chosen is None:
        raise InvalidValueError(
            "A summary needs a step: px.summary.scalar(name, value, step=step), or "
            f"writer.as_default(step=step). Received: step=None for {shown(name)}"
        )
    replica = ctx.active_replica()
    first: Any = True
    if replica is not None and replica.num_replicas_in_sync > 1:
        first = lax.axis_index(REPLICA_AXIS) == 0 if is_compiled(replica) else _is_first(replica)
    if first is False:
        return False
    values = [_as_array(x) for x in (data, chosen, recorded, first)]
    tag = in_scope(name)
    if any(map(compat.is_tracer, values)) or compat.is_staging():
        known = {i: x for i, x in enumerate(values) if not isinstance(x, jax.Array)}
        traced = [x for i, x in enumerate(values) if i not in known]
        jax.debug.callback(functools.partial(_arrived, writer, tag, make, known), *traced)
        return recorded
    _write(writer, tag, make, *values)
    return recorded


def _is_first(replica: Any) -> bool:
    return index_of(replica) + replica.strategy.extended._first_replica == 0


def _as_array(x: Any) -> Any:
    if isinstance(x, Mirrored | PerReplica):
        return x.component(0)
    return x.value() if isinstance(x, Variable) else x


def _plain(x: Any) -> Any:
    return np.asarray(_as_array(x))


def _arrived(
    writer: SummaryWriter,
    tag: str,
    make: Callable[[str, Any], bytes],
    known: dict[int, Any],
    *rest: Any,
) -> None:
    """Write what compiled code has computed."""
    others = iter(rest)
    _write(writer, tag, make, *(known[i] if i in known else next(others) for i in range(4)))


def _write(
    writer: SummaryWriter, tag: str, make: Callable[[str, Any], bytes], data: Any, *others: Any
) -> None:
    step, recorded, first = others
    if bool(np.asarray(recorded)) and bool(np.asarray(first)):
        kept = data if isinstance(data, str | bytes | list) else np.asarray(data)
        writer.add(int(np.asarray(step)), make(tag, kept))
