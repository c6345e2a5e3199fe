"""What a compiled function takes from iterators before it runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from phalanx.core import pulls


@dataclass(frozen=True)
class Source:
    """Where one element comes from: an iterator among the arguments, or one that is captured."""

    method: str
    argument: int | None = None
    captured: weakref.ref[Any] | None = None


class Taken:
    """The elements that one call has taken.

    Args:
        constants: the arguments of the call that are no arrays, among them iterators.
    """

    def __init__(self, constants: Sequence[Any] = ()) -> None:
        self._constants = constants
        self._iterators: list[Any] = []
        self.elements: list[Any] = []

    def take(self, sources: Sequence[Source]) -> None:
        """Take what is still missing; what was taken before is kept."""
        for source in sources[len(self.elements) :]:
            if source.captured is not None:
                iterator = source.captured()
            else:
                assert source.argument is not None
                iterator = self._constants[source.argument].value
            self.elements.append(getattr(iterator, source.method)())
            self._iterators.append(iterator)

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
        return pulls.feeding(self._iterators, self.elements if elements is None else elements, tracing)
