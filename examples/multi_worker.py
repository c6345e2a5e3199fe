"""One program for any number of workers.

    python examples/multi_worker.py
    phalanx run -n 2 examples/multi_worker.py
    phalanx run -n 2 --devices-per-worker 2 examples/multi_worker.py

All print the same losses: every worker runs this program, reads its share of each global batch, and
takes part in every update.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

strategy = px.MultiWorkerMirroredStrategy()  # first of all: it waits for the other workers

GLOBAL_BATCH_SIZE, EPOCHS = 64, 4

rng = np.random.default_rng(0)
features = rng.normal(size=(500, 8)).astype(np.float32)  # the last batch has 52 rows
targets = np.sin(features @ rng.normal(size=8).astype(np.float32))
dataset = px.data.Dataset.from_tensor_slices((features, targets))
dataset = dataset.shuffle(500, seed=1).batch(GLOBAL_BATCH_SIZE)
distributed = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    hidden = px.Variable(rng.normal(size=(8, 32)).astype(np.float32) / 3, name="hidden")
    output = px.Variable(jnp.zeros(32), name="output")
    optimizer = px.train.Optimizer(optax.adam(0.01))
    mean_loss = px.train.Mean()


def train_step(x, y):
    def loss_fn():
        losses = (jnp.tanh(x @ hidden.value()) @ output.value() - y) ** 2
        mean_loss.update_state(jax.lax.stop_gradient(losses))
        return px.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH_SIZE)

    _, gradients = px.value_and_grad(loss_fn, [hidden, output])()
    optimizer.apply_gradients(zip(gradients, [hidden, output], strict=True))


@px.function
def distributed_step(x, y):
    strategy.run(train_step, args=(x, y))


for epoch in range(EPOCHS):
    for x, y in distributed:
        distributed_step(x, y)
    loss = float(mean_loss.result())  # all workers must ask, because it is added up over all of them
    if strategy.extended.should_save_summary:  # and one of them prints
        print(f"epoch {epoch}: loss {loss:.5f}", flush=True)
    mean_loss.reset_state()
