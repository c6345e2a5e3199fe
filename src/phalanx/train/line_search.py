"""The loss again, at other values: what a line search asks for in the middle of an update.

A replica has its part of the batch. So a transformation is given a function that computes the loss of
all replicas, and its gradient: in a compiled step each replica computes its part and the parts are
summed; eagerly one device computes all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from phalanx.collectives import sums_in_programs
from phalanx.core import context as ctx
from phalanx.core.reduction import ReduceOp, divide
from phalanx.core.replica_context import ReplicaContext, is_compiled
from phalanx.core.variables.variable import Variable
from phalanx.errors import UnsupportedError
from phalanx.execution.gradients import with_values
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS

__all__ = ["ReplicaLoss", "loss_of_all"]


class ReplicaLoss:
    """The loss of one replica, as a function of the values of variables.

    Args:
        loss: computes it, from variables.
        variables: those whose values are given.
        context: the replica.
    """

    def __init__(
        self, loss: Callable[[], Any], variables: list[Variable], context: ReplicaContext
    ) -> None:
        strategy = context.strategy
        self.is_compiled = is_compiled(context)
        self.count = context.num_replicas_in_sync
        if not self.is_compiled and len(strategy.extended._replica_devices) != self.count:
            raise UnsupportedError(
                "A line search computes the loss of all workers again and again, which only a compiled "
                "step can do. Call strategy.run in a px.function. "
                f"Received: an eager step on {self.count} replicas of several workers"
            )
        self._mode = ctx.current_mode()
        self._loss, self._variables = loss, variables
        self._closed: Any = None
        if not self.is_compiled and self.count > 1:  # traced here, in the context of the replica
            shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]
            self._closed, _ = compat.jaxpr_and_result(self._of_values, shapes)

    def _of_values(self, values: list[Any]) -> Any:
        return with_values(self._loss, self._variables, values)

    def at(self, values: list[Any]) -> Any:
        """The loss of this replica."""
        if self._closed is None:
            with ctx.push(self._mode):
                return self._of_values(values)
        constants = [np.asarray(x) for x in self._closed.consts]  # for any device
        return compat.eval_jaxpr(self._closed.replace(consts=constants), values)[0]


def loss_of_all(parts: Sequence[ReplicaLoss], op: ReduceOp | None) -> Callable[[list[Any]], Any]:
    """The loss of all replicas, as a function that can be differentiated.

    Args:
        parts: the losses of all replicas; of a compiled step the only one, which stands for all.
        op: how gradients are combined; None if each replica has the whole loss.
    """
    count = parts[0].count
    in_program = parts[0].is_compiled and count > 1
    chosen = parts if op is not None else parts[:1]

    def both(values: list[Any]) -> Any:
        found = jax.value_and_grad(lambda given: sum(part.at(given) for part in chosen))(values)
        if in_program and op is not None:
            found = jax.tree.map(sums_in_programs.total, found)
        if op is ReduceOp.MEAN:
            size = lax.axis_size(REPLICA_AXIS) if in_program else count
            found = jax.tree.map(lambda x: divide(x, size), found)
        return found

    @jax.custom_vjp
    def total(values: list[Any]) -> Any:
        return both(values)[0]

    def backward(gradients: Any, cotangent: Any) -> Any:
        return (jax.tree.map(lambda x: cotangent * x, gradients),)

    total.defvjp(both, backward)
    return total
