"""Collectives that leave their input alone: ``out, handle = all_reduce(x)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.comm import groups
from phalanx.comm import ragged as rg
from phalanx.comm.between_replicas import joined, parts_of, replicas_of
from phalanx.comm.calls import (
    Call,
    Outcome,
    as_array,
    as_arrays,
    begin,
    kind,
    like,
    snapshot,
)
from phalanx.comm.groups import Group
from phalanx.comm.reductions import ReduceOp, as_reduction, check_dtype, name_of
from phalanx.core.errors import InvalidTypeError, InvalidValueError

GroupLike = Group | str | None
Op = Any


def all_reduce(
    tensor: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Combine the arrays of all ranks; every rank gets the result.

    Args:
        tensor: an array, of the same shape and dtype on all ranks.
        op: a `ReduceOp`, its name, a `px.ReduceOp`, or `premul_sum(factor)`.
        group: the ranks that take part; by default all.
        async_op: whether to return at once, with a handle to wait for.

    Returns:
        The result and None; with `async_op` an array that waits when it is used, and its `Handle`. A
        NumPy array gives a NumPy array. A rank outside of the group gets ``(None, None)``.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> out, handle = px.comm.all_reduce(np.float32([1, 2]), "sum")
        >>> out.tolist(), handle
        ([1.0, 2.0], None)
    """
    x, reduction = as_array(tensor), as_reduction(op)
    check_dtype(reduction, x.dtype)
    replicas = replicas_of("all_reduce", group, async_op)
    if replicas is not None:
        return replicas.all_reduce([x], reduction, many=False)
    call = begin("all_reduce", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)
    work = lambda _: like(x, call.run("reduce", mine, reduction))  # noqa: E731
    return call.outcome(call.launch(f"{name_of(reduction)}, {kind(x)}", work))


def all_reduce_coalesced(
    tensors: Sequence[Any], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Like `all_reduce`, of several arrays at once: those of one dtype travel in one message."""
    xs, reduction = [as_array(t) for t in tensors], as_reduction(op)
    for x in xs:
        check_dtype(reduction, x.dtype)
    replicas = replicas_of("all_reduce_coalesced", group, async_op)
    if replicas is not None:
        return replicas.all_reduce(xs, reduction, many=True)
    call = begin("all_reduce_coalesced", group, async_op, xs)
    if call is None:
        return None, None
    mine = [snapshot(x, async_op) for x in xs]

    def work(_: list[Any]) -> list[Any]:
        results: list[Any] = [None] * len(mine)
        for dtype in dict.fromkeys(str(x.dtype) for x in mine):
            chosen = [i for i, x in enumerate(mine) if str(x.dtype) == dtype]
            flat = rg.concatenated([mine[i] for i in chosen])
            parts = rg.cut(call.run("reduce", flat, reduction), [mine[i].shape for i in chosen])
            for i, part in zip(chosen, parts, strict=True):
                results[i] = like(mine[i], part)
        return results

    same = f"{name_of(reduction)}, {', '.join(kind(x) for x in xs)}"
    return call.outcome(call.launch(same, work))


def reduce(
    tensor: Any,
    dst: int = 0,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Outcome:
    """Combine the arrays of all ranks on rank `dst`; the others get their own array back."""
    x, reduction = as_array(tensor), as_reduction(op)
    check_dtype(reduction, x.dtype)
    place = groups.check_rank(dst, "dst", groups.find(group))
    replicas = replicas_of("reduce", group, async_op)
    if replicas is not None:
        return replicas.reduce(x, place, reduction)
    call = begin("reduce", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)

    def work(_: list[Any]) -> Any:
        result = call.run("reduce", mine, reduction)
        return like(x, result if call.me == place else mine)

    return call.outcome(call.launch(f"to {dst}, {name_of(reduction)}, {kind(x)}", work))


def broadcast(tensor: Any, src: int = 0, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """Give every rank the array of rank `src`; all have one of the same shape and dtype."""
    x = as_array(tensor)
    place = groups.check_rank(src, "src", groups.find(group))
    replicas = replicas_of("broadcast", group, async_op)
    if replicas is not None:
        return replicas.broadcast(x, place)
    call = begin("broadcast", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)
    work = lambda _: like(x, call.run("from_one", mine, place))  # noqa: E731
    return call.outcome(call.launch(f"from {src}, {kind(x)}", work))


def all_gather(tensor: Any, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """A list of the arrays of all ranks, whose shapes may differ, except where code is compiled."""
    x = as_array(tensor)
    replicas = replicas_of("all_gather", group, async_op)
    if replicas is not None:
        return replicas.all_gather(x, whole=False)
    call = begin("all_gather", group, async_op, [x])
    if call is None:
        return None, None
    return call.outcome(_gathered(call, x, snapshot(x, async_op)))


def _gathered(call: Call, x: Any, mine: Any, place: int | None = None) -> Any:
    """Launch a gather; everywhere, or at one place only."""

    def work(shapes: list[Any]) -> Any:
        parts = rg.gather(call, mine, [tuple(s) for s in shapes])
        return [like(x, p) for p in parts] if place in (None, call.me) else None

    where = "" if place is None else f"to {call.group.ranks[place]}, "
    return call.launch(f"{where}{jnp.dtype(x.dtype).name}", work, list(x.shape))


def all_gather_into_tensor(tensor: Any, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """The arrays of all ranks, of one shape, joined along the first dimension."""
    x = as_array(tensor)
    _check_rank_one(x)
    replicas = replicas_of("all_gather_into_tensor", group, async_op)
    if replicas is not None:
        return replicas.all_gather(x, whole=True)
    call = begin("all_gather_into_tensor", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)
    work = lambda _: like(x, joined(call.run("gather", mine)))  # noqa: E731
    return call.outcome(call.launch(kind(x), work))


all_gather_single = all_gather_into_tensor


def gather(tensor: Any, dst: int = 0, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """A list of the arrays of all ranks on rank `dst`, None on the others.

    Where replicas are compiled, one program stands for all of them, so all get the list.
    """
    x = as_array(tensor)
    place = groups.check_rank(dst, "dst", groups.find(group))
    replicas = replicas_of("gather", group, async_op)
    if replicas is not None:
        return replicas.gather(x, place, whole=False)
    call = begin("gather", group, async_op, [x])
    if call is None:
        return None, None
    return call.outcome(_gathered(call, x, snapshot(x, async_op), place))


def gather_into_tensor(
    tensor: Any, dst: int = 0, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """The arrays of all ranks joined along the first dimension on rank `dst`; zeros on the others."""
    x = as_array(tensor)
    _check_rank_one(x)
    place = groups.check_rank(dst, "dst", groups.find(group))
    replicas = replicas_of("gather_into_tensor", group, async_op)
    if replicas is not None:
        return replicas.gather(x, place, whole=True)
    call = begin("gather_into_tensor", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)

    def work(_: list[Any]) -> Any:
        rows = joined(call.run("gather", mine))
        return like(x, rows if call.me == place else _zeros(rows))

    return call.outcome(call.launch(f"to {dst}, {kind(x)}", work))


def scatter(
    tensors: Sequence[Any] | None,
    src: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> Outcome:
    """Give each rank its array of the list that rank `src` has; the others give None.

    Where replicas are compiled, all give a list, of arrays of one shape.
    """
    found = groups.find(group)
    place = groups.check_rank(src, "src", found)
    replicas = replicas_of("scatter", group, async_op)
    if replicas is not None:
        what = "The list of scatter"
        xs = None if tensors is None else as_arrays(tensors, len(found), what)
        return replicas.scatter(xs, place)
    call = begin("scatter", group, async_op, tensors or ())
    if call is None:
        return None, None
    arrays: list[Any] | None = None
    if call.me == place:
        arrays = as_arrays(tensors, len(found), "The list of scatter on rank src")
    elif tensors is not None:
        raise InvalidValueError(
            f"Only rank {src}, the source, gives a list to scatter. Received: a list on another rank"
        )
    mine = None if arrays is None else [snapshot(x, async_op) for x in arrays]
    value = None if mine is None else [jnp.dtype(mine[0].dtype).name, [list(x.shape) for x in mine]]

    def work(values: list[Any]) -> Any:
        dtype, shapes = values[place]
        part = rg.scatter(call, mine, dtype, [tuple(s) for s in shapes], place)
        return part if mine is None else like(mine[0], part)

    return call.outcome(call.launch(f"from {src}", work, value))


def scatter_tensor(
    tensor: Any, src: int = 0, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Give each rank its part of the array of rank `src`, cut along the first dimension.

    All ranks give an array of the same shape and dtype; only that of `src` matters.
    """
    x, count = as_array(tensor), len(groups.find(group))
    place = groups.check_rank(src, "src", groups.find(group))
    _check_divisible(x, count)
    replicas = replicas_of("scatter_tensor", group, async_op)
    if replicas is not None:
        return replicas.scatter(parts_of(x, [x.shape[0] // count] * count), place)
    call = begin("scatter_tensor", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)

    def work(_: list[Any]) -> Any:
        rows = mine.reshape((count, x.shape[0] // count, *x.shape[1:]))
        return like(x, call.run("exchange", rows)[place])

    return call.outcome(call.launch(f"from {src}, {kind(x)}", work))


def reduce_scatter(
    tensors: Sequence[Any], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Combine lists of one array per rank; each rank gets its place of the result.

    The arrays of one list may differ in shape, except where replicas are compiled; the lists of all
    ranks have the same shapes.
    """
    found, reduction = groups.find(group), as_reduction(op)
    xs = as_arrays(tensors, len(found), "The list of reduce_scatter")
    check_dtype(reduction, xs[0].dtype)
    replicas = replicas_of("reduce_scatter", group, async_op)
    if replicas is not None:
        return replicas.reduce_scatter(xs, reduction)
    call = begin("reduce_scatter", group, async_op, xs)
    if call is None:
        return None, None
    mine = [snapshot(x, async_op) for x in xs]

    def work(_: list[Any]) -> Any:
        part = call.run("reduce_scatter", rg.padded_rows(mine), reduction)
        return like(xs[0], rg.cut(part, [mine[call.me].shape])[0])

    same = f"{name_of(reduction)}, {', '.join(kind(x) for x in xs)}"
    return call.outcome(call.launch(same, work))


def reduce_scatter_tensor(
    tensor: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Combine the arrays of all ranks; each gets its part of the result along the first dimension."""
    x, reduction, count = as_array(tensor), as_reduction(op), len(groups.find(group))
    check_dtype(reduction, x.dtype)
    _check_divisible(x, count)
    replicas = replicas_of("reduce_scatter_tensor", group, async_op)
    if replicas is not None:
        return replicas.reduce_scatter(parts_of(x, [x.shape[0] // count] * count), reduction)
    call = begin("reduce_scatter_tensor", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)

    def work(_: list[Any]) -> Any:
        rows = mine.reshape((count, x.shape[0] // count, *x.shape[1:]))
        return like(x, call.run("reduce_scatter", rows, reduction))

    return call.outcome(call.launch(f"{name_of(reduction)}, {kind(x)}", work))


reduce_scatter_single = reduce_scatter_tensor


def all_to_all(tensors: Sequence[Any], group: GroupLike = None, async_op: bool = False) -> Outcome:
    """Send array i of the list to rank i; returns the list of those that came, by rank.

    The shapes may differ, except where replicas are compiled; all arrays have one dtype.
    """
    found = groups.find(group)
    xs = as_arrays(tensors, len(found), "The list of all_to_all")
    replicas = replicas_of("all_to_all", group, async_op)
    if replicas is not None:
        return replicas.all_to_all(xs)
    call = begin("all_to_all", group, async_op, xs)
    if call is None:
        return None, None
    mine = [snapshot(x, async_op) for x in xs]

    def work(values: list[Any]) -> list[Any]:
        parts = rg.exchange(call, mine, values)
        return [like(xs[0], p) for p in parts]

    shapes = [list(x.shape) for x in xs]
    return call.outcome(call.launch(jnp.dtype(xs[0].dtype).name, work, shapes))


def all_to_all_single(
    tensor: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Outcome:
    """Send parts of an array, cut along the first dimension, to all ranks; join those that came.

    Args:
        tensor: the array; the sizes after the first dimension are the same on all ranks.
        output_split_sizes: how much comes from each rank, which is checked; None trusts the senders.
        input_split_sizes: how much goes to each rank, by default equal parts; may be 0.
        group: the ranks that take part; by default all.
        async_op: whether to return at once, with a handle to wait for.
    """
    x, count = as_array(tensor), len(groups.find(group))
    _check_rank_one(x)
    outputs = None if output_split_sizes is None else _splits(output_split_sizes, count, None)
    if input_split_sizes is None:
        _check_divisible(x, count)
    inputs = [x.shape[0] // count] * count
    if input_split_sizes is not None:
        inputs = _splits(input_split_sizes, count, x.shape[0])
    replicas = replicas_of("all_to_all_single", group, async_op)
    if replicas is not None:
        return replicas.all_to_all_single(x, outputs, inputs)
    call = begin("all_to_all_single", group, async_op, [x])
    if call is None:
        return None, None
    mine = snapshot(x, async_op)
    rest = list(x.shape[1:])

    def work(values: list[Any]) -> Any:
        rg.check_splits(call, values)
        ends = np.cumsum(inputs)
        blocks = [mine[e - n : e] for e, n in zip(ends, inputs, strict=True)]
        shapes = [[[n, *rest] for n in sent] for sent, _ in values]
        return like(x, rg.rejoined(rg.exchange(call, blocks, shapes), rest))

    same = f"{jnp.dtype(x.dtype).name} with the trailing shape {rest}"
    return call.outcome(call.launch(same, work, [inputs, outputs]))


def barrier(group: GroupLike = None, async_op: bool = False, timeout: float | None = None) -> Any:
    """Wait until all ranks are here.

    Args:
        group: the ranks that take part; by default all.
        async_op: whether to return at once, with a handle to wait for.
        timeout: seconds after which the job fails, and the error on all ranks names those that have not
            come. By default the job's deadline (PHALANX_DEADLINE).

    Returns:
        None, or the handle.
    """
    if timeout is not None and not timeout > 0:
        raise InvalidValueError(f"timeout must be a positive number of seconds. Received: {timeout!r}")
    replicas = replicas_of("barrier", group, async_op)
    if replicas is not None:
        return replicas.barrier()[1]
    call = begin("barrier", group, async_op)
    if call is None:
        return None
    handle = call.launch("", lambda _: None, timeout=timeout)
    if async_op:
        return handle
    handle.result()
    return None


# -- checks ----------------------------------------------------------------------------------------


def _zeros(x: Any) -> Any:
    with jax.enable_x64(True):
        return np.zeros_like(x) if isinstance(x, np.ndarray) else jnp.zeros_like(x)


def _check_rank_one(x: Any) -> None:
    if x.ndim == 0:
        raise InvalidValueError(f"The tensor needs a first dimension. Received: {kind(x)}")


def _check_divisible(x: Any, count: int) -> None:
    _check_rank_one(x)
    if x.shape[0] % count:
        raise InvalidValueError(
            f"The first dimension must be divisible by the {count} ranks of the group. "
            f"Received: {kind(x)}"
        )


def _splits(sizes: Any, count: int, total: int | None) -> list[int]:
    if not isinstance(sizes, Sequence | np.ndarray) or isinstance(sizes, str):
        raise InvalidTypeError(f"Split sizes must be a list of whole numbers. Received: {sizes!r}")
    found = [int(n) for n in sizes]
    if len(found) != count or min(found) < 0 or (total is not None and sum(found) != total):
        whole = "" if total is None else f" that add up to {total}"
        raise InvalidValueError(
            f"There must be {count} split sizes from 0, one for each rank of the group{whole}. "
            f"Received: {found}"
        )
    return found
