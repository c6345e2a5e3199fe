"""Collectives that write into buffers: ``handle = all_reduce_(buffer)``.

Buffers are NumPy arrays and `px.Variable`s. Each function returns None, or a handle if `async_op` is
set; the buffer is written before the handle is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.collectives import groups
from phalanx.collectives.handles import Handle, Outcome, OwnHandle, fill_with
from phalanx.collectives.perform import GroupLike, Op, perform
from phalanx.collectives.table import kind
from phalanx.core.reduction import ReduceOp
from phalanx.core.replica_context import is_compiled
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.futures import settle


def all_reduce_(
    tensor: Any, op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Like `all_reduce`, into the array itself.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> buffer = np.int32([1, 2])
        >>> px.comm.all_reduce_(buffer, "max")
        >>> buffer.tolist()
        [1, 2]
    """
    check_buffer(tensor)
    # Without `_into`: small ones are called again and again.
    outcome = perform("all_reduce", group, async_op, tensor, op=op, out=whole(tensor))
    return filled(outcome, lambda out: write(tensor, out), async_op)


def all_reduce_coalesced_(
    tensors: Sequence[Any], op: Op = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Like `all_reduce_coalesced`, into the arrays themselves."""
    for tensor in tensors:
        check_buffer(tensor)
    outcome = perform("all_reduce_coalesced", group, async_op, tensors, op=op)
    return filled(outcome, lambda out: write_all(tensors, out), async_op)


def reduce_(
    tensor: Any,
    dst: int = 0,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Like `reduce`, into the array of rank `dst`; the others keep theirs."""
    check_buffer(tensor)
    return _into(tensor, "reduce", group, async_op, tensor, op=op, root=dst)


def broadcast_(
    tensor: Any, src: int = 0, group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Like `broadcast`, into the array itself."""
    check_buffer(tensor)
    return _into(tensor, "broadcast", group, async_op, tensor, root=src)


def all_gather_(
    tensor_list: Sequence[Any], tensor: Any, group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Like `all_gather`, into a list of one buffer per rank."""
    check_buffers(tensor_list, group, tensor.dtype)
    return _into(tensor_list, "all_gather", group, async_op, tensor)


def all_gather_into_tensor_(
    output: Any, tensor: Any, group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Like `all_gather_into_tensor`, into `output`: joined along the first dimension, or as rows."""
    count = groups.get_group_size(group)
    joined = (count * tensor.shape[0], *tensor.shape[1:]) if tensor.ndim else (count,)
    shapes = [joined, (count, *tensor.shape)]
    check_buffer(output, shapes, tensor.dtype)
    given = tensor if tensor.ndim else jnp.reshape(tensor, (1,))
    outcome = perform("all_gather_into_tensor", group, async_op, given, out=whole(output))
    return filled(outcome, lambda out: write(output, out.reshape(output.shape)), async_op)


all_gather_single_ = all_gather_into_tensor_


def gather_(
    tensor: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Like `gather`, into the list of buffers of rank `dst`; the others give None."""
    found = groups.find(group)
    groups.check_rank(dst, "dst", found)
    is_here = groups.own_rank() in (dst, None)
    if is_here:
        check_buffers(gather_list, group, tensor.dtype)
    elif gather_list is not None:
        raise InvalidValueError(
            f"Only rank {dst}, the destination, has a gather_list. Received: a list on another rank"
        )
    return _into(gather_list or (), "gather", group, async_op, tensor, root=dst)


def scatter_(
    tensor: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int = 0,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Like `scatter`, into `tensor`."""
    check_buffer(tensor)
    return _into(tensor, "scatter", group, async_op, scatter_list, root=src)


def scatter_tensor_(
    output: Any, tensor: Any, src: int = 0, group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Like `scatter_tensor`, into `output`."""
    _check_part(output, tensor, group)
    return _into(output, "scatter_tensor", group, async_op, tensor, root=src)


def reduce_scatter_(
    output: Any,
    tensor_list: Sequence[Any],
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Like `reduce_scatter`, into `output`."""
    check_buffer(output)
    return _into(output, "reduce_scatter", group, async_op, tensor_list, op=op)


def reduce_scatter_tensor_(
    output: Any,
    tensor: Any,
    op: Op = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Like `reduce_scatter_tensor`, into `output`."""
    _check_part(output, tensor, group)
    return _into(output, "reduce_scatter_tensor", group, async_op, tensor, op=op)


reduce_scatter_single_ = reduce_scatter_tensor_


def all_to_all_(
    output_list: Sequence[Any], tensors: Sequence[Any], group: GroupLike = None, async_op: bool = False
) -> Handle | None:
    """Like `all_to_all`, into a list of one buffer per rank."""
    check_buffers(output_list, group, tensors[0].dtype if len(tensors) else None)
    return _into(output_list, "all_to_all", group, async_op, tensors)


def all_to_all_single_(
    output: Any,
    tensor: Any,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Handle | None:
    """Like `all_to_all_single`, into `output`."""
    check_buffer(output, None, tensor.dtype)
    if output_split_sizes is None:
        count = groups.get_group_size(group)
        if output.ndim == 0 or output.shape[0] % count:
            raise InvalidValueError(
                f"The first dimension of the output must be divisible by the {count} ranks of the "
                f"group, or output_split_sizes given. Received: {kind(output)}"
            )
        output_split_sizes = [output.shape[0] // count] * count
    elif sum(output_split_sizes) != output.shape[0]:
        raise InvalidValueError(
            f"output_split_sizes must add up to the {output.shape[0]} rows of the output. "
            f"Received: {list(output_split_sizes)}"
        )
    splits = (input_split_sizes, output_split_sizes)
    return _into(output, "all_to_all_single", group, async_op, tensor, splits=splits)


# -- buffers ---------------------------------------------------------------------------------------


def _into(
    buffer: Any, name: str, group: GroupLike, async_op: bool, x: Any, **arguments: Any
) -> Handle | None:
    """Perform an operation whose result goes into a buffer, or into a list of them."""
    if isinstance(buffer, np.ndarray | Variable):
        outcome = perform(name, group, async_op, x, out=whole(buffer), **arguments)
        return filled(outcome, lambda result: write(buffer, result), async_op)
    outcome = perform(name, group, async_op, x, out=[whole(b) for b in buffer], **arguments)
    return filled(outcome, lambda results: write_all(buffer, results), async_op)


def check_buffer(
    buffer: Any, shapes: Sequence[tuple[int, ...]] | None = None, dtype: Any = None
) -> None:
    """Require something that can be written, of one of the shapes, and of the dtype."""
    if not isinstance(buffer, np.ndarray | Variable):
        raise InvalidTypeError(
            "A buffer must be a NumPy array or a px.Variable; other arrays cannot be written. The "
            f"functions without an underscore return the result instead. Received: {shown(buffer)}"
        )
    inside = groups.replica()
    if isinstance(buffer, np.ndarray) and inside is not None and is_compiled(inside):
        raise InvalidTypeError(
            "Where replicas are compiled, a buffer must be a px.Variable. The functions without an "
            f"underscore return the result instead. Received: a NumPy array, {kind(buffer)}"
        )
    if isinstance(buffer, np.ndarray) and not buffer.flags.writeable:
        raise InvalidValueError("A buffer must be writeable. Received: a read-only NumPy array")
    if shapes is not None and tuple(buffer.shape) not in shapes:
        wanted = " or ".join(map(str, dict.fromkeys(shapes)))
        raise InvalidValueError(f"The output must have the shape {wanted}. Received: {kind(buffer)}")
    if dtype is not None and jnp.dtype(buffer.dtype) != jnp.dtype(dtype):
        raise InvalidValueError(
            f"The output must have the input's dtype, {jnp.dtype(dtype).name}. Received: {kind(buffer)}"
        )


def check_buffers(buffers: Any, group: GroupLike, dtype: Any) -> None:
    """Require one buffer for each rank of a group."""
    count = groups.get_group_size(group)
    if not isinstance(buffers, Sequence) or len(buffers) != count:
        raise InvalidValueError(
            f"There must be a list of {count} buffers, one for each rank. Received: {shown(buffers)}"
        )
    for buffer in buffers:
        check_buffer(buffer, None, dtype)


def _check_part(output: Any, tensor: Any, group: GroupLike) -> None:
    count = groups.get_group_size(group)
    if tensor.ndim and tensor.shape[0] % count == 0:
        check_buffer(output, [(tensor.shape[0] // count, *tensor.shape[1:])], tensor.dtype)


def whole(buffer: Any) -> Any:
    """A buffer that results can be received into as it is, else None."""
    is_array = isinstance(buffer, np.ndarray) and type(buffer) is np.ndarray
    return buffer if is_array and buffer.flags.c_contiguous and buffer.dtype.isnative else None


def write(buffer: Any, value: Any) -> None:
    """Put a result into a buffer of the same shape and dtype, unless it is there already."""
    if value is buffer:
        return
    check_buffer(buffer, [tuple(value.shape)], value.dtype)
    if isinstance(buffer, Variable):
        buffer.assign(value)
    elif not isinstance(value, np.ndarray) or value.ctypes.data != buffer.ctypes.data:
        buffer[...] = np.asarray(value)


def write_all(buffers: Sequence[Any], values: Sequence[Any]) -> None:
    """Put a list of results into a list of buffers."""
    for buffer, value in zip(buffers, values, strict=True):
        write(buffer, value)


def filled(outcome: Outcome, fill: Callable[[Any], None], async_op: bool) -> Handle | None:
    """What an operation returns that writes its result somewhere when it is there."""
    result, handle = outcome
    if not async_op:
        if result is not None:
            fill(result)
        return None
    if handle is None:
        return None
    if isinstance(handle, OwnHandle):
        return handle.filling(fill)
    future: Future[Any] = Future()
    handle.get_future().add_done_callback(
        lambda done: settle(future, lambda: fill_with(done.result(), fill))
    )
    return handle.following(future)
