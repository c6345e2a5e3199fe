"""One step of a transformation as a function: from gradients, state and parameters to new ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from phalanx.train.precision import LossScale

__all__ = ["Updates"]


class Updates:
    """The step of a transformation, with and without a loss scale; `whole` and `scaled` are compiled.

    Args:
        transform: the transformation.
        loss_scale: what divides gradients first, if any.
    """

    def __init__(self, transform: optax.GradientTransformation, loss_scale: LossScale | None) -> None:
        self._transform, self._loss_scale = transform, loss_scale
        self.whole = jax.jit(self.values)
        self.scaled = jax.jit(self.scaled_values)

    def __reduce__(self) -> Any:
        return Updates, (self._transform, self._loss_scale)

    def values(
        self, grads: Any, state: Any, params: Any, extra: Any = None, functions: Any = None
    ) -> tuple[Any, Any]:
        """New parameters and the new state."""
        more = {**(extra or {}), **(functions or {})}
        updates, new_state = self._transform.update(grads, state, params, **more)
        return optax.apply_updates(params, updates), new_state

    def scaled_values(
        self,
        grads: Any,
        state: Any,
        params: Any,
        scaling: Any,
        extra: Any = None,
        functions: Any = None,
    ) -> tuple[Any, Any, Any]:
        """Divide out the loss scale; a step with gradients that are not finite changes nothing."""
        assert self._loss_scale is not None
        scale, good_steps = scaling
        # In float16 a scale of 65536 is infinite, and would make every gradient zero.
        grads = [(g / scale).astype(g.dtype) for g in grads]
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
        safe = [jnp.where(finite, g, jnp.zeros_like(g)) for g in grads]
        new = self.values(safe, state, params, extra, functions)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
        return (*kept, self._loss_scale.next_state(scale, good_steps, finite))
