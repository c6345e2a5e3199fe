"""Many training steps: how long the first call takes, and the later ones, in each way to write them.

``python benchmarks/loops.py`` runs all ways side by side, prints a table and writes it to
``benchmarks/results/loops.md``. Each way is a child process with logical CPU devices of its own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _harness as harness
from _harness import Child, median_and_spread, ratios, say

HAND = "hand"
NAMES = {
    HAND: "`lax.scan` by hand, JAX alone",
    "range": "`for i in px.range(n)` in a function",
    "loop": "`px.train.loop`",
    "loop_inside": "`px.train.loop` in a function",
    "dataset": "`for x in dataset` in a function",
    "single": "a compiled step, called in a loop",
    "unrolled": "`for i in range(n)` in a function: unrolled",
}


@dataclass
class Way:
    """What one way to write the steps took."""

    steps: int
    first: float = 0.0  # seconds of the first call
    rounds: list[float] = field(default_factory=list)  # milliseconds per step of the later ones


def measure(
    replicas: int, counts: Mapping[str, int], rounds: int, versions: list[str]
) -> dict[str, Way]:
    ways = {kind: Way(steps) for kind, steps in counts.items()}

    def start(kind: str) -> Child:
        arguments = [str(harness.HERE / "_loop_steps.py"), str(replicas), kind, str(counts[kind])]
        return Child(NAMES[kind], Path(sys.executable), arguments)

    with harness.started(list(counts), start, versions) as children:
        for kind, child in children.items():
            ways[kind].first = child.run(1).seconds
            say(f"{NAMES[kind]}: the first call took {ways[kind].first:.1f} s")
        for done in harness.take_turns(children, rounds, dict.fromkeys(counts, 1)):
            for kind, one in done.items():
                ways[kind].rounds.append(one.milliseconds / counts[kind])
    return ways


def table(ways: Mapping[str, Way]) -> str:
    rows = [["way", "steps", "first call, s", "later, ms per step", "by hand / this"]]
    for kind, way in ways.items():
        relative = median_and_spread(ratios(ways[HAND].rounds, way.rounds))
        later = f"{statistics.median(way.rounds):.2f}"
        rows.append([NAMES[kind], str(way.steps), f"{way.first:.1f}", later, relative])
    return harness.markdown_table(rows)


def report(
    ways: Mapping[str, Way], replicas: int, rounds: int, unrolled: int, versions: Sequence[str]
) -> str:
    steps = ways[HAND].steps
    return f"""# Many steps

{table(ways)}

Measured: training steps of a network of two convolutions and a dense layer (float32, cross-entropy,
Adam, global batches of 32 images of 28 x 28) under `MirroredStrategy` with {replicas} replicas on
logical CPU devices, each way in a process of its own. The first call traces and compiles; it also makes
the state of the optimizer, for which functions are traced a second time. Later times are medians over
{rounds} rounds, with the input, in which the ways took turns. What is unrolled has fewer steps, because
the time to compile grows with them.

XLA's programs for CPUs compute convolutions inside a loop with less parallelism than outside it,
also in JAX alone. There, steps by themselves are faster than one loop.

{harness.circumstances(versions)}

To repeat: `python benchmarks/loops.py --steps {steps} --unrolled {unrolled} --rounds {rounds}`.
"""


def main() -> int:
    parser = harness.options_parser("Time the ways to write many training steps.", 5)
    parser.add_argument("--steps", type=harness.positive, default=50, help="of a call (default 50)")
    parser.add_argument("--unrolled", type=harness.positive, default=10, help="steps (default 10)")
    parser.add_argument("--replicas", type=harness.positive, default=4)
    options = harness.parse(parser)
    counts = dict.fromkeys(NAMES, options.steps) | {"unrolled": options.unrolled}

    def measured() -> str:
        versions: list[str] = []
        ways = measure(options.replicas, counts, options.rounds, versions)
        return report(ways, options.replicas, options.rounds, options.unrolled, versions)

    return harness.finish("loops.md", measured, keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
