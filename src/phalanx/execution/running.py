"""Runs of programs: how variables go in and come out, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx.core import phases, transactions
from phalanx.core.errors import InvalidValueError
from phalanx.core.interrupts import uninterrupted
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import Variable
from phalanx.execution.meetings import Meeting
from phalanx.execution.throttle import THROTTLE


class Code:
    """The compiled code of a program, which overwrites the variables that it writes or keeps them."""

    def __init__(self, program: Callable[..., Any]) -> None:
        self.overwriting = jax.jit(program, donate_argnums=0)
        self.keeping = jax.jit(program)
        self._compiled: list[Any] = []

    def compile(self, code: Any, inputs: Callable[[], Any]) -> None:
        """Compile, before anything waits for the program, and where Ctrl-C can end it."""
        if code not in self._compiled:
            with phases.phase("compile"):
                code.lower(*inputs()).compile()
            self._compiled.append(code)


@dataclass(slots=True)
class Run:
    """One run of a program.

    Args:
        code: what to run.
        written: the variables that it writes, and perhaps reads.
        read: those that it reads only.
        wrappers: what each of the written variables makes of the array that it gets.
        arrays: the arguments.
        steps: how many steps it makes.
        then: called if they happen, in the same moment.
        can_fail: whether it may fail after it has begun.
        meeting: what other workers must run too, if they take part in it.
    """

    code: Code
    written: Sequence[Variable]
    read: Sequence[Variable]
    wrappers: Sequence[Callable[[jax.Array], Any]]
    arrays: list[Any]
    steps: int
    then: Callable[[], None]
    can_fail: bool
    meeting: Callable[[], Meeting] | None

    def run(self) -> list[jax.Array]:
        """Start the program, and make its results what the variables hold."""
        if self.can_fail or transactions.current() is not None:
            return transactions.atomically(self._keep)
        self.code.compile(self.code.overwriting, self._present_inputs)
        THROTTLE.make_room()
        if self.meeting is not None:
            return self._overwrite_together(self.meeting())
        if self.written:
            return transactions.STEPS.run(self._overwrite)[0]
        return self._overwrite()[0]

    def _overwrite(self) -> tuple[list[jax.Array], jax.Array]:
        """Run a program that overwrites the variables it writes, and cannot fail once it has begun.

        Nothing may come between its start, which makes the old arrays useless, and the new ones.
        """
        with transactions.STATE:
            new = []
            for variable in self.written:
                x = _present(variable)
                new.append(x if variable._exclusive else x.copy())
            old = [_present(v) for v in self.read]
            (outputs, values), token = THROTTLE.start(self.code.overwriting, new, old, self.arrays)
            for variable, wrap, value in zip(self.written, self.wrappers, values, strict=True):
                variable._value = wrap(value)
                variable._exclusive = True
            self.then()
        return outputs, token

    def _overwrite_together(self, meeting: Meeting) -> list[jax.Array]:
        phases.count_steps(self.steps)

        def start() -> tuple[list[jax.Array], jax.Array]:
            with uninterrupted():
                return self._overwrite()

        return transactions.in_turn(lambda: THROTTLE.in_order(start, meeting)[0])

    def _keep(self) -> list[jax.Array]:
        """Run a program as a part of a step; the variables keep what they hold until that has ended.

        A program that calls Python or communicates with other workers can fail after it has begun.
        """
        step = transactions.current()
        assert step is not None
        new = [_checked(v, as_array(step.held(v))) for v in self.written]
        old = [_checked(v, as_array(step.held(v))) for v in self.read]
        meeting = None
        if self.meeting is not None:
            self.code.compile(self.code.keeping, lambda: (new, old, self.arrays))
            meeting = self.meeting()
            phases.count_steps(self.steps)
        outputs, values = THROTTLE.dispatch(
            self.code.keeping, new, old, self.arrays, meeting=meeting, wait=self.can_fail
        )
        for variable, wrap, value in zip(self.written, self.wrappers, values, strict=True):
            step.set(variable, wrap(value))
        step.when_committed(self.then)
        return outputs

    def _present_inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        new, old = ([as_array(v._value) for v in some] for some in (self.written, self.read))
        return new, old, self.arrays


def as_array(value: Any) -> Any:
    """The one array that stands for a value in a program."""
    return value.array if isinstance(value, Mirrored | PerReplica) else value


def _present(variable: Variable) -> Any:
    """The array of a variable, for a program. Call it with the state locked."""
    x = as_array(variable._value)
    return x if variable._exclusive else _checked(variable, x)


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
