"""Compiled runs of replicas that hold different shapes: uneven batches.

The step is traced once for each combination of shapes that a replica has, so it sees its true shapes.
`phalanx.execution.joint` makes one program of what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.core.padding import CannotJoin, Padded
from phalanx.core.regrouping import regroup
from phalanx.core.spmd import Shapes, SpmdPerReplica, different_shapes
from phalanx.core.structure import leaves, replace_leaves
from phalanx.core.values import Mirrored, PerReplica, ReplicaLayout
from phalanx.core.variables import traced_variables
from phalanx.execution.compiled import CompiledRun, global_array, local_part
from phalanx.execution.joint import Slot, join
from phalanx.runtime import compat
from phalanx.runtime.host_memory import expect_model
from phalanx.runtime.placement import REPLICA_AXIS

_MOST_PROGRAMS = 16
"""How many combinations of shapes there may be in one run: compiling takes longer with each."""

_MOST_ROUNDS = 8
"""How often programs are traced until they agree on the shapes that they exchange."""

_OUT, _SHARED, _MIRRORED, _COPIED = range(4)
Key = tuple[int, Any]
"""What an array that leaves the program is: a result, by its number, or the value of a variable."""


@dataclass(frozen=True)
class _Traced:
    """The step as replicas of one combination of shapes run it."""

    run: CompiledRun
    closed: Any
    keys: list[Key]
    scalars: dict[int, bool]
    shapes: Shapes


class UnevenRun(CompiledRun):
    """One call of `Strategy.run` in traced code, with arguments of different shapes."""

    def add(self) -> Any:
        """Trace the step for all shapes and return its results."""
        given = leaves(self._inputs)
        split = [i for i, x in enumerate(given) if isinstance(x, PerReplica)]
        padded = {i: given[i].padded for i in split if given[i].padded is not None}
        arrays = [padded[i].array if i in padded else global_array(given[i]) for i in split]
        expect_model([x for x in given if isinstance(x, Mirrored | jax.Array)])
        variables = self._on_read_variables()
        held = [self._parent.held(v) for v in variables] if self._parent else []
        copies = [global_array(value) for value in held]
        by_replica = list(zip(*(p.shapes for p in padded.values()), strict=True))
        kinds = list(dict.fromkeys(by_replica))
        if len(kinds) > _MOST_PROGRAMS:
            raise CannotJoin(f"there are {len(kinds)} of them, more than {_MOST_PROGRAMS}")
        self._programs = [kinds.index(kind) for kind in by_replica]
        found: list[Any] = []

        def body(arrays: list[jax.Array], copies: list[jax.Array]) -> Any:
            mine = [
                x if i in padded else local_part(x, given[i].layout)
                for i, x in zip(split, arrays, strict=True)
            ]
            mine += [local_part(x, h.layout) for x, h in zip(copies, held, strict=True)]
            specs = []
            for kind in kinds:
                shapes = dict(zip(padded, kind, strict=True))
                own = [compat.shape_of(x) for x in mine]
                for n, i in enumerate(split):
                    own[n] = jax.ShapeDtypeStruct(shapes.get(i, own[n].shape), own[n].dtype)
                specs.append(own)

            def step(run: CompiledRun, values: Sequence[Any]) -> Any:
                seen = list(given)
                for i, x in zip(split, values, strict=False):
                    seen[i] = x
                own = {
                    v: SpmdPerReplica(x, self._count)
                    for v, x in zip(variables, values[len(split) :], strict=True)
                }
                return run._body(replace_leaves(self._inputs, seen), own)

            traced = self._traced(specs, step, variables)
            inputs = [
                Slot(x, tuple(t.closed.jaxpr.invars[i].aval for t in traced))
                for i, x in enumerate(mine)
            ]
            index = jnp.asarray(self._programs, jnp.int32)[lax.axis_index(REPLICA_AXIS)]
            slots = join([(t.closed.jaxpr, t.closed.consts) for t in traced], index, inputs)
            found[:] = traced, slots
            groups: tuple[list[Any], ...] = ([], [], [], [])
            for (group, _), slot in zip(traced[0].keys, slots, strict=True):
                groups[group].append(jnp.asarray(slot.array))
            return groups

        return self._results(self._on_replicas(body, arrays, copies), *found)

    # -- tracing ----------------------------------------------------------------------------------

    def _traced(
        self, specs: list[list[Any]], step: Callable[..., Any], variables: list[Any]
    ) -> list[_Traced]:
        """Trace all programs, until each knows what shapes the others have where they exchange some."""
        programs = [
            p for p in traced_variables.enclosing() if not isinstance(p, traced_variables.Substitution)
        ]
        outer = programs[0] if programs else traced_variables.VariableTrace({})
        after_runs = list(outer.after_runs)
        guesses: list[list[Any]] = []
        for _ in range(_MOST_ROUNDS):
            made = len(outer.made)
            traced: list[_Traced] = []
            asked: list[list[Any]] = []
            failure: Exception | None = None
            for spec in specs:
                outer.after_runs[:] = after_runs  # what one of the programs asks for is enough
                shapes = Shapes(self._programs, guesses)
                try:
                    traced.append(self._trace(spec, step, variables, shapes))
                except Exception as error:  # noqa: BLE001 - it may come of a wrong guess
                    failure = failure or error
                asked.append(shapes.asked)
            if len(outer.made) > made:
                continue  # the first programs have not seen the variables that others made
            answers = [list(column) for column in zip(*asked, strict=False)]
            news = answers[len(guesses) :]
            if answers[: len(guesses)] == guesses and all(_alike(column) for column in news):
                if failure is not None:
                    raise failure
                _check(traced)
                return traced
            guesses = answers
        raise CannotJoin("the shapes that they exchange depend on each other without end")

    def _trace(
        self, spec: list[Any], step: Callable[..., Any], variables: list[Any], shapes: Shapes
    ) -> _Traced:
        run = CompiledRun(self._strategy, self._devices, self._fn, self._inputs)
        keys: list[Key] = []
        scalars: dict[int, bool] = {}

        def flat(*values: Any) -> list[Any]:
            outputs, common, mirrored, copied = step(run, values)
            if run.changes:
                raise CannotJoin("they change variables on parameter servers")
            taken = {*run._shared, *run._plain}
            others = [i for i in range(len(leaves(run._result))) if i not in taken]
            scalars.update(zip(others, run._scalars, strict=True))
            # A copy that this program does not write is returned too: others may write theirs.
            copies = values[len(values) - len(variables) :]
            old = [x if v.part_shape else x[None] for v, x in zip(variables, copies, strict=True)]
            new = dict(zip(variables, old, strict=True)) | dict(zip(run._copied, copied, strict=True))
            keys.extend((_OUT, i) for i in others)
            keys.extend((_SHARED, i) for i in run._shared)
            keys.extend((_MIRRORED, v) for v in run._mirrored)
            # Variables made meanwhile are left out: the function is traced again because of them.
            keys.extend((_COPIED, v) for v in variables)
            marked = [compat.mark_same_in_all_programs(x) for x in (*common, *mirrored)]
            return [*outputs, *marked, *(new[v] for v in variables)]

        with different_shapes(shapes):
            closed, _ = compat.jaxpr_and_result(flat, *spec)
        return _Traced(run, closed, keys, scalars, shapes)

    # -- results ----------------------------------------------------------------------------------

    def _results(self, groups: Any, traced: list[_Traced], slots: list[Slot]) -> Any:
        first = traced[0]
        written = {v for t in traced for v in t.run._copied}
        remaining = [iter(group) for group in groups]
        new: dict[int, Any] = {i: self._plain_leaf(i, traced) for i in first.run._plain}
        for (group, what), slot in zip(first.keys, slots, strict=True):
            x = next(remaining[group])
            if group == _SHARED:
                new[what] = x
            elif group == _MIRRORED:
                self._write_back(what, x)
            elif group == _COPIED and what in written:
                self._write_back(
                    what, PerReplica.from_global(x, ReplicaLayout(self._count, not what.part_shape))
                )
            elif group == _OUT and slot.is_even:
                new[what] = PerReplica.from_global(x, ReplicaLayout(self._count, first.scalars[what]))
            elif group == _OUT:
                shapes = tuple(tuple(slot.avals[i].shape) for i in self._programs)
                new[what] = PerReplica.from_padded(Padded(x, shapes))
        return replace_leaves(first.run._result, [new[i] for i in range(len(new))])

    def _plain_leaf(self, i: int, traced: list[_Traced]) -> Any:
        """A result that is no array of the program, such as a number that Python computed."""
        here = [p for p, d in zip(self._programs, self._devices, strict=True) if _is_here(d)]
        span = None if len(here) == self._count else self._devices
        return regroup([traced[p].run._plain[i] for p in here], span=span)


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()


def _alike(column: Sequence[Any]) -> bool:
    return all(x == column[0] for x in column)


def _check(traced: list[_Traced]) -> None:
    """Require that programs return the same things, apart from shapes."""
    first = traced[0]
    for other in traced[1:]:
        if len(other.shapes.asked) != len(first.shapes.asked):
            raise CannotJoin("some exchange arrays more often than others")
        if other.shapes.plain != first.shapes.plain:
            raise CannotJoin("what a merge function returns depends on the shape")
        if _skeleton(other) != _skeleton(first) or other.scalars != first.scalars:
            raise CannotJoin("they return different structures")
        if [k for k in other.keys if k[0] != _MIRRORED] != [k for k in first.keys if k[0] != _MIRRORED]:
            raise CannotJoin("they return different kinds of results")
        if len(other.keys) != len(first.keys) or any(
            a[1] is not b[1] for a, b in zip(other.keys, first.keys, strict=True) if a[0] == _MIRRORED
        ):
            raise CannotJoin("they write different variables")


def _skeleton(traced: _Traced) -> Any:
    """The structure of what a program returns."""
    return jax.tree.structure(
        traced.run._result, is_leaf=lambda x: isinstance(x, PerReplica | Mirrored)
    )
