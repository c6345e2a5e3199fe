"""A small GPT that is trained by the plan that suits its sizes.

    python examples/gpt_plans.py --regime weights --devices 4

With a large batch the plan is data parallel. With large weights it cuts matrices as Megatron does, and
with a large vocabulary the embedding and the head. The plans are for A100s, which need not be there;
then a small model of the same kind is trained on the devices that are.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import phalanx as px

REGIMES = {  # blocks, width, vocabulary, batch, length
    "batch": (2, 128, 512, 4096, 64),
    "weights": (2, 4096, 512, 4, 32),
    "vocabulary": (1, 256, 512 * 1024, 8, 32),
}
SMALL = (1, 32, 64, 16, 8)
HEADS = 4
OPTIMIZER = optax.adam(0.01)


def shapes_of(blocks, width, vocabulary):
    """The shapes of all parameters."""
    block = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    block |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layers = [dict(block) for _ in range(blocks)]
    return {"embedding": (vocabulary, width), "blocks": layers, "head": (width, vocabulary)}


def normalised(x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def attention(x, p):
    batch, length, width = x.shape
    q, k, v = ((x @ p[n]).reshape(batch, length, HEADS, -1) for n in ("query", "key", "value"))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // HEADS) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, length, width) @ p["out"]


def loss_fn(params, tokens, targets):
    x = params["embedding"][tokens]
    for p in params["blocks"]:
        x = x + attention(normalised(x), p)
        x = x + jax.nn.gelu(normalised(x) @ p["up"]) @ p["down"]
    chances = jax.nn.log_softmax(normalised(x) @ params["head"])
    return -jnp.take_along_axis(chances, targets[..., None], -1).mean()


def step(state, tokens, targets):
    params, slots = state
    loss, gradients = px.parallel.value_and_grad(loss_fn)(params, tokens, targets)
    updates, slots = OPTIMIZER.update(gradients, slots, params)
    return (optax.apply_updates(params, updates), slots), loss


def planned(regime, devices):
    """The layouts of a plan for large devices, by parameter."""
    *sizes, batch, length = REGIMES[regime]
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes_of(*sizes), is_leaf=is_shape
    )
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    mesh = px.parallel.mesh_of(px.parallel.profile("A100").topology(devices), (devices,), ("x",))
    plan = px.parallel.search(loss_fn, (params, tokens, tokens), mesh, "A100")
    layouts = {name.replace("/0/", "/"): tensor.spec for name, tensor in plan.parameters.items()}
    layouts["tokens"] = plan.inputs["tokens"].spec
    return {name: spec for name, spec in layouts.items() if "/1/" not in name}


def trained(devices):
    """The losses of a small model under its own plan; it learns to count."""
    blocks, width, vocabulary, batch, length = SMALL
    random = np.random.default_rng(0)
    starts = random.integers(0, vocabulary, (batch, 1))
    rows = ((starts + np.arange(length + 1)) % vocabulary).astype(np.int32)
    tokens, targets = rows[:, :-1], rows[:, 1:]

    def init(key):
        leaves, structure = jax.tree.flatten(
            shapes_of(blocks, width, vocabulary), is_leaf=lambda x: isinstance(x, tuple)
        )
        keys = jax.random.split(key, len(leaves))
        made = [0.1 * jax.random.normal(k, shape) for k, shape in zip(keys, leaves, strict=True)]
        params = jax.tree.unflatten(structure, made)
        return params, OPTIMIZER.init(params)

    program = px.parallel.parallelize(
        step,
        (jax.eval_shape(init, jax.random.key(0)), tokens, targets),
        devices=jax.devices()[:devices],
        parallel_mode="auto_parallel",
        search_mode="dynamic_programming",
    )
    state = program.create(init, jax.random.key(0))
    for _ in range(20):
        state, loss = program(state, tokens, targets)
        yield float(loss)


def main():
    parser = argparse.ArgumentParser(description="Plans for a GPT.")
    parser.add_argument("--regime", choices=[*REGIMES, "all"], default="all")
    parser.add_argument("--devices", type=int, default=4)
    options = parser.parse_args()
    px.config.ensure_cpu_devices(options.devices)
    for regime in REGIMES if options.regime == "all" else [options.regime]:
        print(f"{regime}:")
        for name, spec in planned(regime, options.devices).items():
            if spec != PartitionSpec():
                print(f"  {name} is cut {tuple(spec)}")
    losses = list(trained(options.devices))
    print(f"trained: loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
