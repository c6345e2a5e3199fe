"""What replicas agree on: the values of parameters, and how often a loss counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from phalanx.core import context as ctx
from phalanx.core.replica_context import MergePoint, meet
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.strategy import Strategy
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables.distributed_variables import MirroredVariable
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer

__all__ = ["broadcast_parameters", "repeated_loss"]


def broadcast_parameters(variables: Sequence[Variable]) -> None:
    """Give all copies of mirrored variables the value of the first replica's.

    Copies are equal anyway, unless `Variable.values` were written one by one. MindSpore's
    `parameter_broadcast` does this before the first step. Variables that are kept in slices, and those
    with a single copy, stay as they are. Call it in a step, or outside of replicas on all workers.

    Args:
        variables: a list of variables.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w = px.Variable(1.0)
        >>> _ = w.values[1].assign(5.0)
        >>> px.train.broadcast_parameters([w])
        >>> [float(x) for x in w.values]
        [1.0, 1.0]
    """
    listed = list(variables)
    if not all(isinstance(v, Variable) for v in listed):
        raise InvalidTypeError(f"A list of px.Variable is needed. Received: {shown(variables)}")
    replica = ctx.active_replica()

    def broadcast(strategy: Strategy | None) -> None:
        for variable in listed:
            if type(variable) is MirroredVariable:
                own = variable.distribute_strategy
                with ctx.push(ctx.Mode(own)):
                    variable.replace(_from_first(own, variable))

    if replica is None:
        broadcast(None)
    else:
        meet(replica, MergePoint("broadcast of parameters", broadcast, (), {}))


def _from_first(strategy: Strategy, variable: MirroredVariable) -> Any:
    held = variable.distributed()
    if isinstance(held, Mirrored) and held.is_traced:
        return strategy.extended._from_first(SpmdPerReplica(held.component(0), held.count))
    given = strategy.extended._from_first(PerReplica(held.values, held.span))
    return given.component(0) if isinstance(given, Mirrored) else given


def repeated_loss(loss: Any, repeats: int, mean: bool = True) -> Any:
    """A loss that several replicas compute alike, for gradients that are summed over them.

    Its value stays the same. With MindSpore's `loss_repeated_mean` its gradient is divided by the
    number of repetitions, so that their sum is the gradient of one; without, the sum is as many times
    too large.

    Args:
        loss: a scalar.
        repeats: how many replicas compute it.
        mean: whether to divide.

    Examples:
        >>> import jax, phalanx as px
        >>> f = lambda w: px.train.repeated_loss(w * w, repeats=4)
        >>> [float(x) for x in jax.value_and_grad(f)(3.0)]
        [9.0, 1.5]
    """
    check_integer(repeats, "repeats", 1, 2**31 - 1)
    if not mean or repeats == 1:
        return loss
    fixed = lax.stop_gradient(loss)
    return fixed + (loss - fixed) / repeats
