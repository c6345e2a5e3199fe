"""Small models, and what one device makes of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from phalanx.parallel import value_and_grad

MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
OPTIMIZER = optax.adam(0.01)


def mlp(params: Any, x: Any, y: Any) -> Any:
    """A mean over the examples of a batch."""
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return jnp.mean((hidden @ params["down"] - y) ** 2)


def mlp_parameters(inputs: int = 6, width: int = 24, outputs: int = 4, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return {
        "up": {
            "kernel": random.normal(size=(inputs, width)).astype(np.float32) * 0.4,
            "bias": np.zeros(width, np.float32),
        },
        "down": random.normal(size=(width, outputs)).astype(np.float32) * 0.4,
    }


def batch(count: int, inputs: int = 6, outputs: int = 4, seed: int = 1) -> Any:
    random = np.random.default_rng(seed)
    return tuple(random.normal(size=(count, n)).astype(np.float32) for n in (inputs, outputs))


def step(state: Any, x: Any, y: Any) -> Any:
    """A step of training, the same in all modes."""
    params, slots = state
    loss, gradients = value_and_grad(mlp)(params, x, y)
    updates, slots = OPTIMIZER.update(gradients, slots, params)
    return (optax.apply_updates(params, updates), slots), loss


def state_of(params: Any) -> Any:
    return params, OPTIMIZER.init(params)


def after(function: Any, state: Any, batches: Any) -> Any:
    """The state and the losses after some steps."""
    losses = []
    for x, y in batches:
        state, loss = function(state, x, y)
        losses.append(float(loss))
    return state, losses


def check_close(found: Any, expected: Any) -> None:
    def check(a: Any, b: Any) -> None:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6)

    jax.tree.map(check, found, expected)
