"""The children of `step.py`, `eager.py` and `multiworker.py`: steps of an MLP, in several libraries.

``python _mlp.py VARIANT WIDTH REPLICAS`` is one child; see `MAINS` for the variants.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from _child import phalanx_strategy, phalanx_versions, serve

LEARNING_RATE = 0.01
INPUTS, CLASSES = 784, 10
BATCHES = {64: 64, 512: 256, 2048: 256}
"""The global batch for each width of the hidden layers."""

CHECK_STEPS = 10
LOSS_TOLERANCE = 1e-3  # relative
MAX_IN_FLIGHT = 16


@dataclass(frozen=True)
class Problem:
    """An MLP with two hidden layers of one width, trained by some replicas."""

    hidden: int
    replicas: int

    @property
    def batch(self) -> int:
        """How many examples all replicas together take in a step."""
        return BATCHES[self.hidden]

    @property
    def name(self) -> str:
        """For progress and error messages."""
        return f"width {self.hidden}, {self.replicas} replicas"

    def parameters(self) -> list[np.ndarray]:
        """Weights and biases, layer by layer; the same in every child."""
        rng = np.random.default_rng(0)
        made = []
        for fan_in, fan_out in itertools.pairwise((INPUTS, self.hidden, self.hidden, CLASSES)):
            weights = rng.standard_normal((fan_in, fan_out)) * np.sqrt(2 / fan_in)
            made += [weights.astype(np.float32), np.zeros(fan_out, np.float32)]
        return made

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """The global batch: inputs and labels."""
        rng = np.random.default_rng(1)
        x = rng.standard_normal((self.batch, INPUTS)).astype(np.float32)
        return x, rng.integers(0, CLASSES, self.batch).astype(np.int32)

    def parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The global batch, cut into one part per replica."""
        x, y = (np.array_split(a, self.replicas) for a in self.data())
        return list(zip(x, y, strict=True))


def serve_steps(
    versions: dict[str, str],
    reset: Callable[[], None],
    step: Callable[[], Any],
    finish: Callable[[Any], float],
) -> None:
    """Answer the parent; the first step from the initial parameters, which may copy, is not timed."""

    def reset_and_step() -> None:
        reset()
        finish(step())

    serve(versions, reset_and_step, lambda _: step(), finish)


# -- Phalanx -------------------------------------------------------------------------------------


def jax_loss(batch: int) -> Callable[..., Any]:
    """The loss of both JAX variants: a replica's share of the mean over the global batch."""
    import jax
    import jax.numpy as jnp

    def loss(parameters: Sequence[Any], x: Any, y: Any) -> Any:
        w1, b1, w2, b2, w3, b3 = parameters
        hidden = jax.nn.relu(x @ w1 + b1)
        hidden = jax.nn.relu(hidden @ w2 + b2)
        log_probabilities = jax.nn.log_softmax(hidden @ w3 + b3)
        return -jnp.sum(log_probabilities[jnp.arange(y.shape[0]), y]) / batch

    return loss


def phalanx_child(problem: Problem, **how: bool) -> None:
    serve_phalanx(problem, phalanx_strategy(problem.replicas), **how)


def serve_phalanx(
    problem: Problem,
    strategy: Any,
    before_round: Callable[[], None] = lambda: None,
    compiled: bool = True,
    compiled_gradients: bool = False,
) -> None:
    """Train under any strategy; the replicas may be those of several processes.

    An eager step updates the variables in one `merge_call`, as TensorFlow's does.
    """
    import jax
    import jax.numpy as jnp

    import phalanx as px

    with strategy.scope():
        weights = [px.Variable(p) for p in problem.parameters()]
    loss_and_gradients = jax.value_and_grad(jax_loss(problem.batch))
    if compiled_gradients:
        loss_and_gradients = jax.jit(loss_and_gradients)

    def replica_step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = loss_and_gradients([w.value() for w in weights], x, y)
        context = px.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        if compiled:
            for w, gradient in zip(weights, gradients, strict=True):
                apply_one(w, gradient)
        else:
            context.merge_call(apply, args=(gradients,))
        return loss

    def apply(strategy: px.Strategy, gradients: Sequence[Any]) -> None:
        for w, gradient in zip(weights, gradients, strict=True):
            strategy.extended.update(w, apply_one, args=(gradient,))

    def apply_one(w: px.Variable, gradient: jax.Array) -> None:
        w.assign_sub(LEARNING_RATE * gradient)

    def train(x: Any, y: Any) -> Any:
        losses = strategy.run(replica_step, args=(x, y))
        return strategy.reduce("sum", losses, axis=None) if compiled else losses

    run = px.function(train) if compiled else train
    parts = problem.parts()
    x, y = (
        strategy.experimental_distribute_values_from_function(
            lambda context, i=i: jnp.asarray(parts[context.replica_id_in_sync_group][i])
        )
        for i in range(2)
    )

    def wait() -> None:
        for w in weights:
            for copy in w.values:
                copy.value().block_until_ready()

    def reset() -> None:
        before_round()
        for w, initial in zip(weights, problem.parameters(), strict=True):
            w.assign(initial)
        wait()

    def finish(loss: Any) -> float:
        wait()
        return float(loss if compiled else strategy.reduce("sum", loss, axis=None))

    serve_steps(phalanx_versions(), reset, lambda: run(x, y), finish)


# -- hand-written JAX ------------------------------------------------------------------------------


def hand_child(problem: Problem) -> None:
    replicas = problem.replicas
    # XLA's CPU client deadlocks with fewer threads, and with more programs in flight (see `step`).
    os.environ["PJRT_NPROC"] = str(max(os.cpu_count() or 1, 2 * replicas))
    import jax

    jax.config.update("jax_num_cpu_devices", replicas)
    serve_hand(problem)


def serve_hand(problem: Problem) -> None:
    """Train on the first devices of all; they may be those of several processes."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[: problem.replicas]), ("replica",))
    whole, split = PartitionSpec(), PartitionSpec("replica")
    loss_and_gradients = jax.value_and_grad(jax_loss(problem.batch))

    def replica_step(parameters: list[Any], x: Any, y: Any) -> Any:
        loss, gradients = loss_and_gradients(parameters, x, y)
        gradients = [jax.lax.psum(g, "replica") for g in gradients]
        new = [p - LEARNING_RATE * g for p, g in zip(parameters, gradients, strict=True)]
        return new, jax.lax.psum(loss, "replica")

    mapped = jax.shard_map(
        replica_step,
        mesh=mesh,
        in_specs=(whole, split, split),
        out_specs=(whole, whole),
        check_vma=False,
    )
    train = jax.jit(mapped, donate_argnums=0)
    x, y = (jax.device_put(a, NamedSharding(mesh, split)) for a in problem.data())
    parameters: list[Any] = []
    in_flight: collections.deque[Any] = collections.deque()

    def reset() -> None:
        parameters[:] = [jax.device_put(p, NamedSharding(mesh, whole)) for p in problem.parameters()]
        jax.block_until_ready(parameters)

    def step() -> Any:
        parameters[:], loss = train(parameters, x, y)
        in_flight.append(loss)
        if len(in_flight) > MAX_IN_FLIGHT:
            in_flight.popleft().block_until_ready()
        return loss

    def finish(loss: Any) -> float:
        jax.block_until_ready(parameters)
        in_flight.clear()
        return float(loss)

    serve_steps({"JAX": jax.__version__}, reset, step, finish)


# -- TensorFlow ----------------------------------------------------------------------------------


def tensorflow_child(problem: Problem, **how: bool) -> None:
    import tensorflow as tf

    replicas = problem.replicas
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    serve_tensorflow(problem, strategy, **how)


def serve_tensorflow(problem: Problem, strategy: Any, compiled: bool = True) -> None:
    """Train under any strategy; the replicas may be those of several processes."""
    import tensorflow as tf

    with strategy.scope():
        weights = [tf.Variable(p) for p in problem.parameters()]
    w1, b1, w2, b2, w3, b3 = weights

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(x @ w1 + b1)
            hidden = tf.nn.relu(hidden @ w2 + b2)
            logits = hidden @ w3 + b3
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
            loss = tf.reduce_sum(losses) / problem.batch
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, tape.gradient(loss, weights))
        context.merge_call(apply, args=(gradients,))
        return loss

    def apply(strategy: tf.distribute.Strategy, gradients: Sequence[Any]) -> None:
        for w, gradient in zip(weights, gradients, strict=True):
            strategy.extended.update(w, apply_one, args=(gradient,))

    def apply_one(w: tf.Variable, gradient: tf.Tensor) -> None:
        w.assign_sub(LEARNING_RATE * gradient)

    def total(losses: Any) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def train(x: Any, y: Any) -> Any:
        losses = strategy.run(replica_step, args=(x, y))
        return total(losses) if compiled else losses

    run = tf.function(train) if compiled else train
    parts = problem.parts()

    def distribute(which: int) -> Any:
        def value(context: tf.distribute.experimental.ValueContext) -> tf.Tensor:
            i = context.replica_id_in_sync_group
            here = strategy.extended.worker_devices
            with tf.device(here[i % len(here)]):
                return tf.constant(parts[i][which])

        return strategy.experimental_distribute_values_from_function(value)

    x, y = distribute(0), distribute(1)

    def wait() -> None:
        # One element of each copy, because `numpy` copies the whole.
        for w in weights:
            for copy in strategy.experimental_local_results(w):
                tf.reshape(copy, [-1])[0].numpy()

    def reset() -> None:
        for w, initial in zip(weights, problem.parameters(), strict=True):
            w.assign(initial)
        wait()

    def finish(loss: Any) -> float:
        wait()
        return float(loss if compiled else total(loss))

    serve_steps({"TensorFlow": tf.__version__}, reset, lambda: run(x, y), finish)


# -- torch ---------------------------------------------------------------------------------------


def torch_child(problem: Problem) -> None:
    import torch

    with torch_ranks(problem) as ranks:

        def ask(command: int) -> list[float]:
            for connection in ranks:
                connection.send(command)
            return [connection.recv() for connection in ranks]

        def reset() -> None:
            ask(0)
            ask(1)

        # The ranks loop by themselves: steps are only counted here, and all of them run at the end.
        versions = {"torch": torch.__version__.split("+")[0]}
        serve(versions, reset, lambda i: i + 1, lambda count: statistics.fmean(ask(count)))


@contextlib.contextmanager
def torch_ranks(problem: Problem) -> Iterator[list[Any]]:
    """A process for each rank; gives connections to them."""
    from torch import multiprocessing

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)  # so that the ranks end with this process
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    start = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    connections: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(problem.replicas):
                here, there = start.Pipe()
                arguments = (problem, rank, str(Path(folder) / "store"), there)
                process = start.Process(target=torch_rank, args=arguments, daemon=True)
                process.start()
                there.close()
                processes.append(process)
                connections.append(here)
            for connection in connections:
                connection.recv()
            yield connections
        finally:
            for connection in connections:
                connection.close()
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(2.0)
                if process.is_alive():
                    process.kill()
                    process.join(2.0)


def torch_rank(problem: Problem, rank: int, store: str, parent: Any) -> None:
    """A rank: answers each number of steps with the loss of the last one; 0 starts all over."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # the pipe to the benchmark is not for ranks
    from torch import distributed

    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=problem.replicas
    )
    reset, step = torch_training(problem, rank)

    def train(steps: int) -> float:
        for _ in range(steps):
            loss = step()
        distributed.barrier()
        return float(loss)

    parent.send("ready")
    with contextlib.suppress(EOFError):  # the parent is gone
        while True:
            steps = parent.recv()
            if steps:
                parent.send(train(steps))
            else:
                reset()
                parent.send(0.0)


def torch_training(problem: Problem, rank: int) -> tuple[Callable[[], None], Callable[[], Any]]:
    """How a rank that has joined the others starts all over, and makes one step."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    width = problem.hidden
    model = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, CLASSES),
    )
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    x, y = (torch.from_numpy(np.array(a)) for a in problem.parts()[rank])
    y = y.long()

    def reset() -> None:
        with torch.no_grad():
            for parameter, initial in zip(model.parameters(), problem.parameters(), strict=True):
                parameter.copy_(torch.from_numpy(initial.T))
        distributed.barrier()

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return reset, step


MAINS: dict[str, Callable[[Problem], None]] = {
    "phalanx": phalanx_child,
    "hand": hand_child,
    "tensorflow": tensorflow_child,
    "torch": torch_child,
    "eager-phalanx": partial(phalanx_child, compiled=False),
    "eager-phalanx-jit": partial(phalanx_child, compiled=False, compiled_gradients=True),
    "eager-tensorflow": partial(tensorflow_child, compiled=False),
}


if __name__ == "__main__":
    MAINS[sys.argv[1]](Problem(int(sys.argv[2]), int(sys.argv[3])))
