"""Collectives between replicas that run eagerly: they are made of exchanges and sums.

Only members of a group call its operations. Both kinds of operations carry gradients back, by meeting
once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.collectives import programs
from phalanx.collectives.packing import Packing
from phalanx.comm.arithmetic import reduce_into
from phalanx.comm.between_replicas import parts_of
from phalanx.comm.calls import Outcome, kind, like, snapshot
from phalanx.comm.groups import Group
from phalanx.comm.handles import Handle, PendingArray
from phalanx.comm.office import Meeting, Pending, is_here, office_of, rank_of
from phalanx.comm.reductions import ReduceOp, Reduction, combine, kind_of, name_of
from phalanx.core import compat, reduction
from phalanx.core.collective_calls import differentiably
from phalanx.core.errors import CollectiveMismatchError, InvalidValueError
from phalanx.core.placement import place as placed
from phalanx.core.replica_context import ReplicaContext

Everyone = tuple[int, ...]


class EagerReplicas:
    """The replicas of a group, from the view of one replica, which has a value for everything."""

    def __init__(self, context: ReplicaContext, group: Group, name: str, async_op: bool) -> None:
        context.require_known_values(name)
        self._context, self._group, self._name, self.async_op = context, group, name, async_op
        rank = rank_of(context)
        self.me = group.ranks.index(rank) if rank in group.ranks else -1
        self._all = tuple(range(len(group)))

    # -- operations ------------------------------------------------------------------------------

    def all_reduce(self, xs: list[Any], op: Reduction, many: bool) -> Outcome:
        """See `Replicas`."""
        same = f"{name_of(op)}, {', '.join(map(kind, xs))}"
        if op in (ReduceOp.SUM, ReduceOp.AVG) and all(_is_summed_by_xla(x) for x in xs):
            if self._spans_workers and not self.async_op:
                out = self._context.all_reduce("sum" if op is ReduceOp.SUM else "mean", list(xs))
                return (out if many else out[0]), None
            call = _Sum(self._context, self._group, self._text(same), op)
            return self._run(call, xs, lambda out: out if many else out[0])

        def combined(came: list[Any]) -> Any:
            rows = [came[i :: len(xs)] for i in range(len(xs))]
            results = [_combined(op, r, x) for r, x in zip(rows, xs, strict=True)]
            return results if many else results[0]

        return self._exchanged(same, xs, [self._all] * len(xs), combined)

    def reduce(self, x: Any, place: int, op: Reduction) -> Outcome:
        """See `Replicas`."""
        same = f"to {self._group.ranks[place]}, {name_of(op)}, {kind(x)}"
        is_place = self.me == place

        def finish(came: list[Any]) -> Any:
            return _combined(op, came, x) if is_place else like(x, came[0])

        # The own array takes the way of the others, so that its gradient does.
        return self._exchanged(same, [x], [(place, self.me)], finish)

    def broadcast(self, x: Any, place: int) -> Outcome:
        """See `Replicas`."""
        same = f"from {self._group.ranks[place]}, {kind(x)}"
        to = self._all if self.me == place else ()
        return self._exchanged(same, [x], [to], lambda came: like(x, came[0]))

    def all_gather(self, x: Any, whole: bool) -> Outcome:
        """See `Replicas`."""
        same = kind(x) if whole else x.dtype.name
        return self._exchanged(same, [x], [self._all], lambda came: _listed(came, x, whole))

    def gather(self, x: Any, place: int, whole: bool) -> Outcome:
        """See `Replicas`."""
        same = f"to {self._group.ranks[place]}, {kind(x) if whole else x.dtype.name}"

        is_place = self.me == place

        def finish(came: list[Any]) -> Any:
            if is_place:
                return _listed(came, x, whole)
            if not whole:
                return None
            nothing = jnp.where(jnp.zeros((), bool), jnp.asarray(came[0]), jnp.zeros(x.shape, x.dtype))
            return like(x, jnp.concatenate([nothing] * len(self._group)))

        # The own array takes the way of the others, so that its gradient does.
        return self._exchanged(same, [x], [(place, self.me)], finish)

    def scatter(self, xs: list[Any] | None, place: int) -> Outcome:
        """See `Replicas`."""
        same = f"from {self._group.ranks[place]}"
        is_source = self.me == place
        if is_source and xs is None:
            raise InvalidValueError(
                f"Replica {self._group.ranks[place]} must give a list of {len(self._group)} arrays to "
                "scatter. Received: None"
            )
        given = (xs or []) if is_source or self._differentiates(xs) else []
        to = [(i,) if is_source else () for i in range(len(given))]
        return self._exchanged(same, given, to, lambda came: came[0])

    def reduce_scatter(self, xs: list[Any], op: Reduction) -> Outcome:
        """See `Replicas`."""
        same = f"{name_of(op)}, {', '.join(map(kind, xs))}"
        finish = lambda came: _combined(op, came, xs[0])  # noqa: E731
        return self._exchanged(same, xs, [(i,) for i in self._all], finish)

    def all_to_all(self, xs: list[Any]) -> Outcome:
        """See `Replicas`."""
        finish = lambda came: [like(xs[0], c) for c in came]  # noqa: E731
        return self._exchanged(xs[0].dtype.name, xs, [(i,) for i in self._all], finish)

    def all_to_all_single(self, x: Any, outputs: list[int] | None, inputs: list[int] | None) -> Outcome:
        """See `Replicas`."""
        count, ranks = len(self._group), self._group.ranks
        sizes = inputs or [x.shape[0] // count] * count

        def finish(came: list[Any]) -> Any:
            found = [c.shape[0] for c in came]
            if outputs not in (None, found):
                raise CollectiveMismatchError(
                    f"all_to_all_single: replica {ranks[self.me]} expects parts of the sizes {outputs} "
                    f"from the replicas {list(ranks)}, but they send {found}."
                )
            return _listed(came, x, True)

        same = f"{x.dtype.name} with the trailing shape {list(x.shape[1:])}"
        return self._exchanged(same, parts_of(x, sizes), [(i,) for i in self._all], finish)

    def barrier(self) -> Outcome:
        """See `Replicas`."""
        return self._exchanged("", [], [], lambda _: None)

    # -- inside ----------------------------------------------------------------------------------

    def _text(self, same: str) -> str:
        return f"{self._name}({same}) in {self._group.name!r}"

    @property
    def _spans_workers(self) -> bool:
        """Whether these are all replicas of several workers, which have programs of their own."""
        span = self._context.strategy.extended._span
        return span is not None and self._group.ranks == tuple(range(len(span)))

    def _differentiates(self, xs: Sequence[Any] | None) -> bool:
        return any(compat.is_tracer(x) for x in xs or ())

    def _exchanged(
        self, same: str, xs: Sequence[Any], to: Sequence[Everyone], finish: Callable[[list[Any]], Any]
    ) -> Outcome:
        if self.me < 0:
            return None, None
        call = Exchange(self._context, self._group, self._text(same), to)
        return self._run(call, xs, finish)

    def _run(
        self, call: Exchange | _Sum, xs: Sequence[Any], finish: Callable[[list[Any]], Any]
    ) -> Outcome:
        if self.me < 0:
            return None, None
        mine = [snapshot(x, True) for x in xs]
        if self._differentiates(mine):
            result = finish(differentiably(call, [_known_if_whole(x) for x in mine]))
            return self._outcome(result, None)
        pending = call.launch(mine, finish)
        if not self.async_op:
            return pending.wait(), None
        return self._outcome(None, pending)

    def _outcome(self, result: Any, pending: Pending | None) -> Outcome:
        if not self.async_op:
            return result, None
        if pending is None:
            future: Future[Any] = Future()
            future.set_result(result)
            pending = Pending(self._context, future, "", "", lambda: None, list)
        handle = ReplicaHandle(pending)
        return PendingArray(handle), handle


class OwnHandle(Handle):
    """A handle that only its own replica waits for."""

    def filling(self, fill: Callable[[Any], None]) -> Handle:
        """A handle that writes the result somewhere when this replica waits for it."""
        return _FillingHandle(self, fill)


class ReplicaHandle(OwnHandle):
    """The handle of an operation between replicas that run eagerly: waiting lets the others run."""

    def __init__(self, pending: Pending, source: Callable[[], int] | None = None) -> None:
        super().__init__(pending.future, pending.site, None, source)
        self._pending = pending

    def result(self, timeout: float | None = None) -> Any:
        """See `Handle.result`; the other replicas go on until it is there, or all of them wait."""
        del timeout
        return self._pending.wait()

    def is_completed(self) -> bool:
        """See `Handle.is_completed`."""
        return self._pending.done()


class _FillingHandle(Handle):
    """The handle of an operation that writes into a buffer, which only its own replica may do."""

    def __init__(self, handle: Handle, fill: Callable[[Any], None]) -> None:
        super().__init__(Future(), handle._site, None, handle._source)
        self._handle, self._fill = handle, fill

    def result(self, timeout: float | None = None) -> Any:
        """See `Handle.result`."""
        if not self._future.done():
            try:
                result = self._handle.result(timeout)
                if result is not None:
                    self._fill(result)
            except Exception as error:  # noqa: BLE001 - the future has it
                self._future.set_exception(error)
            else:
                self._future.set_result(None)
        return self._future.result()

    def is_completed(self) -> bool:
        """See `Handle.is_completed`; writes what is there."""
        if not self._future.done() and self._handle.is_completed():
            self.wait()
        return self._future.done()


# -- exchanges ---------------------------------------------------------------------------------


class Exchange:
    """Arrays that go to members of a group. Backward, gradients go back to where they came from.

    Args:
        context: the replica.
        group: whose exchange it is.
        same: what must be the same for all members.
        to: for each array the places that get it.
        labels: for each array a number that the receiver shall know.
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

    def launch(self, xs: Sequence[Any], finish: Callable[[list[Any]], Any]) -> Pending:
        """Begin; the result is what `finish` makes of the arrays that come, by member."""
        me, device = self._me, self.context.device
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

        return office_of(self.context).meet(self.context, self._group, self._same, value, take)

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

    def launch(self, xs: Sequence[Any], finish: Callable[[list[Any]], Any]) -> Pending:
        """Begin; the result is what `finish` makes of the reductions."""
        rank, device = rank_of(self.context), self.context.device

        def take(meeting: Meeting) -> Any:
            rows = [meeting.brought[r].value for r in self._group.ranks]
            traced = any(compat.is_tracer(x) for row in rows for x in row)
            if traced or not all(is_here(self.context, r) for r in self._group.ranks):
                columns = [[_delivered(x, device) for x in c] for c in zip(*rows, strict=True)]
                return finish([_combined(self._op, c, c[0]) for c in columns])
            sums = meeting.shared("sums", lambda: self._sums(rows))
            return finish([s[self._group.ranks.index(rank)] for s in sums])

        return office_of(self.context).meet(self.context, self._group, self._same, list(xs), take)

    def _sums(self, rows: list[list[Any]]) -> list[list[jax.Array]]:
        """For each array its sum on the device of each member: one program on their devices."""
        extended = self.context.strategy.extended
        here = extended._devices  # type: ignore[attr-defined]
        mine = tuple(here[r - extended._first_replica] for r in self._group.ranks)
        op = reduction.ReduceOp.SUM if self._op is ReduceOp.SUM else reduction.ReduceOp.MEAN
        columns = [list(column) for column in zip(*rows, strict=True)]
        return [list(m.values) for m in programs.all_reduce(op, columns, mine, Packing())]

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
