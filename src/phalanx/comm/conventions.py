"""Names by which programs of torch.distributed and MindSpore know operations that have another here.

Each says in one line what it is here; nothing in them is new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.collectives import groups
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Handle, LazyHandle, Outcome, PendingArray
from phalanx.collectives.table import as_array
from phalanx.comm import functional, in_place, objects
from phalanx.comm.in_place import check_buffer, filled, write
from phalanx.comm.messages import recv, recv_, send
from phalanx.core.reduction import ReduceOp
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

GroupLike = Group | str | None


# -- MindSpore -------------------------------------------------------------------------------------


def all_to_all_with_output_shape(
    output_shape_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: GroupLike = None,
    async_op: bool = False,
) -> Outcome:
    """MindSpore's `all_to_all`, which is told the shapes, or arrays of them, of what will come.

    Args:
        output_shape_list: one shape, or array, for each rank; what comes is checked.
        input_tensor_list: array i goes to rank i.
        group: the ranks that take part; by default all.
        async_op: whether to return at once, with a handle to wait for.
    """
    shapes = [_shape(s) for s in output_shape_list]
    outcome = functional.all_to_all(input_tensor_list, group, async_op)
    return _checked(outcome, lambda out: [tuple(x.shape) for x in out], shapes)


def all_to_all_single_with_output_shape(
    output_shape: Any,
    tensor: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Outcome:
    """MindSpore's `all_to_all_single`, which is told the shape, or an array of it, of what will come.

    Without `input_split_sizes` the input is cut into equal parts, whatever the output is.
    """
    shape = _shape(output_shape)
    outcome = functional.all_to_all_single(
        tensor, output_split_sizes or None, input_split_sizes or None, group, async_op
    )
    return _checked(outcome, lambda out: tuple(out.shape), shape)


def all_to_all_v_c(
    output: Any,
    tensor: Any,
    send_count_matrix: Sequence[int],
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """MindSpore's exchange into a buffer by a matrix of counts, the same on all ranks.

    Args:
        output: the buffer, flat.
        tensor: what to send, flat.
        send_count_matrix: for n ranks n*n numbers; number i*n+j is how much goes from rank i to rank j.
        group: the ranks that take part; by default all.
        async_op: whether to return at once, with a handle to wait for.
    """
    count = groups.get_group_size(group)
    numbers = [int(n) for n in send_count_matrix]
    if len(numbers) != count * count:
        raise InvalidValueError(
            f"send_count_matrix must have {count * count} numbers, {count} for each of the {count} "
            f"ranks. Received: {len(numbers)} numbers"
        )
    me = _known_rank(group, "all_to_all_v_c")
    if me < 0:
        return None
    sent = numbers[me * count : (me + 1) * count]
    return in_place.all_to_all_single_(output, tensor, numbers[me::count], sent, group, async_op)


def all_gather_into_tensor_uneven(
    output: Any,
    tensor: Any,
    output_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """MindSpore's `all_gather_into_tensor_` of parts of different sizes along the first dimension.

    Args:
        output: the buffer for all parts, one after another.
        tensor: this rank's part.
        output_split_sizes: the size of each part, which is checked; None trusts the ranks.
        group: the ranks that take part; by default all.
        async_op: whether to return at once, with a handle to wait for.
    """
    check_buffer(output, None, tensor.dtype)
    outcome = functional.all_gather(tensor, group, async_op)

    def fill(parts: Sequence[Any]) -> None:
        _check(output_split_sizes, [p.shape[0] for p in parts], "output_split_sizes")
        library: Any = np if all(isinstance(p, np.ndarray) for p in parts) else jnp
        write(output, library.concatenate(parts))

    return filled(outcome, fill, async_op)


def reduce_scatter_tensor_uneven(
    output: Any,
    tensor: Any,
    input_split_sizes: Sequence[int] | None = None,
    op: Any = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """MindSpore's `reduce_scatter_tensor_` in parts of different sizes along the first dimension.

    Args:
        output: the buffer for this rank's part.
        tensor: all parts, one after another.
        input_split_sizes: the size of each part, by default equal ones.
        op: the reduction.
        group: the ranks that take part; by default all.
        async_op: whether to return at once, with a handle to wait for.
    """
    x, count = as_array(tensor), groups.get_group_size(group)
    if input_split_sizes is None:
        return in_place.reduce_scatter_tensor_(output, tensor, op, group, async_op)
    sizes = [int(n) for n in input_split_sizes]
    if len(sizes) != count or min(sizes) < 0 or not x.ndim or sum(sizes) != x.shape[0]:
        raise InvalidValueError(
            f"input_split_sizes must be {count} numbers from 0 that add up to the first dimension of "
            f"the input. Received: {sizes} for the shape {tuple(x.shape)}"
        )
    starts = [sum(sizes[:i]) for i in range(count)]
    parts = [x[s : s + n] for s, n in zip(starts, sizes, strict=True)]
    return in_place.reduce_scatter_(output, parts, op, group, async_op)


# -- torch -----------------------------------------------------------------------------------------


def get_global_rank(group: GroupLike, group_rank: int) -> int:
    """Torch's name of `get_world_rank_from_group_rank`."""
    return groups.get_world_rank_from_group_rank(group, group_rank)


def get_group_rank(group: GroupLike, global_rank: int) -> int:
    """Torch's name of `get_group_rank_from_world_rank`."""
    return groups.get_group_rank_from_world_rank(global_rank, group)


def monitored_barrier(
    group: GroupLike = None,
    timeout: float | timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Torch's barrier that names who has not come; here every `barrier` does.

    Args:
        group: the ranks that take part; by default all.
        timeout: seconds, or a `datetime.timedelta`.
        wait_all_ranks: all ranks that have not come are named in any case.
    """
    del wait_all_ranks
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    functional.barrier(group, timeout=seconds)


def new_subgroups(group_size: int, group: GroupLike = None) -> tuple[Group | None, list[Group]]:
    """Cut a group into groups of one size, of neighbours; returns this rank's own, and all.

    In compiled code there is no own one, so it is None.

    Examples:
        >>> import phalanx as px
        >>> px.comm.new_subgroups(1)[1][0].ranks
        (0,)
    """
    ranks = groups.get_process_group_ranks(group)
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        raise InvalidTypeError(
            f"group_size must be a whole number from 1. Received: {shown(group_size)}"
        )
    if len(ranks) % group_size:
        raise InvalidValueError(
            f"The {len(ranks)} ranks must be divisible by group_size. Received: {group_size}"
        )
    cut = [ranks[i : i + group_size] for i in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(cut)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
) -> tuple[Group | None, list[Group]]:
    """Make groups that have no rank in common; returns this rank's own, or None, and all."""
    ranks = [r for part in ranks_per_subgroup_list for r in part]
    if len(set(ranks)) < len(ranks):
        raise InvalidValueError(
            f"A rank can be in one subgroup only. Received: {list(map(list, ranks_per_subgroup_list))}"
        )
    made = [groups.new_group(part) for part in ranks_per_subgroup_list]
    mine = [g for g in made if groups.own_rank() in g.ranks]
    return (mine[0] if mine else None), made


def send_object_list(
    object_list: Sequence[Any], dst: int, group: GroupLike = None, tag: int = 0
) -> None:
    """Send objects to rank `dst`, where `recv_object_list` gets as many."""
    objects.check_place("send_object_list")
    data = objects.packed(list(object_list))
    send(_length(data), dst, group, tag)
    send(data, dst, group, tag)
    objects.check_packed(data)


def recv_object_list(
    object_list: list[Any], src: int | None = None, group: GroupLike = None, tag: int = 0
) -> int | None:
    """Replace the items of a list by those that rank `src`, or any, sends; returns who sent them."""
    objects.check_place("recv_object_list")
    length = _length(np.zeros(0))
    source = recv_(length, src, group, tag)
    if source is None:
        return None
    items = objects.unpacked(recv(np.zeros(int(length[0]), np.uint8), source, group, tag))
    if len(items) != len(object_list):
        raise InvalidValueError(
            f"The list must have {len(items)} items, as that of rank {source}. "
            f"Received: {len(object_list)} items"
        )
    object_list[:] = items
    return source


# -- inside ----------------------------------------------------------------------------------------


def _length(data: Any) -> Any:
    return np.array([math.prod(data.shape)], np.int64)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in getattr(x, "shape", x))


def _known_rank(group: GroupLike, name: str) -> int:
    rank = groups.own_rank()
    if rank is None:
        raise InvalidValueError(
            f"{name} gives results of different shapes, but where replicas are compiled one shape "
            "stands for all of them. Use all_to_all_single. Received: a compiled replica"
        )
    members = groups.find(group).ranks
    return members.index(rank) if rank in members else -1


def _check(wanted: Any, found: Any, what: str) -> None:
    if wanted is not None and list(wanted) != list(found):
        raise InvalidValueError(
            f"What came has other sizes than {what} says, {found}. Received: {list(wanted)}"
        )


def _checked(outcome: Outcome, shape_of: Any, wanted: Any) -> Outcome:
    """The outcome, of which the shapes are checked as soon as it is used."""
    out, handle = outcome
    if out is None:
        return outcome
    if handle is None:
        _check(wanted, shape_of(out), "the output shape")
        return outcome

    def get(timeout: float | None) -> Any:
        result = handle.result(timeout)
        _check(wanted, shape_of(result), "the output shape")
        return result

    checked = LazyHandle(handle.get_future(), get, handle.is_completed, handle.site)
    return PendingArray(checked), checked
