"""Batches that devices cannot share evenly, in programs of which each device has a part.

Each device gets as many examples as the others, or one less. The program is traced for both numbers,
so that code sees its true shapes, and `phalanx.execution.joint` makes one program of them. What each
device has counts by its examples, so that means are those of the whole batch.

Code that communicates by itself would average unequal parts, or exchange arrays of unequal shapes. It
runs on fewer parts, as many as divide the batch, of which several devices compute the same one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.execution.joint import CannotJoin, Slot, join
from phalanx.parallel.communication import Share
from phalanx.parallel.divided import LocalProgram, divided, kept_mesh, state_layouts
from phalanx.parallel.modes import ParallelProgram, ParallelTask, whole
from phalanx.parallel.placing import mesh_of_sizes, names_of
from phalanx.parallel.running import ParallelRun, in_run
from phalanx.parallel.storing import like
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS

__all__ = ["of_parts", "shares"]

_COPY = "copy"
"""The axis of devices that compute the same part."""


def shares(rows: int, devices: int) -> list[int]:
    """How many examples each device gets.

    >>> shares(10, 4), shares(2, 3)
    ([3, 3, 2, 2], [1, 1, 0])
    """
    least, more = divmod(rows, devices)
    return [least + (i < more) for i in range(devices)]


def of_parts(task: ParallelTask, mesh: Mesh, layerwise: Mapping[str, PartitionSpec]) -> ParallelProgram:
    """A program that each device runs on its part of the batch, whether that divides or not.

    Args:
        task: what is to run.
        mesh: of the axis of replicas.
        layerwise: parameters of which each device has its own part, and how they are cut.
    """
    found = divided(task, mesh, layerwise)
    if found is not None:
        return found
    if layerwise or _communicates(task):
        return _in_fewer_parts(task, mesh, layerwise)
    return _unevenly_divided(task, mesh) or _undivided(task, mesh)


def _communicates(task: ParallelTask) -> bool:
    """Whether the function itself uses the axis of replicas, which is not there where it is traced."""

    def alone(*args: Any) -> Any:
        with in_run(ParallelRun(None, task.options)):
            return task.function(*args)

    try:
        jax.eval_shape(alone, *task.args)
    except NameError as error:
        return "unbound axis name" in str(error)
    except Exception:  # noqa: BLE001 - the program that runs raises it again
        return False
    return False


def _in_fewer_parts(
    task: ParallelTask, mesh: Mesh, layerwise: Mapping[str, PartitionSpec]
) -> ParallelProgram:
    """A program with as many parts as divide the batch; the state is kept as always.

    Several devices compute the same part, with the same part of the state, which they gather.
    """
    rows = [leaf.shape[0] for leaf, is_state in _leaves(task) if not is_state and leaf.shape]
    count = math.gcd(mesh.size, *rows)
    devices = tuple(mesh.devices.flat)
    fewer = mesh_of_sizes(devices, (count, mesh.size // count), (REPLICA_AXIS, _COPY))
    in_one_piece = replace(task, options=replace(task.options, enable_parallel_optimizer=False))
    program = divided(in_one_piece, fewer, layerwise)
    assert program is not None
    kept, known, specs = state_layouts(task, mesh, layerwise)
    batch, structure = jax.tree.flatten(program.arguments)
    pairs = zip(specs, batch, strict=True)
    arguments = [other if spec is None else NamedSharding(kept, spec) for spec, other in pairs]
    given = jax.tree.unflatten(structure, arguments)
    results, _ = jax.eval_shape(program.inner, *task.args)
    leaves, shape = jax.tree.flatten(results)
    found = (like(n, x.shape, known) for n, x in zip(names_of(results), leaves, strict=True))
    outs = [None if spec is None else NamedSharding(kept, spec) for spec in found]
    shardings = (jax.tree.unflatten(shape, outs), None)
    how = {"in_shardings": given, "out_shardings": shardings}
    return ParallelProgram.of(program.inner, task, given, known, **how)


def _undivided(task: ParallelTask, mesh: Mesh) -> ParallelProgram:
    """A program of which every device computes all."""
    specs = [PartitionSpec()] * len(task.shapes())
    pairs = zip(task.names(), task.shapes(), strict=True)
    known = {name: (shape, PartitionSpec()) for name, shape in pairs}
    run = ParallelRun(kept_mesh(mesh, task.options), task.options)
    return whole(task, run, specs, known)


def _unevenly_divided(task: ParallelTask, mesh: Mesh) -> ParallelProgram | None:
    """A program whose devices have unequal parts of the batch; None if there is no such program.

    There is none if arguments have different numbers of examples, if code cannot do with the number of
    examples that some device has, or if what is communicated depends on it.
    """
    batch = [leaf for leaf, is_state in _leaves(task) if not is_state and leaf.shape]
    if len({leaf.shape[0] for leaf in batch}) != 1 or not batch[0].shape[0]:
        return None
    try:
        return divided(task, mesh, {}, _UnevenProgram)
    except (Exception, CannotJoin):  # noqa: BLE001 - that of the whole batch raises what is the user's
        return None


def _leaves(task: ParallelTask) -> list[tuple[Any, bool]]:
    return list(zip(jax.tree.leaves(task.args), task.states(), strict=True))


class _UnevenProgram(LocalProgram):
    """What one device runs; it gets the whole batch, of which it takes its part."""

    slots: Sequence[Slot] = ()

    @functools.cached_property
    def is_cut(self) -> list[bool]:
        """For each leaf of the arguments, whether devices share it."""
        return [not is_state and bool(leaf.shape) for leaf, is_state in _leaves(self.task)]

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many examples each device has."""
        shapes = zip(self.task.shapes(), self.is_cut, strict=True)
        return shares(next(shape[0] for shape, cut in shapes if cut), self.mesh.size)

    @functools.cached_property
    def kinds(self) -> list[int]:
        """The numbers of examples that some device has, the largest first."""
        return sorted(set(self.counts), reverse=True)

    def on_device(self, args: tuple[Any, ...], scalars: Sequence[int]) -> list[jax.Array]:
        """The results for this device's part of the batch; arrays have room for those of any."""
        leaves, structure = jax.tree.flatten(args)
        here = lax.axis_index(REPLICA_AXIS)
        starts = list(itertools.accumulate(self.counts, initial=0))[:-1]
        rows = jnp.asarray(starts)[here] + jnp.arange(self.kinds[0])
        mine = [
            jnp.take(x, rows, axis=0, mode="clip") if cut else x
            for x, cut in zip(leaves, self.is_cut, strict=True)
        ]
        programs = []
        for count in self.kinds:
            run = replace(self.run, share=Share(count, sum(self.counts), self.mesh.size))

            def flat(*xs: Any, run: ParallelRun = run) -> list[jax.Array]:
                return self.results(jax.tree.unflatten(structure, xs), scalars, run)

            shapes = [
                jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype) if cut else compat.shape_of(x)
                for x, cut in zip(mine, self.is_cut, strict=True)
            ]
            programs.append(compat.jaxpr_and_result(flat, *shapes)[0])
        inputs = [Slot(x, tuple(p.jaxpr.invars[i].aval for p in programs)) for i, x in enumerate(mine)]
        index = jnp.asarray([self.kinds.index(count) for count in self.counts], jnp.int32)[here]
        self.slots = join([(p.jaxpr, p.consts) for p in programs], index, inputs)
        if any(len({aval.shape[1:] for aval in slot.avals}) > 1 for slot in self.slots):
            raise CannotJoin("they return arrays that cannot be joined along the first dim")
        self.shapes = [tuple(slot.avals[0].shape) for slot in self.slots]
        return [jnp.asarray(slot.array) for slot in self.slots]

    def joined(self, number: int, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The rows that devices have, without the room that some of them left."""
        slot = self.slots[number]
        if slot.is_even or not any(spec):
            return x
        room = x.shape[0] // self.mesh.size
        sizes = [slot.avals[self.kinds.index(count)].shape[0] for count in self.counts]
        places = [i * room + np.arange(size) for i, size in enumerate(sizes)]
        return jnp.take(x, np.concatenate(places), axis=0)
