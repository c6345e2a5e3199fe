"""`px.comm.torch`: collectives with the names and signatures of ``torch.distributed``.

``import phalanx.comm.torch as dist`` takes the place of ``import torch.distributed as dist``. Tensors
are written in place: they are NumPy arrays, or `px.Variable`s. Each call is one of `px.comm`, so both
ways may be mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.collectives import groups
from phalanx.collectives.groups import (
    Group,
    destroy,
    get_process_group_ranks,
    get_rank,
    init,
    is_initialized,
)
from phalanx.collectives.handles import Handle as Work
from phalanx.collectives.perform import GroupLike, Op
from phalanx.comm import functional, in_place, objects
from phalanx.comm.conventions import (
    get_global_rank,
    get_group_rank,
    monitored_barrier,
    new_subgroups,
)
from phalanx.comm.in_place import (
    all_gather_ as all_gather,
    all_reduce_ as all_reduce,
    all_reduce_coalesced_ as all_reduce_coalesced,
    broadcast_ as broadcast,
    gather_ as gather,
    reduce_ as reduce,
    scatter_ as scatter,
)
from phalanx.comm.messages import (
    P2POp,
    batch_isend_irecv,
    irecv_ as irecv,
    isend,
    recv_ as recv,
    send,
)
from phalanx.comm.objects import broadcast_object_list
from phalanx.core.reduction import ReduceOp
from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = [
    "Group",
    "P2POp",
    "ReduceOp",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_global_rank",
    "get_group_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]


def is_available() -> bool:
    """Always True."""
    return True


def init_process_group(
    backend: str | None = None, init_method: str | None = None, timeout: Any = None, **kwargs: Any
) -> None:
    """Meet the other workers of the job; ``phalanx run`` says who they are.

    Args:
        backend: accepted for ported code; Phalanx chooses what data travels over.
        init_method: accepted for ported code, as are `timeout` and all others (`rank`, `world_size`,
            `store`).
        timeout: see `init_method`.
        **kwargs: see `init_method`.

    Examples:
        >>> import phalanx.comm.torch as dist
        >>> dist.init_process_group("gloo")
        >>> dist.get_rank(), dist.get_world_size()
        (0, 1)
        >>> dist.destroy_process_group()
    """
    del backend, init_method, timeout, kwargs
    init()


def destroy_process_group(group: GroupLike = None) -> None:
    """Forget a group; without one, leave the other workers."""
    if group is None:
        destroy()
    else:
        groups.destroy_group(group)


def get_backend(group: GroupLike = None) -> str:
    """The name of what data travels over: "phalanx"."""
    groups.find(group)
    return "phalanx"


def get_world_size(group: GroupLike = None) -> int:
    """How many ranks a group has; -1 if this one is no member of it."""
    is_member = group is None or groups.own_rank() in (None, *groups.find(group).ranks)
    return groups.get_group_size(group) if is_member else -1


def new_group(
    ranks: Sequence[int] | None = None, timeout: Any = None, backend: str | None = None, **kwargs: Any
) -> Group:
    """Make a group of some ranks, or of all. All other arguments are accepted for ported code."""
    del timeout, backend, kwargs
    return groups.new_group(None if ranks is None else list(ranks))


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Join the arrays of all ranks in one buffer, along the first dimension or as rows."""
    return in_place.all_gather_into_tensor_(output_tensor, input_tensor, group, async_op)


def reduce_scatter(
    output: Any,
    input_list: Sequence[Any],
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Combine lists over ranks; each gets its own element in a buffer."""
    return in_place.reduce_scatter_(output, input_list, op, group, async_op)


def reduce_scatter_tensor(
    output: Any, input: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Combine arrays over ranks; each gets its part of the first dimension in a buffer."""
    return in_place.reduce_scatter_tensor_(output, input, op, group, async_op)


def all_to_all(
    output_tensor_list: Sequence[Any],
    input_tensor_list: Sequence[Any],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Each rank sends one array to each, and gets one from each in a list of buffers."""
    return in_place.all_to_all_(output_tensor_list, input_tensor_list, group, async_op)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """As `all_to_all`, with the parts of one array and one buffer."""
    return in_place.all_to_all_single_(
        output, input, output_split_sizes, input_split_sizes, group, async_op
    )


def all_gather_object(object_list: list[Any], obj: Any, group: GroupLike = None) -> None:
    """Fill a list with the objects of all ranks."""
    found = objects.all_gather_object(obj, group)
    if found is not None:
        _fill(object_list, found, "object_list")


def gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, group: GroupLike = None
) -> None:
    """Fill a list of rank `dst` with the objects of all ranks; the others give no list."""
    found = objects.gather_object(obj, dst, group)
    if found is not None:
        _fill(object_gather_list, found, "object_gather_list")


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int = 0,
    group: GroupLike = None,
) -> None:
    """Put this rank's object of the list of rank `src` into the first place of a list."""
    mine = objects.scatter_object_list(scatter_object_input_list, src, group)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise InvalidValueError(
            "scatter_object_output_list must be a list with room for one object. "
            f"Received: {shown(scatter_object_output_list)}"
        )
    scatter_object_output_list[0] = mine


def _fill(given: Any, found: list[Any], name: str) -> None:
    if not isinstance(given, list) or len(given) != len(found):
        raise InvalidValueError(
            f"{name} must be a list with room for {len(found)} objects. Received: {shown(given)}"
        )
    given[:] = found


def barrier(group: GroupLike = None, async_op: bool = False, device_ids: Any = None) -> Work | None:
    """Wait until all ranks of a group are here."""
    del device_ids
    handle = functional.barrier(group, async_op)
    return handle if async_op else None
