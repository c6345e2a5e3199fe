"""One model, trained with models, loaders and checkpoints of other libraries.

    python examples/libraries.py optax
    python examples/libraries.py flax_linen --replicas 4
    phalanx run -n 2 examples/libraries.py grain --strategy workers

The first argument says which library: optax (plain pytrees), flax_linen, flax_nnx, equinox, grain,
orbax or datasets (of Hugging Face). However many replicas and workers there are, each prints the same
losses: a replica computes its part of every batch, and gradients are summed.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

FEATURES, HIDDEN, ROWS, BATCH, EPOCHS = 4, 8, 44, 16, 2  # the last batch has 12 rows
OPTIMIZER = optax.adam(0.05)


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return x, np.sin(x @ np.float32([1.0, -2.0, 0.5, 1.0]))


def start():
    """The weights that every library begins with, so that losses can be compared."""
    first, second = jax.random.split(jax.random.key(0))
    return {
        "hidden": 0.5 * jax.random.normal(first, (FEATURES, HIDDEN)),
        "output": 0.5 * jax.random.normal(second, (HIDDEN, 1)),
    }


# -- models: parameters, and what computes predictions -------------------------------------------------


def of_optax():
    """Plain pytrees: nothing else is needed."""
    return start(), lambda params, x: jnp.tanh(x @ params["hidden"]) @ params["output"]


def of_flax_linen():
    """The parameters are a pytree beside the module."""
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = jnp.tanh(linen.Dense(HIDDEN, use_bias=False, name="hidden")(x))
            return linen.Dense(1, use_bias=False, name="output")(x)

    params = {"params": {name: {"kernel": kernel} for name, kernel in start().items()}}
    return params, Model().apply


def of_flax_nnx():
    """A module has its parameters inside: it is taken apart, and made again in the step."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(FEATURES, HIDDEN, use_bias=False, rngs=rngs)
            self.output = nnx.Linear(HIDDEN, 1, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.output(jnp.tanh(self.hidden(x)))

    model = Model(nnx.Rngs(0))
    for name, kernel in start().items():
        getattr(model, name).kernel[...] = kernel
    graph, params = nnx.split(model)
    return params, lambda params, x: nnx.merge(graph, params)(x)


def of_equinox():
    """A module is a pytree itself; what is no array stays outside of the variables."""
    import equinox as eqx

    class Model(eqx.Module):
        hidden: jax.Array
        output: jax.Array
        activation: object

        def __call__(self, x):
            return self.activation(x @ self.hidden) @ self.output

    params, rest = eqx.partition(Model(**start(), activation=jnp.tanh), eqx.is_array)
    return params, lambda params, x: eqx.combine(params, rest)(x)


# -- input: batches of the global size -----------------------------------------------------------------


def batches_of_grain():
    """A data loader of Grain; every worker has the same one, and takes its rows of each batch."""
    import grain.python as grain

    x, y = arrays()
    dataset = grain.MapDataset.source([(x[i], y[i]) for i in range(ROWS)])
    return dataset.batch(BATCH, drop_remainder=False).to_iter_dataset()


def batches_of_datasets():
    """A dataset of Hugging Face, as NumPy batches."""
    import datasets

    x, y = arrays()
    table = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("numpy")
    return [(b["x"].astype(np.float32), b["y"].astype(np.float32)) for b in table.iter(BATCH)]


def batches(library):
    if library == "grain":
        return batches_of_grain()
    if library == "datasets":
        return batches_of_datasets()
    return px.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)


# -- training ------------------------------------------------------------------------------------------


def train(library, strategy):
    made = {"flax_linen": of_flax_linen, "flax_nnx": of_flax_nnx, "equinox": of_equinox}
    params, predict = made.get(library, of_optax)()
    with strategy.scope():  # each array becomes a variable, in a nest of the same structure
        variables = jax.tree.map(px.Variable, params)
        optimizer = px.train.Optimizer(OPTIMIZER)

    def step(x, y):
        def loss():
            values = jax.tree.map(lambda v: v.value(), variables, is_leaf=is_variable)
            losses = (predict(values, x)[:, 0] - y) ** 2
            return px.nn.compute_average_loss(losses, global_batch_size=BATCH)

        return optimizer.minimize(loss, jax.tree.leaves(variables, is_leaf=is_variable))

    @px.function
    def train_step(x, y):
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    dataset = strategy.experimental_distribute_dataset(batches(library))
    for epoch in range(EPOCHS):
        losses = [float(train_step(*batch)) for batch in dataset]
        if strategy.extended.should_save_summary:
            print(f"epoch {epoch}: loss {np.mean(losses):.5f}", flush=True)
        if library == "orbax":
            save_and_restore(variables)


def is_variable(x):
    return isinstance(x, px.Variable)


def save_and_restore(variables):
    """All workers save together, in Orbax's format, and go on with what is in the file."""
    listed = jax.tree.leaves(variables, is_leaf=is_variable)
    checkpoint = px.train.Checkpoint(model=listed)
    folder = [tempfile.mkdtemp()]
    px.comm.broadcast_object_list(folder)  # the first worker's
    options = px.train.CheckpointOptions(format="orbax")
    path = checkpoint.write(f"{folder[0]}/state", options)
    for v in listed:
        v.assign(jnp.zeros(v.shape))
    checkpoint.read(path).assert_consumed()


def main():
    libraries = ["optax", "flax_linen", "flax_nnx", "equinox", "grain", "orbax", "datasets"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=libraries)
    parser.add_argument("--strategy", choices=["mirrored", "workers"], default="mirrored")
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    if options.strategy == "workers":
        strategy = px.MultiWorkerMirroredStrategy()
    else:
        px.config.ensure_cpu_devices(options.replicas)
        strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    train(options.library, strategy)


if __name__ == "__main__":
    main()
