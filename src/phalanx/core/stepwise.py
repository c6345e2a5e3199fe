"""Functions that run as Python, in which each `Strategy.run` is compiled by itself."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

T = TypeVar("T")


class RunsSteps(Protocol):
    """Takes the place of `Strategy.run`."""

    def __call__(
        self,
        strategy: Strategy,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Run `fn` on all replicas of a strategy."""


_current: contextvars.ContextVar[RunsSteps | None] = contextvars.ContextVar("runs")


def current() -> RunsSteps | None:
    """What runs the steps of the function that this code is a part of, if it is not the strategy."""
    return _current.get(None)


def in_function() -> bool:
    """Whether this code is a part of a function that runs as Python, and whose author knows it."""
    return _current in contextvars.copy_context()


def running_steps(run: RunsSteps | None, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function; `run` runs the steps in it, or the strategy itself if that is None."""
    # In a context of its own, so that whatever happens it is not set outside of it.
    place = contextvars.copy_context()
    place.run(_current.set, run)
    return place.run(fn, *args, **kwargs)
