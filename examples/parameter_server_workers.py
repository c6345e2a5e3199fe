"""Asynchronous training without a coordinator: every worker runs this program on shared variables.

    phalanx run -n 2 --ps 1 --no-chief examples/parameter_server_workers.py

Parameter servers hold the variables. Worker 0 makes them, the others wait for them; then each worker
reads its own batches and takes its own steps, without waiting for others.
"""

import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

STEPS = 150  # of each worker
WEIGHTS = np.array([1.0, -2.0, 3.0], np.float32)


def batches(context):
    """Each worker draws its own."""
    rng = np.random.default_rng(context.input_pipeline_id)
    x = rng.normal(size=(2000, 3)).astype(np.float32)
    return px.data.Dataset.from_tensor_slices((x, x @ WEIGHTS + 4)).shuffle(2000).repeat().batch(32)


def main(resolver):
    strategy = px.experimental.ParameterServerStrategy(resolver)
    with strategy.scope():
        weights = px.Variable(jnp.zeros(3), name="weights")
        bias = px.Variable(0.0, name="bias")
        optimizer = px.train.Optimizer(optax.adam(0.05))

    def step(batch):
        x, y = batch

        def loss_fn():
            return jnp.mean((x @ weights.value() + bias.value() - y) ** 2)

        return optimizer.minimize(loss_fn, [weights, bias])

    train = px.function(lambda batch: strategy.run(step, args=(batch,)))
    iterator = iter(strategy.distribute_datasets_from_function(batches))
    for _ in range(STEPS):
        loss = train(next(iterator))
    print(f"loss {float(loss):.4f}, {int(optimizer.iterations)} steps of all workers", flush=True)
    print(f"weights {np.round(weights.numpy(), 1)}, bias {float(bias):.1f}", flush=True)


resolver = px.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type == "ps":
    px.Server(resolver.cluster_spec(), job_name="ps", task_index=resolver.task_id).join()
else:
    main(resolver)
