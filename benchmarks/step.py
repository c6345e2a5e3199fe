"""Compiled training steps: Phalanx beside hand-written JAX, TensorFlow and torch.

``python benchmarks/step.py`` makes environments for TensorFlow and torch on first use (see `peers.py`),
runs all variants side by side, prints tables and writes them to ``benchmarks/results/step.md``, with a
plot in ``step.png`` if Matplotlib is installed.

Each variant is a child process (see `_mlp.py`), and one of them computes at a time. Before anything is
timed, and again at the end, all variants train for the same number of steps from the same weights, and
their losses must agree.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _harness as harness
from _harness import Child, Variant, median_and_spread, say
from _mlp import BATCHES, CHECK_STEPS, CLASSES, INPUTS, LOSS_TOLERANCE, MAX_IN_FLIGHT, Problem

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


# -- measuring -----------------------------------------------------------------------------------


@dataclass
class Measurement:
    """One problem: milliseconds per step by round, and steps per round, for each variant."""

    problem: Problem
    rounds: dict[Variant, list[float]] = field(default_factory=dict)
    steps: dict[Variant, int] = field(default_factory=dict)

    def relative_to(self, other: Variant) -> list[float]:
        """Phalanx's time over another variant's, by round."""
        return harness.ratios(self.rounds[PHALANX], self.rounds[other])


def start(variant: Variant, problem: Problem) -> Child:
    """A child that trains."""
    arguments = [str(harness.HERE / "_mlp.py"), variant.key, str(problem.hidden), str(problem.replicas)]
    return Child(f"{variant.name} ({problem.name})", variant.python, arguments)


def measure(
    problem: Problem, variants: Sequence[Variant], rounds: int, seconds: float, versions: list[str]
) -> Measurement:
    """Run all variants side by side."""
    measurement = Measurement(problem, {v: [] for v in variants})
    say(f"{problem.name}: starting {len(variants)} processes")
    with harness.started(variants, lambda v: start(v, problem), versions) as children:
        say(f"{problem.name}: warming up")
        check_losses(children, problem)
        measurement.steps = {v: harness.steps_for(c, seconds) for v, c in children.items()}
        for i, done in enumerate(harness.take_turns(children, rounds, measurement.steps), 1):
            for variant, turn in done.items():
                if not math.isfinite(turn.loss):
                    raise harness.BenchmarkError(f"{children[variant].name}: the loss is {turn.loss}")
                measurement.rounds[variant].append(turn.milliseconds)
            times = ", ".join(f"{v.name} {turn.milliseconds:.2f}" for v, turn in done.items())
            say(f"{problem.name}: round {i} of {rounds}: {times} ms per step")
        check_losses(children, problem)
    return measurement


def check_losses(children: dict[Variant, Child], problem: Problem) -> None:
    """Refuse to compare variants that do not compute the same thing."""
    losses = {v.name: child.run(CHECK_STEPS).loss for v, child in children.items()}
    harness.check_same(f"{problem.name}, {CHECK_STEPS} steps", losses, LOSS_TOLERANCE)


# -- reporting -----------------------------------------------------------------------------------


def times_table(measurements: Sequence[Measurement], variants: Sequence[Variant]) -> str:
    rows = [["MLP", "batch", "replicas", *(v.name for v in variants), "steps per round"]]
    for m in measurements:
        times = [median_and_spread(m.rounds[v]) for v in variants]
        steps = ", ".join(str(m.steps[v]) for v in variants)
        rows.append([*columns(m.problem), *times, steps])
    return harness.markdown_table(rows)


def ratios_table(measurements: Sequence[Measurement], variants: Sequence[Variant]) -> str:
    others = [v for v in variants if v is not PHALANX]
    rows = [["MLP", "batch", "replicas", *(f"Phalanx / {v.name}" for v in others)]]
    for m in measurements:
        rows.append([*columns(m.problem), *(ratio_cell(m, v) for v in others)])
    return harness.markdown_table(rows)


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

{harness.circumstances(versions)} The load average of the machine was {load:.1f} before the first
process was started; where rounds differ much, other work has taken part of it.

To repeat: `python benchmarks/step.py --rounds {options.rounds} --sizes {sizes} --replicas {replicas}
{peers}`.
"""


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """A point for each problem and variant, with the range over rounds, on a logarithmic axis."""
    pyplot = harness.pyplot()
    if pyplot is None:
        return
    widths = list(dict.fromkeys(m.problem.hidden for m in measurements))
    size = (1 + 3.6 * len(widths), 3.6)
    figure, axes = pyplot.subplots(1, len(widths), figsize=size, layout="constrained", squeeze=False)
    for ax, width in zip(axes[0], widths, strict=True):
        shown = [m for m in measurements if m.problem.hidden == width]
        apart = 0.6 / len(shown[0].rounds)
        for i, variant in enumerate(shown[0].rounds):
            at = [j - 0.3 + apart * (i + 0.5) for j in range(len(shown))]
            medians, errors = harness.errors([m.rounds[variant] for m in shown])
            ax.errorbar(at, medians, errors, fmt="o", label=variant.name)
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
    harness.say_written(path)


# -- the command -----------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    peers = ["tensorflow", "torch"]
    parser = harness.options_parser("Time compiled training steps side by side.", 7, peers)
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        choices=list(BATCHES),
        default=list(BATCHES),
        help="widths of the hidden layers (default all)",
    )
    replicas = {"type": harness.positive, "nargs": "+", "default": [2, 4, 8]}
    parser.add_argument("--replicas", help="default 2 4 8", **replicas)
    options = harness.parse(parser)
    for width, count in itertools.product(options.sizes, options.replicas):
        if BATCHES[width] % count:
            parser.error(f"--replicas must divide the batch of {BATCHES[width]}. Received: {count}")
    return options


def main() -> int:
    options = parse_options()
    measurements: list[Measurement] = []

    def measured() -> str:
        versions: list[str] = []
        load = os.getloadavg()[0]
        variants = harness.wanted(VARIANTS, options.peers)
        seconds = 0.2 if options.quick else 1.3
        for problem in itertools.starmap(Problem, itertools.product(options.sizes, options.replicas)):
            measurements.append(measure(problem, variants, options.rounds, seconds, versions))
        return report(measurements, versions, load, options)

    failed = harness.finish("step.md", measured, keep=not options.quick)
    if not failed and not options.quick:
        plot(measurements, harness.RESULTS / "step.png")
    return failed


if __name__ == "__main__":
    sys.exit(main())
