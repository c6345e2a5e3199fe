"""Iterators: a position in a run of a dataset."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jax import tree_util

from phalanx.core.input_requests import begins_loop, gives_elements
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import open_plan
from phalanx.data.run.element_queue import ElementQueue
from phalanx.data.run.read_ahead import ReadAhead
from phalanx.errors import DataLossError, InvalidValueError, OutOfRangeError
from phalanx.runtime import host_memory
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import uninterrupted
from phalanx.runtime.pickling import StaysHere
from phalanx.runtime.seeding import next_seed


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
                self._seed = next_seed()
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


class _Reading:
    """Reads a plan from some position on, and makes elements of it. A `Producer`."""

    def __init__(self, plan: _Plan, state: Mapping[str, int]) -> None:
        host_memory.expect_input()
        run = Run(state["seed"], (state["epoch"],), deterministic=plan.deterministic)
        self._plan, self._cursor = plan, open_plan(plan.node, run)
        self._index = self._to_skip = state["index"]

    def __iter__(self) -> _Reading:
        return self

    def __next__(self) -> tuple[Any, int]:
        if self._to_skip:
            self._cursor.skip(self._to_skip)
            self._to_skip = 0
        chunk = self._cursor.read(1)
        if chunk is None:
            raise StopIteration
        self._index += 1
        return tree_util.tree_unflatten(self._plan.structure, chunk.element(0)), self._index

    def close(self) -> None:
        self._cursor.close()

    def cancel(self) -> None:
        self._cursor.cancel()


class _Plan:
    """What to read."""

    def __init__(self, node: PlanNode, deterministic: bool) -> None:
        self.node, self.deterministic = node, deterministic
        self.keeps_order = node.keeps_order(deterministic)

    @functools.cached_property
    def structure(self) -> Any:
        """Asked for when something was read: a function's result then has shown it."""
        return self.node.structure


class _Iteration:
    """One iteration. After an interrupt the plan is opened anew, where it was.

    The thread that asks reads, except in two cases: where a plan has another order each time it could
    not be opened anew; and where interrupts come faster than it can be, there would be no end. A thread
    then reads, which nothing interrupts.
    """

    def __init__(self, plan: _Plan, state: Mapping[str, int]) -> None:
        self._plan = plan
        self.epoch, self.seed = state["epoch"], state["seed"]
        self.queue: ElementQueue[int] = ElementQueue(state["index"])
        self._lock = threading.RLock()
        self._reading = _Reading(plan, state)
        self._is_whole = True  # whether nothing has interrupted it
        self._ended = False
        self._opened_after = -1  # how many elements had been taken when it was opened anew
        self._ahead: ReadAhead[int] | None = None

    def state(self) -> dict[str, int]:
        """The position."""
        return {"epoch": self.epoch, "index": self.queue.position, "seed": self.seed}

    def fill(self) -> ElementQueue[int] | None:
        """A queue in which an element waits; None at the end."""
        with self._lock:
            if self.queue.waiting:
                return self.queue
            if self._ended:
                return None
            if not self._is_whole:
                self._open_anew()
            if self._ahead is None and not self._plan.keeps_order:
                self._leave_to_thread()
            found = self._ahead.wait() if self._ahead is not None else self._fill()
            return self.queue if found else None

    def _fill(self) -> bool:
        self._is_whole = False
        try:
            found = next(self._reading, None)
        except DataLossError:
            self._is_whole = True  # sources raise it again and again
            raise
        if found is None:
            self._reading.close()
            self._ended = True
            return False
        self.queue.waiting.append(found)
        self._is_whole = True
        return True

    def _open_anew(self) -> None:
        with contextlib.suppress(Exception):  # its state is unknown
            self._reading.cancel()
            self._reading.close()
        self._reading = _Reading(self._plan, self.state())
        if self._opened_after == self.queue.taken:
            self._leave_to_thread()
        self._opened_after = self.queue.taken

    def _leave_to_thread(self) -> None:
        with uninterrupted():
            ahead: ReadAhead[int] = ReadAhead(self._reading, 0, self.queue)
            weakref.finalize(self, ahead.stop, False)
            self._ahead, self._is_whole = ahead, True

    def close(self) -> None:
        self._reading.cancel()
        if self._ahead is not None:
            self._ahead.stop()
        with self._lock:
            self._ended = True
            if self._ahead is not None:
                self._ahead.stop()
            else:
                self._reading.cancel()  # it may be another one now
                self._reading.close()
            self.queue.waiting.clear()


class ElementIterator(StaysHere):
    """What all iterators share: elements are taken from a queue, and each goes to one thread."""

    instead = (
        "Each worker needs an iterator of its own: give the dataset to "
        "ClusterCoordinator.create_per_worker_dataset."
    )
    _iteration: Any  # what fills the queue
    _end_message: ClassVar[str]

    gives_elements_to_functions = True

    def _queue(self) -> ElementQueue[Any] | None:
        """A queue in which an element waits; None at the end."""
        return self._iteration.fill()

    @begins_loop
    def __iter__(self) -> Self:
        return self

    def _take(self) -> Any:
        """The next element; a StopIteration at the end. See `ElementQueue.take` about interrupts."""
        while (queue := self._queue()) is not None:
            try:
                return queue.take()
            except IndexError:  # another thread was faster
                pass
        raise StopIteration

    @gives_elements
    def __next__(self) -> Any:
        return self._take()

    def _get_next(self) -> Any:
        try:
            return self._take()
        except StopIteration:
            raise OutOfRangeError(self._end_message) from None

    def _mark(self) -> Any:
        elements = self._iteration.queue
        return elements, elements.position, elements.taken

    def _give_back(self, mark: Any, element: Any) -> None:
        elements, before, taken = mark
        elements.give_back(element, before, taken)

    def close(self) -> None:
        """Stop, and give back threads and files. A thread that waits for an element is woken."""
        self._iteration.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Iterator(ElementIterator):
    """Yields the elements of a dataset, and knows where it is.

    It is closed at the end of a ``with`` block, by `close`, or when it is collected. Several
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

    _end_message = "The end of the dataset was reached."

    def __init__(
        self,
        node: PlanNode,
        epochs: Epochs,
        deterministic: bool = True,
        state: Mapping[str, int] | None = None,
    ) -> None:
        self._plan, self._epochs = _Plan(node, deterministic), epochs
        if state is not None:
            state = check_state(state)
            epochs.go_on_from(state)
        self._iteration = _Iteration(self._plan, epochs.start() if state is None else state)

    def __repr__(self) -> str:
        return f"<px.data.Iterator at element {self.state()['index']}>"

    @gives_elements
    def get_next(self) -> Any:
        """The next element; a `px.errors.OutOfRangeError` at the end."""
        return self._get_next()

    def initialize(self) -> None:
        """Start again with the next iteration of the dataset, as the iterators of TensorFlow 1 do."""
        self.restore(self._epochs.start())

    def state(self) -> dict[str, int]:
        """The position, as a small dictionary that can be written as JSON.

        It counts the elements that were delivered, not those that were read ahead. Give it to
        `Dataset.iterator` or `restore` to go on from there.
        """
        return self._iteration.state()

    def restore(self, state: Mapping[str, int]) -> None:
        """Go on from a position that `state` returned.

        Elements before it are passed over, where possible without reading them or calling functions.
        """
        numbers = check_state(state)
        before = self._iteration
        self._epochs.go_on_from(numbers)
        self._iteration = _Iteration(self._plan, numbers)
        before.close()
