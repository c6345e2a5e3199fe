"""Runs of programs: how variables go in and come out, whatever happens in between."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from phalanx.core import phases, transactions
from phalanx.core.arrays import copied
from phalanx.core.errors import InvalidValueError
from phalanx.core.interrupts import uninterrupted
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import Variable
from phalanx.execution.meetings import Meeting
from phalanx.execution.throttle import THROTTLE


class Runner:
    """Runs a program, which overwrites the variables that it writes or keeps them.

    Args:
        program: what to run: a function of the arrays of the variables that it writes, of those that it
            only reads, and of the arguments.
        at_once: which of the written variables need their own form of the arrays that they get, because
            other programs could not take those.
        can_fail: whether it may fail after it has begun.
        meeting: says what other workers must run too, given the arguments, if they take part in it.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        at_once: Sequence[bool],
        can_fail: bool,
        meeting: Callable[[list[Any]], Meeting] | None,
    ) -> None:
        self.overwriting = jax.jit(program, donate_argnums=0)
        self.keeping = jax.jit(program)
        self.can_fail, self.meeting = can_fail, meeting
        self._at_once = at_once
        self._compiled: set[Any] = set()

    def run(
        self,
        written: Sequence[Variable],
        read: Sequence[Variable],
        arrays: list[Any],
        steps: int,
        then: Callable[[], None],
    ) -> list[jax.Array]:
        """Start the program, and make its results what the variables hold.

        Args:
            written: the variables that it writes, and perhaps reads.
            read: those that it reads only.
            arrays: the arguments.
            steps: how many steps it makes.
            then: called if they happen, in the same moment.
        """
        if self.can_fail or transactions.current() is not None:
            return transactions.atomically(self._keep, written, read, arrays, steps, then)
        if self.overwriting not in self._compiled:
            self._compile(self.overwriting, *_present_inputs(written, read), arrays)
        THROTTLE.make_room()
        if self.meeting is not None:
            overwrite = functools.partial(self._overwrite, written, read, arrays, then)
            return self._overwrite_together(overwrite, self.meeting(arrays), steps)
        if not written:
            return self._overwrite(written, read, arrays, then)[0]
        return transactions.STEPS.run(self._overwrite, written, read, arrays, then)[0]

    def _compile(self, code: Any, *inputs: Any) -> None:
        """Compile, before anything waits for the program, and where Ctrl-C can end it."""
        with phases.phase("compile"):
            code.lower(*inputs).compile()
        self._compiled.add(code)

    def _overwrite(
        self,
        written: Sequence[Variable],
        read: Sequence[Variable],
        arrays: list[Any],
        then: Callable[[], None],
    ) -> tuple[list[jax.Array], jax.Array]:
        """Run a program that overwrites the variables it writes, and cannot fail once it has begun.

        Nothing may come between its start, which makes the old arrays useless, and the new ones.
        """
        with transactions.STATE:
            new = [_own(v) if v._fresh is None else v._fresh for v in written]
            old = [_present(v) if v._fresh is None else v._fresh for v in read]
            (outputs, values), token = THROTTLE.start(self.overwriting, new, old, arrays)
            for variable, value, at_once in zip(written, values, self._at_once, strict=True):
                variable._fresh, variable._stored = value, None  # which would keep old arrays
                if at_once:
                    _ = variable._value
            then()
        return outputs, token

    def _overwrite_together(
        self, overwrite: Callable[[], tuple[list[jax.Array], jax.Array]], meeting: Meeting, steps: int
    ) -> list[jax.Array]:
        phases.count_steps(steps)

        def start() -> tuple[list[jax.Array], jax.Array]:
            with uninterrupted():
                return overwrite()

        return transactions.in_turn(lambda: THROTTLE.in_order(start, meeting)[0])

    def _keep(
        self,
        written: Sequence[Variable],
        read: Sequence[Variable],
        arrays: list[Any],
        steps: int,
        then: Callable[[], None],
    ) -> list[jax.Array]:
        """Run a program as a part of a step; the variables keep what they hold until that has ended.

        A program that calls Python or communicates with other workers can fail after it has begun.
        """
        step = transactions.current()
        assert step is not None
        new = [_checked(v, as_array(step.held(v))) for v in written]
        old = [_checked(v, as_array(step.held(v))) for v in read]
        meeting = None
        if self.meeting is not None:
            if self.keeping not in self._compiled:
                self._compile(self.keeping, new, old, arrays)
            meeting = self.meeting(arrays)
            phases.count_steps(steps)
        try:
            outputs, values = THROTTLE.dispatch(
                self.keeping, new, old, arrays, meeting=meeting, wait=self.can_fail
            )
        except (ValueError, RuntimeError) as error:
            if _is_interrupt(error):
                raise KeyboardInterrupt from error
            raise
        for variable, value in zip(written, values, strict=True):
            step.set(variable, variable._wrap(value))
        step.when_committed(then)
        return outputs


def _is_interrupt(error: Exception) -> bool:
    """Whether JAX has made this error of an interrupt that came in a callback."""
    last = str(error).strip().rpartition("\n")[2]
    return last.partition(":")[0] == "KeyboardInterrupt"


def _present_inputs(written: Sequence[Variable], read: Sequence[Variable]) -> tuple[list[Any], ...]:
    return tuple([as_array(v._value) for v in some] for some in (written, read))


def as_array(value: Any) -> Any:
    """The one array that stands for a value in a program."""
    return value.array if isinstance(value, Mirrored | PerReplica) else value


def _present(variable: Variable) -> Any:
    """The array of a variable, for a program. Call it with the state locked."""
    x = as_array(variable._value)
    return x if variable._exclusive else _checked(variable, x)


def _own(variable: Variable) -> Any:
    """The same for a program that overwrites it, so that nobody else may have it."""
    x = as_array(variable._value)
    if variable._exclusive:
        return x
    return copied(_checked(variable, x))


def _checked(variable: Variable, x: Any) -> Any:
    # The CPU client crashes if it is given a deleted array over several devices.
    if x.is_deleted():
        raise deleted(f"The value of variable {variable.name!r}", x)
    return x


def deleted(what: str, x: Any) -> InvalidValueError:
    """The error for an array that is no longer there."""
    return InvalidValueError(
        f"{what} has been deleted: it was donated to a function (jax.jit with donate_argnums), or its "
        f"delete method was called. Received: a deleted array of shape {x.shape} and dtype {x.dtype}"
    )
