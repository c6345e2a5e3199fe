"""The model of custom_training_loop.py in pure JAX style: no variables, only functions of pytrees.

    python examples/pure_jax.py --strategy mirrored --replicas 4

Parameters and optimizer state are arguments and results of the step. `jax.jit` compiles the whole step,
`strategy.run` included. What the step returns holds one value per replica and is given to the next step
as it is. Gradients are summed over replicas, so all copies of the parameters stay equal.

The losses are those of custom_training_loop.py, under every strategy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px
from custom_training_loop import (
    CLASSES,
    EPOCHS,
    FEATURES,
    GLOBAL_BATCH_SIZE,
    HIDDEN,
    distribute,
    make_data,
    make_strategy,
    parse_options,
)


def init():
    first, second = jax.random.split(jax.random.key(0))
    return {
        "w1": 0.3 * jax.random.normal(first, (FEATURES, HIDDEN)),
        "b1": jnp.zeros(HIDDEN),
        "w2": 0.3 * jax.random.normal(second, (HIDDEN, CLASSES)),
        "b2": jnp.zeros(CLASSES),
    }


def per_example_loss(params, x, labels):
    predictions = jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(predictions, labels)


def loss_fn(params, x, labels):
    losses = per_example_loss(params, x, labels)
    loss = px.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)
    penalty = 1e-3 * (jnp.sum(params["w1"] ** 2) + jnp.sum(params["w2"] ** 2))
    return loss + px.nn.scale_regularization_loss(penalty)


def main():
    options = parse_options("A training loop in pure JAX style.")
    strategy = make_strategy(options.strategy, options.replicas)
    optimizer = optax.adam(0.01)

    @jax.jit
    def train_step(params, state, batch):
        def on_replica(params, state, batch):
            loss, gradients = jax.value_and_grad(loss_fn)(params, *batch)
            gradients = px.get_replica_context().all_reduce(px.ReduceOp.SUM, gradients)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        params, state, losses = strategy.run(on_replica, args=(params, state, batch))
        return params, state, strategy.reduce(px.ReduceOp.SUM, losses, axis=None)

    @jax.jit
    def test_step(params, batch):
        losses = strategy.run(per_example_loss, args=(params, *batch))
        return strategy.reduce(px.ReduceOp.SUM, losses, axis=0)

    def on_every_replica(tree):
        return strategy.experimental_distribute_values_from_function(lambda _: tree)

    params = init()
    state = on_every_replica(optimizer.init(params))
    params = on_every_replica(params)

    train_data, test_data = make_data(512, seed=1), make_data(128, seed=2)
    shuffle = np.random.default_rng(3)
    for epoch in range(EPOCHS):
        losses = []
        for batch in distribute(strategy, train_data, shuffle.permutation(512)):
            params, state, loss = train_step(params, state, batch)
            losses.append(float(loss))
        test_losses = [
            float(test_step(params, batch)) for batch in distribute(strategy, test_data, np.arange(128))
        ]
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.6f}, test loss {sum(test_losses) / 128:.6f}")


if __name__ == "__main__":
    main()
