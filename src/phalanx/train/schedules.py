"""Learning rates that change with the number of updates, with Keras's names.

`px.optimizers` take them as `learning_rate`, and so does every optimizer of optax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]


class LearningRateSchedule:
    """Base of schedules: a function of the number of updates that have been made.

    Examples:
        >>> import phalanx as px
        >>> schedule = px.optimizers.schedules.ExponentialDecay(0.1, decay_steps=10, decay_rate=0.5)
        >>> round(float(schedule(20)), 4)
        0.025
    """

    def __init__(self, **config: Any) -> None:
        self._config = config

    def __call__(self, step: Any) -> jax.Array:
        """The learning rate of a step."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(step).")

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same schedule of."""
        return dict(self._config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """A schedule with what `get_config` returned."""
        return cls(**config)


class ExponentialDecay(LearningRateSchedule):
    """Multiplied by `decay_rate` every `decay_steps`, evenly or in steps (`staircase`)."""

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        decay_rate: float,
        staircase: bool = False,
        name: str = "ExponentialDecay",
    ) -> None:
        super().__init__(
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            decay_rate=decay_rate,
            staircase=staircase,
            name=name,
        )

    def __call__(self, step: Any) -> jax.Array:
        """The learning rate of a step."""
        c = self._config
        times = jnp.asarray(step, jnp.float32) / c["decay_steps"]
        times = jnp.floor(times) if c["staircase"] else times
        return jnp.asarray(c["initial_learning_rate"] * jnp.power(c["decay_rate"], times))


class InverseTimeDecay(LearningRateSchedule):
    """Divided by 1 more than `decay_rate` times the number of `decay_steps`."""

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        decay_rate: float,
        staircase: bool = False,
        name: str = "InverseTimeDecay",
    ) -> None:
        super().__init__(
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            decay_rate=decay_rate,
            staircase=staircase,
            name=name,
        )

    def __call__(self, step: Any) -> jax.Array:
        """The learning rate of a step."""
        c = self._config
        times = jnp.asarray(step, jnp.float32) / c["decay_steps"]
        times = jnp.floor(times) if c["staircase"] else times
        return c["initial_learning_rate"] / (1.0 + c["decay_rate"] * times)


class PiecewiseConstantDecay(LearningRateSchedule):
    """Values between boundaries: the first up to and with the first boundary, and so on."""

    def __init__(
        self,
        boundaries: Sequence[float],
        values: Sequence[float],
        name: str = "PiecewiseConstant",
    ) -> None:
        if len(values) != len(boundaries) + 1:
            raise InvalidValueError(
                "There must be one value more than boundaries. "
                f"Received: boundaries={shown(boundaries)}, values={shown(values)}"
            )
        super().__init__(boundaries=list(boundaries), values=list(values), name=name)

    def __call__(self, step: Any) -> jax.Array:
        """The learning rate of a step."""
        limits = jnp.asarray(self._config["boundaries"], jnp.float32)
        passed = jnp.sum(jnp.asarray(step, jnp.float32) > limits)
        return jnp.asarray(self._config["values"], jnp.float32)[passed]


class PolynomialDecay(LearningRateSchedule):
    """From one learning rate to another within `decay_steps`, by a power of the part that is left."""

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        name: str = "PolynomialDecay",
    ) -> None:
        super().__init__(
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            end_learning_rate=end_learning_rate,
            power=power,
            cycle=cycle,
            name=name,
        )

    def __call__(self, step: Any) -> jax.Array:
        """The learning rate of a step."""
        c = self._config
        now, steps = jnp.asarray(step, jnp.float32), jnp.float32(c["decay_steps"])
        if c["cycle"]:
            steps = steps * jnp.maximum(jnp.ceil(now / steps), 1.0)
        left = 1.0 - jnp.minimum(now, steps) / steps
        end = c["end_learning_rate"]
        return (c["initial_learning_rate"] - end) * jnp.power(left, c["power"]) + end


class CosineDecay(LearningRateSchedule):
    """Half a period of a cosine, down to the part `alpha`, after a linear warm-up if there is one."""

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        alpha: float = 0.0,
        name: str = "CosineDecay",
        warmup_target: float | None = None,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            alpha=alpha,
            name=name,
            warmup_target=warmup_target,
            warmup_steps=warmup_steps,
        )

    def __call__(self, step: Any) -> jax.Array:
        """The learning rate of a step."""
        c = self._config
        now = jnp.asarray(step, jnp.float32)
        start, target = c["initial_learning_rate"], c["warmup_target"]
        if target is None:
            return self._decayed(start, now)
        share = jnp.minimum(now / max(c["warmup_steps"], 1), 1.0)
        warm = start + (target - start) * share
        return jnp.where(now < c["warmup_steps"], warm, self._decayed(target, now - c["warmup_steps"]))

    def _decayed(self, start: float, step: jax.Array) -> jax.Array:
        share = jnp.clip(step / self._config["decay_steps"], 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * share))
        alpha = self._config["alpha"]
        return start * ((1.0 - alpha) * cosine + alpha)


class CosineDecayRestarts(LearningRateSchedule):
    """Half periods of a cosine, each `t_mul` times as long as the last, and `m_mul` times as high."""

    def __init__(
        self,
        initial_learning_rate: float,
        first_decay_steps: int,
        t_mul: float = 2.0,
        m_mul: float = 1.0,
        alpha: float = 0.0,
        name: str = "SGDRDecay",
    ) -> None:
        super().__init__(
            initial_learning_rate=initial_learning_rate,
            first_decay_steps=first_decay_steps,
            t_mul=t_mul,
            m_mul=m_mul,
            alpha=alpha,
            name=name,
        )

    def __call__(self, step: Any) -> jax.Array:
        """The learning rate of a step."""
        c = self._config
        share, growth = jnp.asarray(step, jnp.float32) / c["first_decay_steps"], c["t_mul"]
        if growth == 1.0:
            restarts = jnp.floor(share)
            share = share - restarts
        else:
            restarts = jnp.floor(jnp.log(1.0 - share * (1.0 - growth)) / jnp.log(growth))
            before = (1.0 - growth**restarts) / (1.0 - growth)
            share = (share - before) / growth**restarts
        cosine = 0.5 * c["m_mul"] ** restarts * (1.0 + jnp.cos(jnp.pi * share))
        return jnp.asarray(c["initial_learning_rate"] * ((1.0 - c["alpha"]) * cosine + c["alpha"]))
