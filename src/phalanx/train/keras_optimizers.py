"""Optimizers with Keras's names, arguments and formulas, each an optax transformation.

The learning rate is a part of their state, so it can be read and set between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_number
from phalanx.train.optimizer import Optimizer

Slots = dict[str, Any]
Rule = Callable[[Any, Any, Any, Slots], tuple[Any, Slots]]
"""From the learning rate, the number of this update, gradients and slots to updates and new slots."""


class KerasState(NamedTuple):
    """How many updates there were, the learning rate, and the slots of the variables by name."""

    count: Any
    hyperparams: dict[str, Any]
    slots: Slots


class Clipping(NamedTuple):
    """How gradients are clipped: each by its values, each by its norm, or all by their common norm."""

    clipvalue: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None

    def __call__(self, grads: Any) -> Any:
        """The clipped gradients."""
        most = self.clipvalue
        if most is not None:
            return jax.tree.map(lambda g: jnp.clip(g, -most, most), grads)
        if self.clipnorm is not None:
            return jax.tree.map(
                lambda g: _within(g, jnp.linalg.norm(jnp.ravel(g)), self.clipnorm), grads
            )
        if self.global_clipnorm is not None:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
            return jax.tree.map(lambda g: _within(g, norm, self.global_clipnorm), grads)
        return grads


def _within(gradient: Any, norm: Any, limit: Any) -> Any:
    return gradient * (limit / jnp.maximum(norm, limit)).astype(gradient.dtype)


def transformation(
    learning_rate: Any,
    rule: Rule,
    slots: dict[str, float],
    clipping: Clipping,
    weight_decay: float | None,
) -> optax.GradientTransformation:
    """An optax transformation of a rule.

    Args:
        learning_rate: a number, or a function of the number of updates.
        rule: what makes updates.
        slots: what each variable has beside it, and what it begins with.
        clipping: what happens to gradients first.
        weight_decay: which part of the variables, times the learning rate, they lose in each step.
    """

    def rate_at(count: Any) -> Any:
        return learning_rate(count) if callable(learning_rate) else learning_rate

    def init(params: Any) -> KerasState:
        made = {
            name: jax.tree.map(lambda p, start=start: jnp.full_like(p, start), params)
            for name, start in slots.items()
        }
        return KerasState(jnp.int32(0), {"learning_rate": jnp.float32(rate_at(0))}, made)

    def update(grads: Any, state: KerasState, params: Any = None) -> tuple[Any, KerasState]:
        stored = state.hyperparams["learning_rate"]
        rate = jnp.float32(rate_at(state.count)) if callable(learning_rate) else stored
        updates, new = rule(rate, state.count + 1, clipping(grads), state.slots)
        if weight_decay:
            updates = jax.tree.map(lambda u, p: u - rate * weight_decay * p, updates, params)
        updates = jax.tree.map(lambda u, g: u.astype(g.dtype), updates, grads)
        new = jax.tree.map(lambda n, o: n.astype(o.dtype), new, state.slots)
        return updates, KerasState(state.count + 1, {"learning_rate": rate}, new)

    return optax.GradientTransformation(init, update)


class KerasOptimizer(Optimizer):
    """Base of the optimizers of `px.optimizers`.

    Args:
        learning_rate: a number, or a schedule: a function of the number of updates.
        rule: what makes updates.
        slots: what each variable has beside it.
        name: a name.
        weight_decay: which part of the variables, times the learning rate, they lose in each step.
        clipnorm: the largest norm of a gradient.
        clipvalue: the largest absolute value of an element of a gradient.
        global_clipnorm: the largest norm of all gradients together.
        config: the arguments of the subclass.
        **options: more arguments of `px.train.Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Any,
        rule: Rule,
        slots: dict[str, float],
        name: str,
        weight_decay: float | None,
        clipnorm: float | None,
        clipvalue: float | None,
        global_clipnorm: float | None,
        config: dict[str, Any],
        **options: Any,
    ) -> None:
        known = ["aggregate", "loss_scale", "shard", "communication"]
        if strange := [what for what in options if what not in known]:
            raise InvalidTypeError(
                f"{type(self).__name__} does not take {strange[0]!r}. The rate is learning_rate; "
                "schedules are in px.optimizers.schedules; averages of weights and other Keras "
                f"arguments are optax transformations in px.train.Optimizer. Received: {shown(options)}"
            )
        if not callable(learning_rate):
            learning_rate = check_number(learning_rate, "learning_rate", 0.0, 1e30)
        limits = {"clipvalue": clipvalue, "clipnorm": clipnorm, "global_clipnorm": global_clipnorm}
        given = [what for what, limit in limits.items() if limit is not None]
        if len(given) > 1:
            raise InvalidValueError(
                "Only one of clipnorm, clipvalue and global_clipnorm can be set. "
                f"Received: {shown({what: limits[what] for what in given})}"
            )
        clipping = Clipping(
            *(None if x is None else check_number(x, what, 0.0, 1e30) for what, x in limits.items())
        )
        decay = None if weight_decay is None else check_number(weight_decay, "weight_decay", 0.0, 1e30)
        self.name = name
        self._schedule = learning_rate if callable(learning_rate) else None
        self._config = {
            "name": name,
            "learning_rate": learning_rate,
            "weight_decay": decay,
            **limits,
            **config,
        }
        super().__init__(transformation(learning_rate, rule, slots, clipping, decay), **options)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same optimizer of, without its state."""
        rate = self._config["learning_rate"]
        return self._config | {"learning_rate": rate if callable(rate) else float(self.learning_rate)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """An optimizer with what `get_config` returned."""
        return cls(**config)


class SGD(KerasOptimizer):
    """Gradient descent, with momentum if there is one.

    Args:
        learning_rate: a number, or a schedule.
        momentum: from 0 to 1.
        nesterov: whether momentum looks ahead.
        weight_decay: see `px.optimizers`; the same for the arguments behind it.
        clipnorm: the largest norm of a gradient.
        clipvalue: the largest absolute value of an element.
        global_clipnorm: the largest norm of all gradients together.
        name: a name.
        **options: more arguments of `px.train.Optimizer`.

    Examples:
        >>> import phalanx as px
        >>> w = px.Variable(1.0)
        >>> optimizer = px.optimizers.SGD(0.5)
        >>> int(optimizer.iterations)
        0
        >>> optimizer.apply_gradients([(1.0, w)])
        >>> optimizer.learning_rate = 0.1
        >>> optimizer.apply_gradients([(1.0, w)])
        >>> round(float(w), 3)
        0.4
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "SGD",
        **options: Any,
    ) -> None:
        momentum = check_number(momentum, "momentum", 0.0, 1.0)

        def rule(rate: Any, count: Any, grads: Any, slots: Slots) -> tuple[Any, Slots]:
            steps = jax.tree.map(lambda g: -rate * g, grads)
            if not momentum:
                return steps, slots
            speed = jax.tree.map(lambda s, v: momentum * v + s, steps, slots["momentum"])
            if nesterov:
                steps = jax.tree.map(lambda s, v: momentum * v + s, steps, speed)
            return (steps if nesterov else speed), {"momentum": speed}

        slots = {"momentum": 0.0} if momentum else {}
        config = {"momentum": momentum, "nesterov": nesterov}
        clips = (clipnorm, clipvalue, global_clipnorm)
        super().__init__(learning_rate, rule, slots, name, weight_decay, *clips, config, **options)


class Adam(KerasOptimizer):
    """Adam, with Keras's formula: `epsilon` is added to the root before its bias is corrected.

    Args:
        learning_rate: a number, or a schedule.
        beta_1: how much of the mean gradient stays.
        beta_2: how much of the mean squared gradient stays.
        epsilon: what keeps the divisor from 0.
        amsgrad: whether the divisor never shrinks.
        weight_decay: see `SGD`; the same for the arguments behind it.
        clipnorm: the largest norm of a gradient.
        clipvalue: the largest absolute value of an element.
        global_clipnorm: the largest norm of all gradients together.
        name: a name.
        **options: more arguments of `px.train.Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "Adam",
        **options: Any,
    ) -> None:
        def rule(rate: Any, count: Any, grads: Any, slots: Slots) -> tuple[Any, Slots]:
            times = count.astype(jnp.float32)
            alpha = rate * jnp.sqrt(1 - jnp.power(beta_2, times)) / (1 - jnp.power(beta_1, times))
            mean = jax.tree.map(lambda m, g: m + (g - m) * (1 - beta_1), slots["mean"], grads)
            square = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - beta_2), slots["square"], grads)
            new = {"mean": mean, "square": square}
            if amsgrad:
                new["largest"] = jax.tree.map(jnp.maximum, slots["largest"], square)
            divisor = new["largest" if amsgrad else "square"]
            steps = jax.tree.map(lambda m, v: -alpha * m / (jnp.sqrt(v) + epsilon), mean, divisor)
            return steps, new

        slots = {"mean": 0.0, "square": 0.0} | ({"largest": 0.0} if amsgrad else {})
        config = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "amsgrad": amsgrad}
        clips = (clipnorm, clipvalue, global_clipnorm)
        super().__init__(learning_rate, rule, slots, name, weight_decay, *clips, config, **options)


class AdamW(Adam):
    """Adam with weight decay, 0.004 by default; see `Adam` for the other arguments."""

    def __init__(
        self, learning_rate: Any = 0.001, weight_decay: float | None = 0.004, **options: Any
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **{"name": "AdamW"} | options)


class RMSprop(KerasOptimizer):
    """Gradients divided by the root of their mean square.

    Args:
        learning_rate: a number, or a schedule.
        rho: how much of the mean squared gradient stays.
        momentum: from 0 to 1.
        epsilon: what keeps the divisor from 0.
        centered: whether the mean gradient is taken off.
        weight_decay: see `SGD`; the same for the arguments behind it.
        clipnorm: the largest norm of a gradient.
        clipvalue: the largest absolute value of an element.
        global_clipnorm: the largest norm of all gradients together.
        name: a name.
        **options: more arguments of `px.train.Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "RMSprop",
        **options: Any,
    ) -> None:
        def rule(rate: Any, count: Any, grads: Any, slots: Slots) -> tuple[Any, Slots]:
            square = jax.tree.map(lambda v, g: rho * v + (1 - rho) * g * g, slots["square"], grads)
            new, divisor = {"square": square}, square
            if centered:
                new["mean"] = jax.tree.map(lambda m, g: rho * m + (1 - rho) * g, slots["mean"], grads)
                divisor = jax.tree.map(lambda v, m: v - m * m, square, new["mean"])
            steps = jax.tree.map(lambda g, d: -rate * g * jax.lax.rsqrt(d + epsilon), grads, divisor)
            if momentum:
                steps = jax.tree.map(lambda v, s: momentum * v + s, slots["momentum"], steps)
                new["momentum"] = steps
            return steps, new

        slots = {"square": 0.0}
        slots |= {"mean": 0.0} if centered else {}
        slots |= {"momentum": 0.0} if momentum else {}
        config = {"rho": rho, "momentum": momentum, "epsilon": epsilon, "centered": centered}
        clips = (clipnorm, clipvalue, global_clipnorm)
        super().__init__(learning_rate, rule, slots, name, weight_decay, *clips, config, **options)


class Adagrad(KerasOptimizer):
    """Gradients divided by the root of the sum of all squares so far.

    Args:
        learning_rate: a number, or a schedule.
        initial_accumulator_value: what the sum begins with.
        epsilon: what keeps the divisor from 0.
        weight_decay: see `SGD`; the same for the arguments behind it.
        clipnorm: the largest norm of a gradient.
        clipvalue: the largest absolute value of an element.
        global_clipnorm: the largest norm of all gradients together.
        name: a name.
        **options: more arguments of `px.train.Optimizer`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        name: str = "Adagrad",
        **options: Any,
    ) -> None:
        def rule(rate: Any, count: Any, grads: Any, slots: Slots) -> tuple[Any, Slots]:
            total = jax.tree.map(lambda a, g: a + g * g, slots["total"], grads)
            steps = jax.tree.map(lambda g, a: -rate * g / jnp.sqrt(a + epsilon), grads, total)
            return steps, {"total": total}

        config = {"initial_accumulator_value": initial_accumulator_value, "epsilon": epsilon}
        slots = {"total": initial_accumulator_value}
        clips = (clipnorm, clipvalue, global_clipnorm)
        super().__init__(learning_rate, rule, slots, name, weight_decay, *clips, config, **options)
