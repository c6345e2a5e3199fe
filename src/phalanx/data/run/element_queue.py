"""Handing elements over: each of them once, whatever interrupts.

The rule: an element is delivered in the one step in which it is taken off the elements that wait. What
raises before that step, in our code or in a function of the user, leaves the element to the next call;
after it the element is on its way to the caller, and the position is behind it. Nothing can raise in
between: neither are there calls, nor other places at which Python runs signal handlers.

A ``for`` loop over an iterator therefore never loses an element. In ``x = next(iterator)`` the call of
`next` itself is such a place: a handler may raise there, in the caller's own statement, when the
element has been delivered and `x` is not assigned yet. The position then says that it was delivered.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

P = TypeVar("P")


class ElementQueue(Generic[P]):
    """Elements that wait to be taken, and the position behind the last one that was.

    Any thread may take, each gets another element. One thread at a time appends to `waiting`.

    Args:
        position: where the first element begins.

    Examples:
        >>> elements = ElementQueue(7)
        >>> elements.waiting.append(("a", 8))
        >>> elements.take(), elements.position, elements.taken
        ('a', 8, 1)
    """

    __slots__ = ("_next", "position", "taken", "waiting")

    def __init__(self, position: P) -> None:
        self.position = position
        self.taken = 0
        self.waiting: deque[tuple[Any, P]] = deque()
        self._next = iter(self.waiting.popleft, None)

    def take(self) -> Any:
        """The first element that waits; an `IndexError` if none does.

        Keep it free of calls, and return what it returns without another one: see above.
        """
        for element, position in self._next:
            self.position = position
            self.taken += 1
            return element
        raise AssertionError  # the loop does not end

    def give_back(self, element: Any, before: P, taken: int) -> None:
        """Let an element wait again, before all others, that was taken and came to nothing.

        Args:
            element: what `take` gave.
            before: the position before it was taken.
            taken: how many had been taken then.
        """
        self.waiting.appendleft((element, self.position))
        if self.taken == taken + 1:  # else another thread has gone on from here
            self.position, self.taken = before, taken
