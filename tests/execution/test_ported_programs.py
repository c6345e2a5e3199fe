"""Whole programs in the shapes that people bring along: the same under every strategy.

Each is written as its authors would, and gives the same numbers on two or four replicas as on one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.training.train_state import TrainState

import phalanx as px

ROWS, BATCH, WIDTH = 44, 8, 5  # the last batch has four rows
A, S = px.VariableAggregation, px.VariableSynchronization

STRATEGIES: dict[str, Callable[[], px.Strategy]] = {
    "mirrored": lambda: px.MirroredStrategy(["CPU:0", "CPU:1"]),
    "central": lambda: px.CentralStorageStrategy([f"CPU:{i}" for i in range(4)]),
}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int32)


def dataset_of(strategy: px.Strategy) -> Any:
    dataset = px.data.Dataset.from_tensor_slices(data()).batch(BATCH)
    return strategy.experimental_distribute_dataset(dataset)


def weights_of(strategy: px.Strategy, *shapes: tuple[int, ...]) -> list[px.Variable]:
    rng = np.random.default_rng(7)
    with strategy.scope():
        return [px.Variable(rng.standard_normal(s).astype(np.float32) * 0.3) for s in shapes]


@functools.cache
def alone(program: Callable[[px.Strategy], list[Any]]) -> list[Any]:
    return program(px.OneDeviceStrategy("CPU:0"))


def same_as_alone(name: str, program: Callable[[px.Strategy], list[Any]]) -> None:
    for mine, wanted in zip(program(STRATEGIES[name]()), alone(program), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(wanted), rtol=2e-4, atol=1e-5)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# -- an epoch in a function, with metrics and evaluation: the tutorial of custom training loops -------


def tutorial(strategy: px.Strategy) -> list[Any]:
    first, second = weights_of(strategy, (WIDTH, 6), (6, 2))
    with strategy.scope():
        optimizer = px.train.Optimizer(optax.adam(0.05))
        train_accuracy, test_loss = px.train.Accuracy("train"), px.train.Mean("test")

    def compute_loss(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jax.nn.relu(x @ first.value()) @ second.value()
        losses = cross_entropy(logits, y)
        return px.nn.compute_average_loss(losses, global_batch_size=BATCH), logits

    def train_step(inputs: Any) -> jax.Array:
        x, y = inputs
        variables = [first, second]
        (loss, logits), gradients = px.value_and_grad(
            lambda: compute_loss(x, y), variables, has_aux=True
        )()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        train_accuracy.update_state(y, logits)
        return loss

    def test_step(inputs: Any) -> None:
        x, y = inputs
        test_loss.update_state(cross_entropy(compute_loss(x, y)[1], y))

    @px.function
    def distributed_train_epoch(dataset: Any) -> jax.Array:
        total_loss, num_batches = jnp.float32(0.0), 0
        for inputs in dataset:
            per_replica = strategy.run(train_step, args=(inputs,))
            total_loss += strategy.reduce(px.ReduceOp.SUM, per_replica, axis=None)
            num_batches += 1
        return total_loss / num_batches

    @px.function
    def distributed_test_step(inputs: Any) -> None:
        strategy.run(test_step, args=(inputs,))

    results = []
    for _ in range(2):
        results.append(distributed_train_epoch(dataset_of(strategy)))
        for inputs in dataset_of(strategy):
            distributed_test_step(inputs)
        results += [train_accuracy.result(), test_loss.result()]
        train_accuracy.reset_state()
        test_loss.reset_state()
    return [*results, first.numpy(), second.numpy()]


# -- inner loops of many steps, and a controller around them: the Model Garden ------------------------


def controller(strategy: px.Strategy) -> list[Any]:
    (w,) = weights_of(strategy, (WIDTH, 2))
    with strategy.scope():
        schedule = optax.exponential_decay(0.1, 3, 0.5)
        optimizer = px.train.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(schedule)))
        train_loss = px.train.Mean()
        global_step = px.Variable(0, trainable=False, aggregation=A.ONLY_FIRST_REPLICA)

    def step(batch: Any) -> None:
        x, y = batch

        def loss() -> jax.Array:
            return px.nn.compute_average_loss(cross_entropy(x @ w.value(), y), global_batch_size=BATCH)

        train_loss.update_state(optimizer.minimize(loss, [w]) * strategy.num_replicas_in_sync)
        global_step.assign_add(1)

    @px.function
    def train_loop(iterator: Any) -> None:
        for _ in px.range(5):
            strategy.run(step, args=(next(iterator),))

    iterator = iter(dataset_of(strategy))
    results = []
    train_loop(iterator)
    results += [train_loss.result(), global_step.numpy()]
    return [*results, w.numpy()]


# -- two networks, two optimizers, and a penalty on a gradient: GANs ----------------------------------


def adversaries(strategy: px.Strategy) -> list[Any]:
    generator, critic, head = weights_of(strategy, (WIDTH, WIDTH), (WIDTH, 6), (6, 1))
    with strategy.scope():
        for_generator = px.train.Optimizer(optax.adam(0.02, b1=0.0))
        for_critic = px.train.Optimizer(optax.adam(0.02, b1=0.0))

    def score(x: jax.Array) -> jax.Array:
        return (jax.nn.softplus(x @ critic.value()) @ head.value())[:, 0]

    def average(per_example: jax.Array) -> jax.Array:
        return px.nn.compute_average_loss(per_example, global_batch_size=BATCH)

    def train_critic(batch: Any) -> jax.Array:
        x, _ = batch
        noise = jnp.sin(x * 3)

        def loss() -> jax.Array:
            fake = jnp.tanh(noise @ generator.value())
            slope = jax.vmap(jax.grad(lambda row: score(row[None])[0]))(x)
            return average(jax.nn.softplus(score(fake)) + jax.nn.softplus(-score(x))) + average(
                jnp.sum(slope**2, 1)
            )

        return for_critic.minimize(loss, [critic, head])

    def train_generator(batch: Any) -> jax.Array:
        noise = jnp.sin(batch[0] * 3)
        return for_generator.minimize(
            lambda: average(jax.nn.softplus(-score(jnp.tanh(noise @ generator.value())))), [generator]
        )

    @px.function
    def train(batch: Any) -> tuple[Any, Any]:
        first = strategy.run(train_critic, args=(batch,))
        second = strategy.run(train_generator, args=(batch,))
        return strategy.reduce("sum", first, axis=None), strategy.reduce("sum", second, axis=None)

    losses = [loss for batch in dataset_of(strategy) for loss in train(batch)]
    return [*losses, generator.numpy(), critic.numpy(), head.numpy()]


# -- a loss over the examples of all replicas: contrastive learning -----------------------------------


def contrastive(strategy: px.Strategy) -> list[Any]:
    (w,) = weights_of(strategy, (WIDTH, 4))
    with strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(0.1))

    def step(batch: Any) -> jax.Array:
        x, _ = batch
        context = px.get_replica_context()

        def loss() -> jax.Array:
            mine = x @ w.value()
            mine = mine / jnp.linalg.norm(mine, axis=1, keepdims=True)
            other = jnp.roll(mine, 1, 1)
            everybody = context.all_gather(other, axis=0)
            logits = mine @ everybody.T
            first = context.replica_id_in_sync_group * x.shape[0]
            labels = first + jnp.arange(x.shape[0])
            return px.nn.compute_average_loss(cross_entropy(logits, labels), global_batch_size=BATCH)

        return optimizer.minimize(loss, [w])

    run = px.function(lambda batch: strategy.run(step, args=(batch,)))
    for batch in dataset_of(strategy):
        if (
            strategy.experimental_local_results(batch)[0][0].shape[0] * strategy.num_replicas_in_sync
            == BATCH
        ):
            run(batch)
    return [w.numpy()]


# -- normalization over all replicas, with moving averages --------------------------------------------


def normalized(strategy: px.Strategy) -> list[Any]:
    w, scale = weights_of(strategy, (WIDTH, 4), (4, 2))
    with strategy.scope():
        mean = px.Variable(np.zeros(4, np.float32), synchronization=S.ON_READ, aggregation=A.MEAN)
        optimizer = px.train.Optimizer(optax.sgd(0.1))

    def step(batch: Any) -> jax.Array:
        x, y = batch
        context = px.get_replica_context()

        def loss() -> jax.Array:
            hidden = x @ w.value()
            total, count = context.all_reduce("sum", [hidden.sum(0), jnp.float32(x.shape[0])])
            center = total / count
            mean.assign(0.9 * mean.value() + 0.1 * center)
            logits = (hidden - center) @ scale.value()
            return px.nn.compute_average_loss(cross_entropy(logits, y), global_batch_size=BATCH)

        return optimizer.minimize(loss, [w, scale])

    run = px.function(lambda batch: strategy.run(step, args=(batch,)))
    for batch in dataset_of(strategy):
        run(batch)
    return [w.numpy(), scale.numpy(), mean.numpy()]


# -- gradients that are summed by hand, and applied as they are: BERT ---------------------------------


def summed_by_hand(strategy: px.Strategy) -> list[Any]:
    (w,) = weights_of(strategy, (WIDTH, 2))
    with strategy.scope():
        optimizer = px.train.Optimizer(optax.adamw(0.05), aggregate=None)

    def step(batch: Any) -> None:
        x, y = batch

        def loss(x: jax.Array, y: jax.Array) -> jax.Array:
            return px.nn.compute_average_loss(cross_entropy(x @ w.value(), y), global_batch_size=BATCH)

        _, gradients = px.train.accumulate_gradients(loss, [w], (x, y), micro_batches=1)
        gradients = px.get_replica_context().all_reduce("sum", gradients)
        gradients = [g / jnp.maximum(1.0, jnp.linalg.norm(g)) for g in gradients]
        optimizer.apply_gradients(zip(gradients, [w], strict=True))

    run = px.function(lambda iterator: strategy.run(step, args=(next(iterator),)))
    iterator = iter(dataset_of(strategy))
    for _ in range(5):
        run(iterator)
    return [w.numpy()]


# -- states of flax and modules of equinox, without variables -----------------------------------------


def flax_state(strategy: px.Strategy) -> list[Any]:
    model = linen.Dense(2)
    parameters = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))
    state = TrainState.create(apply_fn=model.apply, params=parameters, tx=optax.adam(0.05))

    def step(state: TrainState, batch: Any) -> TrainState:
        x, y = batch

        def loss(parameters: Any) -> jax.Array:
            return jnp.sum(cross_entropy(state.apply_fn(parameters, x), y)) / BATCH

        gradients = px.get_replica_context().all_reduce("sum", jax.grad(loss)(state.params))
        return state.apply_gradients(grads=gradients)

    run = px.function(lambda state, batch: strategy.run(step, args=(state, batch)))
    for batch in dataset_of(strategy):
        state = run(state, batch)
    assert run.trace_count <= 5  # not once for each number of the step
    (final, *_) = strategy.experimental_local_results(state)
    return [final.step, *jax.tree.leaves(final.params)]


def equinox_module(strategy: px.Strategy) -> list[Any]:
    optimizer = optax.adam(0.05)
    model = eqx.nn.MLP(WIDTH, 2, 6, 1, key=jax.random.key(1))
    slots = optimizer.init(eqx.filter(model, eqx.is_array))

    def step(model: Any, slots: Any, batch: Any) -> Any:
        x, y = batch

        @eqx.filter_grad
        def gradient(model: Any) -> jax.Array:
            return jnp.sum(cross_entropy(jax.vmap(model)(x), y)) / BATCH

        gradients = px.get_replica_context().all_reduce("sum", gradient(model))
        updates, slots = optimizer.update(gradients, slots)
        return eqx.apply_updates(model, updates), slots

    @eqx.filter_jit
    def run(model: Any, slots: Any, batch: Any) -> Any:
        return strategy.run(step, args=(model, slots, batch))

    for batch in list(dataset_of(strategy))[:5]:
        model, slots = run(model, slots, batch)
    (final, *_) = strategy.experimental_local_results(eqx.filter(model, eqx.is_array))
    return jax.tree.leaves(final)


PROGRAMS = {
    "tutorial": tutorial,
    "controller": controller,
    "adversaries": adversaries,
    "contrastive": contrastive,
    "normalized": normalized,
    "summed by hand": summed_by_hand,
    "flax state": flax_state,
    "equinox module": equinox_module,
}


# What central storage does differently, the tutorial has.
CASES = [
    pytest.param(
        program, strategy, marks=[pytest.mark.soak] * (strategy == "central" and name != "tutorial")
    )
    for name, program in PROGRAMS.items()
    for strategy in STRATEGIES
]
NAMES = [f"{name}-{strategy}" for name in PROGRAMS for strategy in STRATEGIES]


@pytest.mark.parametrize(("program", "strategy"), CASES, ids=NAMES)
def test_it_is_the_same_on_several_replicas(
    program: Callable[[px.Strategy], list[Any]], strategy: str
) -> None:
    same_as_alone(strategy, program)
