"""Lower precision: a policy for computing in bfloat16 or float16, and loss scaling for the latter."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.options import VariableAggregation
from phalanx.core.values import DistributedValues
from phalanx.core.variables import traced_variables
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer, check_number

_log = logging.getLogger("phalanx")


_MIXED = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}


@dataclass(frozen=True)
class Policy:
    """Which dtypes to compute in and to keep parameters and results in.

    Args:
        compute_dtype: a floating dtype. TensorFlow's names 'mixed_bfloat16' and 'mixed_float16' mean
            'bfloat16' and 'float16'.
        param_dtype: what parameters are kept in.
        output_dtype: what results are given in.

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
        if isinstance(self.compute_dtype, str):
            name = _MIXED.get(self.compute_dtype, self.compute_dtype)
            object.__setattr__(self, "compute_dtype", name)
        for dtype in (self.compute_dtype, self.param_dtype, self.output_dtype):
            try:
                floating = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
            except Exception:  # noqa: BLE001 - NumPy raises whatever the text or the object makes it
                floating = False
            if not floating:
                raise InvalidValueError(
                    "A policy needs floating dtypes, such as 'bfloat16' or jnp.float16. "
                    f"Received: {shown(dtype)}"
                )

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


LARGEST_SCALE = 2.0**127
"""The largest power of two in float32: twice as much is infinite, and would never come down again."""

SMALLEST_SCALE = 2.0**-126
"""Devices take what is smaller for zero."""

LONG_RUN = 100
"""Skipped updates in a row that are worth a warning; fewer than 20 bring the usual scale down to 1."""


class LossScale:
    """Multiplies losses so that small float16 gradients do not vanish, and adapts the factor.

    Pass it to an `Optimizer`. After a step whose gradients are not all finite, no variable changes and
    the scale is divided by `factor`, down to 1 (or `initial`, if that is less); after
    `growth_interval` good steps in a row it is multiplied by it, up to the largest power of two in
    float32. If a hundred updates in a row are skipped, the logger "phalanx" says so once.

    Args:
        initial: the first scale.
        growth_interval: how many good steps in a row make the scale grow; 0 keeps it fixed.
        factor: by how much it grows and shrinks.
    """

    def __init__(
        self, initial: float = 2.0**15, growth_interval: int = 2000, factor: float = 2.0
    ) -> None:
        self.initial = check_number(initial, "initial", SMALLEST_SCALE, LARGEST_SCALE)
        self.factor = check_number(factor, "factor", 1.0, LARGEST_SCALE)
        if self.factor == 1.0:
            raise InvalidValueError(f"factor must be more than 1. Received: {factor}")
        self.growth_interval = check_integer(growth_interval, "growth_interval", 0, 2**31 - 1)
        self._scale: Variable | None = None
        self._good_steps: Variable | None = None
        self._updates_since_look = 0
        self._warned = False

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
        """The state: the scale, and how many steps in a row were good; -n if n were skipped."""
        if self._scale is None or self._good_steps is None:
            raise ContextError(
                "The loss scale has no state yet. It is made with the state of its optimizer, by the "
                "first apply_gradients or by optimizer.build(variables)."
            )
        return [self._scale, self._good_steps]

    @property
    def value(self) -> Any:
        """The present scale."""
        return self.initial if self._scale is None else self._scale.value()

    def next_state(
        self, scale: jax.Array, good_steps: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The state after a step: a pure rule. The new scale is finite and positive in any case."""
        usable = jnp.isfinite(scale) & (scale > 0)
        scale = jnp.where(usable, jnp.minimum(scale, LARGEST_SCALE), self.initial)
        good = jnp.clip(good_steps, 0, 2**31 - 2) + 1
        skipped = jnp.clip(good_steps, -(2**31 - 2), 0) - 1
        if self.growth_interval == 0:
            return scale, jnp.where(finite, good, skipped)
        grow = good >= self.growth_interval
        larger = jnp.minimum(scale * self.factor, LARGEST_SCALE)
        smaller = jnp.maximum(scale / self.factor, min(self.initial, 1.0))
        new_scale = jnp.where(finite, jnp.where(grow, larger, scale), jnp.minimum(smaller, scale))
        return new_scale, jnp.where(finite, jnp.where(grow, 0, good), skipped)

    def watch(self) -> None:
        """Look now and then, from now on, whether all updates are skipped."""
        # The program must not keep the scale, whose variables keep their strategy.
        owner = weakref.ref(self)

        def look(updates: int) -> None:
            scale = owner()
            if scale is not None:
                scale._look(updates)

        traced_variables.after_each_run(look)

    def _look(self, updates: int) -> None:
        """Warn once of a long run of skipped updates. Looking waits for the device, so it is rare."""
        self._updates_since_look += updates
        if self._warned or self._updates_since_look < LONG_RUN:
            return
        self._updates_since_look = 0
        scale, good_steps = (_first_copy(v) for v in self.variables)
        if good_steps <= -LONG_RUN:
            self._warned = True
            _log.warning(
                "The last %d updates were skipped, because gradients were not finite in any of them, "
                "and the loss scale has come down to %g. Variables no longer change. Look at the loss "
                "before it is scaled: probably it is infinite or NaN. "
                "jax.config.update('jax_debug_nans', True) stops at the operation that makes the first "
                "NaN.",
                -int(good_steps),
                scale,
            )


def _first_copy(variable: Variable) -> Any:
    held = variable._held()
    return np.asarray(held.values[0] if isinstance(held, DistributedValues) else held)
