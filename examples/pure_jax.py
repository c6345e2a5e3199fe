"""The model of custom_training_loop.py in pure JAX style, with Equinox and optax: no variables.

    python examples/pure_jax.py --strategy mirrored --replicas 4

Modules of Equinox are pytrees. The model and the optimizer's state are arguments and results of the
step. `jax.jit` compiles the whole step, `strategy.run` included. What the step returns holds one value
per replica and is given to the next step as it is. Gradients are summed over replicas, so all copies of
the parameters stay equal.

The losses are those of custom_training_loop.py, under every strategy.
"""

import equinox as eqx
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
    make_datasets,
    make_strategy,
    parse_options,
)


class Classifier(eqx.Module):
    hidden: eqx.nn.Linear
    output: eqx.nn.Linear

    def __init__(self):
        # The initial weights of custom_training_loop.py, so that losses can be compared.
        first, second = jax.random.split(jax.random.key(0))
        self.hidden = linear(0.3 * jax.random.normal(first, (FEATURES, HIDDEN)))
        self.output = linear(0.3 * jax.random.normal(second, (HIDDEN, CLASSES)))

    def __call__(self, x):
        return self.output(jax.nn.relu(self.hidden(x)))


def linear(kernel):
    layer = eqx.nn.Linear(*kernel.shape, key=jax.random.key(0))
    return eqx.tree_at(
        lambda layer: (layer.weight, layer.bias), layer, (kernel.T, jnp.zeros(kernel.shape[1]))
    )


def per_example_loss(model, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), labels)


def loss_fn(model, x, labels):
    losses = per_example_loss(model, x, labels)
    loss = px.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)
    penalty = 1e-3 * (jnp.sum(model.hidden.weight**2) + jnp.sum(model.output.weight**2))
    return loss + px.nn.scale_regularization_loss(penalty)


def main():
    options = parse_options("A training loop in pure JAX style.")
    strategy = make_strategy(options.strategy, options.replicas)
    optimizer = optax.adam(0.01)

    @jax.jit
    def train_step(model, state, batch):
        def on_replica(model, state, batch):
            loss, gradients = jax.value_and_grad(loss_fn)(model, *batch)
            gradients = px.get_replica_context().all_reduce(px.ReduceOp.SUM, gradients)
            updates, state = optimizer.update(gradients, state, model)
            return optax.apply_updates(model, updates), state, loss

        model, state, losses = strategy.run(on_replica, args=(model, state, batch))
        return model, state, strategy.reduce(px.ReduceOp.SUM, losses, axis=None)

    @jax.jit
    def test_step(model, batch):
        losses = strategy.run(per_example_loss, args=(model, *batch))
        return strategy.reduce(px.ReduceOp.SUM, losses, axis=0)

    def on_every_replica(tree):
        return strategy.experimental_distribute_values_from_function(lambda _: tree)

    model = Classifier()
    state = on_every_replica(optimizer.init(model))
    model = on_every_replica(model)

    train_data, test_data = make_datasets(strategy)
    for epoch in range(EPOCHS):
        losses = []
        for batch in train_data:
            model, state, loss = train_step(model, state, batch)
            losses.append(float(loss))
        test_losses = [float(test_step(model, batch)) for batch in test_data]
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.6f}, test loss {sum(test_losses) / 128:.6f}")


if __name__ == "__main__":
    main()
