"""Nothing stays behind in a thread when an exception leaves a step.

Context managers undo what they did, but an interrupt can come when one of them has done it and is not
responsible for it yet. So where exceptions leave a step, the thread is put back to where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from phalanx.core import context as ctx
from phalanx.core import lifting, pulls
from phalanx.core.interrupts import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")


def leaving_nothing(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; if it raises, put this thread back to where it was."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    depths = ctx.depth(), lifting.depth(), pulls.feed()
    try:
        return fn(*args, **kwargs)
    except BaseException as error:
        with uninterrupted():
            ctx.back_to(depths[0])
            lifting.back_to(depths[1])
            pulls.back_to(depths[2])
            if jax.config.jax_default_device is not device:  # type: ignore[attr-defined]
                jax.default_device(device).__enter__()
        if isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None  # it came inside of code in C that calls Python
        raise
