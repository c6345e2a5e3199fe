"""Programs in the five modes: what each device gets, and what is communicated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.execution.throttle import token
from phalanx.parallel.applying import with_branches_apart
from phalanx.parallel.arrays_of import OtherResults
from phalanx.parallel.communication import compiler_options
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.placing import Cuts, batch_spec, names_of, specs_on
from phalanx.parallel.planning import Planner, Seen, check_known, dataset_cuts
from phalanx.parallel.running import ParallelRun, in_run
from phalanx.parallel.spanning import spans_workers
from phalanx.parallel.storing import Known, is_named, like, stored
from phalanx.parallel.wide_sums import with_wide_sums
from phalanx.parallel.without_all_to_all import without_all_to_all

__all__ = [
    "ParallelProgram",
    "ParallelTask",
    "given_layouts",
    "laid_out",
    "planned",
    "whole",
]


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
        others: what the function returns besides arrays.
        inner: `call` as a part of a larger program, which cannot have its options of the compiler.
    """

    call: Any
    arguments: Any
    known: Known = field(default_factory=dict)
    others: OtherResults = field(default_factory=OtherResults)
    inner: Any = None

    @staticmethod
    def of(
        function: Callable[..., Any], task: ParallelTask, arguments: Any, known: Known, **how: Any
    ) -> ParallelProgram:
        """A function, compiled as the options of a task say.

        Args:
            function: takes the arguments, and returns the results and a token for the throttle.
            task: what it computes.
            arguments: a nest of shardings.
            known: the layouts of the parameters.
            **how: for `jax.jit`.
        """
        platform = next(iter(jax.tree.leaves(arguments)[0].device_set)).platform
        inner = jax.jit(function, donate_argnums=task.donate, **how)
        flags = compiler_options(task.options, platform)
        if flags is None:
            return ParallelProgram(inner, arguments, known, inner=inner)
        call = jax.jit(function, donate_argnums=task.donate, compiler_options=flags, **how)
        return ParallelProgram(call, arguments, known, inner=inner)


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

    def kept(spec: PartitionSpec, leaf: Any) -> PartitionSpec:
        return stored(spec, leaf, mesh, task.options)

    leaves, structure = jax.tree.flatten(task.args)
    specs = [
        kept(spec, leaf) if is_state else spec
        for spec, leaf, is_state in zip(specs, leaves, task.states(), strict=True)
    ]
    is_given = task.options.parallel_mode == "semi_auto_parallel"
    if is_given and not task.options.enable_alltoall:  # a plan has its own routes
        function = without_all_to_all(_with_results(function, mesh, known, kept), mesh, specs)
    else:
        function = with_branches_apart(function)

    def traced(*args: Any) -> Any:
        with in_run(run):
            return function(*args), token(spans_workers(tuple(mesh.devices.flat)))

    traced.__name__ = getattr(task.function, "__name__", "program")
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
    shardings = (jax.tree.unflatten(shape, outs), None)
    how = {"in_shardings": arguments, "out_shardings": shardings}
    return ParallelProgram.of(traced, task, arguments, known, **how)


def _with_results(
    function: Callable[..., Any],
    mesh: Mesh,
    known: Known,
    kept: Callable[[PartitionSpec, Any], PartitionSpec],
) -> Callable[..., Any]:
    """A function that says itself how its results are laid out."""

    def laid_out(*args: Any) -> Any:
        results = function(*args)
        leaves, structure = jax.tree.flatten(results)
        for i, name in enumerate(names_of(results)):
            found = like(name, jax.numpy.shape(leaves[i]), known)
            if found is not None and any(found):
                sharding = NamedSharding(mesh, kept(found, leaves[i]))
                leaves[i] = jax.lax.with_sharding_constraint(leaves[i], sharding)
        return jax.tree.unflatten(structure, leaves)

    laid_out.__name__ = getattr(function, "__name__", "function")
    return laid_out


def laid_out(
    task: ParallelTask, mesh: Mesh, parameter_plan: Mapping[str, Cuts]
) -> tuple[list[Any], Known]:
    """The layouts of the arguments in `semi_auto_parallel`: those that are given, and batches cut."""
    names, shapes, states = task.names(), task.shapes(), task.states()
    owned = [(n, s) for n, s, is_state in zip(names, shapes, states, strict=True) if is_state]
    known = given_layouts(mesh, owned, parameter_plan)
    inputs = [i for i, is_state in enumerate(states) if not is_state]
    cuts = dataset_cuts(task.options, [f"input {i}" for i in range(len(inputs))])
    if cuts:
        found = specs_on(mesh, list(cuts.values()), [shapes[i] for i in inputs], list(cuts))
    else:
        found = [batch_spec(shapes[i], mesh.shape) for i in inputs]
    specs: list[Any] = [
        like(n, s, known) or PartitionSpec() for n, s in zip(names, shapes, strict=True)
    ]
    for i, spec in zip(inputs, found, strict=True):
        specs[i] = spec
    return specs, known


def given_layouts(
    mesh: Mesh, owned: Sequence[tuple[str, tuple[int, ...]]], plan: Mapping[str, Cuts]
) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
    """The layouts of parameters: those that are given, and whole for the rest."""
    check_known(plan, [n for n, _ in owned])
    shapes = {name: next(s for n, s in owned if is_named(n, name)) for name in plan}
    specs = specs_on(mesh, list(plan.values()), list(shapes.values()), list(plan))
    found = {n: (shapes[n], spec) for n, spec in zip(plan, specs, strict=True)}
    rest = {n: (s, PartitionSpec()) for n, s in owned if like(n, s, found) is None}
    return {**found, **rest}


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
            found = like(name, shape, known) if is_state else batch_spec(shape, mesh.shape)
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
