"""Iterators: a position in a run of a dataset."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from jax import tree_util

from phalanx.core import host_memory
from phalanx.core.errors import InvalidValueError, OutOfRangeError
from phalanx.core.pulls import begins_loop, gives_elements
from phalanx.data.node import Cursor, Node, Run, open_plan


class Epochs:
    """Counts how often a dataset was iterated, and keeps its root seed. Shared by its iterators."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seed: int | None = None
        self._next = 0

    def start(self) -> dict[str, int]:
        """The position at which the next iteration starts."""
        with self._lock:
            if self._seed is None:
                self._seed = secrets.randbits(63)
            epoch, self._next = self._next, self._next + 1
            return {"epoch": epoch, "index": 0, "seed": self._seed}

    def go_on_from(self, state: Mapping[str, int]) -> None:
        """Let the next iteration be the one after that of `state`."""
        with self._lock:
            self._seed, self._next = state["seed"], state["epoch"] + 1


def check_state(state: Any) -> dict[str, int]:
    """The position that a user gives."""
    numbers = dict(state) if isinstance(state, Mapping) else {}
    for key in ("epoch", "index", "seed"):
        value = numbers.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidValueError(
                "A state is what Iterator.state() returned: a dictionary with the numbers epoch, index "
                f"and seed. Received: {state!r}"
            )
    return numbers


class Iterator:
    """Yields the elements of a dataset, and knows where it is.

    It is closed at the end of a ``with`` block, by `close`, or when nobody has it any more.

    Examples:
        >>> import phalanx as px
        >>> dataset = px.data.Dataset.range(6).shuffle(6, seed=1).batch(2)
        >>> with iter(dataset) as batches:
        ...     first = next(batches)
        ...     state = batches.state()
        ...     second = next(batches)
        >>> (next(dataset.iterator(state)) == second).all()
        np.True_
    """

    def __init__(
        self,
        node: Node,
        epochs: Epochs,
        deterministic: bool = True,
        state: Mapping[str, int] | None = None,
    ) -> None:
        self._node, self._epochs, self._deterministic = node, epochs, deterministic
        self._lock = threading.RLock()
        self._cursor: Cursor | None = None
        self._structure: Any = None
        if state is None:
            self._open(epochs.start())
        else:
            self.restore(state)

    def _open(self, state: Mapping[str, int]) -> None:
        self._epoch, self._seed, self._index = state["epoch"], state["seed"], state["index"]
        run = Run(self._seed, (self._epoch,), deterministic=self._deterministic)
        host_memory.expect_input()
        self._cursor = open_plan(self._node, run)
        self._to_skip = self._index

    gives_elements_to_functions = True

    @begins_loop
    def __iter__(self) -> Iterator:
        return self

    @gives_elements
    def __next__(self) -> Any:
        with self._lock:
            if self._cursor is None:
                raise StopIteration
            if self._to_skip:
                count, self._to_skip = self._to_skip, 0
                self._cursor.skip(count)
            chunk = self._cursor.read(1)
            if chunk is None:
                self._cursor.close()
                self._cursor = None
                raise StopIteration
            self._index += 1
            if self._structure is None:
                self._structure = self._node.structure
            return tree_util.tree_unflatten(self._structure, chunk.element(0))

    @gives_elements
    def get_next(self) -> Any:
        """The next element; a `px.errors.OutOfRangeError` at the end."""
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError("The end of the dataset was reached.") from None

    def state(self) -> dict[str, int]:
        """The position, as a small dictionary that can be written as JSON.

        It counts the elements that were delivered, not those that were read ahead. Give it to
        `Dataset.iterator` or `restore` to go on from there.
        """
        with self._lock:
            return {"epoch": self._epoch, "index": self._index, "seed": self._seed}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a position that `state` returned.

        Elements before it are passed over, where possible without reading them or calling functions.
        """
        numbers = check_state(state)
        self.close()
        with self._lock:
            self._epochs.go_on_from(numbers)
            self._open(numbers)

    def close(self) -> None:
        """Stop, and give back threads and files. Whoever waits for an element is woken."""
        cursor = self._cursor
        if cursor is None:
            return
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
