"""Steps that happen as a whole: all the variables that a step writes change at once, or none does.

A `Transaction` holds what a step has written until the step has ended well. Reads inside the step see
it, all others see what was there before. An exception, an interrupt or the death of another worker
therefore leaves every variable as it was before the step.

Two locks keep threads apart. Only one step at a time may change variables (a *turn*); others wait, and
say so if it takes long. The values themselves are exchanged under `STATE`, which is only held for
moments, so reading never waits for a step of another thread.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax

from phalanx.core import context as ctx, input_requests
from phalanx.core.variables import traced_variables
from phalanx.core.variables.bundles import STATE
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import uninterrupted
from phalanx.runtime.turns import Turn, Turns

if TYPE_CHECKING:
    from phalanx.core.variables.recorded_updates import Home
    from phalanx.core.variables.variable import Variable

P = ParamSpec("P")
T = TypeVar("T")

STEPS = Turns("change variables")
"""The turns of steps. Variables may be shared by all threads, so there is one for the process."""

_protection: list[bool] = []
_SWITCH = "PHALANX_PROTECT_VARIABLES"


def protect_variables(enabled: bool) -> None:
    """Say whether steps over several workers keep the old values of variables until they have ended.

    If another worker dies in the middle of such a step, this worker's variables then still have the
    values from before it, for a last checkpoint. The price is memory: old and new values exist at the
    same time, and time: on CPU devices such a step is awaited. On CPU devices this is the default. On
    other devices old values are overwritten, as memory is scarce there and a failed step mostly ends
    the process. Call it before the first step. The environment variable PHALANX_PROTECT_VARIABLES, 0 or
    1, says the same.

    Without protection steps are asynchronous: a call returns while its program runs, and the next one
    waits for it. If another worker fails, that next call raises the error which names it. A plain
    `jax.Array` that is read before then raises an error of JAX; the traceback of a program that ends
    with it names the worker in a note. Variables cannot be read after a failure: go back to a
    checkpoint.

    Examples:
        >>> import phalanx as px
        >>> px.config.protect_variables(True)
    """
    if not isinstance(enabled, bool):
        raise InvalidTypeError(f"enabled must be True or False. Received: {shown(enabled)}")
    _protection[:] = [enabled]


def protects_variables(platform: str) -> bool:
    """Whether steps over several workers keep the old values of variables until they have ended."""
    switch = os.environ.get(_SWITCH)
    if switch not in (None, "0", "1"):
        raise InvalidValueError(
            f"The environment variable {_SWITCH} must be 0 or 1. Received: {shown(switch)}"
        )
    if _protection:
        return _protection[0]
    return platform == "cpu" if switch is None else switch == "1"


class Transaction:
    """What one step has written so far.

    Args:
        parent: the step that this one is a part of.
    """

    def __init__(self, parent: Transaction | None = None) -> None:
        self._parent = parent
        self._turn: Turn = Turn(STEPS) if parent is None else parent._turn
        self._written: dict[Variable, Any] = {}
        self._then: list[Callable[[], None]] = []

    def held(self, variable: Variable) -> Any:
        """What a variable holds at this point of the step."""
        step: Transaction | None = self
        while step is not None:
            if variable in step._written:
                return step._written[variable]
            step = step._parent
        if variable.home is None:
            self._turn.take()
        return variable._committed()

    def set(self, variable: Variable, held: Any) -> None:
        """Write a variable."""
        if variable.home is None:
            self._turn.take()
        self._written[variable] = held

    def when_committed(self, fn: Callable[[], None]) -> None:
        """Call a short function if the step happens, in the same moment."""
        self._then.append(fn)

    def commit(self) -> None:
        """Make what was written count, for the step around this one or for everybody."""
        if self._parent is not None:
            self._parent._written = {**self._parent._written, **self._written}
            self._parent._then += self._then
        elif self._written or self._then:
            here = {v: held for v, held in self._written.items() if v.home is None}
            if len(here) < len(self._written):
                self._commit_elsewhere()
            with uninterrupted(), STATE:
                for variable, held in here.items():
                    variable._value = held
                    variable._exclusive = False
                for fn in self._then:
                    fn()

    def _commit_elsewhere(self) -> None:
        """Make what was written to variables of other processes count."""
        homes: dict[int, tuple[Home, dict[Variable, Any]]] = {}
        for variable, held in self._written.items():
            if variable.home is not None:
                homes.setdefault(id(variable.home), (variable.home, {}))[1][variable] = held
        for home, changed in homes.values():
            home.commit(changed)

    def end(self) -> None:
        """Let other steps have their turn."""
        if self._parent is None:
            self._turn.end()


_current: contextvars.ContextVar[Transaction | None] = contextvars.ContextVar("step", default=None)


current: Callable[[], Transaction | None] = _current.get
"""The step that this code is a part of, if any."""


def atomically(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function as one step: what it writes to variables counts when it returns.

    Inside another step it is a part of that one, but what it wrote is forgotten if it raises. A
    program that is being traced is a step anyway.
    """
    if traced_variables.in_program():
        return fn(*args, **kwargs)
    parent = _current.get()
    step = Transaction(parent)
    # Set in a context of its own, so that whatever happens it is not set outside of it.
    place = contextvars.copy_context()
    place.run(_current.set, step)
    try:
        if parent is None:
            result = place.run(lambda: leaving_nothing(fn, *args, **kwargs))
        else:
            result = place.run(fn, *args, **kwargs)
        step.commit()
        return result
    finally:
        step.end()


def at_once(fn: Callable[[], None]) -> None:
    """Call a function that gives first values to variables which this thread has just made.

    No other step knows them yet, so it needs no turn, and the values stay if this step fails. It is
    called in a thread of its own, because this one may be tracing a program.
    """
    step = Transaction()
    step._turn = Turn(Turns("give first values"))

    def give() -> None:
        _current.set(step)  # in a context that only this thread has
        fn()

    with ThreadPoolExecutor(1, "phalanx-state") as thread:
        thread.submit(contextvars.Context().run, give).result()
    step.commit()
    step.end()


def in_turn(fn: Callable[[], T]) -> T:
    """Call a function that changes variables by itself, while no other step does."""
    turn = Turn(STEPS)
    try:
        turn.take()
        return fn()
    finally:
        turn.end()


class Moment:
    """What variables held at one moment between two steps; nothing is copied."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._values = Transaction()
        with STATE:
            self._values._written = {v: v._committed() for v in variables if v.home is None}

    def read(self, fn: Callable[[], T]) -> T:
        """Call a function that reads the variables as they were then."""
        place = contextvars.copy_context()
        place.run(_current.set, self._values)
        return place.run(fn)


def between_steps(variables: Iterable[Variable], read: Callable[[], T]) -> T:
    """Call a function that reads variables as they were at one moment between two steps."""
    return Moment(variables).read(read)


def leaving_nothing(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; if it raises, put this thread back to where it was."""
    device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    depths = ctx.depth(), traced_variables.depth(), input_requests.feed()
    try:
        return fn(*args, **kwargs)
    except BaseException as error:
        with uninterrupted():
            ctx.back_to(depths[0])
            traced_variables.back_to(depths[1])
            input_requests.back_to(depths[2])
            if jax.config.jax_default_device is not device:  # type: ignore[attr-defined]
                jax.default_device(device).__enter__()
        if isinstance(error, SystemError) and isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None  # it came in code in C that calls Python
        raise
