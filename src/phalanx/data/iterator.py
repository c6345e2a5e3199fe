"""Iterators: a position in a run of a dataset."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax import tree_util

from phalanx.core.errors import InvalidValueError, OutOfRangeError
from phalanx.data.elements import structure_of
from phalanx.data.node import Cursor, Node, Run, open_plan

if TYPE_CHECKING:
    from types import TracebackType


class Epochs:
    """Counts how often a dataset was iterated, and keeps its root seed. Shared by its iterators."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seed: int | None = None
        self._next = 0

    def start(self) -> dict[str, int]:
        """The position at which the next iteration starts."""
        import secrets

        with self._lock:
            if self._seed is None:
                self._seed = secrets.randbits(63)
            epoch, self._next = self._next, self._next + 1
            return {"epoch": epoch, "index": 0, "seed": self._seed}

    def go_on_from(self, state: Mapping[str, int]) -> None:
        """Let the next iteration be the one after that of `state`."""
        with self._lock:
            self._seed, self._next = state["seed"], state["epoch"] + 1


class Iterator:
    """Yields the elements of a dataset, and knows where it is."""

    def __init__(self, node: Node, epochs: Epochs, deterministic: bool = True) -> None:
        self._node, self._epochs, self._deterministic = node, epochs, deterministic
        self._lock = threading.Lock()
        self._cursor: Cursor | None = None
        self._structure: Any = None
        self._start(epochs.start())

    def _start(self, state: Mapping[str, int]) -> None:
        self._epoch, self._seed, self._index = state["epoch"], state["seed"], state["index"]
        run = Run(self._seed, (self._epoch,), deterministic=self._deterministic)
        self._cursor = open_plan(self._node, run)
        self._pending = self._index

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._cursor is None:
                raise StopIteration
            if self._pending:
                pending, self._pending = self._pending, 0
                self._cursor.skip(pending)
            chunk = self._cursor.read(1)
            if chunk is None:
                raise StopIteration
            self._index += 1
            if self._structure is None:
                self._structure = structure_of(self._node.element_spec)
            return tree_util.tree_unflatten(self._structure, chunk.element(0))

    def get_next(self) -> Any:
        """The next element; an `OutOfRangeError` at the end."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The end of the dataset was reached.") from None

    def state(self) -> dict[str, int]:
        """The position as a small dictionary that can be written as JSON."""
        return {"epoch": self._epoch, "index": self._index, "seed": self._seed}

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a position that `state` returned."""
        self.close()
        self._epochs.go_on_from(state)
        with self._lock:
            self._start(state)

    def close(self) -> None:
        """Stop, and give back threads and files."""
        cursor = self._cursor
        if cursor is not None:
            cursor.cancel()
            with self._lock:
                cursor.close()
                self._cursor = None

    def __enter__(self) -> Iterator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
