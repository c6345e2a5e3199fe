"""What users read and set of an optimizer before and between steps: its updates, its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phalanx.core import context as ctx
from phalanx.core.options import VariableAggregation
from phalanx.core.replica_context import MergePoint, meet
from phalanx.core.strategy import Strategy
from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_number
from phalanx.train.optimizer_state import find_rate, is_scheduled, no_rate, present_value
from phalanx.train.server_updates import ServerUpdates

__all__ = ["CountingOptimizer"]


class NumberToAssign(float):
    """A learning rate for which there is no variable yet: a number that takes a variable's calls."""

    _owner: CountingOptimizer

    @classmethod
    def of(cls, rate: Any, owner: CountingOptimizer) -> Any:
        """The number, unless it is known only when a program runs."""
        if compat.is_tracer(rate):
            return rate
        number = cls(rate)
        number._owner = owner
        return number

    def assign(self, value: Any) -> Any:
        """Set the learning rate; what it is now."""
        self._owner.learning_rate = value
        return self._owner.learning_rate

    def numpy(self) -> Any:
        """The number, as a variable gives it."""
        return np.float32(self)

    def __reduce__(self) -> Any:
        return float, (float(self),)


class CountingOptimizer:
    """The part of an optimizer that has the number of updates and the learning rate."""

    transform: optax.GradientTransformation
    _state: Any = None
    _iterations: Variable | None = None
    _is_built = False
    _rate: Any = None  # which was set before there was a state
    _servers: ServerUpdates | None = None
    _schedule: Any = None  # what computes the learning rate
    _then: Callable[[], None] | None = None  # see `when_built`

    @property
    def is_built(self) -> bool:
        """Whether there is a state: the first step makes it, or `build`."""
        return self._is_built

    def when_built(self, then: Callable[[], None]) -> None:
        """Call a function when there is a state, before it is used. Another one takes its place."""
        self._then = then

    def _finish_building(self) -> None:
        """There is a state."""
        self._is_built = True
        if self._then is not None:
            try:
                transactions.at_once(self._then)
            except BaseException:
                self._is_built = False  # so that the next step fails as well
                raise
            self._then = None

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
        """The learning rate: a variable once there is a state, and before that a number with `assign`.

        Assign to it, or call its ``assign``, to change it, also between the steps of a compiled
        function. The transformation must have it in its state: that of `px.optimizers`, or of
        `optax.inject_hyperparams`. Parameter servers have it for the updates that come to them later;
        set it in the coordinator's program.
        """
        if self._is_built and self._servers is None:
            rate = find_rate(self._state)
        else:
            rate = find_rate(self.transform.init([])) if self._rate is None else self._rate
        if rate is None:
            raise no_rate(self.transform)
        return rate if isinstance(rate, Variable) else NumberToAssign.of(rate, self)

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
