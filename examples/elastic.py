"""A training that loses a worker on purpose, and goes on.

    python examples/elastic.py
    phalanx run --workers 1:2 examples/elastic.py
    phalanx run --workers 1:2 examples/elastic.py --lose-at 10

All print the same losses. With `--lose-at` the second worker kills itself before that step: the first
one goes on alone, with the whole of each global batch, and `phalanx run` starts another worker, which
joins at the next step that both agree on. While it runs, `phalanx resize 1` makes it smaller.
"""

import argparse
import os
import signal

import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

parser = argparse.ArgumentParser()
parser.add_argument("--lose-at", type=int, help="before which step the second worker kills itself")
options = parser.parse_args()

rng = np.random.default_rng(0)
features = rng.normal(size=(500, 8)).astype(np.float32)
targets = np.sin(features @ rng.normal(size=8).astype(np.float32))
dataset = px.data.Dataset.from_tensor_slices((features, targets)).shuffle(500, seed=1)


def train(job):
    with job.strategy.scope():  # a strategy over the workers that there are now
        w = px.Variable(jnp.zeros(8))
        optimizer = px.train.Optimizer(optax.adam(0.05))
        optimizer.build([w])
    job.track(w=w, optimizer=optimizer)  # from the memory of the others, if there is a state already

    def replica_step(x, y):
        def loss_fn():
            losses = (jnp.tanh(x @ w.value()) - y) ** 2
            return px.nn.compute_average_loss(losses, global_batch_size=job.batch_size)

        loss, gradients = px.value_and_grad(loss_fn, [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return loss

    @px.function
    def step(x, y):
        return job.strategy.reduce("SUM", job.strategy.run(replica_step, args=(x, y)), axis=None)

    for x, y in job.steps(dataset, epochs=5):
        first_generation = job.generation == 1 and os.environ.get("PHALANX_RESTART", "0") == "0"
        if job.rank == 1 and job.step == options.lose_at and first_generation:
            os.kill(os.getpid(), signal.SIGKILL)  # as if the machine had vanished
        loss = float(step(x, y))
        if job.step % 8 == 0 and job.rank == 0:
            print(f"step {job.step}: loss {loss:.5f}", flush=True)
    return loss


final = px.train.elastic(train, batch_size=64)
print(f"the last loss is {final:.5f}", flush=True)
