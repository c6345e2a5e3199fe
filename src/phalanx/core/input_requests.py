"""Elements that compiled functions take from iterators.

A program cannot advance an iterator of the host. A compiled function that calls ``next(iterator)``
therefore takes the element before it runs, and gives it to the program as an argument. What it will ask
for is learnt while it is traced.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from phalanx.core import context as ctx
from phalanx.errors import ContextError, InvalidValueError
from phalanx.runtime.formatting import shown

Method = TypeVar("Method", bound=Callable[..., Any])


class NeedsElement(BaseException):
    """A function that is being traced asked an iterator for an element that was not taken yet."""

    def __init__(self, iterator: Any, method: str, rounds: int, may_end: bool) -> None:
        super().__init__(iterator, method, rounds)
        self.iterator, self.method = iterator, method
        self.rounds = rounds
        """How many elements it needs, as it asked in a loop."""
        self.may_end = may_end
        """Whether fewer will do, if the iterator has no more."""


class Rounds:
    """The elements of all rounds of a loop, stacked.

    Args:
        stacked: a nest of arrays; their first dimension counts the rounds.
    """

    def __init__(self, stacked: Any) -> None:
        self._stacked = stacked

    def of_round(self, index: Any) -> Any:
        """The element of one round."""
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), self._stacked)


class LoopsOverInput(BaseException):
    """A function that is being traced began to loop over an iterator or a dataset."""


class _Feed:
    def __init__(self, elements: Sequence[tuple[Any, Any]], tracing: bool) -> None:
        self.elements, self.tracing = list(elements), tracing


class _Current(threading.local):
    feed: _Feed | None = None
    rounds = 1  # how often the loops that are being traced run together
    index: Any = 0  # the number of the present round
    may_end = False  # whether they have fewer rounds if an iterator ends


_current = _Current()


class feeding:  # noqa: N801 - reads as a statement
    """Let iterators give certain elements, in a certain order, for the duration of a ``with`` block.

    Args:
        iterators: the iterator of each element.
        elements: what they give.
        tracing: whether to ask for more by `NeedsElement`; if not, the iterators go on by themselves.
    """

    __slots__ = ("_feed", "_outer")

    def __init__(self, iterators: Sequence[Any], elements: Sequence[Any], tracing: bool) -> None:
        self._feed = _Feed(list(zip(iterators, elements, strict=True)), tracing)

    def __enter__(self) -> None:
        self._outer = _current.feed
        _current.feed = self._feed

    def __exit__(self, *error: object) -> None:
        _current.feed = self._outer


class looping:  # noqa: N801 - reads as a statement
    """Trace the body of a loop, in the rounds of the loops around it, for a ``with`` block.

    Args:
        rounds: how many rounds the loop has.
        index: which of them it is.
        may_end: whether it has fewer if an iterator ends.
    """

    __slots__ = ("_index", "_may_end", "_outer", "_rounds")

    def __init__(self, rounds: int, index: Any, may_end: bool) -> None:
        self._rounds, self._index, self._may_end = rounds, index, may_end

    def __enter__(self) -> None:
        self._outer = _current.rounds, _current.index, _current.may_end
        _current.may_end |= self._may_end
        _current.index = _current.index * self._rounds + self._index
        _current.rounds *= self._rounds

    def __exit__(self, *error: object) -> None:
        _current.rounds, _current.index, _current.may_end = self._outer


def feed() -> Any:
    """What this thread's iterators give, for `back_to`."""
    return _current.feed, _current.rounds, _current.index, _current.may_end


def back_to(feed: Any) -> None:
    """Let this thread's iterators give what they gave before."""
    _current.feed, _current.rounds, _current.index, _current.may_end = feed


def gives_elements(method: Method) -> Method:
    """Mark a method of an iterator that gives its next element: `get_next`, say."""

    @functools.wraps(method)
    def give(self: Any, *args: Any, **kwargs: Any) -> Any:
        feed = _current.feed
        if feed is None or not (feed.tracing or feed.elements):
            if args or kwargs:
                return method(self, *args, **kwargs)
            # A plain call: after others, an interrupt could come between the element and the caller.
            return method(self)
        if ctx.active_replica() is not None:
            raise InvalidValueError(
                "A compiled function takes elements before it runs, so next(iterator) must be called "
                "outside of the function that runs on replicas: "
                "strategy.run(fn, args=(next(iterator),))."
            )
        if not feed.elements:
            raise NeedsElement(self, method.__name__, _current.rounds, _current.may_end)
        iterator, element = feed.elements[0]
        if iterator is not self:
            raise ContextError(
                "A compiled function takes elements from its iterators in another order than when it "
                f"was traced before. Received: a call of {method.__name__} of {shown(self)}"
            )
        del feed.elements[0]
        return element.of_round(_current.index) if isinstance(element, Rounds) else element

    return give  # type: ignore[return-value]


def begins_loop(method: Method) -> Method:
    """Mark a method that begins a loop: `__iter__`, say. A loop over input cannot be compiled."""

    @functools.wraps(method)
    def begin(self: Any) -> Any:
        if _current.feed is not None and _current.feed.tracing:
            raise LoopsOverInput
        return method(self)

    return begin  # type: ignore[return-value]


def is_input(x: Any) -> bool:
    """Whether something gives elements to compiled functions."""
    return getattr(type(x), "gives_elements_to_functions", False)
