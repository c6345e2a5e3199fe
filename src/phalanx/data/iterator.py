"""Iterators: a position in a run of a dataset."""

from __future__ import annotations

import contextlib
import secrets
import threading
import weakref
from collections.abc import Iterator as Yields
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from jax import tree_util

from phalanx.core import host_memory
from phalanx.core.errors import DataLossError, InvalidValueError, OutOfRangeError
from phalanx.core.interrupts import uninterrupted
from phalanx.core.pulls import begins_loop, gives_elements
from phalanx.core.showing import shown
from phalanx.data.background import Ahead
from phalanx.data.handover import Elements
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
                f"and seed. Received: {shown(state)}"
            )
    return numbers


class _Plan:
    """What to read, and how to make elements of it."""

    def __init__(self, node: Node, deterministic: bool) -> None:
        self.node, self._deterministic = node, deterministic
        self.keeps_order = node.keeps_order(deterministic)
        self._structure: Any = None

    def open(self, seed: int, epoch: int) -> Cursor:
        host_memory.expect_input()
        return open_plan(self.node, Run(seed, (epoch,), deterministic=self._deterministic))

    def read(self, cursor: Cursor) -> tuple[Any] | None:
        """The next element, in a tuple of its own; None at the end."""
        chunk = cursor.read(1)
        if chunk is None:
            return None
        if self._structure is None:
            self._structure = self.node.structure
        return (tree_util.tree_unflatten(self._structure, chunk.element(0)),)


class _Reading:
    """One iteration. After an interrupt the plan is opened anew, where it was.

    It is read by whoever asks, except in two cases: where a plan has another order each time it could
    not be opened anew; and where interrupts come faster than it can be, there would be no end. A thread
    then reads, which nothing interrupts.
    """

    def __init__(self, plan: _Plan, state: Mapping[str, int]) -> None:
        self._plan = plan
        self.epoch, self.seed = state["epoch"], state["seed"]
        self.elements: Elements[int] = Elements(state["index"])
        self._lock = threading.RLock()
        self._cursor = plan.open(self.seed, self.epoch)
        self._to_skip = state["index"]
        self._is_whole = True  # whether nothing has interrupted the cursor
        self._ended = False
        self._opened_after = -1  # how many elements had been taken when it was opened anew
        self._ahead: Ahead[int] | None = None

    def fill(self) -> bool:
        """Have an element wait; False at the end."""
        with self._lock:
            if self.elements.waiting:
                return True
            if self._ended:
                return False
            if not self._is_whole:
                self._open_anew()
            if self._ahead is None and not self._plan.keeps_order:
                self._leave_to_thread()
            return self._ahead.wait() if self._ahead is not None else self._fill()

    def _fill(self) -> bool:
        self._is_whole = False
        try:
            if self._to_skip:
                self._cursor.skip(self._to_skip)
                self._to_skip = 0
            found = self._plan.read(self._cursor)
        except DataLossError:
            self._is_whole = True  # sources raise it again and again
            raise
        if found is None:
            self._cursor.close()
            self._ended = True
            return False
        self.elements.waiting.append((found[0], self.elements.position + 1))
        self._is_whole = True
        return True

    def _open_anew(self) -> None:
        with contextlib.suppress(Exception):  # nobody knows in which state it is
            self._cursor.cancel()
            self._cursor.close()
        self._cursor = self._plan.open(self.seed, self.epoch)
        self._to_skip = self.elements.position
        if self._opened_after == self.elements.taken:
            self._leave_to_thread()
        self._opened_after = self.elements.taken

    def _leave_to_thread(self) -> None:
        work = _Work(self._plan, self._cursor, self._to_skip)
        with uninterrupted():
            ahead: Ahead[int] = Ahead(work, 0, self.elements)
            weakref.finalize(self, ahead.stop, False)
            self._ahead, self._is_whole = ahead, True

    def close(self) -> None:
        self._cursor.cancel()
        if self._ahead is not None:
            self._ahead.stop()
        with self._lock:
            self._ended = True
            if self._ahead is not None:
                self._ahead.stop()
            else:
                self._cursor.cancel()  # it may be another one now
                self._cursor.close()
            self.elements.waiting.clear()


class _Work:
    """Reads a plan from some position on."""

    def __init__(self, plan: _Plan, cursor: Cursor, index: int) -> None:
        self._plan, self._cursor, self._index = plan, cursor, index

    def __call__(self) -> Yields[tuple[Any, int]]:
        try:
            if self._index:
                self._cursor.skip(self._index)
            while (found := self._plan.read(self._cursor)) is not None:
                self._index += 1
                yield found[0], self._index
                del found
        finally:
            self._cursor.close()

    def cancel(self) -> None:
        self._cursor.cancel()


class Iterator:
    """Yields the elements of a dataset, and knows where it is.

    It is closed at the end of a ``with`` block, by `close`, or when nobody has it any more. Several
    threads may use it; each element goes to one of them.

    After an exception, also one of a signal handler such as KeyboardInterrupt, it goes on with the
    element that was not delivered. A plan that was interrupted is opened anew and passes over what was
    delivered, as `restore` does; generator functions are then called again.

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
        self._plan, self._epochs = _Plan(node, deterministic), epochs
        if state is not None:
            state = check_state(state)
            epochs.go_on_from(state)
        self._reading = _Reading(self._plan, epochs.start() if state is None else state)

    def __repr__(self) -> str:
        return f"<px.data.Iterator at element {self.state()['index']}>"

    gives_elements_to_functions = True

    @begins_loop
    def __iter__(self) -> Iterator:
        return self

    @gives_elements
    def __next__(self) -> Any:
        while True:
            reading = self._reading
            elements = reading.elements
            if not elements.waiting and not reading.fill():
                raise StopIteration
            try:
                return elements.take()
            except IndexError:  # another thread was faster
                pass

    @gives_elements
    def get_next(self) -> Any:
        """The next element; a `px.errors.OutOfRangeError` at the end."""
        while True:
            reading = self._reading
            elements = reading.elements
            if not elements.waiting and not reading.fill():
                raise OutOfRangeError("The end of the dataset was reached.")
            try:
                return elements.take()
            except IndexError:  # another thread was faster
                pass

    def _mark(self) -> Any:
        elements = self._reading.elements
        return elements, elements.position, elements.taken

    def _give_back(self, mark: Any, element: Any) -> None:
        elements, before, taken = mark
        elements.give_back(element, before, taken)

    def state(self) -> dict[str, int]:
        """The position, as a small dictionary that can be written as JSON.

        It counts the elements that were delivered, not those that were read ahead. Give it to
        `Dataset.iterator` or `restore` to go on from there.
        """
        reading = self._reading
        return {"epoch": reading.epoch, "index": reading.elements.position, "seed": reading.seed}

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a position that `state` returned.

        Elements before it are passed over, where possible without reading them or calling functions.
        """
        numbers = check_state(state)
        before = self._reading
        self._epochs.go_on_from(numbers)
        self._reading = _Reading(self._plan, numbers)
        before.close()

    def close(self) -> None:
        """Stop, and give back threads and files. Whoever waits for an element is woken."""
        self._reading.close()

    def __enter__(self) -> Iterator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
