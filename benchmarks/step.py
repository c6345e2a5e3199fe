"""Compiled training steps: Phalanx beside hand-written JAX, TensorFlow and torch.

``python benchmarks/step.py`` makes environments for TensorFlow and torch on first use (see `peers.py`),
runs all variants side by side, prints tables and writes them to ``benchmarks/results/step.md``, with a
plot in ``step.png`` if Matplotlib is installed.

Each variant is a child process (this file again, as ``step.py child VARIANT HIDDEN REPLICAS``), and one
of them computes at a time. Before anything is timed, and again at the end, all variants train for the
same number of steps from the same weights, and their losses must agree.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import math
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from _eager_common import serve
from _harness import (
    RESULTS,
    BenchmarkError,
    Child,
    circumstances,
    markdown_table,
    median_and_spread,
    positive,
    ratios,
    say,
    say_written,
    started,
    take_turns,
    write_result,
)
from peers import PeerError, peer_python

LEARNING_RATE = 0.01
INPUTS, CLASSES = 784, 10
BATCHES = {64: 64, 512: 256, 2048: 256}
"""The global batch for each width of the hidden layers."""

CHECK_STEPS = 10
LOSS_TOLERANCE = 1e-3  # relative
MAX_IN_FLIGHT = 16


@dataclass(frozen=True)
class Variant:
    """One way to write the step, or one library to write it with."""

    key: str
    name: str
    peer: str | None = None


PHALANX = Variant("phalanx", "Phalanx")
HAND = Variant("hand", "hand-written JAX")
TENSORFLOW = Variant("tensorflow", "TensorFlow", peer="tensorflow")
TORCH = Variant("torch", "torch DDP", peer="torch")
VARIANTS = (PHALANX, HAND, TENSORFLOW, TORCH)

BUDGETS: dict[Variant, dict[int, float]] = {
    HAND: {64: 0.85, 512: 1.0, 2048: 0.8},
    TENSORFLOW: dict.fromkeys(BATCHES, 0.5),
    TORCH: dict.fromkeys(BATCHES, 1.0),
}
"""Phalanx's time may be at most this many times the other's, by width."""


DESCRIPTIONS = {
    PHALANX: """\
- Phalanx: `px.function` around `strategy.run` of the step (`all_reduce` of the gradients, `assign_sub`)
  and `strategy.reduce` of the loss, under `MirroredStrategy` on logical CPU devices.""",
    HAND: f"""\
- hand-written JAX: `jax.jit` of `jax.shard_map`, with one `lax.psum` for each gradient and the loss,
  donated parameters, and at most {MAX_IN_FLIGHT} steps in flight.""",
    TENSORFLOW: """\
- TensorFlow: `tf.function` around the same as for Phalanx, with `merge_call` and `extended.update` to
  update the variables, under `MirroredStrategy` on logical CPU devices.""",
    TORCH: """\
- torch DDP: `DistributedDataParallel` with gloo over loopback, one process with one thread for each
  replica. Its steps do not sum the loss over replicas.""",
}


# -- the problem, as the children see it -----------------------------------------------------------


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


def phalanx_strategy(replicas: int) -> Any:
    import phalanx as px

    px.config.set_logical_device_configuration(
        px.config.list_physical_devices("CPU")[0],
        [px.config.LogicalDeviceConfiguration()] * replicas,
    )
    return px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


def phalanx_child(problem: Problem) -> None:
    serve_phalanx(problem, phalanx_strategy(problem.replicas))


def serve_phalanx(
    problem: Problem, strategy: Any, before_round: Callable[[], None] = lambda: None
) -> None:
    """Train under any strategy; the replicas may be those of several processes."""
    import jax
    import jax.numpy as jnp

    import phalanx as px

    with strategy.scope():
        weights = [px.Variable(p) for p in problem.parameters()]
    loss_and_gradients = jax.value_and_grad(jax_loss(problem.batch))

    def replica_step(x: jax.Array, y: jax.Array) -> jax.Array:
        loss, gradients = loss_and_gradients([w.value() for w in weights], x, y)
        gradients = px.get_replica_context().all_reduce("sum", gradients)
        for w, gradient in zip(weights, gradients, strict=True):
            w.assign_sub(LEARNING_RATE * gradient)
        return loss

    @px.function
    def train(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(replica_step, args=(x, y)), axis=None)

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

    def finish(loss: jax.Array) -> float:
        wait()
        return float(loss)

    versions = {"Phalanx": version("phalanx"), "JAX": jax.__version__}
    serve_steps(versions, reset, lambda: train(x, y), finish)


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


def tensorflow_child(problem: Problem) -> None:
    import tensorflow as tf

    replicas = problem.replicas
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    serve_tensorflow(problem, tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)]))


def serve_tensorflow(problem: Problem, strategy: Any) -> None:
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

    @tf.function
    def train(x: Any, y: Any) -> tf.Tensor:
        per_replica = strategy.run(replica_step, args=(x, y))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

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

    def finish(loss: tf.Tensor) -> float:
        wait()
        return float(loss)

    serve_steps({"TensorFlow": tf.__version__}, reset, lambda: train(x, y), finish)


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


# -- measuring -----------------------------------------------------------------------------------


@dataclass
class Measurement:
    """One problem: milliseconds per step by round, and steps per round, for each variant."""

    problem: Problem
    rounds: dict[Variant, list[float]] = field(default_factory=dict)
    steps: dict[Variant, int] = field(default_factory=dict)

    def relative_to(self, other: Variant) -> list[float]:
        """Phalanx's time over another variant's, by round."""
        return ratios(self.rounds[PHALANX], self.rounds[other])


def measure(
    problem: Problem, pythons: dict[Variant, Path], rounds: int, seconds: float, versions: list[str]
) -> Measurement:
    """Run all variants side by side."""

    def start(variant: Variant) -> Child:
        arguments = [__file__, "child", variant.key, str(problem.hidden), str(problem.replicas)]
        return Child(f"{variant.name} ({problem.name})", pythons[variant], arguments)

    measurement = Measurement(problem, {v: [] for v in pythons})
    say(f"{problem.name}: starting {len(pythons)} processes")
    with started(list(pythons), start, versions) as children:
        say(f"{problem.name}: warming up")
        check_losses(children, problem)
        measurement.steps = {v: steps_for(child, seconds) for v, child in children.items()}
        for i, done in enumerate(take_turns(children, rounds, measurement.steps), 1):
            for variant, turn in done.items():
                if not math.isfinite(turn.loss):
                    raise BenchmarkError(f"{children[variant].name}: the loss is {turn.loss}")
                measurement.rounds[variant].append(turn.milliseconds)
            times = ", ".join(f"{v.name} {turn.milliseconds:.2f}" for v, turn in done.items())
            say(f"{problem.name}: round {i} of {rounds}: {times} ms per step")
        check_losses(children, problem)
    return measurement


def check_losses(children: dict[Variant, Child], problem: Problem) -> None:
    """Refuse to compare variants that do not compute the same thing."""
    losses = {v: child.run(CHECK_STEPS).loss for v, child in children.items()}
    if all(math.isclose(x, losses[HAND], rel_tol=LOSS_TOLERANCE) for x in losses.values()):
        return
    listing = "\n".join(f"  {variant.name}: {loss:.6f}" for variant, loss in losses.items())
    raise BenchmarkError(
        f"With {problem.name} the losses after {CHECK_STEPS} steps differ by more than "
        f"{LOSS_TOLERANCE:g} of {HAND.name}'s:\n{listing}"
    )


def steps_for(child: Child, seconds: float) -> int:
    """How many steps the child can make in about this time."""
    trial = child.run(CHECK_STEPS)
    while trial.seconds < seconds / 5:
        trial = child.run(4 * trial.steps)
    return max(3, round(trial.steps * seconds / trial.seconds))


# -- reporting -----------------------------------------------------------------------------------


def times_table(measurements: Sequence[Measurement], variants: Sequence[Variant]) -> str:
    rows = [["MLP", "batch", "replicas", *(v.name for v in variants), "steps per round"]]
    for m in measurements:
        times = [median_and_spread(m.rounds[v]) for v in variants]
        steps = ", ".join(str(m.steps[v]) for v in variants)
        rows.append([*columns(m.problem), *times, steps])
    return markdown_table(rows)


def ratios_table(measurements: Sequence[Measurement], variants: Sequence[Variant]) -> str:
    others = [v for v in variants if v is not PHALANX]
    rows = [["MLP", "batch", "replicas", *(f"Phalanx / {v.name}" for v in others)]]
    for m in measurements:
        rows.append([*columns(m.problem), *(ratio_cell(m, v) for v in others)])
    return markdown_table(rows)


def ratio_cell(measurement: Measurement, other: Variant) -> str:
    relative = measurement.relative_to(other)
    budget = BUDGETS[other][measurement.problem.hidden]
    verdict = "within" if statistics.median(relative) <= budget else "**over**"
    return f"{median_and_spread(relative)}, {verdict} {budget:g}"


def columns(problem: Problem) -> list[str]:
    width = problem.hidden
    return [f"{INPUTS}-{width}-{width}-{CLASSES}", str(problem.batch), str(problem.replicas)]


def report(
    measurements: Sequence[Measurement],
    versions: Sequence[str],
    load: float,
    options: argparse.Namespace,
) -> str:
    """The whole result as Markdown."""
    variants = list(measurements[0].rounds)
    # Children of one library say the same, and the hand-written one says less.
    versions = [v for v in versions if not any(v in w for w in versions if w is not v)]
    replicas = " ".join(map(str, options.replicas))
    sizes = " ".join(map(str, options.sizes))
    peers = " ".join(["--peers", *options.peers])
    descriptions = "\n".join(DESCRIPTIONS[v] for v in variants)
    return f"""# Compiled training steps

Milliseconds per step: the median over {options.rounds} rounds (min..max).

{times_table(measurements, variants)}

Phalanx's time relative to the others': the median (min..max) of the ratios within a round; below 1 is
faster. Behind it, the budget and whether the median is within.

{ratios_table(measurements, variants)}

Budgets: at most 0.85 times hand-written JAX at width 64, 1.0 times at 512, 0.8 times at 2048; at least
twice as fast as TensorFlow; at least as fast as torch's DistributedDataParallel.

Measured: SGD steps of an MLP (float32, cross-entropy), from the loss and its gradients over their sum
over replicas to the update of the parameters, with a batch that is on the devices already. All variants
ran on the same machine in the same minutes:

{descriptions}

Each variant has a process of its own, and one computes at a time. Rounds take turns in an order that
rotates, and start from the initial parameters; their first step is not timed, and their time ends
when all devices have finished. The losses of all variants agreed to {LOSS_TOLERANCE:g} of the loss
after {CHECK_STEPS} steps from the same weights, before the first round and after the last.

## Circumstances

{circumstances(versions)} The load average of the machine was {load:.1f} before the first process was
started; where rounds differ much, other work has taken part of it.

To repeat: `python benchmarks/step.py --rounds {options.rounds} --sizes {sizes} --replicas {replicas}
{peers}`.
"""


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """A point for each problem and variant, with the range over rounds, on a logarithmic axis."""
    try:
        import matplotlib
    except ImportError:
        say("Matplotlib is not installed: there is no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = list(dict.fromkeys(m.problem.hidden for m in measurements))
    size = (1 + 3.6 * len(widths), 3.6)
    figure, axes = pyplot.subplots(1, len(widths), figsize=size, layout="constrained", squeeze=False)
    for ax, width in zip(axes[0], widths, strict=True):
        shown = [m for m in measurements if m.problem.hidden == width]
        apart = 0.6 / len(shown[0].rounds)
        for i, variant in enumerate(shown[0].rounds):
            rounds = [m.rounds[variant] for m in shown]
            medians = [statistics.median(r) for r in rounds]
            below = [a - min(r) for a, r in zip(medians, rounds, strict=True)]
            above = [max(r) - a for a, r in zip(medians, rounds, strict=True)]
            at = [j - 0.3 + apart * (i + 0.5) for j in range(len(shown))]
            ax.errorbar(at, medians, [below, above], fmt="o", label=variant.name)
        ax.set_yscale("log")
        for which in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            which("{x:g}")
        ax.tick_params(axis="y", which="both", labelsize=7)
        ax.set_xticks(range(len(shown)), [str(m.problem.replicas) for m in shown])
        ax.set_title(f"{INPUTS}-{width}-{width}-{CLASSES}, batch {BATCHES[width]}", fontsize=10)
        ax.set_xlabel("replicas")
        ax.grid(axis="y", which="both", alpha=0.25)
    axes[0][0].set_ylabel("ms per step (lower is better)")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    say_written(path)


# -- the command -----------------------------------------------------------------------------------


def child_main(key: str, number: str, replicas: str) -> None:
    """What a child does; `number` is the width of its MLP."""
    mains = {
        PHALANX.key: phalanx_child,
        HAND.key: hand_child,
        TENSORFLOW.key: tensorflow_child,
        TORCH.key: torch_child,
    }
    mains[key](Problem(int(number), int(replicas)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time compiled training steps side by side.")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        choices=list(BATCHES),
        default=list(BATCHES),
        help="widths of the hidden layers (default all)",
    )
    parser.add_argument("--replicas", type=positive, nargs="+", default=[2, 4, 8], help="default 2 4 8")
    parser.add_argument("--rounds", type=positive, help="rounds per variant (default 7)")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=["tensorflow", "torch"],
        default=["tensorflow", "torch"],
        help="libraries to compare with, besides JAX (default all; none if empty)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 short rounds, to see that everything works; the result is printed only",
    )
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 7)
    for width, replicas in itertools.product(options.sizes, options.replicas):
        if BATCHES[width] % replicas:
            parser.error(f"--replicas must divide the batch of {BATCHES[width]}. Received: {replicas}")
    return options


def main() -> int:
    options = parse_options()
    measurements: list[Measurement] = []
    versions: list[str] = []
    load = os.getloadavg()[0]
    try:
        pythons = {
            v: peer_python(v.peer) if v.peer else Path(sys.executable)
            for v in VARIANTS
            if v.peer is None or v.peer in options.peers
        }
        for width, replicas in itertools.product(options.sizes, options.replicas):
            seconds = 0.2 if options.quick else 1.3
            problem = Problem(width, replicas)
            measurements.append(measure(problem, pythons, options.rounds, seconds, versions))
    except (BenchmarkError, PeerError) as error:
        say(f"error: {error}")
        return 1
    text = report(measurements, versions, load, options)
    print(text)
    if not options.quick:
        write_result("step.md", text)
        plot(measurements, RESULTS / "step.png")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child_main(*sys.argv[2:])
    else:
        sys.exit(main())
