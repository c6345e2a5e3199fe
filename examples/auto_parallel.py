"""An MLP in any of MindSpore's five modes: one step, and one word that says how devices share it.

    python examples/auto_parallel.py --mode auto_parallel --devices 4

The step is plain JAX and optax; only its gradient is `px.parallel.value_and_grad`. The parameters are
made in parts on the devices that will hold them. In `auto_parallel` the plan is searched and printed.

The losses are the same in every mode.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

FEATURES, HIDDEN, CLASSES = 64, 256, 10
BATCH_SIZE, EPOCHS = 128, 3


def parse_options():
    parser = argparse.ArgumentParser(description="An MLP in one of MindSpore's modes.")
    parser.add_argument("--mode", choices=px.parallel.ParallelMode.MODE_LIST, default="auto_parallel")
    parser.add_argument("--devices", type=int, default=4)
    return parser.parse_args()


def make_data():
    """Points of ten clouds; the last batch has fewer of them."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(CLASSES, FEATURES))
    labels = random.integers(0, CLASSES, 600).astype(np.int32)
    points = (centres[labels] + random.normal(size=(600, FEATURES))).astype(np.float32)
    return [(points[i : i + BATCH_SIZE], labels[i : i + BATCH_SIZE]) for i in range(0, 600, BATCH_SIZE)]


def init(key):
    first, second = jax.random.split(key)
    params = {
        "up": {"kernel": 0.1 * jax.random.normal(first, (FEATURES, HIDDEN)), "bias": jnp.zeros(HIDDEN)},
        "down": {
            "kernel": 0.1 * jax.random.normal(second, (HIDDEN, CLASSES)),
            "bias": jnp.zeros(CLASSES),
        },
    }
    return params, OPTIMIZER.init(params)


def loss_fn(params, points, labels):
    hidden = jax.nn.relu(points @ params["up"]["kernel"] + params["up"]["bias"])
    logits = hidden @ params["down"]["kernel"] + params["down"]["bias"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


OPTIMIZER = optax.adam(0.01)


def step(state, points, labels):
    params, slots = state
    loss, gradients = px.parallel.value_and_grad(loss_fn)(params, points, labels)
    updates, slots = OPTIMIZER.update(gradients, slots, params)
    return (optax.apply_updates(params, updates), slots), loss


def main():
    options = parse_options()
    px.config.ensure_cpu_devices(options.devices)
    batches = make_data()
    if options.mode == "hybrid_parallel":  # where each device must get as much
        batches = [batch for batch in batches if len(batch[0]) == BATCH_SIZE]
    given = {}
    if options.mode == "semi_auto_parallel":
        count = options.devices
        given["parameter_plan"] = {
            "up/kernel": (1, count),
            "up/bias": (count,),
            "down/kernel": (count, 1),
        }
    program = px.parallel.parallelize(
        step,
        (jax.eval_shape(init, jax.random.key(0)), *batches[0]),
        devices=jax.devices()[: options.devices],
        parallel_mode=options.mode,
        gradients_mean=True,
        donate_argnums=0,
        **given,
    )
    if program.plan is not None:
        print(program.plan)
    state = program.create(init, jax.random.key(0))
    for epoch in range(EPOCHS):
        losses = []
        for batch in batches:
            state, loss = program(state, *batch)
            losses.append(float(loss))
        print(f"epoch {epoch + 1}: loss {losses[0]:.6f}, last {losses[-1]:.6f}")
    held = program.held(state[0]["up"]["kernel"])
    print(f"device 0 holds {held.shape} of up/kernel")


if __name__ == "__main__":
    main()
