"""Models and states of flax, equinox and optax as they are: with functions and names in them."""

from __future__ import annotations

from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from tests.parallel.models import check_close

from phalanx.errors import InvalidValueError
from phalanx.parallel import parallelize, value_and_grad

ROWS, LABELS = (np.random.default_rng(n).normal(size=(10, n)).astype(np.float32) for n in (6, 4))
BATCHES = [slice(0, 8), slice(2, 10)]
TWO: Any = {"devices": jax.devices()[:2], "gradients_mean": True}


class Net(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(4)(flax.linen.relu(flax.linen.Dense(8)(x)))


def trained(step: Any, state: Any) -> Any:
    losses = []
    for rows in BATCHES:
        state, loss = step(state, ROWS[rows], LABELS[rows])
        losses.append(loss)
    return state, losses


def test_a_state_of_flax_is_created_with_its_functions() -> None:
    """Whose optimizer is made anew by each call, as in most programs."""
    net = Net()

    def create(key: Any) -> TrainState:
        transform = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
        return TrainState.create(apply_fn=net.apply, params=net.init(key, ROWS[:1]), tx=transform)

    def step(state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any, x: Any, y: Any) -> Any:
            return jnp.mean((state.apply_fn(params, x) - y) ** 2)

        value, gradients = value_and_grad(loss)(state.params, x, y)
        return state.apply_gradients(grads=gradients), value

    example = jax.eval_shape(create, jax.random.key(0)), ROWS[:8], LABELS[:8]
    program = parallelize(step, example, parallel_mode="auto_parallel", **TWO)
    state = program.create(create, jax.random.key(0))
    assert jax.tree.structure(state) == jax.tree.structure(example[0])
    found, losses = trained(program, state)
    wanted, expected = trained(jax.jit(step), create(jax.random.key(0)))
    check_close((found.params, losses), (wanted.params, expected))
    assert len(program._programs) == 1  # and not one more for other functions
    with pytest.raises(InvalidValueError, match="it lacks 'opt_state/1/0/count'"):
        program.create(lambda key: create(key).replace(opt_state=()), jax.random.key(0))


def test_a_step_returns_a_model_of_equinox() -> None:
    """With its activation, which is a function."""
    transform = optax.adam(0.01)

    def create(key: Any) -> Any:
        model = equinox.nn.MLP(6, 4, 8, 1, key=key)
        return model, transform.init(equinox.filter(model, equinox.is_inexact_array))

    def step(state: Any, x: Any, y: Any) -> Any:
        params, static = equinox.partition(state[0], equinox.is_inexact_array)

        def loss(params: Any, x: Any, y: Any) -> Any:
            return jnp.mean((jax.vmap(equinox.combine(params, static))(x) - y) ** 2)

        value, gradients = value_and_grad(loss)(params, x, y)
        updates, slots = transform.update(gradients, state[1], params)
        return (equinox.apply_updates(state[0], updates), slots), value

    example = equinox.filter_eval_shape(create, jax.random.key(1)), ROWS[:8], LABELS[:8]
    program = parallelize(step, example, parallel_mode="data_parallel", **TWO)
    state = program.create(create, jax.random.key(1))
    assert state[0].activation is example[0][0].activation
    found, losses = trained(program, state)
    assert found[0].activation is state[0].activation
    wanted, expected = trained(equinox.filter_jit(step), create(jax.random.key(1)))
    check_close(*(equinox.filter(state, equinox.is_array) for state in (found, wanted)))
    check_close(losses, expected)
