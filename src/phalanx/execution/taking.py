"""What a compiled function takes from iterators before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from phalanx.core import pulls
from phalanx.core.interrupts import uninterrupted


@dataclass(frozen=True)
class Source:
    """Where one element comes from: an iterator among the arguments, or one that is captured."""

    method: str
    argument: int | None = None
    captured: weakref.ref[Any] | None = None


class Taken:
    """The elements that one call has taken, to be used or given back.

    Args:
        constants: the arguments of the call that are no arrays, among them iterators.
    """

    def __init__(self, constants: Sequence[Any] = ()) -> None:
        self._constants = constants
        self._from: list[tuple[Any, Any]] = []  # the iterators, and marks of where they were
        self.elements: list[Any] = []
        self.then: Callable[[], None] | None = None
        """What to call when the elements are used."""
        self._used = False

    def take(self, sources: Sequence[Source]) -> None:
        """Take what is still missing; what was taken before is kept."""
        for source in sources[len(self.elements) :]:
            if source.captured is not None:
                iterator = source.captured()
            else:
                assert source.argument is not None
                iterator = self._constants[source.argument].value
            self.take_one(iterator, source.method)

    def take_one(self, iterator: Any, method: str = "__next__") -> None:
        """Take one element; raises what the iterator raises."""
        del self._from[len(self.elements) :]
        self._from.append((iterator, iterator._mark()))
        next_element = getattr(iterator, method)
        element = next_element()  # no call may come between this and the next line
        self.elements.append(element)

    def use(self) -> None:
        """The elements have done what they were taken for."""
        self._used = True
        if self.then is not None:
            self.then()

    def give_back(self) -> None:
        """Let the iterators give the elements once more, unless they were used."""
        with uninterrupted():
            while self.elements and not self._used:
                element = self.elements.pop()
                del self._from[len(self.elements) + 1 :]
                iterator, mark = self._from.pop()
                iterator._give_back(mark, element)

    def source_of(self, need: pulls.NeedsElement) -> Source:
        """How to find the iterator of a missing element again, in later calls too."""
        for i, constant in enumerate(self._constants):
            if constant is not None and constant.value is need.iterator:
                return Source(need.method, argument=i)
        return Source(need.method, captured=weakref.ref(need.iterator))

    def given(
        self, tracing: bool, elements: Sequence[Any] | None = None
    ) -> AbstractContextManager[None]:
        """Let the iterators give what was taken, or what stands for it."""
        iterators = [iterator for iterator, _ in self._from[: len(self.elements)]]
        return pulls.feeding(iterators, self.elements if elements is None else elements, tracing)


def give_back(taken: Sequence[Taken]) -> None:
    """Let iterators give what several calls have taken once more, unless it was used."""
    with uninterrupted():
        for each in reversed(taken):
            each.give_back()
