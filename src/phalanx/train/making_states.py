"""How the state of an optax transformation is made: each device makes what it keeps, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from phalanx.core.options import VariableAggregation, VariableSynchronization
from phalanx.core.slicing import Members
from phalanx.core.strategy import Strategy
from phalanx.core.variables.distributed_variables import MirroredVariable
from phalanx.core.variables.sliced_variables import SlicedVariable
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import VariableSpec
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS, replica_mesh
from phalanx.train.optimizer_state import present_value, slot_name
from phalanx.train.sharded_optimizer import check_slices
from phalanx.train.sharding import OptimizerSharding
from phalanx.train.sliced_updates import Sliced, run_on_slices

__all__ = ["made_state", "slices_program"]

Init = Callable[[Any], Any]


def made_state(
    init: Init, variables: list[Variable], strategy: Strategy, sharding: OptimizerSharding | None
) -> Any:
    """The state of a transformation, as variables of a strategy.

    Args:
        init: makes the state from a list of parameters.
        variables: the parameters.
        strategy: whose they are.
        sharding: which arrays are divided over replicas; each replica makes its slices of these.
    """
    names = [v.name for v in variables]
    mirrored = all(isinstance(v, MirroredVariable) for v in variables)
    if sharding is not None and mirrored and strategy.num_replicas_in_sync > 1:
        made = _in_slices(init, variables, strategy, sharding)
        if made is not None:
            return made
    state = strategy.extended._computed(init, [jnp.asarray(present_value(v)) for v in variables])
    return jax.tree_util.tree_map_with_path(
        lambda path, x: Variable(x, trainable=False, name=slot_name(names, path, x)), state
    )


class _NeedsOthersError(Exception):
    """A state needs parameters whole of which each replica has a slice."""


@dataclass(frozen=True)
class _Alone(Members):
    """Replicas of this process that make slices without asking others.

    Args:
        first: the number of the first replica of this process.
    """

    first: int = 0

    def index(self) -> Any:
        return (lax.axis_index(self.axis) + self.first) % self.parts

    def gather(self, x: jax.Array) -> NoReturn:
        raise _NeedsOthersError

    def sum(self, x: jax.Array) -> NoReturn:
        raise _NeedsOthersError

    def extreme(self, x: jax.Array, largest: bool) -> NoReturn:
        raise _NeedsOthersError


def _in_slices(
    init: Init, variables: list[Variable], strategy: Strategy, sharding: OptimizerSharding
) -> Any:
    """The state, divided; None if `init` must look at values, or at parameters that are divided."""
    parts = sharding.parts_of(strategy.num_replicas_in_sync)
    check_slices(variables, parts)

    def make() -> tuple[Any, Any]:
        program, given, state = slices_program(init, variables, strategy, sharding)
        return program(given), state

    try:
        # A thread of its own, because this one may be tracing a program over the same replicas.
        with ThreadPoolExecutor(1, "phalanx-state") as thread:
            leaves, state = thread.submit(make).result()
    except (jax.errors.ConcretizationTypeError, _NeedsOthersError):
        return None
    names = [v.name for v in variables]
    kinds = VariableSynchronization.AUTO, VariableAggregation.NONE

    def made(path: Any, like: Any, x: jax.Array) -> Variable:
        name = slot_name(names, path, x)
        pieces = [piece.data for piece in x.addressable_shards]
        if not sharding.divides(like):
            return Variable(pieces[0], trainable=False, name=name)
        return SlicedVariable(VariableSpec(like, False, name, *kinds), strategy, pieces, parts)

    return jax.tree_util.tree_map_with_path(made, state, leaves)


def slices_program(
    init: Init, variables: Sequence[Any], strategy: Strategy, sharding: OptimizerSharding
) -> tuple[Any, list[jax.Array], Any]:
    """The program in which each replica of this process makes its part of a state.

    A whole parameter may be read in it. Arrays that are divided are never whole, unless `init` computes
    them by something other than elementwise arithmetic.

    Returns:
        The program, its arguments, and the shapes of the whole state.
    """
    count = strategy.num_replicas_in_sync
    members = _Alone(REPLICA_AXIS, count, sharding.parts_of(count), strategy.extended._first_replica)
    devices: Any = strategy.extended._replica_devices
    mesh = replica_mesh(tuple(devices))
    own, same = PartitionSpec(REPLICA_AXIS), PartitionSpec()
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
    state = jax.eval_shape(init, shapes)
    wanted = jax.tree.map(sharding.divides, state)
    sliced = [isinstance(v, SlicedVariable) for v in variables]

    def program(given: list[jax.Array]) -> Any:
        params = [
            Sliced(x, v.slicing) if is_sliced else x
            for v, x, is_sliced in zip(variables, given, sliced, strict=True)
        ]
        made, _ = run_on_slices(init, (params,), wanted, members)
        return jax.tree.map(
            lambda like, x: x.local.astype(like.dtype) if isinstance(x, Sliced) else x, state, made
        )

    specs = [own if is_sliced else same for is_sliced in sliced]
    results = jax.tree.map(lambda divided: own if divided else same, wanted)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(specs,), out_specs=results, check_vma=False)
    values = [v._value.values for v in variables]
    arrays = [
        compat.assemble(
            (len(pieces) * len(pieces[0]), *pieces[0].shape[1:]) if is_sliced else pieces[0].shape,
            jax.sharding.NamedSharding(mesh, spec),
            list(pieces),
        )
        for pieces, spec, is_sliced in zip(values, specs, sliced, strict=True)
    ]
    return jax.jit(mapped), arrays, state
