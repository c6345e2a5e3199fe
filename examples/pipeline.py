"""A small language model in four stages, whose first and last stage share the embedding.

    python examples/pipeline.py --schedule 1f1b --micro-batches 8

Each stage has a device of its own. The schedule is printed, with a line for each stage. The losses are
those of the same model on one device, whatever the schedule is.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

STAGES, VOCABULARY, WIDTH, LENGTH, ROWS, STEPS = 4, 32, 16, 12, 32, 20


def embed(params, tokens):
    return params["embedding"][tokens]


def block(params, x):
    mixed = jnp.cumsum(x, 1) / (1 + jnp.arange(x.shape[1]))[:, None]  # each position sees those before
    return x + jax.nn.gelu(mixed @ params["up"]) @ params["down"]


def loss(params, x, targets):
    scores = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], -1))


def make_params():
    keys = jax.random.split(jax.random.key(0), 2 * STAGES)

    def matrix(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) / np.sqrt(rows)

    def middle(i):
        return {
            "up": matrix(keys[2 * i], WIDTH, 4 * WIDTH),
            "down": matrix(keys[2 * i + 1], 4 * WIDTH, WIDTH),
        }

    return [{"embedding": matrix(keys[0], VOCABULARY, WIDTH)}, middle(1), middle(2), {}]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "seqpipe"])
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    px.config.ensure_cpu_devices(STAGES)
    pipe = px.parallel.pipeline(
        [embed, block, block, loss],
        options.schedule,
        options.micro_batches,
        shared={"embedding": (0, 3)},
        devices=[f"CPU:{i}" for i in range(STAGES)],
    )
    print(pipe.schedule)
    params = pipe.place(make_params())
    optimizer = pipe.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    state = optimizer.init(params)
    start = np.arange(ROWS)[:, None]
    sequences = (start + np.arange(LENGTH + 1) * (1 + start % 3)) % VOCABULARY
    for step in range(STEPS):
        value, gradients = pipe.value_and_grad(params, sequences[:, :-1], sequences[:, 1:])
        params, state = optimizer.update(gradients, state, params)
        if step % 5 == 4:
            print(f"step {step + 1}: loss {float(value):.4f}")


if __name__ == "__main__":
    main()
