"""What a compiled function takes from iterators before it runs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import input_requests
from phalanx.runtime.interrupts import uninterrupted


@dataclass(frozen=True)
class Source:
    """Where one element comes from: an iterator among the arguments, or one that is captured."""

    method: str
    argument: int | None = None
    captured: weakref.ref[Any] | None = None
    rounds: int = 1  # of the loop that takes one in each round
    may_end: bool = False  # whether the loop has fewer if there are no more


class Ended(Exception):
    """An iterator has fewer elements than a loop has rounds, which then has fewer."""


class Taken:
    """The elements that one call has taken, to be used or given back.

    Args:
        constants: the arguments of the call that are no arrays, among them iterators.
    """

    def __init__(self, constants: Sequence[Any] = ()) -> None:
        self._constants = constants
        self._from: list[tuple[Any, Any]] = []  # the iterators, and marks of where they were
        self.elements: list[Any] = []
        self._sources: list[Source] = []  # of which all elements were taken
        self.then: Callable[[], None] | None = None
        """What to call when the elements are used."""
        self._used = False

    def take(self, sources: Sequence[Source]) -> None:
        """Take what is still missing; what was taken before is kept."""
        for source in sources[len(self._sources) :]:
            if source.captured is not None:
                iterator = source.captured()
            else:
                assert source.argument is not None
                iterator = self._constants[source.argument].value
            try:
                for _ in range(source.rounds):
                    self.take_one(iterator, source.method)
            except StopIteration:
                if source.may_end:
                    raise Ended from None
                raise
            self._sources.append(source)

    def fed(self) -> list[Any] | None:
        """What a program gets: one element per source, stacked for loops; None if they differ."""
        remaining, result = iter(self.elements), []
        for source in self._sources:
            elements = list(itertools.islice(remaining, source.rounds))
            if source.rounds == 1:
                result.append(elements[0])
            elif len({_form(x) for x in elements}) > 1:
                return None
            else:
                result.append(jax.tree.map(lambda *xs: jnp.stack(xs), *elements))
        return result

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

    def source_of(self, need: input_requests.NeedsElement) -> Source:
        """How to find the iterator of a missing element again, in later calls too."""
        for i, constant in enumerate(self._constants):
            if constant is not None and constant.value is need.iterator:
                return Source(need.method, i, None, need.rounds, need.may_end)
        return Source(need.method, None, weakref.ref(need.iterator), need.rounds, need.may_end)

    def given(self) -> AbstractContextManager[None]:
        """Let the iterators give what was taken."""
        if any(source.rounds > 1 for source in self._sources):
            self.give_back()  # the rounds of a loop take them in an order of their own
        iterators = [iterator for iterator, _ in self._from[: len(self.elements)]]
        return input_requests.feeding(iterators, self.elements, tracing=False)

    def traced(self, fed: Sequence[Any]) -> AbstractContextManager[None]:
        """Let the iterators give what stands for it in a program, and ask for more."""
        iterators, place = [], 0
        for source in self._sources:
            iterators.append(self._from[place][0])
            place += source.rounds
        elements = [
            input_requests.Rounds(x) if source.rounds > 1 else x
            for x, source in zip(fed, self._sources, strict=True)
        ]
        return input_requests.feeding(iterators, elements, tracing=True)


def _form(element: Any) -> Any:
    """What must be the same for elements that are stacked."""
    flat, treedef = jax.tree.flatten(element)
    return treedef, tuple((np.shape(x), jnp.result_type(x)) for x in flat)


def give_back(taken: Sequence[Taken]) -> None:
    """Let iterators give what several calls have taken once more, unless it was used."""
    with uninterrupted():
        for each in reversed(taken):
            each.give_back()
