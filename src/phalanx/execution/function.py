"""`px.function`: a function that is traced once and runs as one compiled program.

While tracing, the variables that the function reads and writes are discovered. They become inputs
and outputs of the program, so calling the function reads the variables, runs the program, and
writes them back.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import compat, lifting
from phalanx.core import context as ctx
from phalanx.core.callsite import describe_traceback
from phalanx.core.errors import ContextError, InvalidTypeError, InvalidValueError, StagedValueError
from phalanx.core.structure import leaves, replace_leaves
from phalanx.core.values import Layout, Mirrored, PerReplica
from phalanx.core.variable_spec import live_variables
from phalanx.core.variables import Variable
from phalanx.execution.throttle import THROTTLE
from phalanx.execution.variance import differing_marks

_log = logging.getLogger("phalanx")


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an argument; a dimension of None fits any size.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> spec = px.TensorSpec((None, 3), jnp.float32)
        >>> spec.accepts(jnp.ones((5, 3))), spec.accepts(jnp.ones((5, 4)))
        (True, False)
    """

    shape: tuple[int | None, ...]
    dtype: Any = jnp.float32
    name: str | None = None

    def accepts(self, x: Any) -> bool:
        """Whether an array has this shape and dtype."""
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return False
        fits = len(x.shape) == len(self.shape) and all(
            want in (None, have) for want, have in zip(self.shape, x.shape, strict=True)
        )
        return fits and jnp.dtype(x.dtype) == jnp.dtype(self.dtype)


class Function:
    """What `px.function` returns; see there."""

    def __init__(
        self, python_function: Callable[..., Any], input_signature: Sequence[Any] | None = None
    ) -> None:
        if not callable(python_function):
            raise InvalidTypeError(f"px.function needs a callable. Received: {python_function!r}")
        functools.update_wrapper(self, python_function)
        self.__name__: str = getattr(python_function, "__name__", repr(python_function))
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self._programs: dict[Any, _Program | str] = {}
        self._bound: dict[int, tuple[Any, Function]] = {}
        self._on_replicas: dict[int, tuple[Any, Function]] = {}
        self._trace_count = 0
        self._made_variables = False

    # -- calling -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for these arguments, tracing it first if there is none yet."""
        if compat.is_transformation(compat.current_trace()):
            return self.python_function(*args, **kwargs)  # part of a larger program, or of a gradient
        found = self._find(args, kwargs)
        if isinstance(found, tuple):
            program, arrays = found
            return program.run(arrays)
        return self.python_function(*args, **kwargs)

    def run_on_replicas(
        self, strategy: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """`strategy.run` of a compiled function: the run is what gets compiled."""
        known = self._on_replicas.get(id(strategy))
        if known is None or known[0] is not strategy:

            def run(args: Any, kwargs: Any) -> Any:
                return strategy.run(self.python_function, args=args, kwargs=kwargs)

            run.__name__ = self.__name__
            known = self._on_replicas[id(strategy)] = (strategy, Function(run))
        return known[1](tuple(args), dict(kwargs or {}))

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[_Program, list[Any]] | str:
        """The program for these arguments, or why there can be none."""
        call = _Call.of(args, kwargs)
        if call is None:
            why = "replicas hold arrays of different shapes"
            self._say_eager(why, "Use batches that divide evenly, as with drop_remainder=True")
            return why
        program = self._programs.get(call.key)
        if program is None:
            if self.input_signature is not None:
                self._check_signature(args, kwargs)
            program = self._programs[call.key] = self._trace(call)
        return program if isinstance(program, str) else (program, call.arrays)

    def run_steps(self, elements: Sequence[tuple[Any, ...]]) -> Callable[[int], Any] | None:
        """Run one step per element as a single program; None if they need different programs."""
        found = [self._find(args, {}) for args in elements]
        programs = {id(f[0]) if isinstance(f, tuple) else None for f in found}
        if len(programs) != 1 or None in programs:
            return None
        ready = [f for f in found if isinstance(f, tuple)]
        return ready[0][0].run_loop(
            [list(column) for column in zip(*(a for _, a in ready), strict=True)]
        )

    def _trace(self, call: _Call) -> _Program | str:
        program = self._trace_once(call)
        if isinstance(program, list):
            if self._programs or self._made_variables:
                raise self._makes_variables("again, after its first call", program)
            self._made_variables = True
            program = self._trace_once(call)
            if isinstance(program, list):
                raise self._makes_variables("on every call", program)
        marks = differing_marks(program.jaxpr)
        if marks:
            why = f"replicas may write different values: {', '.join(marks)}"
            self._say_eager(why, "Give the variable an aggregation, or all_reduce the value first")
            return why
        return program

    def _trace_once(self, call: _Call) -> _Program | list[Variable]:
        self._trace_count += 1
        return _Program.trace(self.python_function, call)

    def _makes_variables(self, when: str, made: list[Variable]) -> InvalidValueError:
        return InvalidValueError(
            f"{self.__name__} makes variables {when}. A compiled function may do so once: keep the "
            "variable, as in `if self.w is None: self.w = px.Variable(…)`. "
            f"Received: new variables {[v.name for v in made]}"
        )

    def _say_eager(self, why: str, remedy: str) -> None:
        _say_once(
            f"{self.__name__} runs eagerly, one replica after the other, because {why}. {remedy}."
        )

    def _check_signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.input_signature is not None
        try:
            bound = inspect.signature(self.python_function).bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidTypeError(str(error)) from None
        given = list(bound.arguments.values())
        if len(given) != len(self.input_signature):
            raise InvalidTypeError(
                f"{self.__name__} has an input_signature of {len(self.input_signature)} arguments. "
                f"Received: {len(given)} arguments"
            )
        for spec_nest, nest in zip(self.input_signature, given, strict=True):
            for spec, x in zip(leaves(spec_nest), leaves(nest), strict=True):
                if isinstance(spec, TensorSpec) and not spec.accepts(x):
                    raise InvalidTypeError(
                        f"An argument of {self.__name__} does not fit its input_signature {spec}. "
                        f"Received: {x!r}"
                    )

    def __get__(self, instance: Any, owner: type | None = None) -> Function:
        """Bind a method: each instance has programs of its own, because it has variables of its own."""
        if instance is None:
            return self
        known = self._bound.get(id(instance))
        if known is None or known[0] is not instance:
            bound = Function(self.python_function.__get__(instance, owner), self.input_signature)
            known = self._bound[id(instance)] = (instance, bound)
        return known[1]

    # -- looking inside --------------------------------------------------------------------------

    @property
    def trace_count(self) -> int:
        """How often the Python function has been traced."""
        others = (*self._bound.values(), *self._on_replicas.values())
        return self._trace_count + sum(f.trace_count for _, f in others)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program for these arguments, as `jax.stages.Lowered`; runs nothing."""
        found = self._find(args, kwargs)
        if isinstance(found, str):
            raise ContextError(f"{self.__name__} has no program for these arguments, because {found}")
        program, arrays = found
        return program.lower(arrays)

    def cost(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """XLA's estimate of the program's cost on one device, such as flops and bytes accessed."""
        analysis = self.lower(*args, **kwargs).compile().cost_analysis()
        return dict(analysis[0] if isinstance(analysis, list) else analysis)


def function(
    fn: Callable[..., Any] | None = None, *, input_signature: Sequence[Any] | None = None
) -> Any:
    """Compile a function that may read and write variables.

    A decorator, with or without arguments. The function is traced for each new combination of
    argument shapes and dtypes, Python arguments and current strategy; afterwards calls run the compiled
    program. Python side effects happen while tracing only. Inside, `Strategy.run` is one SPMD
    program. Functions called from compiled functions become part of them.

    Args:
        fn: the function. Arrays, NumPy arrays and distributed values are inputs of the program; other
            Python values are constants of it, and another value means another program. Variables
            may be captured or passed.
        input_signature: a nest of `TensorSpec` that arguments must fit.

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


@functools.cache
def _say_once(text: str) -> None:
    _log.warning("%s", text)


# -- one call ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The arguments of one call: arrays, and everything that shapes the program."""

    key: Any
    treedef: Any
    constants: tuple[_Constant | None, ...]  # None where the argument is an array
    arrays: list[Any]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Take arguments apart; None if replicas hold arrays of different shapes."""
        flat, treedef = jax.tree_util.tree_flatten((args, kwargs), is_leaf=_is_ragged)
        arrays: list[Any] = []
        constants: list[_Constant | None] = []
        parts: list[Any] = []
        for x in flat:
            if isinstance(x, jax.Array | np.ndarray | np.generic):
                arrays.append(compat.movable(x))
                constants.append(None)
                parts.append((x.shape, x.dtype, getattr(x, "weak_type", False)))
            elif isinstance(x, PerReplica):
                return None
            else:
                constants.append(_Constant(x))
                parts.append(_constant_key(x))
        mode = ctx.current_mode()
        where = (id(mode.strategy), mode.replica_context is None, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        return _Call((treedef, tuple(parts), where), treedef, tuple(constants), arrays)

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, with other arrays."""
        remaining = iter(arrays)
        flat = [next(remaining) if c is None else c.value for c in self.constants]
        args, kwargs = jax.tree_util.tree_unflatten(self.treedef, flat)
        return args, kwargs


@dataclass(frozen=True)
class _Constant:
    value: Any


def _is_ragged(x: Any) -> bool:
    return isinstance(x, PerReplica) and x.array is None


def _constant_key(x: Any) -> Any:
    if isinstance(x, Variable):
        return (Variable, id(x))
    try:
        hash(x)
    except TypeError:
        return (type(x), id(x))
    return (type(x), x)


# -- one program -----------------------------------------------------------------------------------


class _Program:
    """A traced function: its variables, its results, and the compiled code."""

    def __init__(
        self,
        closed: Any,
        variables: list[Variable],
        used: lifting.Lifting,
        result: _Result,
    ) -> None:
        self.jaxpr = closed.jaxpr
        self._result = result
        self.written = list(used.written)
        self.read = [v for v in used.read if v not in used.written]
        position = {v: i for i, v in enumerate(variables)}
        written = [position[v] for v in self.written]
        read = [position[v] for v in self.read]
        total = len(variables)

        def program(new: list[Any], old: list[Any], arguments: list[Any]) -> Any:
            inputs: list[Any] = [None] * total + list(arguments)
            for i, x in zip(written, new, strict=True):
                inputs[i] = x
            for i, x in zip(read, old, strict=True):
                inputs[i] = x
            outputs = compat.eval_jaxpr(closed, inputs)
            count = len(outputs) - len(written)
            return (outputs[:count], outputs[count:]), jnp.int32(0)

        def looped(new: list[Any], old: list[Any], stacked: list[Any]) -> Any:
            def body(state: list[Any], arguments: list[Any]) -> tuple[list[Any], list[Any]]:
                (outputs, state), _ = program(state, old, arguments)
                return state, outputs

            state, outputs = jax.lax.scan(body, new, stacked)
            return (outputs, state), jnp.int32(0)

        self._compiled = jax.jit(program, donate_argnums=0)
        self._looped = jax.jit(looped, donate_argnums=0)
        self._device = used.device

    @staticmethod
    def trace(fn: Callable[..., Any], call: _Call) -> _Program | list[Variable]:
        """Trace a function; gives the variables that it made, if it made any.

        They cannot be inputs of the program that makes them, so it must be traced again.
        """
        variables = live_variables()
        box: dict[str, Any] = {}

        def staged(values: list[Any], arrays: list[Any]) -> Any:
            held = {v: _as_held(v, x) for v, x in zip(variables, values, strict=True)}
            used = lifting.Lifting(held)
            args, kwargs = call.rebuild(arrays)
            with lifting.lifted(used):
                result = _Result(fn(*args, **kwargs))
            box["used"], box["result"] = used, result
            return result.arrays, [_as_array(value) for value in used.written.values()]

        shapes = [_shape_of(v) for v in variables]
        arguments = [compat.shape_of(x) for x in call.arrays]
        try:
            closed, _ = compat.jaxpr_and_result(staged, shapes, arguments)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise StagedValueError(
                "Python code asked for a value that the compiled function only computes later, at "
                f"{describe_traceback(error.__traceback__)}. The replica id and all arrays are such "
                "values. Write the branch with jnp.where or jax.lax.cond, or run the step eagerly: "
                "call strategy.run outside of px.function."
            ) from error
        used: lifting.Lifting = box["used"]
        return used.made or _Program(closed, variables, used, box["result"])

    def run(self, arrays: list[Any]) -> Any:
        """Read the variables, run the program, write them back."""
        return self._result.rebuild(self._dispatch(self._compiled, arrays))

    def run_loop(self, columns: list[list[Any]]) -> Callable[[int], Any]:
        """Run the program once per element of each column; gives a function from step to result."""
        stacked = [jnp.stack(column) for column in columns]
        outputs = self._dispatch(self._looped, stacked)
        return lambda step: self._result.rebuild([x[step] for x in outputs])

    def _dispatch(self, compiled: Callable[..., Any], arrays: list[Any]) -> list[jax.Array]:
        with jax.default_device(self._device) if self._device is not None else nullcontext():
            outputs, values = THROTTLE.dispatch(compiled, *self._inputs(arrays))
        for variable, value in zip(self.written, values, strict=True):
            variable._value = _as_value(variable, value)
            variable._exclusive = True
        return outputs

    def lower(self, arrays: list[Any]) -> Any:
        """The lowered program."""
        return self._compiled.lower(*self._inputs(arrays, keep=True))

    def _inputs(self, arrays: list[Any], keep: bool = False) -> tuple[list[Any], list[Any], list[Any]]:
        new = []
        for variable in self.written:
            x = _as_array(variable._value)
            # The program overwrites its input, which must not be an array that somebody else has.
            new.append(x if variable._exclusive or keep else x.copy())
        return new, [_as_array(v._value) for v in self.read], arrays


class _Result:
    """The results of a traced function: which leaves are arrays, and how they are wrapped."""

    def __init__(self, nest: Any) -> None:
        self._nest = nest
        self._leaves = leaves(nest)
        self.arrays: list[Any] = []
        self._slots: list[tuple[type, Layout | None] | None] = []
        for leaf in self._leaves:
            if isinstance(leaf, PerReplica | Mirrored) and leaf.array is not None:
                self._slots.append((type(leaf), leaf.layout))
                self.arrays.append(leaf.array)
            elif isinstance(leaf, jax.Array):
                self._slots.append((jax.Array, None))
                self.arrays.append(leaf)
            else:
                self._slots.append(None)
        # Keep no tracers alive once the arrays have been returned.
        self._leaves = [
            x if slot is None else None for x, slot in zip(self._leaves, self._slots, strict=True)
        ]
        self._nest = replace_leaves(nest, self._leaves)
        self._single = len(self._slots) == 1 and self._nest is None and self._slots[0] is not None

    def rebuild(self, outputs: Sequence[jax.Array]) -> Any:
        """The results again, around computed arrays."""
        remaining = iter(outputs)
        new = []
        for leaf, slot in zip(self._leaves, self._slots, strict=True):
            if slot is None:
                new.append(leaf)
            elif slot[0] is jax.Array:
                new.append(_as_plain(next(remaining)))
            else:
                new.append(slot[0].from_global(next(remaining), slot[1]))  # type: ignore[attr-defined]
        return new[0] if self._single else replace_leaves(self._nest, new)


def _as_held(variable: Variable, x: Any) -> Any:
    """What a variable holds in a program, around its traced array."""
    value = variable._value
    if isinstance(value, Mirrored):
        return Mirrored.of_global(x, value.count)
    if isinstance(value, PerReplica):
        return PerReplica.from_global(x, Layout(value.count, not variable.shape))
    return x


def _as_array(value: Any) -> Any:
    """The one array that stands for a value in a program."""
    return value.array if isinstance(value, Mirrored | PerReplica) else value


def _as_value(variable: Variable, x: jax.Array) -> Any:
    """What a variable holds after a program, around the array that the program returned."""
    old = variable._value
    if isinstance(old, Mirrored):
        return Mirrored.of_global(x, old.count)
    if isinstance(old, PerReplica):
        return PerReplica.from_global(x, Layout(old.count, not variable.shape))
    return _as_plain(x, variable._device)


def _as_plain(x: jax.Array, device: jax.Device | None = None) -> jax.Array:
    """A result that belongs to no replica: an array that follows the computation."""
    if len(x.devices()) > 1 and x.is_fully_replicated:
        pieces = compat.pieces(x)
        x = next((p for p in pieces if device in p.devices()), pieces[0])
    return compat.uncommitted(x)


def _shape_of(variable: Variable) -> jax.ShapeDtypeStruct:
    value = variable._value
    shape = variable.shape
    if isinstance(value, PerReplica):
        shape = (value.count, *shape) if not shape else (value.count * shape[0], *shape[1:])
    return jax.ShapeDtypeStruct(shape, variable.dtype)
