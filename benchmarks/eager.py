"""Eager `strategy.run` of a training step: Phalanx beside TensorFlow.

``python benchmarks/eager.py`` makes an environment for TensorFlow on first use (see `peers.py`), runs
all variants side by side, prints a table and writes it to ``benchmarks/results/eager.md``.

Each variant is a child process with logical CPU devices of its own. The children stay alive; the parent
tells them in turn to run a round of steps, so that a busy spell of the machine hits all of them alike.
Every round starts from the same parameters, and the losses at its end must agree.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _harness import (
    HERE,
    BenchmarkError,
    Child,
    circumstances,
    markdown_table,
    median_and_spread,
    positive,
    ratios,
    say,
    spread,
    started,
    take_turns,
    write_result,
)
from peers import PeerError, peer_python

WARM_UP_STEPS = 20
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Variant:
    """One way to write the step; `arguments` follow the number of replicas."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: str | None = None


TENSORFLOW = Variant("TensorFlow, eager", "_eager_tensorflow.py", peer="tensorflow")
VARIANTS = (
    TENSORFLOW,
    Variant("Phalanx, nothing compiled", "_eager_phalanx.py", ("plain",)),
    Variant("Phalanx, `jax.jit(jax.value_and_grad(loss))`", "_eager_phalanx.py", ("jit",)),
)


# -- measuring ----------------------------------------------------------------------------------


@dataclass
class Measurement:
    """What one variant did with one number of replicas: milliseconds per step, by round."""

    variant: Variant
    replicas: int
    rounds: list[float] = field(default_factory=list)


def measure(
    replicas: int, rounds: int, steps: int, pythons: dict[Variant, Path]
) -> tuple[list[Measurement], list[str]]:
    """Run all variants side by side; returns what they took, and the versions in each environment."""
    versions: list[str] = []
    measurements = {v: Measurement(v, replicas) for v in VARIANTS}

    def start(variant: Variant) -> Child:
        arguments = [str(HERE / variant.script), str(replicas), *variant.arguments]
        return Child(f"{variant.name} ({replicas} replicas)", pythons[variant], arguments)

    say(f"{replicas} replicas: starting {len(VARIANTS)} processes")
    with started(VARIANTS, start, versions) as children:
        say(f"{replicas} replicas: warming up")
        losses = {v: child.run(WARM_UP_STEPS).loss for v, child in children.items()}
        check_losses(losses, replicas, WARM_UP_STEPS)
        for i, done in enumerate(take_turns(children, rounds, dict.fromkeys(VARIANTS, steps)), 1):
            for variant, measurement in measurements.items():
                measurement.rounds.append(done[variant].milliseconds)
            check_losses({v: r.loss for v, r in done.items()}, replicas, steps)
            times = ", ".join(f"{r.milliseconds:.2f}" for r in done.values())
            say(f"{replicas} replicas: round {i} of {rounds}: {times} ms per step")
    return list(measurements.values()), versions


def check_losses(losses: dict[Variant, float], replicas: int, steps: int) -> None:
    """Refuse to compare variants that do not compute the same thing."""
    expected = losses[TENSORFLOW]
    if all(math.isfinite(x) and abs(x - expected) <= LOSS_TOLERANCE for x in losses.values()):
        return
    listing = "\n".join(f"  {variant.name}: {loss:.6f}" for variant, loss in losses.items())
    raise BenchmarkError(
        f"With {replicas} replicas the losses after {steps} steps differ by more than "
        f"{LOSS_TOLERANCE:g}:\n{listing}"
    )


# -- reporting ----------------------------------------------------------------------------------


def table(measurements: Sequence[Measurement]) -> str:
    """All measurements as a Markdown table."""
    base = {m.replicas: m for m in measurements if m.variant is TENSORFLOW}
    rows = [["replicas", "variant", "ms per step", "min..max", "time relative to TensorFlow"]]
    for m in measurements:
        relative = median_and_spread(ratios(m.rounds, base[m.replicas].rounds))
        rows.append(
            [
                str(m.replicas),
                m.variant.name,
                f"{statistics.median(m.rounds):.2f}",
                spread(m.rounds),
                "1" if m.variant is TENSORFLOW else relative,
            ]
        )
    return markdown_table(rows)


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
faster. The losses of all variants agreed to {LOSS_TOLERANCE:g} at the end of every round.

{circumstances(versions)}

To repeat: `python benchmarks/eager.py --rounds {rounds} --steps {steps} --replicas {replicas}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time eager training steps beside TensorFlow's.")
    parser.add_argument("--rounds", type=positive, help="rounds per variant (default 7)")
    parser.add_argument("--steps", type=positive, help="steps per round (default 50)")
    parser.add_argument("--replicas", type=positive, nargs="+", default=[2, 4], help="default 2 4")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 rounds of 5 steps, to see that everything works; the result is printed only",
    )
    options = parser.parse_args()
    rounds = options.rounds or (2 if options.quick else 7)
    steps = options.steps or (5 if options.quick else 50)
    measurements: list[Measurement] = []
    versions: list[str] = []
    try:
        pythons = {v: peer_python(v.peer) if v.peer else Path(sys.executable) for v in VARIANTS}
        for replicas in options.replicas:
            measured, versions = measure(replicas, rounds, steps, pythons)
            measurements += measured
    except (BenchmarkError, PeerError) as error:
        say(f"error: {error}")
        return 1
    text = report(measurements, versions, rounds, steps)
    print(text)
    if not options.quick:
        write_result("eager.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
