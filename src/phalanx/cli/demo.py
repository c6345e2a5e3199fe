"""``phalanx demo``: train a small classifier on several replicas, and on one for comparison.

The model is a two-layer perceptron on scikit-learn's handwritten digits. The training loop is written
once, against `px.Strategy`; only the strategy changes between the two runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import phalanx as px

GLOBAL_BATCH = 64
LEARNING_RATE = 0.1
MOMENTUM = 0.9
HIDDEN = 128


@dataclass(frozen=True)
class Digits:
    """The data: pixels scaled to [0, 1], labels from 0 to 9."""

    train_x: np.ndarray[Any, Any]
    train_y: np.ndarray[Any, Any]
    test_x: np.ndarray[Any, Any]
    test_y: np.ndarray[Any, Any]


@dataclass(frozen=True)
class TrainingResult:
    """What a training run ended with."""

    losses: list[float]
    accuracy: float
    parameters: list[np.ndarray[Any, Any]]
    seconds: float


def load_digits() -> Digits:
    """Scikit-learn's digits, split into 1437 training and 360 test examples."""
    from sklearn.datasets import load_digits as load

    data = load()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (data.data[order] / 16.0).astype(np.float32)
    y = data.target[order].astype(np.int32)
    return Digits(x[:1437], y[:1437], x[1437:], y[1437:])


def initial_parameters() -> list[jax.Array]:
    """Weights and biases of the two layers."""
    first, second = jax.random.split(jax.random.key(0))
    return [
        jax.random.normal(first, (64, HIDDEN)) * np.sqrt(2 / 64),
        jnp.zeros(HIDDEN),
        jax.random.normal(second, (HIDDEN, 10)) * np.sqrt(2 / HIDDEN),
        jnp.zeros(10),
    ]


@jax.jit
def logits(parameters: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """The model."""
    w1, b1, w2, b2 = parameters
    return jax.nn.relu(x @ w1 + b1) @ w2 + b2


@jax.jit
def loss_and_gradients(
    parameters: list[jax.Array], x: jax.Array, y: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """The replica's part of the loss of a global batch, and its gradients."""

    def loss(parameters: list[jax.Array]) -> jax.Array:
        scores = jax.nn.log_softmax(logits(parameters, x))
        return -jnp.sum(scores[jnp.arange(len(y)), y]) / GLOBAL_BATCH

    return jax.value_and_grad(loss)(parameters)


def batches(strategy: px.Strategy, data: Digits) -> px.DistributedDataset:
    """Shuffled global batches of the training data; the last one is smaller."""
    dataset = px.data.Dataset.from_tensor_slices((data.train_x, data.train_y))
    shuffled = dataset.shuffle(len(data.train_x), seed=1).batch(GLOBAL_BATCH)
    return strategy.experimental_distribute_dataset(shuffled)


def train(strategy: px.Strategy, data: Digits, epochs: int, progress: Progress) -> TrainingResult:
    """The training loop; nothing in it depends on which strategy it is given."""
    with strategy.scope():
        weights = [px.Variable(p, name=f"w{i}") for i, p in enumerate(initial_parameters())]
        momenta = [px.Variable(jnp.zeros(w.shape), trainable=False) for w in weights]

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = loss_and_gradients([w.value() for w in weights], x, y)
        context = px.get_replica_context()
        assert context is not None
        gradients = context.all_reduce(px.ReduceOp.SUM, gradients)
        context.merge_call(apply, args=(gradients,))
        return loss

    def apply(strategy: px.Strategy, gradients: Sequence[Any]) -> None:
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            strategy.extended.update(weight, apply_one, args=(momentum, gradient))

    def apply_one(weight: px.Variable, momentum: px.Variable, gradient: jax.Array) -> None:
        momentum.assign(MOMENTUM * momentum + gradient)
        weight.assign_sub(LEARNING_RATE * momentum)

    @px.function
    def train_step(x: Any, y: Any) -> Any:
        per_replica = strategy.run(step, args=(x, y))
        return strategy.reduce(px.ReduceOp.SUM, per_replica, axis=None)

    started = time.perf_counter()
    losses = []
    count = len(data.train_x)
    steps = -(-count // GLOBAL_BATCH)
    task = progress.add_task(describe(strategy), total=epochs * steps, loss="")
    dataset = batches(strategy, data)
    for _ in range(epochs):
        total = 0.0
        for batch in dataset:
            total += train_step(*batch) * GLOBAL_BATCH / count
            progress.advance(task)
        losses.append(float(total))
        progress.update(task, loss=f"loss {total:.4f}")

    final = [w.value() for w in weights]
    right = np.argmax(np.asarray(logits(final, data.test_x)), axis=1) == data.test_y
    seconds = time.perf_counter() - started
    return TrainingResult(losses, float(np.mean(right)), [np.asarray(w) for w in final], seconds)


def describe(strategy: px.Strategy) -> str:
    """A strategy's name and number of replicas."""
    count = strategy.num_replicas_in_sync
    return f"{type(strategy).__name__} ({count} replica{'s' if count > 1 else ''})"


def placement_table(strategy: px.Strategy, data: Digits) -> Table:
    """Which examples of the first batch go to which device."""
    table = Table(title="A global batch of 64 examples on the replicas")
    for column in ("replica", "device", "examples", "labels"):
        table.add_column(column)
    _, labels = next(iter(batches(strategy, data)))
    results = strategy.experimental_local_results(labels)
    for i, (device, part) in enumerate(zip(strategy.extended.worker_devices, results, strict=True)):
        shown = " ".join(str(v) for v in np.asarray(part)[:8])
        table.add_row(str(i), device.rsplit("device:")[-1], str(len(part)), f"{shown} …")
    return table


def run_demo(replicas: int = 4, epochs: int = 15, console: Console | None = None) -> int:
    """Train under both strategies and compare; returns the exit code."""
    console = console or Console()
    px.config.set_logical_device_configuration(
        px.config.list_physical_devices("CPU")[0],
        [px.config.LogicalDeviceConfiguration()] * replicas,
    )
    try:
        data = load_digits()
    except ImportError:
        console.print("The demo needs scikit-learn: pip install 'phalanx[demo]'")
        return 1
    mirrored = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    console.print(placement_table(mirrored, data))
    columns = (
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        many = train(mirrored, data, epochs, progress)
        one = train(px.OneDeviceStrategy("CPU:0"), data, epochs, progress)
    table = Table(title="The same training loop under two strategies")
    for column in ("", "first loss", "last loss", "test accuracy", "seconds"):
        table.add_column(column)
    for name, outcome in ((describe(mirrored), many), ("OneDeviceStrategy (1 replica)", one)):
        table.add_row(
            name,
            f"{outcome.losses[0]:.6f}",
            f"{outcome.losses[-1]:.6f}",
            f"{outcome.accuracy:.2%}",
            f"{outcome.seconds:.1f}",
        )
    console.print(table)
    pairs = list(zip(many.parameters, one.parameters, strict=True))
    worst = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    equal = all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)
    console.print(f"Largest difference of any parameter between the two runs: {worst:.1e}")
    if not equal or many.accuracy <= 0.95:
        console.print("[red]The runs disagree, or the accuracy is too low.[/red]")
        return 1
    console.print("Both runs learned the same model.")
    return 0
