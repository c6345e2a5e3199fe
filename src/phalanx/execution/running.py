"""Runs of programs: how variables go in and come out, whatever happens in between."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import transactions
from phalanx.core.variables.bundles import STATE, Bundle
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidValueError
from phalanx.execution.throttle import THROTTLE
from phalanx.job.shared_programs import SharedProgram
from phalanx.runtime import activity
from phalanx.runtime.interrupts import uninterrupted
from phalanx.runtime.placement import copied

_INTERRUPTED = contextlib.nullcontext()


class Runner:
    """Runs a program, which overwrites the variables that it writes or keeps them.

    Args:
        program: what to run: a function of the arrays of the variables that it writes, of those that it
            only reads, and of the arguments.
        bundled: how many of the written variables, the first ones, take the arrays that they get as
            they are. The others need a form of their own at once, which other programs can take.
        can_fail: whether it may fail after it has begun.
        shared: says what other workers must run too, given the arguments, if they take part in it.
        compiler_options: for XLA.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        bundled: int,
        can_fail: bool,
        shared: Callable[[list[Any]], SharedProgram] | None,
        compiler_options: Mapping[str, Any],
    ) -> None:
        how: Any = {"compiler_options": dict(compiler_options)} if compiler_options else {}
        self.overwriting = jax.jit(program, donate_argnums=0, **how)
        self.keeping = jax.jit(program, **how)
        self.can_fail, self.shared = can_fail, shared
        self._bundled = bundled
        self._bundle: Bundle | None = None
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
        if self._bundle is None:
            self._bundle = Bundle(written[: self._bundled])
        inputs = self._bundle, written[: self._bundled], written[self._bundled :], read, arrays
        if self.shared is not None:
            overwrite = functools.partial(self._overwrite, *inputs, then)
            return self._overwrite_together(overwrite, self.shared(arrays), steps)
        if not written:
            return self._overwrite(*inputs, then)[0]
        return transactions.STEPS.run(self._overwrite, *inputs, then)[0]

    def run_again(
        self,
        others: Sequence[Variable],
        read: Sequence[Variable],
        arrays: list[Any],
        then: Callable[[], None] | None,
    ) -> list[jax.Array] | None:
        """Start the program as the last time; None if more has changed since than the arguments.

        Args:
            others: those of the variables that it writes which are not bundled.
            read: the variables that it reads only.
            arrays: the arguments.
            then: called if the step happens, in the same moment.
        """
        bundle = self._bundle
        if bundle is None or not bundle.is_whole or self.shared is not None:
            return None
        if transactions.current() is not None:
            return None
        THROTTLE.make_room()
        writes = bool(self._bundled or others)
        with uninterrupted() if writes else _INTERRUPTED, STATE:
            # A step that takes its turn from now on must wait for the state.
            if not bundle.is_whole or (writes and transactions.STEPS.is_taken()):
                return None
            return self._start(bundle, bundle.arrays.copy(), others, read, arrays, then)[0]

    def _compile(self, code: Any, *inputs: Any) -> None:
        """Compile, before anything waits for the program, and where Ctrl-C can end it."""
        with activity.phase("compile"):
            code.lower(*inputs).compile()
        self._compiled.add(code)

    def _overwrite(
        self,
        bundle: Bundle,
        bundled: Sequence[Variable],
        others: Sequence[Variable],
        read: Sequence[Variable],
        arrays: list[Any],
        then: Callable[[], None] | None,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Run a program that overwrites the variables it writes, and cannot fail once it has begun."""
        with STATE:
            new = bundle.arrays.copy() if bundle.is_whole else [_own(v) for v in bundled]
            return self._start(bundle, new, others, read, arrays, then)

    def _start(
        self,
        bundle: Bundle,
        new: list[Any],
        others: Sequence[Variable],
        read: Sequence[Variable],
        arrays: list[Any],
        then: Callable[[], None] | None,
    ) -> tuple[list[jax.Array], jax.Array]:
        """Start the program. Call it with the state locked, and with signal handlers held back.

        Nothing may come between its start, which makes the old arrays useless, and the new ones.
        """
        if others:
            new += [_own(v) for v in others]
        old = [_present(v) for v in read] if read else []
        (outputs, values), token = THROTTLE.start(self.overwriting, new, old, arrays)
        if others:
            for variable, value in zip(others, values[self._bundled :], strict=True):
                variable._value = variable._wrap(value)
                variable._exclusive = True
            del values[self._bundled :]
        bundle.give(values)
        if then is not None:
            then()
        return outputs, token

    def _overwrite_together(
        self,
        overwrite: Callable[[], tuple[list[jax.Array], jax.Array]],
        shared: SharedProgram,
        steps: int,
    ) -> list[jax.Array]:
        activity.count_steps(steps)

        def start() -> tuple[list[jax.Array], jax.Array]:
            with uninterrupted():
                return overwrite()

        return transactions.in_turn(lambda: THROTTLE.in_order(start, shared, may_return=True)[0])

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
        shared = None
        if self.shared is not None:
            if self.keeping not in self._compiled:
                self._compile(self.keeping, new, old, arrays)
            shared = self.shared(arrays)
            activity.count_steps(steps)
        try:
            outputs, values = THROTTLE.dispatch(
                self.keeping, new, old, arrays, shared=shared, wait=self.can_fail
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
    bundle = variable._bundle
    if bundle is not None:
        return bundle.arrays[variable._place]
    x = as_array(variable._value)
    return x if variable._exclusive else _checked(variable, x)


def _own(variable: Variable) -> Any:
    """The same for a program that overwrites it, so that there may be no other reference to it."""
    bundle = variable._bundle
    if bundle is not None:
        return bundle.arrays[variable._place]
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
