"""Collectives between compiled replicas: XLA's own, over the devices of a group alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Outcome, PendingArray, finished
from phalanx.collectives.reductions import (
    PremulSum,
    Reduction,
    combine,
    divided,
    kind_of,
    premultiplied,
)
from phalanx.collectives.table import Request, Splits, join_rows, rows_of
from phalanx.core.reduction import ReduceOp
from phalanx.core.replica_context import ReplicaContext
from phalanx.errors import InvalidValueError
from phalanx.runtime.placement import REPLICA_AXIS


class CompiledReplicas:
    """The replicas of a group, in the one program that stands for all replicas.

    All replicas make the call. Those outside of the group get their own array back where the shape of
    the result is the same, and else something of that shape that is of no use.
    """

    def __init__(self, context: ReplicaContext, group: Group, name: str) -> None:
        self._context, self._name = context, name
        self._ranks, self._count = group.ranks, len(group)
        total = context.num_replicas_in_sync
        self._everyone = group.ranks == tuple(range(total))
        rank = jnp.asarray(context.replica_id_in_sync_group)
        places = [group.ranks.index(r) if r in group.ranks else 0 for r in range(total)]
        self.me: Any = rank if self._everyone else jnp.asarray(places)[rank]
        others = [r for r in range(total) if r not in group.ranks]
        self._has_others = bool(others)
        self._inside = jnp.asarray([r in group.ranks for r in range(total)])[rank]
        # Groups of different sizes do for sums; for the rest XLA wants equal ones.
        self._alone = None if self._everyone else [list(group.ranks), *([r] for r in others)]
        self._equal = None if self._everyone else equal_groups(group.ranks, others)

    # -- movements -------------------------------------------------------------------------------

    def run(self, request: Request, async_op: bool) -> Outcome:
        """Perform a collective, which is scheduled by XLA in any case."""
        request.me = self.me
        result = request.perform(self)
        if not async_op:
            return result, None
        handle = finished(result)
        return PendingArray(handle), handle

    def reduce(self, xs: list[Any], op: Reduction, root: int | None, out: Any = None) -> list[Any]:
        """See `Backend`."""
        results = [self._reduced(jnp.asarray(x), op) for x in xs]
        if root is None:
            return results
        return [self._only_at(root, r, x) for r, x in zip(results, xs, strict=True)]

    def broadcast(self, x: Any, root: int, out: Any = None) -> Any:
        """See `Backend`."""
        x = jnp.asarray(x)
        if self._count == 1:
            return x
        # The neutral element of a sum that keeps every bit is -0.
        here = self._inside & (self.me == root)
        plain = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
        chosen = jnp.where(here, plain, -jnp.zeros_like(plain))
        total = lax.psum(chosen, REPLICA_AXIS, axis_index_groups=self._alone)
        return self.or_own(total.astype(x.dtype), x)

    def gather(self, x: Any, root: int | None, joined: bool, out: Any = None) -> Any:
        """See `Backend`; all replicas get a list."""
        rows = self.rows(jnp.asarray(x))
        if not joined:
            return list(rows)
        whole = join_rows(rows)
        return whole if root is None else self._only_at(root, whole, jnp.zeros_like(whole))

    def scatter(self, xs: Any, root: int, out: Any = None) -> Any:
        """See `Backend`; all replicas give a list."""
        if xs is None:
            raise InvalidValueError(
                "Where replicas are compiled, one program stands for all of them: all give a list of "
                "the same shapes to scatter. Received: None"
            )
        return self._exchange(self._even(xs))[root]

    def reduce_scatter(self, xs: Any, op: Reduction, out: Any = None) -> Any:
        """See `Backend`."""
        rows = self._even(xs)
        if self._count > 1 and op is ReduceOp.SUM and rows.dtype != jnp.bool_ and self._grouped:
            return lax.psum_scatter(rows, REPLICA_AXIS, axis_index_groups=self._equal)
        return combine(op, self._exchange(rows))

    def exchange(self, xs: Any, splits: Splits | None, out: Any = None) -> Any:
        """See `Backend`."""
        if splits is None:
            return list(self._exchange(self._even(xs)))
        equal = [xs.shape[0] // self._count] * self._count
        if splits.inputs != equal or splits.outputs not in (None, equal):
            raise self._uneven(f"the splits {splits.inputs} and {splits.outputs} of {xs.shape[0]} rows")
        return join_rows(self._exchange(self._even(xs)))

    def barrier(self) -> None:
        """See `Backend`: the replicas of one program are always together."""

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _grouped(self) -> bool:
        """Whether XLA can work on the group alone, without messages between pairs."""
        return self._everyone or self._equal is not None

    def _reduced(self, x: jax.Array, op: Reduction) -> Any:
        what = kind_of(x.dtype)
        if isinstance(op, PremulSum):
            return self.or_own(self._sum(premultiplied(op, x)), x)
        if what in ("floating", "complex") and self._everyone and op in (ReduceOp.SUM, ReduceOp.MEAN):
            return self._context.all_reduce("sum" if op is ReduceOp.SUM else "mean", x)
        if self._count == 1:
            return combine(op, x[None])
        if what != "bool" and op is ReduceOp.SUM:
            return self.or_own(self._sum(x), x)
        if what != "bool" and op is ReduceOp.MEAN:
            return self.or_own(divided(self._sum(x), self._count), x)
        if what == "integer" and op in (ReduceOp.MAX, ReduceOp.MIN):
            extreme: Any = lax.pmax if op is ReduceOp.MAX else lax.pmin
            return self.or_own(extreme(x, REPLICA_AXIS, axis_index_groups=self._alone), x)
        return self.or_own(combine(op, self.rows(x)), x)

    def _sum(self, x: jax.Array) -> Any:
        if self._count == 1:
            return x
        return lax.psum(x, REPLICA_AXIS, axis_index_groups=self._alone)

    def rows(self, x: jax.Array) -> Any:
        """The arrays of all members as rows."""
        if self._count == 1:
            return x[None]
        if self._everyone:
            return self._context.all_gather(x[None], 0)
        if self._grouped:
            return lax.all_gather(x, REPLICA_AXIS, axis_index_groups=self._equal)
        shifts = [x, *(self._shifted(x, -j) for j in range(1, self._count))]
        return jnp.take(jnp.stack(shifts), (jnp.arange(self._count) - self.me) % self._count, axis=0)

    def _exchange(self, rows: jax.Array) -> Any:
        """Row i goes to member i; row i of the result came from member i."""
        if self._count == 1:
            return rows
        if self._grouped:
            groups = self._equal
            return lax.all_to_all(rows, REPLICA_AXIS, 0, 0, axis_index_groups=groups, tiled=True)
        mine = [jnp.take(rows, (self.me + j) % self._count, axis=0) for j in range(self._count)]
        came = [mine[0], *(self._shifted(mine[j], j) for j in range(1, self._count))]
        return jnp.take(jnp.stack(came), (self.me - jnp.arange(self._count)) % self._count, axis=0)

    def _shifted(self, x: jax.Array, steps: int) -> Any:
        """What the member that many places before this one has."""
        ranks, count = self._ranks, self._count
        pairs = [(ranks[m], ranks[(m + steps) % count]) for m in range(count)]
        return lax.ppermute(x, REPLICA_AXIS, pairs)

    def _even(self, xs: Any) -> jax.Array:
        """A list, or an array that is cut, as rows, which must have one shape."""
        if not isinstance(xs, list):
            return rows_of(jnp.asarray(xs), self._count)
        if len({tuple(x.shape) for x in xs}) > 1:
            raise self._uneven(f"arrays of the shapes {[tuple(x.shape) for x in xs]}")
        return jnp.stack([jnp.asarray(x) for x in xs])

    def _uneven(self, received: str) -> InvalidValueError:
        return InvalidValueError(
            f"{self._name} in unequal parts gives results of different shapes, but where replicas are "
            "compiled one program with one shape stands for all of them. Pad the parts to one size and "
            "cut what came, or run the step eagerly: call strategy.run outside of px.function and "
            f"jax.jit. Received: {received}"
        )

    def _only_at(self, place: int, result: Any, otherwise: Any) -> jax.Array:
        return jnp.where(self._inside & (self.me == place), result, otherwise)

    def or_own(self, result: jax.Array, x: Any) -> jax.Array:
        """The result for members, and their own array for others."""
        return jnp.where(self._inside, result, x) if self._has_others else result


def equal_groups(ranks: tuple[int, ...], others: list[int]) -> list[list[int]] | None:
    """Groups of one size that have all replicas, the first of them as given; None if that cannot be."""
    size = len(ranks)
    if len(others) % size:
        return None
    return [list(ranks), *(others[i : i + size] for i in range(0, len(others), size))]
