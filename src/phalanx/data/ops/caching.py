"""Keeping the elements of a first pass, in memory or in a file."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.ops.cache_files import FileStore, FileWriter
from phalanx.data.plan.columns import Chunk, read_only
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.nodes import Rows, SameElements
from phalanx.data.plan.opening import open_plan
from phalanx.errors import InvalidValueError


class MemoryStore:
    """Keeps elements in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: Rows | None = None

    def __reduce__(self) -> Any:
        return MemoryStore, ()

    def rows(self) -> Rows | None:
        """The elements as columns."""
        return self._rows

    def open(self) -> Cursor | None:
        """Never needed, because there are rows."""
        return None

    def writer(self) -> MemoryWriter:
        """Begin to keep the elements of a pass."""
        return MemoryWriter(self)

    def publish(self, chunks: list[Chunk]) -> None:
        """Keep the elements of a whole pass, unless another pass was faster."""
        with self._lock:
            if self._rows is None:
                whole = Chunk.concat(chunks) if chunks else Chunk((), 0)
                self._rows = Rows(tuple(read_only(c) for c in whole.columns), whole.count)


class MemoryWriter:
    """Collects the chunks of a pass."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._chunks: list[Chunk] = []
        self.add, self.abort = self._chunks.append, self._chunks.clear

    def commit(self) -> None:
        """Let others use what was collected."""
        self._store.publish(self._chunks)
        self._chunks.clear()


@dataclass(frozen=True, eq=False)
class Cache(SameElements):
    """The elements of the input, which is read only once.

    What is kept belongs to the node: plans that share it share the elements. What is read does not
    depend on when it is read, because the input is always run as in its first pass.
    """

    filename: str = ""
    store: FileStore | MemoryStore = field(init=False)
    probe_below = True
    starts_anew = True

    def __post_init__(self) -> None:
        store = FileStore(self.filename) if self.filename else MemoryStore()
        object.__setattr__(self, "store", store)

    def size(self, *inputs: int) -> int:
        """As many as before."""
        rows = self.store.rows()
        return inputs[0] if rows is None else rows.count

    def rows(self) -> Rows | None:
        """What is kept, once it is complete. Arrays in memory need not be kept again."""
        below = None if self.filename else self.input.rows()
        rows = below or self.store.rows()
        if rows is not None and rows is not below:
            self._check(rows)
        return rows

    def _check(self, rows: Rows) -> None:
        """A file may have been written by another plan."""
        known = self.input.known_spec()
        if not self.filename or known is None or not rows.count:
            return
        have = [column.dtype for column in rows.columns if not isinstance(column, list)]
        want = [spec.dtype for spec in tree_util.tree_leaves(known) if isinstance(spec, TensorSpec)]
        if have != want:
            raise InvalidValueError(
                f"The cache file {self.filename!r} was written by another dataset; remove it or choose "
                f"another name. Received: dtypes {have} in the file and {want} in the dataset"
            )

    def open(self, run: Run) -> Cursor:
        """Read what is kept, or read the input and keep it."""
        kept = self.store.open()
        if kept is not None:
            return kept
        input_ = open_plan(self.input, run.first_pass().in_branch(-2))
        return _FillingCursor(input_, self.store.writer())


class _FillingCursor(Cursor):
    def __init__(self, input_: Cursor, writer: FileWriter | MemoryWriter) -> None:
        self.inputs = (input_,)
        self._writer = writer
        self._ended = False
        self._abort = weakref.finalize(self, writer.abort)

    def read(self, limit: int) -> Chunk | None:
        if self._ended:
            return None
        chunk = self.inputs[0].read(limit)
        if chunk is None:
            self._ended = True
            self._writer.commit()
            return None
        chunk = Chunk([read_only(column) for column in chunk.columns], chunk.count)
        self._writer.add(chunk)
        return chunk

    def close(self) -> None:
        self._ended = True
        self._abort()
        super().close()
