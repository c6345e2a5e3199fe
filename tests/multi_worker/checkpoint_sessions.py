"""A small training that can be saved and restored under any strategy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px
from phalanx.train.checkpoints.trackables import found

X = np.random.default_rng(0).normal(size=(48, 6)).astype(np.float32)
Y = (X @ np.arange(24.0, dtype=np.float32).reshape(6, 4)).astype(np.float32)
BATCH = 12


class Session:
    """A model, an optimizer, a metric and an input, with a checkpoint of all of them.

    An optimizer that is not built makes its variables in the first step.
    """

    def __init__(self, over: px.Strategy, shard: str | None = None, is_built: bool = True) -> None:
        self.over = over
        sharding = None if shard is None else px.train.OptimizerSharding(shard, threshold=0)
        with over.scope():
            self.w = px.Variable(lambda: jnp.ones((6, 4)), name="w")
            self.b = px.Variable(lambda: jnp.zeros(4), name="b")
            self.c = px.Variable(lambda: jnp.ones(5), name="c")
            self.optimizer = px.train.Optimizer(optax.adam(0.1), shard=sharding)
            if is_built:
                self.optimizer.build([self.w, self.b, self.c])
            self.seen = px.train.Mean()
        dataset = px.data.Dataset.from_tensor_slices((X, Y)).shuffle(48, seed=1).batch(BATCH).repeat()
        self.input = iter(over.experimental_distribute_dataset(dataset))
        self.model = {"w": self.w, "b": self.b, "c": self.c}
        self.checkpoint = px.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            seen=self.seen,
            input=self.input,
            key=jax.random.key(5),
        )
        self._step = px.function(self._train)

    def _train(self, x: Any, y: Any) -> Any:
        def step(x: jax.Array, y: jax.Array) -> jax.Array:
            def loss() -> jax.Array:
                errors = (x @ self.w.value() + self.b.value() - y) ** 2
                each = errors.sum(axis=1) + jnp.sum(self.c.value() ** 2)
                return px.nn.compute_average_loss(each, global_batch_size=BATCH)

            variables = list(self.model.values())
            value, gradients = px.value_and_grad(loss, variables)()
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            self.seen.update_state(y)
            return value

        return self.over.reduce("sum", self.over.run(step, args=(x, y)), axis=None)

    def steps(self, count: int) -> list[float]:
        """Losses of the next steps."""
        return [float(self._step(*next(self.input))) for _ in range(count)]


def save(session: Session, path: str, is_async: bool = False, format: str = "phalanx") -> list[float]:
    """Train a little, save, and return the losses of the ten steps that follow."""
    session.steps(3)
    session.checkpoint.write(path, px.train.CheckpointOptions(enable_async=is_async, format=format))
    losses = session.steps(10)
    session.checkpoint.sync()
    return losses


def restore(session: Session, paths: list[str]) -> list[list[float]]:
    """Restore each checkpoint, see that the state is what was saved, and train ten steps."""
    losses = []
    for path in paths:
        session.checkpoint.restore(path).assert_consumed()
        saved = px.train.load_checkpoint(path)
        state = found({"model": session.model, "optimizer": session.optimizer, "seen": session.seen})
        assert {*state, "key", "save_counter"} == set(saved.get_variable_to_shape_map())
        for name, variable in state.items():
            # A sum over replicas is divided among them, by numbers that need not be powers of two.
            np.testing.assert_allclose(variable.state(), saved.get_tensor(name), rtol=1e-6)
        losses.append(session.steps(10))
    return losses
