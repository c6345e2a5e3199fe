"""Datasets made of elements: flat_map reads them one after the other, interleave in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import LeafBase, merge_specs
from phalanx.data.plan.functions import Function, caller, function_error
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, ParallelNode, PlanNode
from phalanx.data.plan.opening import first_element, open_plan
from phalanx.data.run.parallel_map import POLL
from phalanx.data.run.thread_pool import PendingCall, ThreadPool, threads_for
from phalanx.errors import CancelledError, InvalidTypeError
from phalanx.runtime.formatting import shown

MOST_DATASETS = 2**20
"""How many datasets may be open at the same time."""


class _Inner:
    """The first dataset that the function made; all others must be like it."""

    node: PlanNode | None = None


@dataclass(frozen=True, eq=False)
class Interleave(ParallelNode):
    """The elements of the datasets that a function makes of the elements of the input.

    `cycle_length` of them are open at the same time, and `block_length` elements are taken from each in
    turn. With a cycle of one they come one after the other, whatever the length of a block.
    """

    fn: Function
    cycle_length: int = 1
    block_length: int | None = None
    parallel_calls: int | None = None
    deterministic: bool | None = None
    what: str = "flat_map"
    inner: _Inner = field(init=False, default_factory=_Inner)

    def known_spec(self) -> Any | None:
        """The spec of a dataset that the function made."""
        return None if self.inner.node is None else self.inner.node.known_spec()

    def has_sure_shapes(self) -> bool:
        """The next dataset may have others."""
        return False

    @property
    def element_spec(self) -> Any:
        """Found out by calling the function for the first element."""
        if self.inner.node is None:
            self.inner.node = self.maker()(first_element(self.inputs[0]).element(0), 0)
        return self.inner.node.element_spec

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return 0 if inputs[0] == 0 else INFINITE if inputs[0] == INFINITE else UNKNOWN

    def maker(self) -> Callable[[Sequence[Any], int], PlanNode]:
        """The function from the leaves of an element and its number to the plan of a dataset."""
        call: Callable[[Sequence[Any]], Any] | None = None

        def make(leaves: Sequence[Any], index: int) -> PlanNode:
            nonlocal call
            if call is None:
                call = caller(self.fn, self.inputs[0].structure)
            try:
                dataset = call(leaves)
            except Exception as error:
                raise function_error(self.what, f"element {index}", error) from error
            if not isinstance(dataset, LeafBase):
                raise InvalidTypeError(
                    f"The function given to {self.what} must return a dataset. "
                    f"Received: {shown(dataset)} for element {index}"
                )
            return dataset._node

        return make

    def check(self, node: PlanNode) -> None:
        """Compare the elements of another dataset with those of the first; called once one was read."""
        if self.inner.node is None or self.inner.node is node:
            self.inner.node = node
            return
        first, other = self.inner.node.known_spec(), node.known_spec()
        if first is not None and other is not None:
            merge_specs(first, other, self.what)

    def open(self, run: Run) -> Cursor:
        """Open datasets as they are needed."""
        return _InterleaveCursor(self, run)


_MOST_AHEAD = 256
"""How many elements of one dataset a thread reads ahead at most."""

_MOST_BYTES_AHEAD = 2**20
"""How many bytes these elements have at most, if that is more than a block."""


class _Slot:
    """One of the datasets that are open, read by the reader itself."""

    def __init__(self, node: PlanNode, run: Run) -> None:
        self.node = node
        self._cursor = open_plan(node, run)
        self._held: Chunk | None = None  # what was read, and is not used up
        self._failure: Exception | None = None
        self.left = 0  # how many elements of the block are still to come
        self.checked = False  # whether its elements are known to be like those of others

    @property
    def at_hand(self) -> int:
        """How many elements can be taken."""
        return 0 if self._held is None else self._held.count

    def fill(self, count: int) -> bool:
        """Have elements at hand, at most `count` if there were none; False at the end."""
        if self._held is None:
            if self._failure is not None:
                raise self._failure
            try:
                self._held = self._read(count)
            except Exception as error:
                self._failure = error
                raise
        return self._held is not None

    def _read(self, count: int) -> Chunk | None:
        return self._cursor.read(count)

    def take(self, count: int) -> Chunk:
        """Up to `count` of the elements at hand."""
        assert self._held is not None
        chunk, self._held = self._held.split(count)
        return chunk

    def skip(self, count: int) -> int:
        return self.take(count).count if self.at_hand else self._cursor.skip(count)

    @property
    def ready(self) -> bool:
        """Whether filling would not wait for a thread."""
        return True

    def cancel(self) -> None:
        self._cursor.cancel()

    def close(self) -> None:
        self._cursor.close()


class _ParallelSlot(_Slot):
    """One of the datasets that are open; threads read its next elements while others are used.

    They read one block first, and more at once as long as the dataset goes on, up to a limit.
    """

    def __init__(self, node: PlanNode, run: Run, pool: ThreadPool, block: int) -> None:
        super().__init__(node, run)
        self._pool, self._block, self._size = pool, block, block
        self._cancelled = False
        self.coming: PendingCall[Chunk | None] = self._ask()

    def _ask(self) -> PendingCall[Chunk | None]:
        return self._pool.submit(self._cursor.read, self._size)

    def _read(self, count: int) -> Chunk | None:
        while not self.coming.done and not self._cancelled:
            self._pool.wait([self.coming], POLL)
        if self._cancelled:
            raise CancelledError("The iterator was closed while it was read.")
        chunk = self.coming.result()
        if chunk is not None:
            most = min(_MOST_AHEAD, _MOST_BYTES_AHEAD // max(1, _size_of(chunk.element(0))))
            self._size = max(self._block, min(2 * self._size, most))
            self.coming = self._ask()
        return chunk

    def skip(self, count: int) -> int:
        return self.take(count).count if self.fill(count) else 0

    @property
    def ready(self) -> bool:
        return self._held is not None or self.coming.done

    def cancel(self) -> None:
        self._cancelled = True
        super().cancel()


def _size_of(leaves: Sequence[Any]) -> int:
    """About how many bytes an element has."""
    return sum(leaf.nbytes if hasattr(leaf, "nbytes") else _length(leaf) for leaf in leaves)


def _length(leaf: Any) -> int:
    return len(leaf) if isinstance(leaf, str | bytes) else 64


class _InterleaveCursor(Cursor):
    def __init__(self, node: Interleave, run: Run) -> None:
        self._node, self._run = node, run
        self.inputs = (open_plan(node.inputs[0], run.in_branch(-1)),)
        self._make = node.maker()
        self._slots: list[_Slot | None] = [None] * node.cycle_length
        self._turn = 0
        self._opened = 0
        self._input_ended = False
        self._pool: ThreadPool | None = None
        self._any_order = not node.is_ordered(run.deterministic)
        self._failure: Exception | None = None

    # The order is TensorFlow's: a dataset that ends gives up its turn, and its place is filled when its
    # turn comes again.

    def read(self, limit: int) -> Chunk | None:
        """Elements of the next blocks."""
        if self._failure is not None:
            raise self._failure
        parts: list[Chunk] = []
        have = 0
        try:
            while have < limit and (part := self._part(limit - have)) is not None:
                parts.append(part)
                have += part.count
        except Exception as error:
            self._failure = error
            if not parts:
                raise
        return Chunk.concat(parts) if parts else None

    def _part(self, limit: int) -> Chunk | None:
        """Some elements of one dataset, or of all of them in turn."""
        while (slot := self._current()) is not None:
            if not slot.fill(self._share(slot, limit)):
                self._end(slot)
                continue
            self._check(slot)
            rounds = self._rounds(slot, limit)
            if rounds is not None:
                return rounds
            part = slot.take(limit if slot.left < 0 else min(limit, slot.left))
            self._passed(slot, part.count)
            return part
        return None

    def _check(self, slot: _Slot) -> None:
        if not slot.checked:
            self._node.check(slot.node)
            slot.checked = True

    def _share(self, slot: _Slot, limit: int) -> int:
        """How many of the next `limit` elements are surely from this dataset, if it has so many."""
        if slot.left < 0:
            return limit
        places = self._places()
        rounds = limit // (len(places) * self._block)
        return max(min(limit, slot.left), rounds * self._block)

    def _places(self) -> list[_Slot | None]:
        """The datasets that have a turn, from the current one on; None for one still to be opened."""
        places = self._slots[self._turn :] + self._slots[: self._turn]
        return [slot for slot in places if slot is not None] if self._input_ended else places

    def _rounds(self, current: _Slot, limit: int) -> Chunk | None:
        """Whole rounds of blocks, if every dataset has blocks at hand."""
        block = self._block
        if block < 0 or current.left != block or limit < 2 * block:
            return None
        slots = [slot for slot in self._places() if slot is not None]
        rounds = limit // (len(slots) * block)
        if not rounds or (not self._input_ended and len(slots) < len(self._slots)):
            return None
        for slot in slots:
            if self._any_order and not slot.ready:
                return None
            with contextlib.suppress(Exception):  # raised again when it has its turn
                slot.fill(rounds * block)
            rounds = min(rounds, slot.at_hand // block)
            if not rounds:
                return None
            self._check(slot)
        return Chunk.in_turns([slot.take(rounds * block) for slot in slots], block)

    def _passed(self, slot: _Slot, count: int) -> None:
        if slot.left > 0:
            slot.left -= count
            if slot.left == 0:
                self._next_turn()

    def _end(self, slot: _Slot) -> None:
        slot.close()
        self._slots[self._turn] = None
        self._next_turn()

    def _next_turn(self) -> None:
        self._turn = (self._turn + 1) % len(self._slots)
        slot = self._slots[self._turn]
        if slot is not None:
            slot.left = self._block

    @property
    def _block(self) -> int:
        length = self._node.block_length
        return -1 if length is None else length

    def _current(self) -> _Slot | None:
        """The dataset whose turn it is; None at the end."""
        if self._node.parallel_calls is not None:
            self._fill()
        for _ in self._slots:
            if self._slots[self._turn] is None and not self._input_ended:
                self._slots[self._turn] = self._open()
            slot = self._slots[self._turn]
            if slot is not None:
                return self._readiest(slot)
            self._next_turn()
        return None

    def _fill(self) -> None:
        """Let threads begin to read all datasets of the first cycle."""
        if self._opened == 0:
            for i in range(len(self._slots)):
                self._slots[i] = self._open()

    def _readiest(self, slot: _Slot) -> _Slot:
        """Where the order does not matter, a dataset that need not be waited for."""
        if not self._any_order or not isinstance(slot, _ParallelSlot) or slot.ready:
            return slot
        others = [s for s in self._slots if isinstance(s, _ParallelSlot)]
        assert self._pool is not None
        self._pool.wait([s.coming for s in others], POLL)
        for turn, other in enumerate(self._slots):
            if isinstance(other, _ParallelSlot) and other.ready:
                self._turn = turn
                other.left = other.left or self._block
                return other
        return slot

    def _open(self) -> _Slot | None:
        chunk = None if self._input_ended else self.inputs[0].read(1)
        if chunk is None:
            self._input_ended = True
            return None
        number, self._opened = self._opened, self._opened + 1
        node = self._make(chunk.element(0), number)
        run = self._run.in_branch(number)
        slot: _Slot
        if self._node.parallel_calls is None:
            slot = _Slot(node, run)
        else:
            if self._pool is None:
                self._pool = ThreadPool(threads_for(self._node.parallel_calls), "px-interleave")
            slot = _ParallelSlot(node, run, self._pool, max(self._block, 1))
        slot.left = self._block
        return slot

    def skip(self, count: int) -> int:
        """Skip in the datasets, so that what they would have to read or compute is left out."""
        if self._failure is not None:
            raise self._failure
        skipped = 0
        while skipped < count and (slot := self._current()) is not None:
            wanted = count - skipped
            found = slot.skip(wanted if slot.left < 0 else min(wanted, slot.left))
            skipped += found
            self._passed(slot, found)
            if found == 0:
                self._end(slot)
        return skipped

    def cancel(self) -> None:
        """Wake the reader."""
        for slot in self._slots:
            if slot is not None:
                slot.cancel()
        super().cancel()

    def close(self) -> None:
        """Close all datasets."""
        if self._pool is not None:
            self._pool.close()
        for slot in self._slots:
            if slot is not None:
                slot.close()
        self._input_ended = True
        self._slots = [None] * len(self._slots)
        super().close()
