"""Collectives inside of `Strategy.run`: the ranks are the replicas.

Nearly everything is made of the two operations that a replica context has, a sum and a concatenation
over all replicas. So it works in both executors, inside of staged code, and can be differentiated.
Compiled code has XLA's own exchange and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.comm.groups import Group
from phalanx.comm.reductions import ReduceOp, Reduction, combine, kind_of
from phalanx.core.replica_context import ReplicaContext
from phalanx.core.values import REPLICA_AXIS


class Replicas:
    """The replicas of a group, from the view of one replica.

    All replicas call an operation, because one program stands for all of them. What replicas outside of
    the group get has the shape of the result and is of no use, except that their own array comes back
    where the shape is the same.
    """

    def __init__(self, context: ReplicaContext, group: Group) -> None:
        self._context, self._group = context, group
        count = context.num_replicas_in_sync
        self._id = jnp.asarray(context.replica_id_in_sync_group)
        places = [group.ranks.index(r) if r in group.ranks else 0 for r in range(count)]
        self._all = group.ranks == tuple(range(count))
        self._direct = self._all and context.compiled and count > 1
        self.me: Any = self._id if self._all else jnp.asarray(places)[self._id]
        self._inside = jnp.asarray([r in group.ranks for r in range(count)])[self._id]

    def gather(self, x: Any) -> jax.Array:
        """The arrays of all members as rows."""
        rows = self._context.all_gather(jnp.asarray(x)[None], 0)
        return rows if self._all else rows[jnp.asarray(self._group.ranks)]

    def all_reduce(self, x: Any, op: Reduction) -> jax.Array:
        """The reduction over all members."""
        x = jnp.asarray(x)
        plain = op in (ReduceOp.SUM, ReduceOp.AVG) and kind_of(x.dtype) in ("floating", "complex")
        if self._all and plain:
            return self._context.all_reduce("sum" if op is ReduceOp.SUM else "mean", x)
        return self._or_own(combine(op, self.gather(x)), x)

    def from_one(self, x: Any, source: int) -> jax.Array:
        """The array of one member."""
        return self._or_own(self.gather(x)[source], x)

    def only_at(self, result: jax.Array, place: int, otherwise: Any) -> jax.Array:
        """The result on one member, and something else on the others."""
        return jnp.where(self._inside & (self.me == place), result, otherwise)

    def exchange(self, rows: jax.Array) -> jax.Array:
        """Row i goes to member i; row i of the result came from member i."""
        if self._direct:
            return lax.all_to_all(rows, REPLICA_AXIS, 0, 0, tiled=True)
        return jnp.take(self.gather(rows), self.me, axis=1)

    def reduce_scatter(self, rows: jax.Array, op: Reduction) -> jax.Array:
        """The reduction over all members of the row that is this member's."""
        if self._direct and op is ReduceOp.SUM and rows.dtype != jnp.bool_:
            return lax.psum_scatter(rows, REPLICA_AXIS, scatter_dimension=0)
        if self._direct:
            return combine(op, self.exchange(rows))
        return self.own(self.all_reduce(rows, op))

    def own(self, rows: jax.Array) -> jax.Array:
        """This member's row."""
        return jnp.take(rows, self.me, axis=0)

    def _or_own(self, result: jax.Array, x: Any) -> jax.Array:
        return result if self._all else jnp.where(self._inside, result, jnp.asarray(x))


def split_rows(x: jax.Array, count: int) -> jax.Array:
    """The first dimension in `count` equal parts, as rows."""
    return jnp.reshape(x, (count, x.shape[0] // count, *x.shape[1:]))


def joined(rows: Any) -> Any:
    """Rows joined along the first dimension."""
    return rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:]))


def listed(rows: jax.Array) -> list[jax.Array]:
    """Rows as a list."""
    return [rows[i] for i in range(rows.shape[0])]


def stacked(xs: Sequence[Any]) -> jax.Array:
    """Arrays of one shape as rows."""
    return jnp.stack([jnp.asarray(x) for x in xs])
