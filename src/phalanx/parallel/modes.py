"""Programs in the five modes: what each device gets, and what is communicated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.collectives.packing import Packing
from phalanx.collectives.sums_in_programs import reduce_over_replicas
from phalanx.core.reduction import ReduceOp
from phalanx.errors import InvalidValueError
from phalanx.execution.throttle import token
from phalanx.execution.variance import differing_marks
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.placing import Cuts, names_of, parts_of, specs_on
from phalanx.parallel.planning import Planner, Seen, check_known, dataset_cuts
from phalanx.parallel.running import ParallelRun, in_run
from phalanx.parallel.storing import Known, is_named, like, stored
from phalanx.parallel.wide_sums import with_wide_sums
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS

__all__ = ["ParallelProgram", "ParallelTask", "divided", "laid_out", "planned", "whole"]


@dataclass(frozen=True)
class ParallelTask:
    """A function that is to run in a mode, with arguments of certain shapes.

    Args:
        function: takes and returns nests of arrays.
        args: the shapes of its arguments.
        parameters: the numbers of the arguments that are parameters, or other state.
        options: that are in force.
        donate: the numbers of the arguments whose memory the results may have.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    parameters: tuple[int, ...]
    options: ParallelOptions
    donate: tuple[int, ...] = ()

    def states(self) -> list[bool]:
        """For each leaf of the arguments, whether it is a part of the state."""
        flags = ([i in self.parameters] * len(jax.tree.leaves(arg)) for i, arg in enumerate(self.args))
        return [flag for part in flags for flag in part]

    def names(self) -> list[str]:
        """For each leaf of the arguments, its path in its argument."""
        return [name for arg in self.args for name in names_of(arg)]

    def shapes(self) -> list[tuple[int, ...]]:
        """For each leaf of the arguments, its shape."""
        return [tuple(leaf.shape) for leaf in jax.tree.leaves(self.args)]


@dataclass(frozen=True)
class ParallelProgram:
    """A compiled function, and the shardings of its arguments.

    Args:
        call: takes the arguments, and returns the results and a token for the throttle.
        arguments: a nest of shardings like the arguments.
        known: the layouts of the parameters.
    """

    call: Any
    arguments: Any
    known: Known = field(default_factory=dict)


# -- programs that see the whole batch -----------------------------------------------------------------


def whole(
    task: ParallelTask, run: ParallelRun, specs: Sequence[PartitionSpec], known: Known
) -> ParallelProgram:
    """A program that sees whole arrays; XLA divides the work by their layouts.

    Args:
        task: what is to run.
        run: the mode.
        specs: the layout of each leaf of the arguments.
        known: the layouts of the parameters; results that are like them are laid out alike.
    """
    mesh = run.mesh
    assert mesh is not None
    run = replace(run, known=known)
    function = with_wide_sums(task.function) if task.options.force_fp32_communication else task.function

    def traced(*args: Any) -> Any:
        with in_run(run):
            return function(*args), token(between_workers=False)

    def kept(spec: PartitionSpec, leaf: Any) -> PartitionSpec:
        return stored(spec, leaf, mesh, task.options)

    traced.__name__ = getattr(task.function, "__name__", "program")
    leaves, structure = jax.tree.flatten(task.args)
    specs = [
        kept(spec, leaf) if is_state else spec
        for spec, leaf, is_state in zip(specs, leaves, task.states(), strict=True)
    ]
    arguments = jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for spec in specs])
    results, _ = jax.eval_shape(traced, *task.args)
    leaves, shape = jax.tree.flatten(results)
    outs = [
        None if found is None else NamedSharding(mesh, kept(found, leaf))
        for leaf, found in (
            (leaf, like(name, leaf.shape, known))
            for name, leaf in zip(names_of(results), leaves, strict=True)
        )
    ]
    call = jax.jit(
        traced,
        in_shardings=arguments,
        out_shardings=(jax.tree.unflatten(shape, outs), None),
        donate_argnums=task.donate,
    )
    return ParallelProgram(call, arguments, known)


def laid_out(
    task: ParallelTask, mesh: Mesh, parameter_plan: Mapping[str, Cuts]
) -> tuple[list[Any], Known]:
    """The layouts of the arguments in `semi_auto_parallel`: those that are given, and batches cut."""
    names, shapes, states = task.names(), task.shapes(), task.states()
    owned = [(n, s) for n, s, is_state in zip(names, shapes, states, strict=True) if is_state]
    known = _given(mesh, owned, parameter_plan)
    inputs = [i for i, is_state in enumerate(states) if not is_state]
    cuts = dataset_cuts(task.options, [f"input {i}" for i in range(len(inputs))])
    if cuts:
        found = specs_on(mesh, list(cuts.values()), [shapes[i] for i in inputs], list(cuts))
    else:
        found = [batch_spec(shapes[i], mesh) for i in inputs]
    specs: list[Any] = [
        like(n, s, known) or PartitionSpec() for n, s in zip(names, shapes, strict=True)
    ]
    for i, spec in zip(inputs, found, strict=True):
        specs[i] = spec
    return specs, known


def _given(
    mesh: Mesh, owned: Sequence[tuple[str, tuple[int, ...]]], plan: Mapping[str, Cuts]
) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
    """The layouts of parameters: those that are given, and whole for the rest."""
    check_known(plan, [n for n, _ in owned])
    shapes = {name: next(s for n, s in owned if is_named(n, name)) for name in plan}
    specs = specs_on(mesh, list(plan.values()), list(shapes.values()), list(plan))
    found = {n: (shapes[n], spec) for n, spec in zip(plan, specs, strict=True)}
    rest = {n: (s, PartitionSpec()) for n, s in owned if like(n, s, found) is None}
    return {**found, **rest}


def batch_spec(shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The first dim, cut by as many axes of a mesh as divide it; the rest of the devices repeat.

    >>> mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> batch_spec((16, 3), mesh), batch_spec((6, 3), mesh), batch_spec((), mesh)
    (P(('a', 'b'),), P('a',), P())
    """
    sizes = dict(mesh.shape)
    axes: list[str] = []
    for name, size in sizes.items():
        if shape and size > 1 and shape[0] % prod([*(sizes[a] for a in axes), size]) == 0:
            axes.append(name)
    return PartitionSpec(tuple(axes) if len(axes) > 1 else axes[0]) if axes else PartitionSpec()


# -- programs that are laid out by a plan ----------------------------------------------------------


def planned(task: ParallelTask, planner: Planner) -> ParallelProgram:
    """A program whose losses are laid out by plans."""
    seen, given = _losses(task, planner)
    if not seen:  # it is a loss itself, or what is computed with parameters
        task = replace(task, function=_as_loss(task, planner))
        seen, given = _losses(task, planner)
    mesh = planner.mesh_of(seen[0].plan)
    known: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {}
    direct: dict[int, PartitionSpec] = {}
    for loss in reversed(seen):
        tensors = {**loss.plan.parameters, **loss.plan.inputs}
        for leaf, name in zip(loss.leaves, loss.plan.order, strict=True):
            direct[id(leaf)] = tensors[name].spec
        for plain, name in loss.names.items():
            tensor = loss.plan.parameters[name]
            known[plain] = (tensor.shape, tensor.spec)
    specs: list[PartitionSpec] = []
    leaves = zip(given, task.names(), task.shapes(), task.states(), strict=True)
    for leaf, name, shape, is_state in leaves:
        found = direct.get(id(leaf))
        if found is None:
            found = like(name, shape, known) if is_state else batch_spec(shape, mesh)
        specs.append(found or PartitionSpec())
    return whole(task, ParallelRun(mesh, task.options, planner=planner), specs, known)


def _losses(task: ParallelTask, planner: Planner) -> tuple[list[Seen], list[Any]]:
    """The losses that a program calls, and the arguments that it was traced with."""
    given: list[Any] = []
    run = ParallelRun(planner.mesh, task.options, planner=planner)

    def watched(*args: Any) -> Any:
        given.extend(jax.tree.leaves(args))
        with in_run(run):
            return task.function(*args)

    with planner.watching() as seen:
        jax.eval_shape(watched, *task.args)
    return seen, given


def _as_loss(task: ParallelTask, planner: Planner) -> Callable[..., Any]:
    """A function that is laid out as a whole; if it returns one number, it will be trained."""
    results = jax.tree.leaves(jax.eval_shape(task.function, *task.args))
    training = bool(results) and not results[0].shape
    numbers: Any = task.parameters[0] if len(task.parameters) == 1 else task.parameters

    def laid_out(*args: Any) -> Any:
        return planner.laid_out(task.function, args, numbers, training)(*args)

    laid_out.__name__ = getattr(task.function, "__name__", "function")
    return laid_out


# -- programs of which each device has a part of the batch -----------------------------------------


def divided(
    task: ParallelTask, mesh: Mesh, layerwise: Mapping[str, PartitionSpec]
) -> ParallelProgram | None:
    """A program that each device runs on its part of the batch; None if the batch cannot be divided.

    Args:
        task: what is to run.
        mesh: of the axis of replicas; the batch is cut along it.
        layerwise: parameters of which each device has its own part, and how they are cut.
    """
    names, shapes, states = task.names(), task.shapes(), task.states()
    owned = [(n, s) for n, s, is_state in zip(names, shapes, states, strict=True) if is_state]
    known = _given(mesh, owned, layerwise)
    specs = []
    for name, shape, is_state in zip(names, shapes, states, strict=True):
        if is_state:
            specs.append(like(name, shape, known) or PartitionSpec())
        elif not shape:
            specs.append(PartitionSpec())
        elif shape[0] % mesh.size:
            return None
        else:
            specs.append(PartitionSpec(REPLICA_AXIS))
    run = ParallelRun(mesh, task.options, divided=True, combines=True, layerwise=frozenset(layerwise))
    local = _Local(task, run, specs, known)
    differing = local.differing()
    out_specs = [local.out_spec(i, i in differing) for i in range(len(local.names))]
    structure = jax.tree.structure(task.args)
    arguments = jax.tree.unflatten(structure, [NamedSharding(mesh, spec) for spec in specs])
    mapped = local.mapped(out_specs, [i for i in differing if not local.shapes[i]])
    return ParallelProgram(jax.jit(mapped, donate_argnums=task.donate), arguments, known)


class _Local:
    """What one device runs: its results, and which of them differ between devices."""

    def __init__(
        self, task: ParallelTask, run: ParallelRun, specs: Sequence[PartitionSpec], known: Known
    ) -> None:
        assert run.mesh is not None
        self.task, self.run, self.specs, self.known = task, run, specs, known
        self.mesh = run.mesh
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.structure: Any = None

    def mapped(
        self, out_specs: Sequence[PartitionSpec] | None, scalars: Sequence[int], mark: bool = False
    ) -> Callable[..., Any]:
        """The function of whole arguments, without layouts of results if they are not known yet."""

        def local(*args: Any) -> Any:
            function = self.task.function
            if self.task.options.force_fp32_communication:
                function = with_wide_sums(function)
            with in_run(self.run):
                results = function(*args)
            leaves, self.structure = jax.tree.flatten(results)
            leaves = [jnp.asarray(x) for x in leaves]
            self.names, self.shapes = names_of(results), [x.shape for x in leaves]
            if mark:
                leaves = [compat.mark_same_on_all_replicas(x, str(i)) for i, x in enumerate(leaves)]
            for i in scalars:
                leaves[i] = _joined(self.task.options, leaves[i])
            return leaves

        structure = jax.tree.structure(self.task.args)

        def program(*args: Any) -> Any:
            leaves = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=jax.tree.unflatten(structure, list(self.specs)),
                out_specs=PartitionSpec() if out_specs is None else list(out_specs),
                check_vma=False,
            )(*args)
            return jax.tree.unflatten(self.structure, leaves), token(between_workers=False)

        program.__name__ = getattr(self.task.function, "__name__", "program")
        return program

    def differing(self) -> list[int]:
        """The numbers of the results that may differ between devices."""
        closed, _ = compat.jaxpr_and_result(self.mapped(None, (), mark=True), *self.task.args)
        marks, hazards = differing_marks(closed.jaxpr)
        if hazards:
            raise InvalidValueError(
                f"The program communicates inside {hazards[0]} whose condition may differ between "
                "devices, so some would wait for others forever. Communicate outside of it. "
                f"Received: {getattr(self.task.function, '__name__', self.task.function)}"
            )
        return [int(mark) for mark in marks]

    def out_spec(self, number: int, differs: bool) -> PartitionSpec:
        """The layout of a result: one for all, or the parts of the devices one after the other."""
        name, shape = self.names[number], self.shapes[number]
        own = {n: (self._part(s, spec), spec) for n, (s, spec) in self.known.items()}
        found = like(name, shape, own)
        if found is not None and any(found):
            return found
        if not differs or not shape:
            return PartitionSpec()
        if found is not None and _is_state(name, self.known):
            raise InvalidValueError(
                "The state that the step returns would differ between devices, because it is computed "
                "from the gradients of one device. Use px.parallel.value_and_grad in place of "
                f"jax.value_and_grad, or sum over the axis {REPLICA_AXIS!r}. Received: result {name!r}"
            )
        return PartitionSpec(REPLICA_AXIS)

    def _part(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        counts = [parts_of(e, self.mesh) for e in spec]
        counts += [1] * (len(shape) - len(counts))
        return tuple(n // c for n, c in zip(shape, counts, strict=True))


def _is_state(name: str, known: Known) -> bool:
    """Whether the name of a result is that of a parameter at the top, or in a tuple."""
    plain = re.sub(r"^\d+/?", "", name)
    return name in known or plain in known


def _joined(options: ParallelOptions, x: jax.Array) -> jax.Array:
    """A number of all devices from that of each: their mean or sum, as for gradients."""
    op = ReduceOp.MEAN if options.gradients_mean else ReduceOp.SUM
    return reduce_over_replicas(op, [x], Packing())[0]
