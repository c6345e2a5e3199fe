"""Eager `strategy.run` of a training step: Phalanx beside TensorFlow.

``python benchmarks/eager.py`` makes an environment for TensorFlow on first use (see `peers.py`), runs
all variants side by side, prints a table and writes it to ``benchmarks/results/eager.md``.

Each variant is a child process with logical CPU devices of its own. The children stay alive; the parent
tells them in turn to run a round of steps, so that a busy spell of the machine hits all of them alike.
Every round starts from the same parameters, and the losses of all variants must agree.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import _harness as harness
from _harness import Variant, median_and_spread, say
from _mlp import LOSS_TOLERANCE, Problem
from step import check_losses, start

WIDTH = 64
TENSORFLOW = Variant("eager-tensorflow", "TensorFlow, eager", peer="tensorflow")
VARIANTS = (
    TENSORFLOW,
    Variant("eager-phalanx", "Phalanx, nothing compiled"),
    Variant("eager-phalanx-jit", "Phalanx, `jax.jit(jax.value_and_grad(loss))`"),
)


# -- measuring ----------------------------------------------------------------------------------


@dataclass
class Measurement:
    """What one variant did with one number of replicas: milliseconds per step, by round."""

    variant: Variant
    replicas: int
    rounds: list[float] = field(default_factory=list)


def measure(replicas: int, rounds: int, steps: int, versions: list[str]) -> list[Measurement]:
    """Run all variants side by side."""
    measurements = {v: Measurement(v, replicas) for v in VARIANTS}
    problem = Problem(WIDTH, replicas)
    say(f"{problem.name}: starting {len(VARIANTS)} processes")
    with harness.started(VARIANTS, lambda v: start(v, problem), versions) as children:
        check_losses(children, problem)
        turns = harness.take_turns(children, rounds, dict.fromkeys(VARIANTS, steps))
        for i, done in enumerate(turns, 1):
            for variant, measurement in measurements.items():
                measurement.rounds.append(done[variant].milliseconds)
            times = ", ".join(f"{r.milliseconds:.2f}" for r in done.values())
            say(f"{problem.name}: round {i} of {rounds}: {times} ms per step")
        check_losses(children, problem)
    return list(measurements.values())


# -- reporting ----------------------------------------------------------------------------------


def table(measurements: Sequence[Measurement]) -> str:
    """All measurements as a Markdown table."""
    base = {m.replicas: m for m in measurements if m.variant is TENSORFLOW}
    rows = [["replicas", "variant", "ms per step", "min..max", "time relative to TensorFlow"]]
    for m in measurements:
        relative = median_and_spread(harness.ratios(m.rounds, base[m.replicas].rounds))
        rows.append(
            [
                str(m.replicas),
                m.variant.name,
                f"{statistics.median(m.rounds):.2f}",
                harness.spread(m.rounds),
                "1" if m.variant is TENSORFLOW else relative,
            ]
        )
    return harness.markdown_table(rows)


def report(
    measurements: Sequence[Measurement], versions: Sequence[str], rounds: int, steps: int
) -> str:
    """The whole result as Markdown."""
    replicas = " ".join(str(n) for n in dict.fromkeys(m.replicas for m in measurements))
    return f"""# Eager training steps

{table(measurements)}

Measured: one `strategy.run` of a training step of the MLP 784-64-64-10 (float32, cross-entropy, SGD,
global batch of 64) under `MirroredStrategy` on logical CPU devices, in one process per variant. On each
replica: loss and gradients, `all_reduce` of the gradients, and one `merge_call` that updates every
variable with `strategy.extended.update` and `assign_sub`. No variant compiles the step as a whole
(there is no `tf.function`); the last one compiles the loss and its gradients, and nothing else.

{rounds} rounds of {steps} steps for each variant, taking turns, in an order that rotates. The time of a
round ends when all devices have finished. "ms per step" is the median over rounds. "time relative to
TensorFlow" is the median (and range) of the ratios to TensorFlow's time in the same round; below 1 is
faster. The losses of all variants agreed to {LOSS_TOLERANCE:g} before the first round and after the
last.

{harness.circumstances(versions)}

To repeat: `python benchmarks/eager.py --rounds {rounds} --steps {steps} --replicas {replicas}`.
"""


def main() -> int:
    parser = harness.options_parser("Time eager training steps beside TensorFlow's.", 7)
    parser.add_argument("--steps", type=harness.positive, default=50, help="per round (default 50)")
    parser.add_argument("--replicas", type=harness.positive, nargs="+", default=[2, 4])
    options = harness.parse(parser)
    steps = 5 if options.quick else options.steps

    def measured() -> str:
        versions: list[str] = []
        found = [measure(n, options.rounds, steps, versions) for n in options.replicas]
        return report([m for some in found for m in some], versions, options.rounds, steps)

    return harness.finish("eager.md", measured, keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
