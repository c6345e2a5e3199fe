"""Shapes of programs that people port: each of them has met something once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px

ONE_REPLICA = {
    "default": px.get_strategy,
    "one device": lambda: px.OneDeviceStrategy("CPU:1"),
    "mirrored": lambda: px.MirroredStrategy(["CPU:0"]),
    "central storage": lambda: px.experimental.CentralStorageStrategy(["CPU:0"]),
}


@pytest.mark.parametrize("make", ONE_REPLICA.values(), ids=ONE_REPLICA)
@pytest.mark.parametrize("compile_with", [px.function, jax.jit])
def test_the_id_of_a_replica_is_asked_for_first_in_a_program(make, compile_with) -> None:
    s = make()

    def replica_id():
        return px.get_replica_context().replica_id_in_sync_group + 0

    for n in (2, 3):  # another shape is another program
        result = compile_with(lambda x: s.run(lambda x: replica_id() + x, args=(x,)))(jnp.ones(n))
        np.testing.assert_array_equal(s.experimental_local_results(result)[0], np.ones(n))
    (eager,) = s.experimental_local_results(s.run(replica_id))
    assert int(eager) == 0
    assert not isinstance(eager, jax.core.Tracer)


NAMES = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion
    nadam nadamw noisy_sgd novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop
    sgd sign_sgd sm3 yogi
"""
OPTIMIZERS = {name: getattr(optax, name) for name in NAMES.split() if hasattr(optax, name)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_runs_in_one_function_with_every_optimizer(name: str) -> None:
    make = OPTIMIZERS[name]
    transform = {"noisy_sgd": lambda: make(0.1, key=0)}.get(name, lambda: make(0.1))()
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with s.scope():
        w = px.Variable(jnp.ones((4, 3)))
        optimizer = px.train.Optimizer(transform)

    def step(x: jax.Array) -> jax.Array:
        loss, gradients = px.value_and_grad(lambda: jnp.sum((x @ w.value()) ** 2), [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return loss

    @px.function
    def two_steps(x):
        s.run(step, args=(x,))
        return s.reduce("sum", s.run(step, args=(x,)), axis=None)

    losses = [float(two_steps(jnp.ones((2, 4)))) for _ in range(2)]
    assert all(np.isfinite(losses))
    assert int(optimizer.iterations) == 4


@pytest.mark.parametrize("where", ["outside", "replica", "function"])
def test_mapped_functions_read_variables(where: str) -> None:
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with s.scope():
        w = px.Variable(jnp.arange(3.0))
    x = jnp.arange(6.0).reshape(2, 3)

    def mapped():
        rows = jax.vmap(lambda row: row * w + w.value())(x)
        return rows, jax.vmap(jax.grad(lambda row: (row * w).sum()))(x)

    run = {
        "outside": mapped,
        "replica": lambda: s.run(mapped),
        "function": px.function(lambda: s.run(mapped)),
    }[where]
    for rows, gradients in s.experimental_local_results(run()):
        np.testing.assert_allclose(rows, x * np.arange(3.0) + np.arange(3.0))
        np.testing.assert_allclose(gradients, np.tile(np.arange(3.0), (2, 1)))
    if where == "outside":
        with pytest.raises(px.errors.ContextError, match="written while JAX staged"):
            jax.vmap(w.assign)(x)
