"""Answers to names that the package does not have, but that its users bring from elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NoReturn

ELSEWHERE = {
    "GradientTape": "px.value_and_grad(loss_fn, variables) gives the loss and its gradients",
    "gradients": "px.grad(loss_fn, variables) gives the gradients",
    "Tensor": "values are arrays of JAX: jax.Array",
    "constant": "make arrays with jax.numpy.asarray",
    "convert_to_tensor": "make arrays with jax.numpy.asarray",
    "cast": "write x.astype(dtype)",
    "zeros": "use jax.numpy.zeros",
    "ones": "use jax.numpy.ones",
    "reduce_sum": "use jax.numpy.sum, and strategy.reduce over replicas",
    "reduce_mean": "use jax.numpy.mean, and strategy.reduce over replicas",
    "print": "jax.debug.print prints from compiled functions",
    "py_function": "jax.pure_callback and jax.experimental.io_callback call Python",
    "numpy_function": "jax.pure_callback and jax.experimental.io_callback call Python",
    "distribute": "what TensorFlow has in tf.distribute, px has itself: px.MirroredStrategy",
    "get_strategy_scope": "px.get_strategy() gives the strategy, whose scope() is the scope",
    "Dataset": "datasets are px.data.Dataset",
    "Optimizer": "the optimizer is px.train.Optimizer",
    "ClusterSpec": "the cluster's description is px.train.ClusterSpec",
    "jit": "px.function compiles functions that use variables; jax.jit works for pure ones",
    "pmap": "strategy.run runs a function on all replicas",
    "init_process_group": "collectives between workers are px.comm, which begins with px.comm.init()",
    "all_reduce": "in strategy.run: px.get_replica_context().all_reduce; between workers: px.comm",
    "DistributedDataParallel": "px.MirroredStrategy().run runs a step on all replicas",
}
"""What to write instead of names of TensorFlow, JAX and torch."""


def no_such_name(module: str, name: str, names: Sequence[str]) -> NoReturn:
    """Say that a module does not have a name, and what its user may have meant."""
    text = f"{module} has no {name!r}."
    if name in ELSEWHERE:
        text += f" In Phalanx, {ELSEWHERE[name]}."
    elif close := difflib.get_close_matches(name, names, n=1, cutoff=0.8):
        text += f" Did you mean {module}.{close[0]}?"
    raise AttributeError(text)
