"""What users are told, once, about programs that are slower than they need to be."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from phalanx.core import compat, lifting, stepwise

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
    program = lifting.program()
    if program is not None:
        program.runs[name] += 1
        if program.runs[name] == MANY_UNROLLED:
            say_once(
                f"A compiled function has {MANY_UNROLLED} or more runs of {name} in one program, "
                "because Python loops are unrolled. It takes as many times as long to compile. Write "
                "`for i in px.range(n)`, which stays a loop, or use px.train.loop."
            )
    elif not compat.is_staging() and not stepwise.in_function():
        with _lock:
            _eager[name] += 1
            many = _eager[name] == MANY_EAGER
        if many:
            say_once(
                f"{name} has run eagerly {MANY_EAGER} times, one operation after the other. Decorate "
                "the function that calls strategy.run with @px.function to compile the whole step."
            )
