"""Objects that stay in the process that made them."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from phalanx.core.errors import InvalidTypeError
from phalanx.core.showing import shown

T = TypeVar("T", bound="StaysHere")


class StaysHere:
    """Refuses to be pickled, with a word on what to send instead; `copy.copy` works.

    Attributes:
        instead: what to do instead, as a sentence.
    """

    instead = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidTypeError(
            f"A {type(self).__name__} belongs to the devices of this process and cannot be pickled. "
            f"{self.instead} Received: {shown(self)}"
        )

    def __copy__(self: T) -> T:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone
