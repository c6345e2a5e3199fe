"""Collectives between replicas that run eagerly: they are made of exchanges and sums.

Only members of a group call its operations. Both kinds of operations carry gradients back, by meeting
once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.collectives import device_programs
from phalanx.collectives.group_rendezvous import Meeting, PendingResult, is_here, rank_of, rendezvous_of
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Outcome, OwnHandle, PendingArray
from phalanx.collectives.mismatches import different_parts
from phalanx.collectives.packing import Packing
from phalanx.collectives.reductions import Reduction, combine, kind_of, reduce_into
from phalanx.collectives.table import Request, Splits, like, parts_of
from phalanx.core.collective_calls import differentiably
from phalanx.core.reduction import ReduceOp
from phalanx.core.replica_context import ReplicaContext, replica_device, require_known_values
from phalanx.errors import CollectiveMismatchError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.placement import place as placed

Everyone = tuple[int, ...]


@dataclass
class _Exchanged:
    """What a movement will be: arrays that go to some members, and what to make of those that come."""

    xs: Sequence[Any]
    to: Sequence[Everyone]
    finish: Callable[[list[Any]], Any]
    sums: Reduction | None = None
    """The reduction, if it is one that XLA does with all arrays at once."""


class EagerReplicas:
    """The replicas of a group, from the view of one replica, which has a value for everything."""

    def __init__(self, context: ReplicaContext, group: Group) -> None:
        self._context, self._group = context, group
        rank = rank_of(context)
        self.me = group.ranks.index(rank) if rank in group.ranks else -1
        self._all = tuple(range(len(group)))

    def run(self, request: Request, async_op: bool) -> Outcome:
        """Perform a collective."""
        name = request.operation.name
        require_known_values(self._context, name)
        if self.me < 0:
            return None, None
        request.me = self.me
        moved: _Exchanged = request.operation.movement(self, request)
        if moved.sums is not None and self._spans_workers and not async_op:
            op = "sum" if moved.sums is ReduceOp.SUM else "mean"
            out = self._context.all_reduce(op, list(moved.xs))
            return request.operation.finish(request, out), None
        same = f"{name}({request.same}) in {self._group.name!r}"
        call: Exchange | _Sum = (
            Exchange(self._context, self._group, same, moved.to)
            if moved.sums is None
            else _Sum(self._context, self._group, same, moved.sums)
        )

        def finish(came: list[Any]) -> Any:
            return request.operation.finish(request, moved.finish(came))

        return self._launch(call, moved.xs, finish, async_op)

    # -- movements -------------------------------------------------------------------------------

    def reduce(self, xs: list[Any], op: Reduction, root: int | None, out: Any) -> _Exchanged:
        """See `Backend`."""
        if root is None:
            if op in (ReduceOp.SUM, ReduceOp.MEAN) and all(_is_summed_by_xla(x) for x in xs):
                return _Exchanged(xs, (), list, op)

            def combined(came: list[Any]) -> Any:
                rows = [came[i :: len(xs)] for i in range(len(xs))]
                return [_combined(op, r, x) for r, x in zip(rows, xs, strict=True)]

            return _Exchanged(xs, [self._all] * len(xs), combined)

        def finish(came: list[Any]) -> Any:
            return [_combined(op, came, xs[0]) if self.me == root else like(xs[0], came[0])]

        # The own array takes the way of the others, so that its gradient does.
        return _Exchanged(xs, [(root, self.me)], finish)

    def broadcast(self, x: Any, root: int, out: Any) -> _Exchanged:
        """See `Backend`."""
        to = self._all if self.me == root else ()
        return _Exchanged([x], [to], lambda came: like(x, came[0]))

    def gather(self, x: Any, root: int | None, joined: bool, out: Any) -> _Exchanged:
        """See `Backend`."""
        if root is None:
            return _Exchanged([x], [self._all], lambda came: _listed(came, x, joined))

        def finish(came: list[Any]) -> Any:
            if self.me == root:
                return _listed(came, x, joined)
            if not joined:
                return None
            nothing = jnp.where(jnp.zeros((), bool), jnp.asarray(came[0]), jnp.zeros(x.shape, x.dtype))
            return like(x, jnp.concatenate([nothing] * len(self._group)))

        # The own array takes the way of the others, so that its gradient does.
        return _Exchanged([x], [(root, self.me)], finish)

    def scatter(self, xs: Any, root: int, out: Any) -> _Exchanged:
        """See `Backend`."""
        is_source = self.me == root
        if is_source and xs is None:
            raise InvalidValueError(
                f"Replica {self._group.ranks[root]} must give a list of {len(self._group)} arrays to "
                "scatter. Received: None"
            )
        given = self._parts(xs) if is_source or (xs is not None and _is_traced(xs)) else []
        to = [(i,) if is_source else () for i in range(len(given))]
        return _Exchanged(given, to, lambda came: came[0])

    def reduce_scatter(self, xs: Any, op: Reduction, out: Any) -> _Exchanged:
        """See `Backend`."""
        parts = self._parts(xs)
        return _Exchanged(parts, self._each, lambda came: _combined(op, came, parts[0]))

    def exchange(self, xs: Any, splits: Splits | None, out: Any) -> _Exchanged:
        """See `Backend`."""
        if splits is None:
            return _Exchanged(xs, self._each, lambda came: [like(xs[0], c) for c in came])

        def finish(came: list[Any]) -> Any:
            found, ranks = [c.shape[0] for c in came], self._group.ranks
            if splits.outputs not in (None, found):
                who = f"all_to_all_single: replica {ranks[self.me]}"
                raise CollectiveMismatchError(
                    different_parts(who, splits.outputs or (), "replicas", ranks, found)
                )
            return _listed(came, xs, True)

        return _Exchanged(parts_of(xs, splits.inputs), self._each, finish)

    def barrier(self) -> _Exchanged:
        """See `Backend`."""
        return _Exchanged([], [], lambda _: None)

    # -- inside ----------------------------------------------------------------------------------

    @property
    def _each(self) -> list[Everyone]:
        """Where the arrays of a list go: each to its member."""
        return [(i,) for i in self._all]

    def _parts(self, xs: Any) -> list[Any]:
        if isinstance(xs, list):
            return xs
        count = len(self._group)
        return parts_of(xs, [xs.shape[0] // count] * count)

    @property
    def _spans_workers(self) -> bool:
        """Whether these are all replicas of several workers, which have programs of their own."""
        span = self._context.strategy.extended._span
        return span is not None and self._group.ranks == tuple(range(len(span)))

    def _launch(
        self,
        call: Exchange | _Sum,
        xs: Sequence[Any],
        finish: Callable[[list[Any]], Any],
        async_op: bool,
    ) -> Outcome:
        mine = [snapshot(x) for x in xs]
        if _is_traced(mine):
            result = finish(differentiably(call, [_known_if_whole(x) for x in mine]))
            if not async_op:
                return result, None
            future: Future[Any] = Future()
            future.set_result(result)
            pending = PendingResult(self._context, future, "", "", lambda: None, list)
        else:
            pending = call.launch(mine, finish)
            if not async_op:
                return pending.wait(), None
        handle = replica_handle(pending, pending.wait)
        return PendingArray(handle), handle


def _is_traced(xs: Any) -> bool:
    return any(compat.is_tracer(x) for x in (xs if isinstance(xs, list) else [xs]))


def snapshot(x: Any) -> Any:
    """What `x` is now, whatever becomes of its memory while an operation is under way."""
    return x.copy() if isinstance(x, np.ndarray) else x


def replica_handle(pending: PendingResult, get: Callable[[], Any], source: Any = None) -> OwnHandle:
    """The handle of an operation between replicas that run eagerly: waiting lets the others run."""
    return OwnHandle(pending.future, lambda _: get(), pending.done, pending.site, source)


# -- exchanges ---------------------------------------------------------------------------------


class Exchange:
    """Arrays that go to members of a group. Backward, gradients go back to where they came from.

    `to` has for each array the places that get it, and `labels` a number that its receiver shall know.
    """

    def __init__(
        self,
        context: ReplicaContext,
        group: Group,
        same: str,
        to: Sequence[Everyone],
        labels: Sequence[int] | None = None,
    ) -> None:
        self.context = context
        self._group, self._same, self._to = group, same, to
        self._labels = [0] * len(to) if labels is None else labels
        self._me = group.ranks.index(rank_of(context))
        self._given: list[Any] = []
        self._came: list[tuple[int, int, int]] = []  # places, their numbers for it, labels

    def launch(self, xs: Sequence[Any], finish: Callable[[list[Any]], Any]) -> PendingResult:
        """Begin; the result is what `finish` makes of the arrays that come, by member."""
        me, device = self._me, replica_device(self.context)
        value = list(zip(range(len(xs)), self._labels, self._to, xs, strict=True))

        def take(meeting: Meeting) -> Any:
            came: list[Any] = []
            self._came = []
            for place, rank in enumerate(self._group.ranks):
                for number, label, to, x in meeting.brought[rank].value:
                    if me in to:
                        self._came.append((place, number, label))
                        came.append(_delivered(x, device))
            return finish(came)

        return rendezvous_of(self.context).meet(self.context, self._group, self._same, value, take)

    def forward(self, xs: list[Any]) -> list[Any]:
        """The arrays that came to this member."""
        self._given = [(x.shape, x.dtype) for x in xs]
        return list(self.launch(xs, list).wait())

    def backward(self, cotangents: list[Any]) -> list[Any]:
        """The gradients that came back, added up for each array that was given."""
        back = Exchange(
            self.context,
            self._group,
            f"the gradient of {self._same}",
            [(place,) for place, _, _ in self._came],
            [number for _, number, _ in self._came],
        )
        came = differentiably(back, cotangents)
        totals = [jnp.zeros(shape, dtype) for shape, dtype in self._given]
        for (_, _, label), x in zip(back._came, came, strict=True):
            totals[label] = totals[label] + x
        return totals


class _Sum:
    """Sums, or means, over the members of a group. Its own transpose."""

    def __init__(self, context: ReplicaContext, group: Group, same: str, op: Reduction) -> None:
        self.context, self._group, self._same, self._op = context, group, same, op

    def launch(self, xs: Sequence[Any], finish: Callable[[list[Any]], Any]) -> PendingResult:
        """Begin; the result is what `finish` makes of the reductions."""
        rank, device = rank_of(self.context), replica_device(self.context)

        def take(meeting: Meeting) -> Any:
            rows = [meeting.brought[r].value for r in self._group.ranks]
            traced = any(compat.is_tracer(x) for row in rows for x in row)
            if traced or not all(is_here(self.context, r) for r in self._group.ranks):
                columns = [[_delivered(x, device) for x in c] for c in zip(*rows, strict=True)]
                return finish([_combined(self._op, c, c[0]) for c in columns])
            sums = meeting.shared("sums", lambda: self._sums(rows))
            return finish([s[self._group.ranks.index(rank)] for s in sums])

        return rendezvous_of(self.context).meet(self.context, self._group, self._same, list(xs), take)

    def _sums(self, rows: list[list[Any]]) -> list[list[jax.Array]]:
        """For each array its sum on the device of each member: one program on their devices."""
        extended = self.context.strategy.extended
        here = extended._devices  # type: ignore[attr-defined]
        mine = tuple(here[r - extended._first_replica] for r in self._group.ranks)
        columns = [list(column) for column in zip(*rows, strict=True)]
        summed = device_programs.all_reduce(self._op, columns, mine, Packing())  # type: ignore[arg-type]
        return [list(m.values) for m in summed]

    def forward(self, xs: list[Any]) -> list[Any]:
        """The reductions."""
        return list(self.launch(xs, list).wait())

    def backward(self, cotangents: list[Any]) -> list[Any]:
        """The same of the gradients."""
        same = f"the gradient of {self._same}"
        return differentiably(_Sum(self.context, self._group, same, self._op), cotangents)


def _is_summed_by_xla(x: Any) -> bool:
    return not isinstance(x, np.ndarray) and kind_of(x.dtype) in ("floating", "complex")


def _known_if_whole(x: Any) -> Any:
    """The value of an array that has no gradient."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else compat.primal_value(x)


def _delivered(x: Any, device: Any) -> Any:
    """An array as its receiver has it: NumPy's as a copy, JAX's on the device."""
    return np.array(x) if isinstance(x, np.ndarray) else placed(x, device)


def _combined(op: Reduction, xs: Sequence[Any], own: Any) -> Any:
    if len(xs) > 1 and isinstance(own, np.ndarray):
        out = np.empty_like(own, shape=xs[0].shape)
        reduce_into(op, [np.asarray(x) for x in xs], out)
        return out
    return like(own, combine(op, jnp.stack([jnp.asarray(x) for x in xs])))


def _listed(xs: Sequence[Any], own: Any, whole: bool) -> Any:
    if not whole:
        return [like(own, x) for x in xs]
    if isinstance(own, np.ndarray):
        return np.concatenate([np.asarray(x) for x in xs])
    return like(own, jnp.concatenate([jnp.asarray(x) for x in xs]))
