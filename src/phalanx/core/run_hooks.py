"""Hooks around `Strategy.run`: what compiles its steps, and hints to authors of slow ones."""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from phalanx.core.variables import traced_variables
from phalanx.runtime import compat

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


_log = logging.getLogger("phalanx")
_lock = threading.Lock()
_eager: Counter[str] = Counter()

MANY_EAGER = 200
"""After so many eager runs of a step its author hears of px.function."""

MANY_UNROLLED = 20
"""After so many runs of a step in one program its author hears of px.range."""


@functools.lru_cache(maxsize=1000)  # names of functions may differ without end
def say_once(text: str) -> None:
    """Warn, unless that has been said before."""
    _log.warning("%s", text)


def count_run(step: Callable[..., Any]) -> None:
    """Count a run of a step, to tell its author if there is a faster way to have many."""
    name: str = getattr(step, "__qualname__", type(step).__name__)
    program = traced_variables.program()
    if program is not None:
        program.runs[name] += 1
        if program.runs[name] == MANY_UNROLLED:
            say_once(
                f"A compiled function has {MANY_UNROLLED} or more runs of {name} in one program, "
                "because Python loops are unrolled. It takes as many times as long to compile. Write "
                "`for i in px.range(n)`, which stays a loop, or use px.train.loop."
            )
    elif not compat.is_staging() and not in_function():
        with _lock:
            _eager[name] += 1
            many = _eager[name] == MANY_EAGER
        if many:
            say_once(
                f"{name} has run eagerly {MANY_EAGER} times, one operation after the other. Decorate "
                "the function that calls strategy.run with @px.function to compile the whole step."
            )
