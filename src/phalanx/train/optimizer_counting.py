"""What users read and set of an optimizer before and between steps: its updates, its learning rate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from phalanx.core import context as ctx
from phalanx.core.options import VariableAggregation
from phalanx.core.replica_context import MergePoint, meet
from phalanx.core.strategy import Strategy
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_number
from phalanx.train.optimizer_state import find_rate, is_scheduled, no_rate, present_value
from phalanx.train.server_updates import ServerUpdates

__all__ = ["CountingOptimizer"]


class CountingOptimizer:
    """The part of an optimizer that has the number of updates and the learning rate."""

    transform: optax.GradientTransformation
    _state: Any = None
    _iterations: Variable | None = None
    _is_built = False
    _rate: Any = None  # which was set before there was a state
    _servers: ServerUpdates | None = None
    _schedule: Any = None  # what computes the learning rate

    @property
    def iterations(self) -> Variable:
        """How many updates have been made, as an integer variable.

        It may be asked for before the first step. Make the optimizer in the strategy's scope, then this
        variable belongs to the strategy.
        """
        if self._iterations is None:
            replica = ctx.active_replica()
            if replica is None:
                self._count(ctx.get_strategy())
            else:
                meet(replica, MergePoint("creation of optimizer state", self._count, (), {}))
        assert self._iterations is not None
        return self._iterations

    def _count(self, strategy: Strategy) -> None:
        """Have a variable of the strategy for the number of updates."""
        known = self._iterations
        if known is not None and known.distribute_strategy in (strategy, None):
            return
        mode = ctx.default_mode() if strategy is ctx.default_mode().strategy else ctx.Mode(strategy)
        with ctx.push(mode), jax.ensure_compile_time_eval():
            self._iterations = Variable(
                jnp.int32(0) if known is None else jnp.asarray(present_value(known)),
                trainable=False,
                name="iterations",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )

    @property
    def learning_rate(self) -> Any:
        """The learning rate: a variable once there is a state, and a number before that.

        Assign to it to change it, also between the steps of a compiled function. The transformation
        must have it in its state: that of `px.optimizers`, or of `optax.inject_hyperparams`. Parameter
        servers have it for the updates that come to them later; set it in the coordinator's program.
        """
        if self._is_built and self._servers is None:
            rate = find_rate(self._state)
        else:
            rate = find_rate(self.transform.init([])) if self._rate is None else self._rate
        if rate is None:
            raise no_rate(self.transform)
        return rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        state = self.transform.init([])
        if find_rate(state) is None:
            raise no_rate(self.transform)
        if self._schedule is not None or is_scheduled(state):
            raise InvalidTypeError(
                "The learning rate follows a schedule, which the next step would go back to. Make the "
                f"optimizer with a number to set it. Received: {shown(value)}"
            )
        on_servers = self._servers is not None
        known = on_servers or not compat.is_tracer(value)
        given = check_number(value, "learning_rate", 0.0, 1e30) if known else value
        if self._servers is not None:
            self._servers.set_rate(self.transform, given)
            self._rate = given
        elif self._is_built:
            find_rate(self._state).assign(jnp.float32(given))  # type: ignore[union-attr]
        else:
            self._rate = given

    lr = learning_rate
