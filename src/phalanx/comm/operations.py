"""What each operation checks, and who does it: replicas inside of `Strategy.run`, else workers.

`out` is where workers may put the result, if it fits: a NumPy array in one piece, or a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.comm import groups
from phalanx.comm.between_replicas import parts_of, replicas_of
from phalanx.comm.between_workers import Workers
from phalanx.comm.calls import Outcome, as_array, as_arrays, kind
from phalanx.comm.groups import Group
from phalanx.comm.reductions import as_reduction, check_dtype
from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.core.showing import shown

GroupLike = Group | str | None
Op = Any


def all_reduce(tensor: Any, op: Op, group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.all_reduce`."""
    x, reduction = as_array(tensor), as_reduction(op)
    check_dtype(reduction, x.dtype)
    replicas = replicas_of("all_reduce", group, async_op)
    if replicas is not None:
        return replicas.all_reduce([x], reduction, many=False)
    return Workers("all_reduce", group, async_op, out).all_reduce(x, reduction)


def all_reduce_coalesced(tensors: Sequence[Any], op: Op, group: GroupLike, async_op: bool) -> Outcome:
    """See `functional.all_reduce_coalesced`."""
    xs, reduction = [as_array(t) for t in tensors], as_reduction(op)
    for x in xs:
        check_dtype(reduction, x.dtype)
    replicas = replicas_of("all_reduce_coalesced", group, async_op)
    if replicas is not None:
        return replicas.all_reduce(xs, reduction, many=True)
    return Workers("all_reduce_coalesced", group, async_op).all_reduce_coalesced(xs, reduction)


def reduce(tensor: Any, dst: int, op: Op, group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.reduce`."""
    x, reduction = as_array(tensor), as_reduction(op)
    check_dtype(reduction, x.dtype)
    place = groups.check_rank(dst, "dst", groups.find(group))
    replicas = replicas_of("reduce", group, async_op)
    if replicas is not None:
        return replicas.reduce(x, place, reduction)
    return Workers("reduce", group, async_op, out).reduce(x, place, reduction)


def broadcast(tensor: Any, src: int, group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.broadcast`."""
    x = as_array(tensor)
    place = groups.check_rank(src, "src", groups.find(group))
    replicas = replicas_of("broadcast", group, async_op)
    if replicas is not None:
        return replicas.broadcast(x, place)
    return Workers("broadcast", group, async_op, out).broadcast(x, place)


def all_gather(tensor: Any, group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.all_gather`."""
    x = as_array(tensor)
    replicas = replicas_of("all_gather", group, async_op)
    if replicas is not None:
        return replicas.all_gather(x, whole=False)
    return Workers("all_gather", group, async_op, out).all_gather(x)


def all_gather_into_tensor(tensor: Any, group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.all_gather_into_tensor`."""
    x = as_array(tensor)
    _check_rank_one(x)
    replicas = replicas_of("all_gather_into_tensor", group, async_op)
    if replicas is not None:
        return replicas.all_gather(x, whole=True)
    return Workers("all_gather_into_tensor", group, async_op, out).all_gather_into_tensor(x)


def gather(tensor: Any, dst: int, group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.gather`."""
    x = as_array(tensor)
    place = groups.check_rank(dst, "dst", groups.find(group))
    replicas = replicas_of("gather", group, async_op)
    if replicas is not None:
        return replicas.gather(x, place, whole=False)
    return Workers("gather", group, async_op, out).all_gather(x, place)


def gather_into_tensor(tensor: Any, dst: int, group: GroupLike, async_op: bool) -> Outcome:
    """See `functional.gather_into_tensor`."""
    x = as_array(tensor)
    _check_rank_one(x)
    place = groups.check_rank(dst, "dst", groups.find(group))
    replicas = replicas_of("gather_into_tensor", group, async_op)
    if replicas is not None:
        return replicas.gather(x, place, whole=True)
    return Workers("gather_into_tensor", group, async_op).gather_into_tensor(x, place)


def scatter(
    tensors: Sequence[Any] | None, src: int, group: GroupLike, async_op: bool, out: Any = None
) -> Outcome:
    """See `functional.scatter`."""
    found = groups.find(group)
    place = groups.check_rank(src, "src", found)
    replicas = replicas_of("scatter", group, async_op)
    if replicas is not None:
        what = "The list of scatter"
        xs = None if tensors is None else as_arrays(tensors, len(found), what)
        return replicas.scatter(xs, place)
    if groups.world().rank == src:
        arrays = as_arrays(tensors, len(found), "The list of scatter on rank src")
        return Workers("scatter", group, async_op, out).scatter(arrays, place)
    if tensors is not None and groups.world().rank in found.ranks:
        raise InvalidValueError(
            f"Only rank {src}, the source, gives a list to scatter. Received: a list on another rank"
        )
    return Workers("scatter", group, async_op, out).scatter(None, place)


def scatter_tensor(tensor: Any, src: int, group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.scatter_tensor`."""
    x, count = as_array(tensor), len(groups.find(group))
    place = groups.check_rank(src, "src", groups.find(group))
    _check_divisible(x, count)
    replicas = replicas_of("scatter_tensor", group, async_op)
    if replicas is not None:
        return replicas.scatter(parts_of(x, [x.shape[0] // count] * count), place)
    return Workers("scatter_tensor", group, async_op, out).scatter_tensor(x, place)


def reduce_scatter(
    tensors: Sequence[Any], op: Op, group: GroupLike, async_op: bool, out: Any = None
) -> Outcome:
    """See `functional.reduce_scatter`."""
    found, reduction = groups.find(group), as_reduction(op)
    xs = as_arrays(tensors, len(found), "The list of reduce_scatter")
    check_dtype(reduction, xs[0].dtype)
    replicas = replicas_of("reduce_scatter", group, async_op)
    if replicas is not None:
        return replicas.reduce_scatter(xs, reduction)
    return Workers("reduce_scatter", group, async_op, out).reduce_scatter(xs, reduction)


def reduce_scatter_tensor(
    tensor: Any, op: Op, group: GroupLike, async_op: bool, out: Any = None
) -> Outcome:
    """See `functional.reduce_scatter_tensor`."""
    x, reduction, count = as_array(tensor), as_reduction(op), len(groups.find(group))
    check_dtype(reduction, x.dtype)
    _check_divisible(x, count)
    replicas = replicas_of("reduce_scatter_tensor", group, async_op)
    if replicas is not None:
        return replicas.reduce_scatter(parts_of(x, [x.shape[0] // count] * count), reduction)
    return Workers("reduce_scatter_tensor", group, async_op, out).reduce_scatter_tensor(x, reduction)


def all_to_all(tensors: Sequence[Any], group: GroupLike, async_op: bool, out: Any = None) -> Outcome:
    """See `functional.all_to_all`."""
    found = groups.find(group)
    xs = as_arrays(tensors, len(found), "The list of all_to_all")
    replicas = replicas_of("all_to_all", group, async_op)
    if replicas is not None:
        return replicas.all_to_all(xs)
    return Workers("all_to_all", group, async_op, out).all_to_all(xs)


def all_to_all_single(
    tensor: Any,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: GroupLike,
    async_op: bool,
    out: Any = None,
) -> Outcome:
    """See `functional.all_to_all_single`."""
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
    return Workers("all_to_all_single", group, async_op, out).all_to_all_single(x, outputs, inputs)


def barrier(group: GroupLike, async_op: bool, timeout: float | None) -> Any:
    """See `functional.barrier`."""
    if timeout is not None and not timeout > 0:
        raise InvalidValueError(
            f"timeout must be a positive number of seconds. Received: {shown(timeout)}"
        )
    replicas = replicas_of("barrier", group, async_op)
    if replicas is not None:
        return replicas.barrier()[1]
    return Workers("barrier", group, async_op).barrier(timeout)[1]


# -- checks ----------------------------------------------------------------------------------------


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
        raise InvalidTypeError(f"Split sizes must be a list of whole numbers. Received: {shown(sizes)}")
    found = [int(n) for n in sizes]
    if len(found) != count or min(found) < 0 or (total is not None and sum(found) != total):
        whole = "" if total is None else f" that add up to {total}"
        raise InvalidValueError(
            f"There must be {count} split sizes from 0, one for each rank of the group{whole}. "
            f"Received: {found}"
        )
    return found
