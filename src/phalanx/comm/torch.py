"""`px.comm.torch`: collectives with the names and signatures of ``torch.distributed``.

``import phalanx.comm.torch as dist`` takes the place of ``import torch.distributed as dist``. Tensors
are written in place: they are NumPy arrays, or `px.Variable`s. Each call is one of `px.comm`, so both
ways may be mixed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
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
from phalanx.comm import conventions, functional, in_place, messages, objects
from phalanx.comm.conventions import get_global_rank, get_group_rank, monitored_barrier
from phalanx.comm.in_place import (
    all_gather_ as all_gather,
    all_reduce_ as all_reduce,
    all_reduce_coalesced_ as all_reduce_coalesced,
)
from phalanx.comm.messages import P2POp, batch_isend_irecv
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
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
]


class group:  # noqa: N801 - torch's name
    """``group.WORLD`` is all ranks."""

    WORLD = None


def is_available() -> bool:
    """Always True."""
    return True


def is_nccl_available() -> bool:
    """False, as are the two below: Phalanx chooses what data travels over."""
    return False


is_gloo_available = is_mpi_available = is_nccl_available


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


def new_subgroups(
    group_size: int, group: GroupLike = None, timeout: Any = None, **kwargs: Any
) -> tuple[Group | None, list[Group]]:
    """Cut a group into groups of one size. All other arguments are accepted for ported code."""
    del timeout, kwargs
    return conventions.new_subgroups(group_size, group)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]], timeout: Any = None, **kwargs: Any
) -> tuple[Group | None, list[Group]]:
    """Make groups that have no rank in common. All other arguments are accepted for ported code."""
    del timeout, kwargs
    return conventions.new_subgroups_by_enumeration(ranks_per_subgroup_list)


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


def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: Any = None,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Wait until all ranks of a group are here, for some time at most."""
    del device_ids
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    handle = functional.barrier(group, async_op, seconds)
    return handle if async_op else None


# -- ranks of groups -------------------------------------------------------------------------------


def _with_group_rank(function: Callable[..., Any], name: str, usual: int | None = 0) -> Any:
    """A function that takes ``group_src`` or ``group_dst`` in place of ``src`` or ``dst`` too.

    Args:
        function: takes a rank of all.
        name: that of the rank.
        usual: the rank without either.
    """
    signature, new = inspect.signature(function), f"group_{name}"

    @functools.wraps(function)
    def taking(*args: Any, **kwargs: Any) -> Any:
        if new not in kwargs:
            if usual is None or kwargs.get(name, 0) is not None:
                return function(*args, **kwargs)
            return function(*args, **(kwargs | {name: usual}))
        inside = kwargs.pop(new)
        given = signature.bind_partial(*args, **kwargs).arguments
        if inside is not None and given.get(name) is not None:
            raise InvalidValueError(
                f"Give {name}, a rank of all, or {new}, a rank of the group. "
                f"Received: {name}={shown(given[name])} and {new}={shown(inside)}"
            )
        if inside is not None:
            given[name] = get_global_rank(given.get("group"), inside)
        return taking(**given)

    del taking.__wrapped__  # tools would read its arguments there
    taking.usual_function = function  # type: ignore[attr-defined]
    more = inspect.Parameter(new, inspect.Parameter.KEYWORD_ONLY, default=None, annotation="int | None")
    taking.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), more]
    )
    return taking


broadcast = _with_group_rank(in_place.broadcast_, "src")
reduce = _with_group_rank(in_place.reduce_, "dst")
gather = _with_group_rank(in_place.gather_, "dst")
scatter = _with_group_rank(in_place.scatter_, "src")
send = _with_group_rank(messages.send, "dst", None)
recv = _with_group_rank(messages.recv_, "src", None)
isend = _with_group_rank(messages.isend, "dst", None)
irecv = _with_group_rank(messages.irecv_, "src", None)
broadcast_object_list = _with_group_rank(objects.broadcast_object_list, "src")
gather_object = _with_group_rank(gather_object, "dst")
scatter_object_list = _with_group_rank(scatter_object_list, "src")
send_object_list = _with_group_rank(conventions.send_object_list, "dst", None)
recv_object_list = _with_group_rank(conventions.recv_object_list, "src", None)
