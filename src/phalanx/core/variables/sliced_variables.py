"""`SlicedVariable`: a mirrored variable of which each replica keeps one slice.

It means what a mirrored variable means: one value, the same on all replicas, whose writes are
aggregated. Only where it lies differs, so reading it joins the slices of all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from phalanx.core import context as ctx
from phalanx.core.replica_context import MergePoint, meet
from phalanx.core.slicing import Members, Slicing
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.values import Mirrored, PerReplica, ReplicaLayout
from phalanx.core.variables.distributed_variables import MirroredVariable
from phalanx.core.variables.variable_spec import VariableSpec, apply_update
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS, place

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy


class SlicedVariable(MirroredVariable):
    """A mirrored variable that is kept in slices; made of them, or by `slice_variable`.

    Args:
        spec: what it is; of its value only the shape and dtype are looked at.
        strategy: the strategy.
        slices: those of the replicas of this process.
        parts: how many replicas, next to each other, share one value.
    """

    slicing: Slicing
    regather = False
    """Whether gradients gather it again."""

    def __init__(
        self,
        spec: VariableSpec,
        strategy: Strategy,
        slices: Sequence[jax.Array],
        parts: int,
    ) -> None:
        devices = strategy.extended._replica_devices
        self._describe(spec, strategy, devices[0])
        self._devices = devices
        self.slicing = Slicing(self.shape, parts)
        placed = [place(x, device) for x, device in zip(slices, devices, strict=True)]
        self._value = PerReplica(placed, strategy.extended._span)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of each slice."""
        return (self.slicing.length,)

    @property
    def _members(self) -> Members:
        assert self._strategy is not None
        return Members(REPLICA_AXIS, self._strategy.num_replicas_in_sync, self.slicing.parts)

    # -- slices ----------------------------------------------------------------------------------

    @property
    def local_slice(self) -> jax.Array:
        """The slice of the replica that runs the program; only in compiled runs."""
        held = self._held()
        if isinstance(held, SpmdPerReplica):
            local: jax.Array = held.component(0)
            return local
        return self.slicing.cut(self.whole_of(held), self._members.index())

    def joined(self, local: jax.Array) -> jax.Array:
        """The value, given the slice of the replica that runs the program."""
        return self.slicing.join(self._members.gather(local).reshape(-1))

    def set_local_slice(self, new: jax.Array) -> None:
        """Replace it, on every replica at once."""
        self._set(SpmdPerReplica(new.astype(self.dtype), self._members.count))

    # -- reading ---------------------------------------------------------------------------------

    def _read(self) -> jax.Array:
        here = self._here()
        held = self._held()
        replica = ctx.active_replica()
        others_have_some = isinstance(held, PerReplica) and len(held.values) < self._members.count
        if replica is not None and others_have_some and not isinstance(held, SpmdPerReplica):
            # Replicas of other processes must send their slices, so all read together.
            what = f"reading variable {self.name!r}, whose slices are on all workers"
            whole = meet(replica, MergePoint(what, lambda _: self.whole_of(held), (), {}))
        else:
            whole = self.whole_of(held, here)
        return whole if here is None else place(whole, self._devices[here])

    def _copy(self, index: int) -> jax.Array:
        return place(self.whole_of(self._held(), index), self._devices[index])

    def whole_of(self, held: Any, index: int | None = None) -> jax.Array:
        """The value, given what the variable holds."""
        if isinstance(held, Mirrored):  # in place of it, as in a gradient
            value: jax.Array = held.component(index or 0)
            return value
        if isinstance(held, SpmdPerReplica):
            return self.joined(held.component(0))
        if held.is_traced:
            return self.slicing.join(held.array)
        assert self._strategy is not None
        if len(held.values) == self._members.count:
            first = self._devices[index or 0]
            parts = [place(x, first) for x in held.values[: self.slicing.parts]]
            return self.slicing.join(jnp.concatenate(parts))
        return self.slicing.join(self._strategy.extended._gather(held, 0))

    def distributed(self) -> Mirrored:
        """The value, joined for each replica."""
        held = self._held()
        whole, count = self.whole_of(held), self._members.count
        if compat.is_tracer(whole):
            return Mirrored.of_global(whole, count)
        assert self._strategy is not None
        return Mirrored([place(whole, d) for d in self._devices], self._strategy.extended._span)

    # -- writing ---------------------------------------------------------------------------------

    def _update(self, method: str, operand: Any) -> Any:
        result = super()._update(method, operand)
        return self if isinstance(result, PerReplica) else result

    def _write(self, method: str, operand: Any) -> None:
        if isinstance(operand, Mirrored):
            operand = operand.component(0)
        self.setwhole_of(apply_update(method, self.whole_of(self._held()), operand))

    def _store_copy(self, index: int, new: jax.Array) -> None:
        del index
        self.setwhole_of(new)

    def setwhole_of(self, new: Any) -> None:
        """Replace the value: each replica takes its slice."""
        held, slicing, members = self._held(), self.slicing, self._members
        if isinstance(held, SpmdPerReplica):
            self.set_local_slice(slicing.cut(new, members.index()))
        elif isinstance(held, Mirrored):
            self._set(held.map_components(lambda _, x: x, new))
        elif held.is_traced or compat.is_tracer(new):
            every = jnp.tile(slicing.flat(new), members.count // members.parts)
            self._set(PerReplica.from_global(every, ReplicaLayout(members.count, False)))
        else:
            self._set(self._divided(new))

    def _divided(self, whole: Any) -> PerReplica:
        return self._divided_copies([whole] * len(self._devices))

    def _divided_copies(self, copies: Sequence[Any]) -> PerReplica:
        """The slices of the replicas, each cut from its own copy."""
        assert self._strategy is not None
        first = self._strategy.extended._first_replica
        parts = [
            place(self.slicing.cut(copy, (first + i) % self.slicing.parts), device)
            for i, (copy, device) in enumerate(zip(copies, self._devices, strict=True))
        ]
        return PerReplica(parts, self._strategy.extended._span)


def slice_variable(variable: Any, parts: int) -> SlicedVariable:
    """Keep a mirrored variable in slices from now on; the variable stays the same object.

    Programs that were traced with the variable as it was must not run again.

    Args:
        variable: a `MirroredVariable`.
        parts: how many replicas, next to each other, share one value.
    """
    copies = variable._committed().values
    variable.__class__ = SlicedVariable
    variable.slicing = Slicing(tuple(variable.shape), parts)
    variable._value = variable._divided_copies(copies)
    variable.__dict__.pop("_wrap", None)
    assert isinstance(variable, SlicedVariable)
    return variable
