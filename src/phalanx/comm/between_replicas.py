"""Collectives inside of `Strategy.run`, where the ranks are the replicas.

Replicas that run eagerly exchange what they have at an `Office`, like workers do: only members of a
group call its operations, and shapes may differ. Compiled replicas are one program, whose operations
are XLA's own; all replicas make each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp

from phalanx.comm import groups
from phalanx.comm.calls import Outcome
from phalanx.comm.groups import Group
from phalanx.comm.reductions import Reduction
from phalanx.core.errors import InvalidValueError
from phalanx.core.showing import shown


class Replicas(Protocol):
    """The replicas of a group, from the view of one of them; `place`s are ranks in the group."""

    async_op: bool

    def all_reduce(self, xs: list[Any], op: Reduction, many: bool) -> Outcome:
        """The reductions of `many` arrays, or of one."""
        ...

    def reduce(self, x: Any, place: int, op: Reduction) -> Outcome:
        """The reduction at one place, and the own array elsewhere."""
        ...

    def broadcast(self, x: Any, place: int) -> Outcome:
        """The array of one place."""
        ...

    def all_gather(self, x: Any, whole: bool) -> Outcome:
        """The arrays of all, as a list or as a whole."""
        ...

    def gather(self, x: Any, place: int, whole: bool) -> Outcome:
        """The arrays of all at one place."""
        ...

    def scatter(self, xs: list[Any] | None, place: int) -> Outcome:
        """This member's array of the list of one place."""
        ...

    def reduce_scatter(self, xs: list[Any], op: Reduction) -> Outcome:
        """This member's place of the reductions of all lists."""
        ...

    def all_to_all(self, xs: list[Any]) -> Outcome:
        """Array i to place i; those that came."""
        ...

    def all_to_all_single(self, x: Any, outputs: list[int] | None, inputs: list[int] | None) -> Outcome:
        """Parts of one array to all places; those that came, joined."""
        ...

    def barrier(self) -> Outcome:
        """Nothing, when all are here."""
        ...


def replicas_of(name: str, group: Any, async_op: bool = False) -> Replicas | None:
    """The replicas of a group inside of `Strategy.run`; None outside of it.

    Args:
        name: the operation that asks.
        group: the group, its name, or None.
        async_op: whether results shall have handles.
    """
    context = groups.replica()
    if context is None:
        return None
    found = checked_group(group)
    if context.compiled or context.num_replicas_in_sync == 1:
        from phalanx.comm.replicas_compiled import CompiledReplicas

        return CompiledReplicas(context, found, name, async_op)
    from phalanx.comm.replicas_eager import EagerReplicas

    return EagerReplicas(context, found, name, async_op)


def checked_group(group: Any) -> Group:
    """A group whose ranks are replicas."""
    found, count = groups.find(group), groups.world_size()
    if max(found.ranks) >= count:
        raise InvalidValueError(
            f"Inside of strategy.run the ranks are the {count} replicas. Received: {shown(found)}"
        )
    return found


def parts_of(x: Any, sizes: Sequence[int]) -> list[Any]:
    """An array cut along the first dimension."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [x[e - n : e] for e, n in zip(ends, sizes, strict=True)]


def joined(rows: Any) -> Any:
    """Rows joined along the first dimension."""
    return rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:]))


def stacked(xs: Sequence[Any]) -> Any:
    """Arrays of one shape as rows."""
    return jnp.stack([jnp.asarray(x) for x in xs])
