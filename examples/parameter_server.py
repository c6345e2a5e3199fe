"""Asynchronous training of a linear model: two workers, two parameter servers, a coordinator.

    phalanx run -n 2 --ps 2 examples/parameter_server.py
    phalanx run -n 2 --ps 2 --restarts 3 examples/parameter_server.py --kill

Every process runs this program. The chief coordinates: it schedules steps, and any worker that has time
runs them. With --kill, a worker dies in the middle. Its steps run on the other one, and each of them
counts once: the servers count exactly as many steps as the chief has scheduled.
"""

import argparse
import os
import signal

import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--kill", action="store_true", help="a worker dies after a while")
options = parser.parse_args()

WEIGHTS = np.array([1.0, -2.0, 3.0], np.float32)


def batches():
    """Each worker draws its own."""
    rng = np.random.default_rng()
    x = rng.normal(size=(2000, 3)).astype(np.float32)
    return px.data.Dataset.from_tensor_slices((x, x @ WEIGHTS + 4)).shuffle(2000).repeat().batch(32)


def die_once():
    """End this worker as if its machine had failed, unless it has been started again."""
    index = px.coordinator.experimental_get_current_worker_index()
    if index == 0 and os.environ.get("PHALANX_RESTART") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def main(resolver):
    strategy = px.ParameterServerStrategy(resolver)
    coordinator = px.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = px.Variable(jnp.zeros(3), name="weights")
        bias = px.Variable(0.0, name="bias")
        count = px.Variable(0, name="count")
        optimizer = px.train.Optimizer(optax.adam(0.05))

    @px.function
    def step(iterator):
        x, y = next(iterator)

        def loss_fn():
            return jnp.mean((x @ weights.value() + bias.value() - y) ** 2)

        loss, gradients = px.value_and_grad(loss_fn, [weights, bias])()
        optimizer.apply_gradients(zip(gradients, [weights, bias], strict=True))
        count.assign_add(1)
        return loss

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    for i in range(options.steps):
        loss = coordinator.schedule(step, args=(iterator,))
        if options.kill and i == options.steps // 2:
            coordinator.schedule(px.function(die_once))
        if (i + 1) % 100 == 0:
            print(f"step {i + 1}: loss {loss.fetch():.4f}", flush=True)
    coordinator.join()
    print(f"{int(count)} of {options.steps} steps counted", flush=True)
    print(f"weights {np.round(weights.numpy(), 1)}, bias {float(bias):.1f}", flush=True)


resolver = px.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    cluster = resolver.cluster_spec()
    px.Server(cluster, job_name=resolver.task_type, task_index=resolver.task_id).join()
else:
    main(resolver)
