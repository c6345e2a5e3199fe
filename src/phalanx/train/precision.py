"""Lower precision: a policy for computing in bfloat16 or float16, and loss scaling for the latter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core.errors import InvalidValueError
from phalanx.core.synchronization import VariableAggregation
from phalanx.core.variables import Variable


@dataclass(frozen=True)
class Policy:
    """Which dtypes to compute in and to keep parameters and results in.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> policy = px.train.Policy("bfloat16")
        >>> str(policy.cast_to_compute({"w": jnp.ones(2), "i": jnp.arange(2)})["w"].dtype)
        'bfloat16'
    """

    compute_dtype: Any
    param_dtype: Any = jnp.float32
    output_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for dtype in (self.compute_dtype, self.param_dtype, self.output_dtype):
            if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
                raise InvalidValueError(f"A policy needs floating dtypes. Received: {dtype!r}")

    def cast_to_compute(self, tree: Any) -> Any:
        """Floating arrays of a tree in the dtype to compute in; variables are read."""
        return _cast(tree, self.compute_dtype)

    def cast_to_param(self, tree: Any) -> Any:
        """Floating arrays of a tree in the dtype that parameters are kept in."""
        return _cast(tree, self.param_dtype)

    def cast_to_output(self, tree: Any) -> Any:
        """Floating arrays of a tree in the dtype of results."""
        return _cast(tree, self.output_dtype)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(x: Any) -> Any:
        array = jnp.asarray(x)
        return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array

    return jax.tree.map(cast, tree)


class LossScale:
    """Multiplies losses so that small float16 gradients do not vanish, and adapts the factor.

    Give it to an `Optimizer`. After a step whose gradients are not all finite, no variable changes
    and the scale is divided by `factor`; after `growth_interval` good steps in a row it is multiplied
    by it.

    Args:
        initial: the first scale.
        growth_interval: how many good steps in a row make the scale grow; 0 keeps it fixed.
        factor: by how much it grows and shrinks.
    """

    def __init__(
        self, initial: float = 2.0**15, growth_interval: int = 2000, factor: float = 2.0
    ) -> None:
        if not initial > 0 or not factor > 1 or growth_interval < 0:
            raise InvalidValueError(
                "A loss scale needs initial > 0, factor > 1 and growth_interval >= 0. "
                f"Received: initial={initial}, factor={factor}, growth_interval={growth_interval}"
            )
        self.initial = initial
        self.growth_interval = growth_interval
        self.factor = factor
        self._scale: Variable | None = None
        self._good_steps: Variable | None = None

    def build(self) -> None:
        """Make the state, under the current strategy; the optimizer calls it."""
        first = VariableAggregation.ONLY_FIRST_REPLICA
        if self._scale is None:
            self._scale = Variable(
                jnp.float32(self.initial), trainable=False, name="loss_scale", aggregation=first
            )
            self._good_steps = Variable(
                jnp.int32(0), trainable=False, name="good_steps", aggregation=first
            )

    @property
    def variables(self) -> list[Variable]:
        """The state: the scale, and the number of good steps in a row."""
        assert self._scale is not None
        assert self._good_steps is not None
        return [self._scale, self._good_steps]

    @property
    def value(self) -> Any:
        """The present scale."""
        return self.initial if self._scale is None else self._scale.value()

    def next_state(
        self, scale: jax.Array, good_steps: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The state after a step: a pure rule."""
        grown = good_steps + 1
        grow = (grown >= self.growth_interval) & (self.growth_interval > 0)
        new_scale = jnp.where(
            finite,
            jnp.where(grow, scale * self.factor, scale),
            jnp.maximum(scale / self.factor, 1.0),
        )
        return new_scale, jnp.where(finite & ~grow, grown, 0)
