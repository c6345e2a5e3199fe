"""`px.function`: a function that is traced once and runs as one compiled program.

While tracing, the variables that the function reads and writes are discovered. They become inputs
and outputs of the program, so calling the function reads the variables, runs the program, and
writes them back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.core import context as ctx, input_requests, run_hooks
from phalanx.core.padding import CannotJoin
from phalanx.core.run_hooks import say_once
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.transactions import leaving_nothing
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import live_variables
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.execution.call_arguments import Call, Pattern
from phalanx.execution.captures import Captured
from phalanx.execution.iterator_inputs import Ended, Source, Taken, give_back
from phalanx.execution.lifetimes import Table, Whole
from phalanx.execution.program import CHANGED, Program, Stacked
from phalanx.execution.reasons import (
    ENDED,
    IN_EAGER_STEP,
    LOOPS,
    LOOPS_ELSEWHERE,
    NO_ARRAYS,
    ROUNDS,
    Reason,
    cannot_join,
    failed_to_trace,
    first_line,
)
from phalanx.execution.retracing import ChangingNumbers, TraceWatch
from phalanx.execution.signatures import fitted
from phalanx.execution.tracing import trace_program
from phalanx.execution.variance import why_eager
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.pickling import OnePerProcess
from phalanx.runtime.turns import Turn, Turns

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

_MOST_UNEVEN = 16
"""How many programs for uneven batches one function may have: each takes its time to compile."""
_FED = object()  # the first argument of calls to which elements of iterators were added


@dataclass(frozen=True)
class _Found:
    """What to run for a call: a program with its arrays, or Python, and why."""

    program: Program | None = None
    arrays: list[Any] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)  # so that they last as long as the run
    reason: Reason | None = None


class Function(OnePerProcess):
    """A compiled function, as `px.function` returns it.

    Args:
        python_function: what it makes programs of.
        input_signature: as for `px.function`.
        is_run: whether it is no more than a call of `Strategy.run`.
    """

    def __init__(
        self,
        python_function: Callable[..., Any],
        input_signature: Sequence[Any] | None = None,
        is_run: bool = False,
    ) -> None:
        if not callable(python_function):
            raise InvalidTypeError(f"px.function needs a callable. Received: {shown(python_function)}")
        functools.update_wrapper(self, python_function)
        self.__name__: str = getattr(python_function, "__name__", repr(python_function))
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self._is_run = is_run
        self._may_fail = False  # to be traced: then it runs eagerly
        self._programs: Table[Program | Reason] = Table()
        self._tracing = Turns(f"trace {self.__name__}")
        self._latest: weakref.ref[Program] | None = None  # what ran the last time
        self._sources: Table[tuple[Source, ...]] = Table()
        self.unbound: Function | None = None
        self._runs: dict[tuple[str, bool], Function] = {}
        self._traces = [0]  # shared with the functions that run it on replicas
        self._made_variables = False
        self._numbers = ChangingNumbers()
        self._watch = TraceWatch()
        self._calls = 0
        self._uneven_count = 0  # never falls, so that all workers count alike

    # -- calling -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for these arguments, tracing it first if there is none yet."""
        return self.call_then(None, args, kwargs)

    def call_then(
        self, then: Callable[[], None] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the function; `then` is called if the step happens, in the same moment."""
        if compat.in_transformation():
            return self.python_function(*args, **kwargs)  # part of a larger program, or of a gradient
        replica = ctx.active_replica()
        if replica is not None and replica.num_replicas_in_sync > 1:
            self._say_eager(IN_EAGER_STEP)
            return self.python_function(*args, **kwargs)
        self._calls += 1
        if self.input_signature is not None:
            args, kwargs = fitted(
                self.python_function, self.__name__, self.input_signature, args, kwargs
            )
        latest = None if self._latest is None else self._latest()
        if latest is not None and latest.pattern is not None:
            arrays = latest.pattern.arrays_of(args, kwargs)
            if arrays is not None:
                result = latest.run_again(arrays, then)
                if result is not CHANGED:
                    return result
                variables = latest.variables()
                if variables is not None:
                    return _run_known(latest, variables, arrays, then)
        del latest  # so that it can end
        call = Call.of(args, kwargs)
        known = None if call is None else self._programs.get(call.key)
        if call is not None and isinstance(known, Program):  # mostly, and it takes no elements
            variables = known.variables()
            if variables is not None:
                if known.pattern is None and known.can_run_again:
                    known.pattern = Pattern.of(call, args, kwargs)
                self._latest = weakref.ref(known)
                return _run_known(known, variables, call.arrays, then)
        return leaving_nothing(self._run, call, then, args, kwargs)

    def _run(
        self,
        call: Call | None,
        then: Callable[[], None] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        taken = Taken(() if call is None else call.constants)
        taken.then = then
        try:
            found = self._find(call, taken, args, kwargs)
            if found.program is not None:
                return found.program.run(found.variables, found.arrays, taken.use)
            assert found.reason is not None
            with taken.given():
                return self._run_as_python(found.reason, taken, args, kwargs)
        except BaseException as error:
            # A step that fails has had its input. One that was interrupted gets it once more.
            if not isinstance(error, Exception):
                taken.give_back()
            raise

    def _run_as_python(
        self, reason: Reason, taken: Taken, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the Python function. Each `Strategy.run` in it is compiled by itself, if it can be."""
        if self._is_run:
            self._say_eager(reason)
            return transactions.atomically(self._call_python, None, taken, args, kwargs)
        has_runs = False

        def run(strategy: Strategy, fn: Any, args: Sequence[Any], kwargs: Any) -> Any:
            nonlocal has_runs
            has_runs = True
            return self._run_step(strategy, Captured(fn), args, kwargs)

        try:
            if reason is LOOPS:  # each step in it counts by itself
                return run_hooks.running_steps(run, self.python_function, *args, **kwargs)
            return transactions.atomically(self._call_python, run, taken, args, kwargs)
        finally:
            if not has_runs and reason is not ENDED:  # where px.train.loop has compiled steps
                self._say_eager(reason)

    def _call_python(
        self,
        run: run_hooks.RunsSteps | None,
        taken: Taken,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        step = transactions.current()
        if step is not None:
            step.when_committed(taken.use)
        return run_hooks.running_steps(run, self.python_function, *args, **kwargs)

    def run_on_replicas(
        self, strategy: Strategy, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """`strategy.run` of a compiled function: the run is what gets compiled."""
        return self._run_step(strategy, Whole(self.python_function), args, kwargs)

    def _run_step(
        self,
        strategy: Strategy,
        step: Captured | Whole,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Run a step on all replicas, as a program of its own."""
        name: str = getattr(step.x, "__name__", type(step.x).__name__)
        is_captured = isinstance(step, Captured)
        known = self._runs.get((name, is_captured))
        if known is None:
            known = self._runs[name, is_captured] = Function(_run, is_run=True)
            known.__name__ = name
            known._traces = self._traces
            known._may_fail = is_captured  # the user has not asked for it to be compiled
        return known(strategy, step, tuple(args), dict(kwargs or {}))

    def _find(
        self, call: Call | None, taken: Taken, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Found:
        """The program for these arguments, or why there can be none.

        The caller must give back what was taken, if it is interrupted before it has used it.
        """
        if call is None:
            return _Found(reason=NO_ARRAYS)
        turn = Turn(self._tracing)
        try:
            return self._find_in_turn(call, args, kwargs, taken, turn)
        except BaseException:
            taken.give_back()
            raise
        finally:
            turn.end()

    def _find_in_turn(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], taken: Taken, turn: Turn
    ) -> _Found:
        sources = self._sources.get(call.key) or ()
        while True:
            try:
                taken.take(sources)
            except Ended:
                taken.give_back()
                return _Found(reason=ENDED)
            elements = taken.fed()
            if elements is None:
                return _Found(reason=ROUNDS)
            fed = Call.of((_FED, elements, args), kwargs) if sources else call
            if fed is None:
                return _Found(reason=NO_ARRAYS)
            known = self._programs.get(fed.key)
            as_constants = fed
            if known is None:
                fed = self._numbers.as_inputs(fed) or fed
                known = self._programs.get(fed.key)
            variables = known.variables() if isinstance(known, Program) else []
            if known is None or variables is None:
                if not turn.taken:
                    turn.take()  # one thread traces; perhaps another has just done it
                    continue
                alive = live_variables()
                try:
                    known = self._trace(fed, taken)
                except Exception:
                    if fed is as_constants:
                        raise
                    self._numbers.must_be_known(as_constants)
                    continue
                except input_requests.NeedsElement as need:
                    self._traces[0] -= 1
                    sources = (*sources, taken.source_of(need))
                    captured = [s.captured() for s in sources if s.captured is not None]
                    self._sources.put(call.key, sources, [*call.needs, *captured])
                    continue
                variables = (known.variables() or []) if isinstance(known, Program) else []
                del alive
                self._watch.note(
                    self.__name__, self._calls, self.python_function, (elements, args, kwargs)
                )
                self._programs.put(fed.key, known, [*fed.needs, *variables])
            if isinstance(known, Reason):
                return _Found(reason=known)
            return _Found(known, fed.arrays, variables)

    def run_steps(
        self, elements: Sequence[tuple[Any, ...]], then: Callable[[], None]
    ) -> Stacked | None:
        """Run one step per element as a single program; None if they need different programs.

        Args:
            elements: the arguments of each step.
            then: called if the steps happen, in the same moment.
        """
        taken: list[Taken] = []
        try:
            return leaving_nothing(self._run_found, elements, taken, then)
        finally:
            give_back(taken)

    def _run_found(
        self, elements: Sequence[tuple[Any, ...]], taken: list[Taken], then: Callable[[], None]
    ) -> Stacked | None:
        def use() -> None:
            then()
            for each in taken:
                each.use()

        found = []
        for args in elements:
            call = Call.of(args, {})
            taken.append(Taken(() if call is None else call.constants))
            found.append(self._find(call, taken[-1], args, {}))
        program = found[0].program
        if program is None or any(f.program is not program for f in found):
            return None
        if not program.can_loop:
            return None
        if not found[0].arrays:  # nothing that a loop could go over
            return None
        columns = zip(*(f.arrays for f in found), strict=True)
        return program.run_loop(found[0].variables, [list(column) for column in columns], use)

    def _trace(self, call: Call, taken: Taken) -> Program | Reason:
        if call.is_uneven:
            if self._uneven_count == _MOST_UNEVEN:
                return cannot_join(f"there are {_MOST_UNEVEN} programs for other such batches")
            self._uneven_count += 1
        program = self._try_to_trace(call, taken)
        if isinstance(program, list):
            if self._programs or self._made_variables:
                raise self._makes_variables("again, after its first call", program)
            self._made_variables = True
            program = self._try_to_trace(call, taken)
            if isinstance(program, list):
                raise self._makes_variables("on every call", program)
        if isinstance(program, Reason):
            return program
        return why_eager(program.jaxpr, self.__name__, call.is_uneven) or program

    def _try_to_trace(self, call: Call, taken: Taken) -> Program | list[Variable] | Reason:
        try:
            return self._trace_once(call, taken)
        except input_requests.LoopsOverInput:
            return LOOPS
        except traced_variables.LoopsElsewhere:
            return LOOPS_ELSEWHERE
        except CannotJoin as reason:
            return cannot_join(str(reason))
        except Exception as error:
            # What cannot be traced may run eagerly. If not, the error there says on which replica.
            if call.is_uneven:
                return cannot_join(f"tracing failed with {first_line(error)}")
            if self._may_fail:
                return failed_to_trace(error)
            raise

    def _trace_once(self, call: Call, taken: Taken) -> Program | list[Variable]:
        self._traces[0] += 1

        def with_elements(*args: Any, **kwargs: Any) -> Any:
            _, elements, args = args if taken.elements else (_FED, [], args)
            with taken.traced(elements):
                return self.python_function(*args, **kwargs)

        return trace_program(with_elements, call, self.__name__)

    def _makes_variables(self, when: str, made: list[Variable]) -> InvalidValueError:
        return InvalidValueError(
            f"{self.__name__} makes variables {when}. A compiled function may do so once: keep the "
            "variable, as in `if self.w is None: self.w = px.Variable(…)`. "
            f"Received: new variables {[v.name for v in made]}"
        )

    def _say_eager(self, reason: Reason) -> None:
        say_once(
            f"{self.__name__} runs eagerly for these arguments, one replica after the other, because "
            f"{reason.why}. {reason.remedy}."
        )

    def __get__(self, instance: Any, owner: type | None = None) -> Function:
        """Bind a method: each instance has programs of its own, because it has variables of its own."""
        if instance is None:
            return self
        # Kept in the instance, so that both end together.
        cache: dict[str, Any] = getattr(instance, "__dict__", {})
        name = f"_px_function_{self.__name__}"
        bound = cache.get(name)
        if bound is None or bound.unbound is not self:
            bound = Function(self.python_function.__get__(instance, owner), self.input_signature)
            bound.unbound = self
            cache[name] = bound
        return bound

    def recipe(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What makes the function in another process that unpickles it."""
        if self.unbound is not None:
            return getattr, (self.python_function.__self__, self.__name__)  # type: ignore[attr-defined]
        return Function, (self.python_function, self.input_signature)

    # -- looking inside --------------------------------------------------------------------------

    @property
    def trace_count(self) -> int:
        """How often the Python function has been traced."""
        return self._traces[0]

    def __repr__(self) -> str:
        return f"<px.Function {self.__name__}: {len(self._programs)} programs>"

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program for these arguments, as `jax.stages.Lowered`; runs nothing."""
        call = Call.of(args, kwargs)
        taken = Taken(() if call is None else call.constants)
        try:
            found = self._find(call, taken, args, kwargs)
        finally:
            taken.give_back()
        if found.program is None:
            assert found.reason is not None
            raise ContextError(
                f"{self.__name__} has no program for these arguments, because {found.reason.why}"
            )
        return found.program.lower(found.variables, found.arrays)

    def cost(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """XLA's estimate of the program's cost on one device, such as flops and bytes accessed."""
        analysis = self.lower(*args, **kwargs).compile().cost_analysis()
        return dict(analysis[0] if isinstance(analysis, list) else analysis)


def function(
    fn: Callable[..., Any] | None = None, *, input_signature: Sequence[Any] | None = None
) -> Any:
    """Compile a function that may read and write variables.

    A decorator, with or without arguments. JAX traces the function for each new combination of
    argument shapes and dtypes, Python arguments and current strategy; later calls run the compiled
    program. Python side effects happen only while JAX traces. Inside, `Strategy.run` is one SPMD
    program, also where replicas hold arrays of different sizes: JAX then traces the step once for each
    size. A function has at most 16 programs of that kind. Functions called from compiled functions
    become part of them. A function that loops over input runs as Python, and each `Strategy.run` in it
    is a program.

    Args:
        fn: the function. Arrays, NumPy arrays and distributed values are inputs of the program; other
            Python values are constants of it, and another value means another program. Numbers in
            objects with arrays, such as training states, become inputs when they change. Variables may
            be captured or passed.
        input_signature: a nest of `TensorSpec` that arguments must fit; numbers become arrays.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     total = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
        >>> @px.function
        ... def step(x):
        ...     return strategy.run(lambda x: total.assign_add(x.sum()) + 0.0, args=(x,))
        >>> batch = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(3))
        >>> for _ in range(3):
        ...     result = step(batch)
        >>> float(total), step.trace_count
        (18.0, 1)
    """
    if fn is None:
        return functools.partial(function, input_signature=input_signature)
    return Function(fn, input_signature)


def _run_known(
    program: Program, variables: list[Variable], arrays: list[Any], then: Callable[[], None] | None
) -> Any:
    if program.leaves_nothing:
        return program.run(variables, arrays, then or _nothing)
    return leaving_nothing(program.run, variables, arrays, then or _nothing)


def _nothing() -> None:
    pass


def _run(
    strategy: Strategy, step: Captured | Whole, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    result = strategy.run(step.x, args=args, kwargs=kwargs)
    if isinstance(step, Captured):
        step.check_unchanged()
    return result
