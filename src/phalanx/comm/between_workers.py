"""Collectives between the workers of a job: what is compared, and what is moved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.comm import groups
from phalanx.comm import ragged as rg
from phalanx.comm.calls import Call, Movement, Outcome, begin, kind
from phalanx.comm.reductions import Reduction, name_of


class Workers:
    """The workers of a group, from the view of one of them; `place`s are ranks in the group.

    Args:
        name: the operation.
        group: the group, its name, or None.
        async_op: whether the caller goes on at once.
        out: where the result may be put.
    """

    def __init__(self, name: str, group: Any, async_op: bool, out: Any = None) -> None:
        self._name, self._group, self._async, self._out = name, group, async_op, out

    def all_reduce(self, x: Any, op: Reduction) -> Outcome:
        """The reduction of all arrays."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, out = self._own(x), self._out
        return call.perform(
            f"{name_of(op)}, {kind(x)}", lambda movement: movement.reduce(mine, op, None, out)
        )

    def all_reduce_coalesced(self, xs: list[Any], op: Reduction) -> Outcome:
        """The reductions of several arrays, those of one dtype at once."""
        call = self._begin(xs)
        if call is None:
            return None, None
        mine = [self._own(x) for x in xs]

        def work(movement: Movement) -> list[Any]:
            results: list[Any] = [None] * len(mine)
            for dtype in dict.fromkeys(str(x.dtype) for x in mine):
                chosen = [i for i, x in enumerate(mine) if str(x.dtype) == dtype]
                flat = rg.concatenated([mine[i] for i in chosen])
                parts = rg.cut(movement.reduce(flat, op), [mine[i].shape for i in chosen])
                for i, part in zip(chosen, parts, strict=True):
                    results[i] = np.array(part) if isinstance(mine[i], np.ndarray) else part
            if not mine:
                movement.agree()
            return results

        return call.perform(f"{name_of(op)}, {', '.join(kind(x) for x in xs)}", work)

    def reduce(self, x: Any, place: int, op: Reduction) -> Outcome:
        """The reduction at one place, and the own array elsewhere."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, out = self._own(x), self._out
        return call.perform(
            f"to {call.group.ranks[place]}, {name_of(op)}, {kind(x)}",
            lambda movement: movement.reduce(mine, op, place, out),
        )

    def broadcast(self, x: Any, place: int) -> Outcome:
        """The array of one place."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, out = self._own(x), self._out
        return call.perform(
            f"from {call.group.ranks[place]}, {kind(x)}",
            lambda movement: movement.from_one(mine, place, out),
        )

    def all_gather(self, x: Any, place: int | None = None) -> Outcome:
        """The arrays of all, of any shapes, as a list; everywhere, or at one place."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, outs = self._own(x), self._out
        where = "" if place is None else f"to {call.group.ranks[place]}, "
        return call.perform(
            f"{where}{jnp.dtype(x.dtype).name}",
            lambda movement: movement.gather(mine, place, outs),
            list(x.shape),
        )

    def all_gather_into_tensor(self, x: Any) -> Outcome:
        """The arrays of all, joined."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, out = self._own(x), self._out
        return call.perform(kind(x), lambda movement: movement.gather_rows(mine, None, out))

    def gather_into_tensor(self, x: Any, place: int) -> Outcome:
        """The arrays of all joined at one place, and zeros elsewhere."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine = self._own(x)

        def work(movement: Movement) -> Any:
            rows = movement.gather_rows(mine, place)
            return _zeros(x, call) if rows is None else rows

        return call.perform(f"to {call.group.ranks[place]}, {kind(x)}", work)

    def scatter(self, xs: list[Any] | None, place: int) -> Outcome:
        """This member's array of the list of one place."""
        call = self._begin(xs or ())
        if call is None:
            return None, None
        mine, out = None if xs is None else [self._own(x) for x in xs], self._out
        value = None if xs is None else [jnp.dtype(xs[0].dtype).name, [list(x.shape) for x in xs]]
        return call.perform(
            f"from {call.group.ranks[place]}",
            lambda movement: movement.scatter(mine, place, out),
            value,
        )

    def scatter_tensor(self, x: Any, place: int) -> Outcome:
        """This member's part of the array of one place."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, out = self._own(x), self._out
        return call.perform(
            f"from {call.group.ranks[place]}, {kind(x)}",
            lambda movement: movement.scatter_rows(mine, place, out),
        )

    def reduce_scatter(self, xs: list[Any], op: Reduction) -> Outcome:
        """This member's place of the reductions of all lists."""
        call = self._begin(xs)
        if call is None:
            return None, None
        mine, out = [self._own(x) for x in xs], self._out
        return call.perform(
            f"{name_of(op)}, {', '.join(kind(x) for x in xs)}",
            lambda movement: movement.reduce_scatter(mine, op, out),
        )

    def reduce_scatter_tensor(self, x: Any, op: Reduction) -> Outcome:
        """This member's part of the reduction of all arrays."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, out = self._own(x), self._out
        return call.perform(
            f"{name_of(op)}, {kind(x)}",
            lambda movement: movement.reduce_scatter(mine, op, out),
        )

    def all_to_all(self, xs: list[Any]) -> Outcome:
        """Array i to place i; those that came."""
        call = self._begin(xs)
        if call is None:
            return None, None
        mine, outs = [self._own(x) for x in xs], self._out
        return call.perform(
            jnp.dtype(xs[0].dtype).name,
            lambda movement: movement.exchange(mine, outs),
            [list(x.shape) for x in xs],
        )

    def all_to_all_single(self, x: Any, outputs: list[int] | None, inputs: list[int]) -> Outcome:
        """Parts of one array to all places; those that came, joined."""
        call = self._begin([x])
        if call is None:
            return None, None
        mine, out = self._own(x), self._out

        def check(values: Sequence[Any]) -> None:
            _check_splits(call, values)

        return call.perform(
            f"{jnp.dtype(x.dtype).name} with the trailing shape {json.dumps(x.shape[1:])}",
            lambda movement: movement.exchange_rows(mine, inputs, check, out),
            [inputs, outputs],
        )

    def barrier(self, timeout: float | None) -> Outcome:
        """Nothing, when all are here."""
        call = self._begin(())
        if call is None:
            return None, None

        def work(movement: Movement) -> None:
            movement.agree()

        return call.perform("", work, timeout=timeout)

    def _begin(self, arrays: Sequence[Any]) -> Call | None:
        return begin(self._name, self._group, self._async, arrays)

    def _own(self, x: Any) -> Any:
        """What `x` is now, whatever becomes of its memory while the operation is under way.

        A buffer that the result is put into belongs to the operation until it is done.
        """
        is_free = self._async and isinstance(x, np.ndarray)
        return x.copy() if is_free and x is not self._out else x


def _zeros(x: Any, call: Call) -> Any:
    shape = (len(call.group) * x.shape[0], *x.shape[1:])
    with jax.enable_x64(True):
        return (np if isinstance(x, np.ndarray) else jnp).zeros(shape, x.dtype)


def _check_splits(call: Call, values: Sequence[Any]) -> None:
    """Require that every member expects what the others send to it; all members find the same."""
    for place, (_, expected) in enumerate(values):
        comes = [sent[place] for sent, _ in values]
        if expected is not None and expected != comes:
            ranks = call.group.ranks
            text = (
                f"all_to_all_single at {call.site}: rank {ranks[place]} expects parts of the sizes "
                f"{expected} from the ranks {list(ranks)}, but they send {comes}."
            )
            raise groups.world().fail("mismatch", text)
