"""A model with large tables of embeddings, trained by the plan that suits their sizes.

    python examples/embedding_plans.py --devices 4

It says whether a user likes an item. Nearly all of its parameters are rows of two tables, of which a
batch reads few. So the plan cuts the tables over the devices, and leaves the small layers whole: the
rows of a batch travel, and not the gradients of tables. With small tables and a large batch it is data
parallel: the batch is cut, and parameters are kept in parts that are gathered before use. The plans are
for A100s, which need not be there; then a small model of the same kind is trained on the devices that
are.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

SIZES = {  # users, items, width, batch
    "large tables": (8_000_000, 2_000_000, 64, 1024),
    "small tables": (1024, 256, 64, 65_536),
}
SMALL = (64, 32, 8, 512)
HIDDEN = 32
OPTIMIZER = optax.adam(0.05)


def shapes_of(users, items, width):
    """The shapes of all parameters."""
    layers = {"up": (2 * width, HIDDEN), "bias": (HIDDEN,), "down": (HIDDEN,)}
    return {"users": (users, width), "items": (items, width), **layers}


def loss_fn(params, users, items, liked):
    rows = jnp.concatenate([params["users"][users], params["items"][items]], -1)
    hidden = jax.nn.relu(rows @ params["up"] + params["bias"])
    return optax.sigmoid_binary_cross_entropy(hidden @ params["down"], liked).mean()


def step(state, users, items, liked):
    params, slots = state
    loss, gradients = px.parallel.value_and_grad(loss_fn)(params, users, items, liked)
    updates, slots = OPTIMIZER.update(gradients, slots, params)
    return (optax.apply_updates(params, updates), slots), loss


def planned(kind, devices):
    """The plan for large devices."""
    *sizes, batch = SIZES[kind]
    shapes = shapes_of(*sizes)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    ids, liked = (jax.ShapeDtypeStruct((batch,), dtype) for dtype in (jnp.int32, jnp.float32))
    mesh = px.parallel.mesh_of(px.parallel.profile("A100").topology(devices), (devices,), ("x",))
    return px.parallel.search(loss_fn, (params, ids, ids, liked), mesh, "A100")


def examples(seed=0):
    """Users like items of their own kind, of which there are two."""
    users, items, _, batch = SMALL
    random = np.random.default_rng(seed)
    who, what = (random.integers(0, n, batch).astype(np.int32) for n in (users, items))
    return who, what, (who % 2 == what % 2).astype(np.float32)


def trained(devices):
    """The losses of a small model under its own plan."""
    shapes = shapes_of(*SMALL[:-1])

    def init(key):
        keys = jax.random.split(key, len(shapes))
        pairs = zip(keys, shapes.items(), strict=True)
        params = {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in pairs}
        return params, OPTIMIZER.init(params)

    program = px.parallel.parallelize(
        step,
        (jax.eval_shape(init, jax.random.key(0)), *examples()),
        devices=jax.devices()[:devices],
        parallel_mode="auto_parallel",
        search_mode="dynamic_programming",
    )
    state = program.create(init, jax.random.key(0))
    for seed in range(40):
        state, loss = program(state, *examples(seed))
        yield float(loss)


def main():
    parser = argparse.ArgumentParser(description="Plans for a model with tables of embeddings.")
    parser.add_argument("--devices", type=int, default=4)
    options = parser.parse_args()
    px.config.ensure_cpu_devices(options.devices)
    for kind in SIZES:
        plan = planned(kind, options.devices)
        print(f"{kind}: {plan.memory.total / 1e9:.2f} GB per device")
        for name, tensor in {**plan.parameters, **plan.inputs}.items():
            how = f"cut {tuple(tensor.spec)}" if any(tensor.spec) else "whole"
            print(f"  {name} is {how}")
    losses = list(trained(options.devices))
    print(f"trained: loss {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
