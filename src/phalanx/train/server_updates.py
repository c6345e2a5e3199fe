"""Optimizers on parameter servers: where gradients go, and which transformations can run there.

A server applies a transformation to one variable at a time: another server may hold the next one, and
workers push whenever they are ready. So a transformation must treat each variable on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import optax

from phalanx.core import context as ctx
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.options import VariableAggregation
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidValueError
from phalanx.parameter_server.closure import current_closure
from phalanx.parameter_server.remote_variable import RemoteVariable
from phalanx.parameter_server.requests import OptimizerDefinition
from phalanx.parameter_server.sharded_variable import ShardedVariable
from phalanx.runtime import compat, program_parts
from phalanx.runtime.formatting import shown
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.train.optimizer_state import find_rate

__all__ = ["ServerUpdates", "couples_rows", "couples_variables"]

_ACROSS = ("reduce_", "arg", "cum", "sort", "dot_general", "conv", "top_k", "fft")


class ServerUpdates:
    """An optimizer on the parameter servers of a strategy.

    Args:
        transform: what the servers apply.
        strategy: whose variables they are.
        rate: the learning rate, if it was set.
    """

    def __init__(
        self,
        transform: optax.GradientTransformation,
        strategy: ParameterServerStrategy,
        rate: float | None = None,
    ) -> None:
        if current_closure() is not None:
            raise ContextError(
                "A scheduled function cannot make an optimizer for parameter servers, because it may "
                "run several times. Make it in strategy.scope(), in the coordinator's program; or "
                "call optimizer.build(variables) there."
            )
        if couples_variables(transform):
            raise InvalidValueError(
                "The transformation sees all gradients together, as clip_by_global_norm does, but "
                "parameter servers apply it to one variable at a time. Do that part in the step, "
                "`gradients, _ = clip.update(gradients, clip.init(gradients))`, "
                f"and give the rest to px.train.Optimizer. Received: {shown(transform)}"
            )
        self.strategy = strategy
        self._couples_rows = couples_rows(transform)
        extended = strategy.extended
        self._id = extended.next_optimizer()
        self._definition = OptimizerDefinition(
            self._id, cloudpickle.dumps(transform), _rate_of(transform, rate)
        )
        with extended.home.in_turn() as servers:
            servers.define_optimizer(self._definition)
        # Where a variable is anyway: a step that changes variables of one server concerns no other.
        near = extended.first_variable
        place = nullcontext() if near is None else ctx.colocation(near)
        with ctx.push(ctx.Mode(strategy)), place:
            self.iterations = Variable(
                jnp.int32(0),
                trainable=False,
                name="iterations",
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )
        assert isinstance(self.iterations, RemoteVariable)
        extended.free_with(self.iterations, self._id)

    def set_rate(self, transform: optax.GradientTransformation, rate: float) -> None:
        """Let all servers have another learning rate, for the updates that come to them from now on."""
        if current_closure() is not None:
            raise ContextError(
                "A scheduled function cannot set the learning rate, because it may run several times "
                "and beside others. Set it in the coordinator's program, or give the optimizer a "
                f"schedule: px.optimizers.schedules. Received: {rate}"
            )
        self._definition = dataclasses.replace(self._definition, rate=_rate_of(transform, rate))
        with self.strategy.extended.home.in_turn() as servers:
            servers.define_optimizer(self._definition)

    def apply(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Push gradients, which have been combined over replicas."""
        transactions.atomically(self._apply, variables, gradients)

    def _apply(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        for variable, given in zip(variables, gradients, strict=True):
            gradient = given.component(0) if isinstance(given, Mirrored | PerReplica) else given
            in_parts = isinstance(variable, ShardedVariable) or isinstance(gradient, IndexedSlices)
            if in_parts and self._couples_rows:
                raise InvalidValueError(
                    "The transformation sees a variable as a whole, as lamb and adafactor do, but this "
                    "variable is divided among servers, or its gradient has only some rows. Use a "
                    "transformation that treats elements alike, such as adam, or do not divide the "
                    f"variable. Received: {shown(variable.name)}"
                )
            variable.apply_gradient(gradient, self._id)
        self.iterations.assign_add(1)


def _rate_of(transform: optax.GradientTransformation, rate: float | None) -> tuple[int, float] | None:
    """Which leaf of the state of a variable is the learning rate, and what it is."""
    if rate is None:
        return None
    state = transform.init(jnp.zeros(()))
    known = find_rate(state)
    return next(i for i, leaf in enumerate(jax.tree.leaves(state)) if leaf is known), float(rate)


def couples_variables(transform: optax.GradientTransformation) -> bool:
    """Whether the update of one variable depends on another variable or its gradient.

    >>> couples_variables(optax.adam(1e-3)), couples_variables(optax.clip_by_global_norm(1.0))
    (False, True)
    """
    like = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    try:
        state = jax.eval_shape(transform.init, like)
        closed, (updates, new) = compat.jaxpr_and_result(transform.update, like, state, like)
    except Exception as error:
        raise InvalidValueError(
            "Parameter servers apply a transformation to one variable at a time, with its gradient and "
            f"its value. This one needs something else: {error}. Received: {shown(transform)}"
        ) from error
    slots = len(jax.tree.leaves(state))
    others = {1, 2 + slots + 1}  # the gradient of the second variable, and its value
    results = [0]  # what the first variable depends on: its update, and then slots
    for result in results:
        needed = program_parts.needed_for(closed, [result])[1]
        if others & set(needed):
            return True
        results += [i for i in needed if 2 <= i < 2 + slots and i not in results]
    del updates, new
    return False


def couples_rows(transform: optax.GradientTransformation) -> bool:
    """Whether the update of one row of a variable depends on others.

    >>> couples_rows(optax.adam(1e-3)), couples_rows(optax.lamb(1e-3))
    (False, True)
    """
    like = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    state = jax.eval_shape(transform.init, like)
    closed, _ = compat.jaxpr_and_result(transform.update, like, state, like)
    return _reduces(closed.jaxpr)


def _reduces(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        sizes = [getattr(getattr(x, "aval", None), "size", 1) for x in eqn.invars]
        if eqn.primitive.name.startswith(_ACROSS) and max(sizes, default=1) > 1:
            return True
        if any(_reduces(inner) for inner in compat.sub_jaxprs(eqn)):
            return True
    return False
