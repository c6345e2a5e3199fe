"""Collectives that leave their input alone: ``out, handle = all_reduce(x)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.collectives.handles import Outcome
from phalanx.collectives.perform import GroupLike, Op, perform
from phalanx.core.reduction import ReduceOp
from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown


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
    return perform("all_reduce", group, async_op, tensor, op=op)


def all_reduce_coalesced(
    tensors: Sequence[Any], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Like `all_reduce`, of several arrays at once: those of one dtype travel in one message."""
    return perform("all_reduce_coalesced", group, async_op, tensors, op=op)


def reduce(
    tensor: Any,
    dst: int = 0,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Outcome:
    """Combine the arrays of all ranks on rank `dst`; the others get their own array back."""
    return perform("reduce", group, async_op, tensor, op=op, root=dst)


def broadcast(tensor: Any, src: int = 0, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """Give every rank the array of rank `src`; all have one of the same shape and dtype."""
    return perform("broadcast", group, async_op, tensor, root=src)


def all_gather(tensor: Any, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """A list of the arrays of all ranks, whose shapes may differ, except where code is compiled."""
    return perform("all_gather", group, async_op, tensor)


def all_gather_into_tensor(tensor: Any, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """The arrays of all ranks, of one shape, joined along the first dimension."""
    return perform("all_gather_into_tensor", group, async_op, tensor)


all_gather_single = all_gather_into_tensor


def gather(tensor: Any, dst: int = 0, group: GroupLike = None, async_op: bool = False) -> Outcome:
    """A list of the arrays of all ranks on rank `dst`, None on the others.

    Where replicas are compiled, one program stands for all of them, so all get the list.
    """
    return perform("gather", group, async_op, tensor, root=dst)


def gather_into_tensor(
    tensor: Any, dst: int = 0, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """The arrays of all ranks joined along the first dimension on rank `dst`; zeros on the others."""
    return perform("gather_into_tensor", group, async_op, tensor, root=dst)


def scatter(
    tensors: Sequence[Any] | None,
    src: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> Outcome:
    """Give each rank its array of the list that rank `src` has; the others give None.

    Where replicas are compiled, all give a list, of arrays of one shape.
    """
    return perform("scatter", group, async_op, tensors, root=src)


def scatter_tensor(
    tensor: Any, src: int = 0, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Give each rank its part of the array of rank `src`, cut along the first dimension.

    All ranks give an array of the same shape and dtype; only that of `src` matters.
    """
    return perform("scatter_tensor", group, async_op, tensor, root=src)


def reduce_scatter(
    tensors: Sequence[Any], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Combine lists of one array per rank; each rank gets its place of the result.

    The arrays of one list may differ in shape, except where replicas are compiled; the lists of all
    ranks have the same shapes.
    """
    return perform("reduce_scatter", group, async_op, tensors, op=op)


def reduce_scatter_tensor(
    tensor: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Outcome:
    """Combine the arrays of all ranks; each gets its part of the result along the first dimension."""
    return perform("reduce_scatter_tensor", group, async_op, tensor, op=op)


reduce_scatter_single = reduce_scatter_tensor


def all_to_all(tensors: Sequence[Any], group: GroupLike = None, async_op: bool = False) -> Outcome:
    """Send array i of the list to rank i; returns the list of those that came, by rank.

    The shapes may differ, except where replicas are compiled; all arrays have one dtype.
    """
    return perform("all_to_all", group, async_op, tensors)


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
    return perform(
        "all_to_all_single",
        group,
        async_op,
        tensor,
        splits=(input_split_sizes, output_split_sizes),
    )


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
        raise InvalidValueError(
            f"timeout must be a positive number of seconds. Received: {shown(timeout)}"
        )
    return perform("barrier", group, async_op, timeout=timeout)[1]
