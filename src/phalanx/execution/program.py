"""Programs: traced functions with their variables, arguments and results.

A `Program` is what tracing a function for a `Call` gives: it knows which variables it reads and writes,
and how results are put together.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core.padding import Padded, Shape
from phalanx.core.structure import is_leaf, leaves, replace_leaves
from phalanx.core.values import Mirrored, PerReplica, ReplicaLayout
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.distributed_variables import CopiedVariable
from phalanx.core.variables.variable import Variable
from phalanx.execution.call_arguments import Pattern
from phalanx.execution.running import Runner, as_array
from phalanx.execution.throttle import token
from phalanx.job.shared_programs import SharedProgram
from phalanx.runtime import compat
from phalanx.runtime.devices import default_device
from phalanx.runtime.host_memory import expect_model

_serials = itertools.count(1)

_traced: weakref.WeakSet[Program] = weakref.WeakSet()

CHANGED = object()
"""What `Program.run_again` returns if it could not run."""


class Program:
    """A traced function: its variables, its results, and the compiled code."""

    can_loop = True
    """Whether several steps can be one program; see `run_loop`."""

    pattern: Pattern | None = None
    """What calls of this program look like."""

    def __init__(
        self,
        closed: Any,
        variables: list[Variable],
        used: traced_variables.VariableTrace,
        result: Result,
        name: str,
    ) -> None:
        self.jaxpr = closed.jaxpr
        self.name = name
        self._result = result
        # Some variables are read and not needed: a run takes in all variables of its strategy that are
        # synchronized on read. The program must not end with them.
        pruned, needed = compat.without_unused(closed)
        position = {v: i for i, v in enumerate(variables)}
        old = [v for v in used.read if v not in used.written and needed[position[v]]]
        _spread(used, [*used.written, *old])
        # Those come last which cannot hold an array of several devices as it is.
        alone = [used.is_spread and not isinstance(v, CopiedVariable) for v in used.written]
        order = sorted(range(len(alone)), key=alone.__getitem__)
        new = [list(used.written)[i] for i in order]
        # Variables belong to the caller, and hold their strategies: here they are not kept alive.
        self._written, self._read = references(new), references(old)
        self._needed = [*self._written, *self._read, *result.variables]
        self._alone = self._needed[alone.count(False) : len(new)]
        self._besides = [*self._read, *result.variables]
        written, read = [position[v] for v in new], [position[v] for v in old]
        total, spans_workers = len(variables), used.spans_workers

        def program(new: list[Any], old: list[Any], arguments: list[Any]) -> Any:
            inputs: list[Any] = [None] * total + list(arguments)
            for i, x in zip(written, new, strict=True):
                inputs[i] = x
            for i, x in zip(read, old, strict=True):
                inputs[i] = x
            inputs = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
            outputs = compat.eval_jaxpr(pruned, inputs)
            count = len(outputs) - len(written)
            return (outputs[:count], [outputs[count + i] for i in order]), token(spans_workers)

        def looped(new: list[Any], old: list[Any], stacked: list[Any]) -> Any:
            def body(state: list[Any], arguments: list[Any]) -> tuple[list[Any], list[Any]]:
                (outputs, state), _ = program(state, old, arguments)
                return state, outputs

            state, outputs = jax.lax.scan(body, new, stacked)
            return (outputs, state), token(spans_workers)

        self._device = used.device
        # Whether runs need nothing but the bundle, as mostly on several devices.
        self._is_bundled = self._device is None and not self._alone and not self._besides
        self._after_runs = list(used.after_runs)
        can_fail = _calls_python(self.jaxpr) or (
            spans_workers and transactions.protects_variables(jax.default_backend())
        )
        for variable in new:
            variable._wrap = wrapper(variable)
        serial = next(_serials)
        flags = used.compiler_options
        self._step, self._loop = (
            Runner(code, alone.count(False), can_fail, self._shared_as(used, serial, loops), flags)
            for code, loops in ((program, False), (looped, True))
        )
        expect_model([*new, *old])
        _traced.add(self)

    def variables(self) -> list[Variable] | None:
        """The variables that the program needs; None if one of them is gone."""
        return _alive(self._needed)

    def end(self) -> None:
        """Never run again, as if a variable were gone."""
        self._needed, self._besides = [_gone()], [_gone()]

    @property
    def can_run_again(self) -> bool:
        """Whether `run_again` is of use."""
        return not self._step.can_fail and self._step.shared is None

    @property
    def leaves_nothing(self) -> bool:
        """Whether an interrupt of a run leaves this thread as it was, without further care."""
        return self._is_here and not self._step.can_fail

    @property
    def _is_here(self) -> bool:
        """Whether the program runs where JAX puts it anyway."""
        return self._device is None or self._device is default_device()

    def run(self, variables: list[Variable], arrays: list[Any], then: Callable[[], None]) -> Any:
        """Read the variables, run the program, write them back.

        Args:
            variables: what `variables` returned.
            arrays: the arguments.
            then: called if the step happens, in the same moment.
        """
        return self._result.rebuild(self._run(self._step, variables, arrays, 1, then))

    def run_again(self, arrays: list[Any], then: Callable[[], None] | None) -> Any:
        """Run the program as the last time, in a fraction of the time that `run` takes.

        Returns `CHANGED`, and runs nothing, if more has changed since than the arguments.

        Args:
            arrays: the arguments.
            then: called if the step happens, in the same moment.
        """
        if self._is_bundled:
            outputs = self._step.run_again((), (), arrays, then)
        else:
            alone, read = _alive(self._alone), _alive(self._besides)
            if alone is None or read is None:
                return CHANGED
            run = self._step.run_again if self._is_here else self._run_again_there
            outputs = run(alone, read[: len(self._read)], arrays, then)
        if outputs is None:
            return CHANGED
        for after in self._after_runs:
            after(1)
        return self._result.rebuild(outputs)

    def _run_again_there(self, *args: Any) -> list[jax.Array] | None:
        def run() -> list[jax.Array] | None:
            with jax.default_device(self._device):
                return self._step.run_again(*args)

        return transactions.leaving_nothing(run)

    def run_loop(
        self, variables: list[Variable], columns: list[list[Any]], then: Callable[[], None]
    ) -> Stacked:
        """Run the program once per element of each column."""
        stacked = [jnp.stack(column) for column in columns]
        steps = len(columns[0]) if columns else 1
        outputs = self._run(self._loop, variables, stacked, steps, then)
        return outputs, self._result.rebuild

    def _run(
        self,
        runner: Runner,
        variables: list[Variable],
        arrays: list[Any],
        steps: int,
        then: Callable[[], None],
    ) -> list[jax.Array]:
        written, read = self._used(variables)
        if self._is_here:
            outputs = runner.run(written, read, arrays, steps, then)
        else:
            with jax.default_device(self._device):
                outputs = runner.run(written, read, arrays, steps, then)
        for after in self._after_runs:
            after(steps)
        return outputs

    def _used(self, variables: list[Variable]) -> tuple[list[Variable], list[Variable]]:
        """Of what `variables` returned, those that the program writes, and those that it reads."""
        count = len(self._written)
        return variables[:count], variables[count : count + len(self._read)]

    def _shared_as(
        self, used: traced_variables.VariableTrace, serial: int, loops: bool
    ) -> Callable[[list[Any]], SharedProgram] | None:
        """Says what other workers must run too, if they take part."""
        if not used.spans_workers:
            return None
        seconds = used.seconds
        operation = f"the compiled function {self.name}{' in a loop' if loops else ''}"
        jaxpr = self.jaxpr

        def content() -> str:
            # Variables that the step does not use are in the program too, and differ between workers:
            # one may have collected the garbage that another has not.
            return str(compat.used_part(jaxpr))

        return lambda arrays: SharedProgram((serial, loops), operation, arrays, content, seconds)

    def lower(self, variables: list[Variable], arrays: list[Any]) -> Any:
        """The lowered program."""
        values = ([as_array(v._held()) for v in some] for some in self._used(variables))
        return self._step.overwriting.lower(*values, arrays)


def end_programs(variables: Sequence[Variable]) -> None:
    """Let no program run again that was traced with these variables: they are kept in another form."""
    gone = set(map(id, variables))
    for program in list(_traced):
        if any(id(reference()) in gone for reference in program._needed):
            program.end()


Stacked = tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]
"""The arrays that the steps of a loop returned, stacked, and what makes a result of those of a step."""


class Result:
    """The results of a traced function: which leaves are arrays, and how they are wrapped."""

    def __init__(self, nest: Any) -> None:
        self._leaves = leaves(nest)
        self.arrays: list[Any] = []
        self._makers: list[tuple[int, Callable[[jax.Array], Any]]] = []  # where, and what to make
        self._references: list[tuple[int, weakref.ref[Variable]]] = []
        for i, leaf in enumerate(self._leaves):
            if isinstance(leaf, PerReplica) and leaf.is_traced and leaf.padded is not None:
                self._makers.append((i, _unpadding(leaf.padded.shapes)))
                self.arrays.append(leaf.padded.array)
            elif isinstance(leaf, PerReplica | Mirrored) and leaf.array is not None:
                self._makers.append((i, _wrapping(type(leaf), leaf.layout)))
                self.arrays.append(leaf.array)
            elif isinstance(leaf, jax.Array):
                self._makers.append((i, _Plain()))
                self.arrays.append(leaf)
            elif isinstance(leaf, Variable):
                self._references.append((i, weakref.ref(leaf)))
            else:
                continue
            self._leaves[i] = None  # keep no tracers alive once the arrays have been returned
        self.variables = [reference for _, reference in self._references]
        self._nest = replace_leaves(nest, self._leaves)
        is_single = self._nest is None and len(self._makers) == 1
        self._single = self._makers[0][1] if is_single else None
        self._is_constant = is_leaf(nest) and not self._makers and not self._references

    def rebuild(self, outputs: Sequence[jax.Array]) -> Any:
        """The results again, around computed arrays."""
        if self._single is not None:
            return self._single(outputs[0])
        if self._is_constant:
            return self._nest
        new = list(self._leaves)
        for (i, make), output in zip(self._makers, outputs, strict=True):
            new[i] = make(output)
        for i, reference in self._references:
            new[i] = reference()
        return replace_leaves(self._nest, new)


def _calls_python(jaxpr: Any) -> bool:
    """Whether a program calls functions outside of XLA, which can fail while it runs."""
    names = (eqn.primitive.name for eqn in jaxpr.eqns)
    if any("callback" in name or name in ("debug_print", "ffi_call") for name in names):
        return True
    return any(_calls_python(inner) for eqn in jaxpr.eqns for inner in compat.sub_jaxprs(eqn))


def _alive(references: Sequence[weakref.ref[Variable]]) -> list[Variable] | None:
    """Variables, if all of them are still there."""
    if not references:
        return []
    found: list[Any] = [reference() for reference in references]
    # Variables have an == of their own, so `None in found` would compute.
    return None if any(map(operator.is_, found, itertools.repeat(None))) else found


def _spread(used: traced_variables.VariableTrace, variables: Sequence[Variable]) -> None:
    """Say that a program runs where its variables are."""
    for variable in variables:
        used.spans_workers |= getattr(variable, "spans_workers", False)  # one value, in parts
        if isinstance(variable, CopiedVariable):
            owner = variable.distribute_strategy
            devices = owner.extended._span or variable._devices
            used.spread_over(devices, f"variable {variable.name!r} of {owner!r}")


class _Nothing:
    """An object that is gone at once."""


def _gone() -> weakref.ref[Any]:
    """A reference to something that is no longer there."""
    return weakref.ref(_Nothing())


def references(variables: Sequence[Variable]) -> list[weakref.ref[Variable]]:
    """References that keep variables no longer alive than their users do."""
    return [weakref.ref(v) for v in variables]


def as_held(variable: Variable, x: Any) -> Any:
    """What a variable holds in a program, around its traced array."""
    value = variable._value
    if isinstance(value, Mirrored):
        return Mirrored.of_global(x, value.count)
    if isinstance(value, PerReplica):
        assert isinstance(variable, CopiedVariable)
        return PerReplica.from_global(x, ReplicaLayout(value.count, not variable.part_shape))
    return x


def wrapper(variable: Variable) -> Callable[[jax.Array], Any]:
    """Makes what a variable holds after a program, around the array that the program returned."""
    if variable._keeps_layout:
        return _as_it_is
    value = variable._value
    if isinstance(value, Mirrored | PerReplica) and value.array is not None:
        return _wrapping(type(value), value.layout)
    return _Plain(variable._device)


def _wrapping(kind: type[Mirrored | PerReplica], layout: ReplicaLayout) -> Callable[[jax.Array], Any]:
    """Makes values of replicas."""
    make = kind.from_global
    return lambda x: make(x, layout)


def _unpadding(shapes: tuple[Shape, ...]) -> Callable[[jax.Array], Any]:
    """Makes values of replicas that have different shapes."""
    return lambda x: PerReplica.from_padded(Padded(x, shapes))


class _Plain:
    """Makes results that belong to no replica: arrays that follow the computation."""

    __slots__ = ("_aval", "_device", "_sharding", "_take")

    def __init__(self, device: jax.Device | None = None) -> None:
        self._device = device
        # Of the last array: mostly the next one is like it, and asking for its devices takes long.
        self._aval: Any = None
        self._sharding: Any = None
        self._take: Callable[[jax.Array], jax.Array] = compat.uncommitted

    def __call__(self, x: jax.Array) -> jax.Array:
        if x.sharding is not self._sharding or x.aval is not self._aval:
            self._take = self._way(x)
            self._sharding, self._aval = x.sharding, x.aval
        return self._take(x)

    def _way(self, x: jax.Array) -> Callable[[jax.Array], jax.Array]:
        if len(x.devices()) == 1:
            return compat.uncommitted
        return compat.one_piece_taker(x, self._device) if x.is_fully_replicated else _as_it_is


def _as_it_is(x: jax.Array) -> jax.Array:
    """An array that is divided over devices stays there."""
    return x


def shape_of(variable: Variable) -> jax.ShapeDtypeStruct:
    """The shape of the array that stands for a variable in programs."""
    value = variable._value
    shape = variable.shape
    if isinstance(value, PerReplica):
        assert isinstance(variable, CopiedVariable)
        shape = variable.part_shape
        shape = (value.count, *shape) if not shape else (value.count * shape[0], *shape[1:])
    return jax.ShapeDtypeStruct(shape, variable.dtype)
