"""Programs of which each device has a part of the batch: `data_parallel` and `hybrid_parallel`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.core.slicing import Members, Slicing
from phalanx.errors import InvalidValueError
from phalanx.execution.throttle import token
from phalanx.execution.variance import differing_marks
from phalanx.parallel.communication import Share, combination, communication_of, sharding_of
from phalanx.parallel.modes import ParallelProgram, ParallelTask, given_layouts
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.placing import mesh_of_sizes, names_of, parts_of
from phalanx.parallel.running import ParallelRun, in_run
from phalanx.parallel.sliced_steps import SlicedStep
from phalanx.parallel.spanning import spans_workers
from phalanx.parallel.storing import Known, like, stored
from phalanx.parallel.wide_sums import with_wide_sums
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS
from phalanx.train.sliced_updates import Sliced

__all__ = ["LocalProgram", "divided", "kept_mesh", "state_layouts"]

_GROUP, _MEMBER = "replica_group", "replica_member"
"""The axes of devices that keep the state in groups."""


def divided(
    task: ParallelTask,
    mesh: Mesh,
    layerwise: Mapping[str, PartitionSpec],
    local_program: type[LocalProgram] | None = None,
) -> ParallelProgram | None:
    """A program that each device runs on its part of the batch; None if the batch cannot be divided.

    Args:
        task: what is to run.
        mesh: with the axis of replicas; the batch is cut along it.
        layerwise: parameters of which each device has its own part, and how they are cut.
        local_program: what runs on each device; one that gets whole batches must cut them itself.
    """
    states = task.states()
    kept, known, of_state = state_layouts(task, mesh, layerwise)
    specs = []
    for leaf, spec in zip(jax.tree.leaves(task.args), of_state, strict=True):
        if spec is not None:
            specs.append(spec)
        elif not leaf.shape or local_program is not None:
            specs.append(PartitionSpec())
        elif leaf.shape[0] % mesh.shape[REPLICA_AXIS]:
            return None
        else:
            specs.append(PartitionSpec(REPLICA_AXIS))
    run = ParallelRun(mesh, task.options, divided=True, combines=True, layerwise=frozenset(layerwise))
    local = (local_program or LocalProgram)(task, run, specs, known, kept)
    differing = local.differing()
    out_specs = [local.out_spec(i, i in differing) for i in range(len(local.names))]
    structure = jax.tree.structure(task.args)
    shardings = [
        NamedSharding(kept if is_state else mesh, spec)
        for spec, is_state in zip(specs, states, strict=True)
    ]
    mapped = local.mapped(out_specs, [i for i in differing if not local.shapes[i]])
    arguments = jax.tree.unflatten(structure, shardings)
    return ParallelProgram.of(mapped, task, arguments, known)


def state_layouts(
    task: ParallelTask, mesh: Mesh, layerwise: Mapping[str, PartitionSpec]
) -> tuple[Mesh, Known, list[PartitionSpec | None]]:
    """How the state is kept: the devices, the layouts of parameters, and those of leaves of arguments.

    The layout of a leaf that is not a part of the state is None.
    """
    names, shapes, states = task.names(), task.shapes(), task.states()
    kept = kept_mesh(mesh, task.options)
    owned = [(n, s) for n, s, is_state in zip(names, shapes, states, strict=True) if is_state]
    known = given_layouts(mesh, owned, layerwise)
    specs: list[PartitionSpec | None] = []
    for name, leaf, is_state in zip(names, jax.tree.leaves(task.args), states, strict=True):
        if not is_state:
            specs.append(None)
            continue
        spec = stored(like(name, leaf.shape, known) or PartitionSpec(), leaf, kept, task.options)
        if any(spec) and name in known:
            known = {**known, name: (tuple(leaf.shape), spec)}
        specs.append(spec)
    return kept, known, specs


def kept_mesh(mesh: Mesh, options: ParallelOptions) -> Mesh:
    """The devices as the state is kept on them: in groups, if each group has all of it.

    >>> from phalanx.runtime.placement import replica_mesh
    >>> options = ParallelOptions(enable_parallel_optimizer=True, optimizer_weight_shard_size=2)
    >>> dict(kept_mesh(replica_mesh(tuple(jax.devices()[:6])), options).shape)
    {'replica_group': 3, 'replica_member': 2}
    """
    sharding = sharding_of(options)
    parts = mesh.size if sharding is None else sharding.parts_of(mesh.size)
    if parts == mesh.size:
        return mesh
    sizes = mesh.size // parts, parts
    return mesh_of_sizes(tuple(mesh.devices.flat), sizes, (_GROUP, _MEMBER))


def _relabelled(x: Any, mesh: Mesh, before: PartitionSpec, after: PartitionSpec) -> Any:
    """The same parts on the same devices, as an array of another shape; nothing is sent."""
    same: Any = jax.shard_map(
        lambda part: part, mesh=mesh, in_specs=before, out_specs=after, check_vma=False
    )
    return same(x)


class LocalProgram:
    """What one device runs: its results, and which of them differ between devices."""

    def __init__(
        self,
        task: ParallelTask,
        run: ParallelRun,
        specs: Sequence[PartitionSpec],
        known: Known,
        kept: Mesh,
    ) -> None:
        assert run.mesh is not None
        self.task, self.run, self.specs, self.known = task, run, specs, known
        self.mesh, self.kept = run.mesh, kept
        self.parts = kept.shape.get(_MEMBER, kept.size)
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.structure: Any = None

    def mapped(
        self, out_specs: Sequence[PartitionSpec] | None, scalars: Sequence[int], mark: bool = False
    ) -> Callable[..., Any]:
        """The function of whole arguments, without layouts of results if they are not known yet."""

        def local(*args: Any) -> Any:
            leaves = self.on_device(args, scalars)
            if mark:
                leaves = [compat.mark_same_on_all_replicas(x, str(i)) for i, x in enumerate(leaves)]
            return leaves

        structure = jax.tree.structure(self.task.args)
        outs = PartitionSpec() if out_specs is None else [_of_all(spec) for spec in out_specs]

        def program(*args: Any) -> Any:
            given = [
                _relabelled(x, self.kept, spec, _stacked(spec)) if _is_grouped(spec) else x
                for x, spec in zip(jax.tree.leaves(args), self.specs, strict=True)
            ]
            leaves = jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=jax.tree.unflatten(structure, [_of_all(spec) for spec in self.specs]),
                out_specs=outs,
                check_vma=False,
            )(*jax.tree.unflatten(structure, given))
            if out_specs is not None:
                leaves = [
                    _relabelled(x, self.kept, _stacked(spec), spec)
                    if _is_grouped(spec)
                    else self.joined(i, x, spec)
                    for i, (x, spec) in enumerate(zip(leaves, out_specs, strict=True))
                ]
            return jax.tree.unflatten(self.structure, leaves), token(
                spans_workers(tuple(self.mesh.devices.flat))
            )

        program.__name__ = getattr(self.task.function, "__name__", "program")
        return program

    def on_device(self, args: tuple[Any, ...], scalars: Sequence[int]) -> list[jax.Array]:
        """The results for the parts of the arguments that this device has.

        Args:
            args: these parts.
            scalars: the numbers of the results that devices combine.
        """
        return self.results(args, scalars, self.run)

    def joined(self, number: int, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """A result of all devices, whose parts are one after the other."""
        return x

    def results(
        self, args: tuple[Any, ...], scalars: Sequence[int], run: ParallelRun
    ) -> list[jax.Array]:
        """What the function returns for arguments of one device."""
        function = self.task.function
        if self.task.options.force_fp32_communication:
            function = with_wide_sums(function)
        if self.task.options.enable_parallel_optimizer:
            found = self._on_slices(function, args, run)
        else:
            with in_run(run):
                found = function(*args)
        leaves, self.structure = jax.tree.flatten(found)
        leaves = [jnp.asarray(x) for x in leaves]
        self.names, self.shapes = names_of(found), [x.shape for x in leaves]
        for i in scalars:
            leaves[i] = _joined(self.task.options, leaves[i], run.share)
        return leaves

    def _on_slices(self, function: Callable[..., Any], args: tuple[Any, ...], run: ParallelRun) -> Any:
        """The results of a step of which this device has slices of the state."""
        size = self.parts
        members = Members(REPLICA_AXIS, self.mesh.size, size)
        slices = SlicedStep(self.task.options, members, run.share)
        run = replace(run, slices=slices)

        def traced(*args: Any) -> Any:
            with in_run(run):
                return function(*args)

        local, structure = jax.tree.flatten(args)
        shapes, states = self.task.shapes(), self.task.states()
        given = [
            Sliced(x.reshape(-1), Slicing(shape, size)) if is_state and any(spec) else x
            for x, spec, shape, is_state in zip(local, self.specs, shapes, states, strict=True)
        ]
        whole = [
            jax.ShapeDtypeStruct(x.slicing.shape, x.local.dtype) if isinstance(x, Sliced) else x
            for x in given
        ]
        results = jax.eval_shape(traced, *jax.tree.unflatten(structure, whole))
        leaves, shape = jax.tree.flatten(results)
        wanted = [
            any(like(name, leaf.shape, self.known) or ())
            for name, leaf in zip(names_of(results), leaves, strict=True)
        ]
        found = slices.run(
            traced, jax.tree.unflatten(structure, given), jax.tree.unflatten(shape, wanted)
        )
        outs = [
            x.local.reshape(leaf.shape[0] // size, *leaf.shape[1:]) if isinstance(x, Sliced) else x
            for x, leaf in zip(
                jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, Sliced)), leaves, strict=True
            )
        ]
        return jax.tree.unflatten(shape, outs)

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
                "from what one device has: its gradients, or statistics of its part of the batch. Use "
                "px.parallel.value_and_grad in place of jax.value_and_grad, and average statistics, as "
                f"by jax.lax.pmean(x, {REPLICA_AXIS!r}); in auto_parallel they are those of the whole "
                f"batch. Received: result {name!r}"
            )
        return PartitionSpec(REPLICA_AXIS)

    def _part(self, shape: tuple[int, ...], spec: PartitionSpec) -> tuple[int, ...]:
        counts = [parts_of(e, self.kept) for e in spec]
        counts += [1] * (len(shape) - len(counts))
        return tuple(n // c for n, c in zip(shape, counts, strict=True))


def _is_grouped(spec: PartitionSpec) -> bool:
    return _MEMBER in spec


def _stacked(spec: PartitionSpec) -> PartitionSpec:
    """The layout of the copies of all groups, one after the other."""
    return PartitionSpec((_GROUP, _MEMBER), *spec[1:])


def _of_all(spec: PartitionSpec) -> PartitionSpec:
    """The same, along the axis of replicas."""
    return PartitionSpec(REPLICA_AXIS, *spec[1:]) if _is_grouped(spec) else spec


def _is_state(name: str, known: Known) -> bool:
    """Whether the name of a result is that of a parameter at the top, or in a tuple."""
    plain = re.sub(r"^\d+/?", "", name)
    return name in known or plain in known


def _joined(options: ParallelOptions, x: jax.Array, share: Share | None) -> jax.Array:
    """A number of all devices from that of each: their mean or sum, as for gradients."""
    op = combination(options)
    if share is not None:
        x = share.weighted(op, x)
    return communication_of(options).summed(op, [x])[0]
