"""Collectives as replicas call them: nests, gradients, and what may be communicated.

Moving the data is left to the strategy's `StrategyExtended`; this module decides what the calls mean.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp

from phalanx.core import cross_replica
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.operators import operand_of
from phalanx.core.options import CommunicationOptions, as_communication_options
from phalanx.core.reduction import ReduceOp, as_operand, as_reduce_op
from phalanx.core.replica_context import MergePoint, index_of, is_compiled, is_transformed, meet
from phalanx.core.structure import leaves, replace_leaves
from phalanx.errors import UnsupportedError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.core.replica_context import ReplicaContext

Arrays = list[jax.Array]


def all_reduce(
    context: ReplicaContext, reduce_op: Any, value: Any, options: CommunicationOptions | None
) -> Any:
    """See `ReplicaContext.all_reduce`."""
    op, options = as_reduce_op(reduce_op), as_communication_options(options)
    items = leaves(value)
    sparse = [i for i, x in enumerate(items) if isinstance(x, IndexedSlices)]
    dense = [i for i, x in enumerate(items) if x is not None and i not in sparse]
    results = list(items)
    if dense:
        operands = [as_operand(operand_of(items[i])) for i in dense]
        reduced = differentiably(_AllReduce(context, op, options), operands)
        for i, x in zip(dense, reduced, strict=True):
            results[i] = x
    for i in sparse:
        point = MergePoint(
            f"all_reduce({op.name}) of IndexedSlices",
            lambda strategy, x: cross_replica.all_reduce_slices(strategy.extended, op, x),
            (items[i],),
            {},
            always_wrap=True,
        )
        results[i] = meet(context, point)
    return replace_leaves(value, results)


def all_gather(
    context: ReplicaContext, value: Any, axis: int, options: CommunicationOptions | None
) -> Any:
    """See `ReplicaContext.all_gather`."""
    options = as_communication_options(options)
    items = leaves(value)
    if any(isinstance(x, IndexedSlices) for x in items):
        raise UnsupportedError(
            "all_gather does not take IndexedSlices; all_reduce joins their rows over replicas. "
            f"Received: {shown(value)}"
        )
    results = list(items)
    for i, x in enumerate(items):
        if x is not None:
            gather = _AllGather(context, axis, options)
            results[i] = differentiably(gather, [jnp.asarray(operand_of(x))])[0]
    return replace_leaves(value, results)


class _AllReduce:
    """The sum or mean over replicas. Linear, and its own transpose."""

    def __init__(self, context: ReplicaContext, op: ReduceOp, options: CommunicationOptions) -> None:
        self.context, self._op, self._options = context, op, options

    def forward(self, xs: Arrays) -> Arrays:
        point = MergePoint(
            f"all_reduce({self._op.name}) of {_kinds(xs)}",
            lambda strategy, *values: cross_replica.all_reduce(
                strategy.extended, self._op, list(values), self._options
            ),
            tuple(xs),
            {},
            always_wrap=True,
        )
        return list(meet(self.context, point))

    def backward(self, cotangents: Arrays) -> Arrays:
        return differentiably(self, cotangents)


class _AllGather:
    """Concatenation over replicas; backward, each replica's slice of the summed gradients."""

    def __init__(self, context: ReplicaContext, axis: int, options: CommunicationOptions) -> None:
        self.context, self._axis, self._options = context, axis, options
        self._part: tuple[int, int, int] | None = None

    def forward(self, xs: Arrays) -> Arrays:
        point = MergePoint(
            f"all_gather(axis={self._axis}) of {_kinds(xs)}",
            lambda strategy, value: cross_replica.all_gather(
                strategy.extended, value, self._axis, self._options
            ),
            tuple(xs),
            {},
            always_wrap=True,
        )
        gathered, axis, sizes = meet(self.context, point)
        me = index_of(self.context) + self.context.strategy.extended._first_replica
        self._part = axis, sum(sizes[:me]), sizes[me]
        return [gathered]

    def backward(self, cotangents: Arrays) -> Arrays:
        assert self._part is not None, "the backward pass ran before the forward pass"
        axis, start, size = self._part
        reduce = _AllReduce(self.context, ReduceOp.SUM, self._options)
        total = differentiably(reduce, cotangents)[0]
        return [jax.lax.slice_in_dim(total, start, start + size, axis=axis)]


class Collective(Protocol):
    """An operation of several replicas, and the one that carries its gradients back."""

    context: ReplicaContext

    def forward(self, xs: Arrays) -> Arrays:
        """The operation."""
        ...

    def backward(self, cotangents: Arrays) -> Arrays:
        """The gradients of what went in, from those of what came out."""
        ...


def _kinds(xs: Sequence[jax.Array]) -> str:
    """The dtypes of a list of arrays, for telling merge points apart."""
    return ", ".join(str(x.dtype) for x in xs) if len(xs) <= 4 else f"{len(xs)} arrays"


def differentiably(call: Collective, xs: Arrays) -> Arrays:
    """Run a collective, with its own gradient where `xs` are being differentiated.

    The rule meets the other replicas once in the forward pass and once in the backward pass, each
    time with known values. If `Strategy.run` itself is being transformed, the plain computation is
    differentiated.
    """
    context = call.context
    if context.num_replicas_in_sync == 1 or is_compiled(context) or is_transformed(context):
        return call.forward(xs)
    if any(compat.is_tracer(x) for x in xs) and not any(compat.is_staged(x) for x in xs):
        return list(_with_gradient(call, tuple(xs)))
    return call.forward(xs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(call: Collective, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(call.forward(list(xs)))


def _forward_rule(call: Collective, xs: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
    # The arguments are tracers again if this is a gradient of a gradient.
    return tuple(differentiably(call, [jnp.asarray(x) for x in xs])), None


def _backward_rule(
    call: Collective, _: None, cotangents: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...]]:
    # Integer arrays have no gradient: JAX hands in, and takes back, a placeholder for them.
    follows = [jnp.issubdtype(c.dtype, jnp.inexact) for c in cotangents]
    if all(follows):
        return (tuple(call.backward(list(cotangents))),)
    reduced = iter(call.backward([c for c, ok in zip(cotangents, follows, strict=True) if ok]))
    return (tuple(next(reduced) if ok else c for c, ok in zip(cotangents, follows, strict=True)),)


_with_gradient.defvjp(_forward_rule, _backward_rule)
