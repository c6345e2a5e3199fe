"""Training steps on uneven batches: compiled, beside even ones and beside the eager executor.

``python benchmarks/uneven.py`` runs all variants side by side, prints a table and writes it to
``benchmarks/results/uneven.md``. Each variant is a child process with logical CPU devices of its own;
they take turns, so that a busy spell of the machine hits all of them alike.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import _harness as harness
from _harness import Child, median_and_spread, ratios, say

EVEN, UNEVEN, SINGLE, EAGER = VARIANTS = ("even", "uneven", "single", "eager")
NAMES = {
    EVEN: "even, compiled",
    UNEVEN: "uneven, compiled",
    SINGLE: "1+0+…, compiled",
    EAGER: "uneven, eager",
}
BUDGET = 1.3
LOSS_TOLERANCE = 1e-4


@dataclass
class Case:
    """What the variants did with one number of replicas and one model."""

    replicas: int
    width: int
    first: dict[str, float] = field(default_factory=dict)  # seconds of the first step
    rounds: dict[str, list[float]] = field(default_factory=lambda: {v: [] for v in VARIANTS})

    @property
    def relative(self) -> list[float]:
        """What an uneven step takes relative to an even one, round by round."""
        return ratios(self.rounds[UNEVEN], self.rounds[EVEN])


def measure(replicas: int, width: int, rounds: int, steps: int, versions: list[str]) -> Case:
    case = Case(replicas, width)
    name = f"{replicas} replicas, width {width}"

    def start(variant: str) -> Child:
        arguments = [str(harness.HERE / "_uneven_steps.py"), str(replicas), str(width), variant]
        return Child(f"{NAMES[variant]} ({name})", Path(sys.executable), arguments)

    counts = dict.fromkeys(VARIANTS, steps) | {EAGER: max(1, steps // 10)}
    say(f"{name}: starting")
    with harness.started(VARIANTS, start, versions) as children:
        for variant, child in children.items():
            case.first[variant] = child.run(1).seconds
        losses = {NAMES[v]: children[v].run(3).loss for v in (UNEVEN, EAGER)}
        harness.check_same(name, losses, LOSS_TOLERANCE)
        for done in harness.take_turns(children, rounds, counts):
            for variant, one in done.items():
                case.rounds[variant].append(one.milliseconds)
    best = {NAMES[v]: f"{min(case.rounds[v]):.2f}" for v in VARIANTS}
    say(f"{name}: {best} ms per step at best")
    return case


def table(cases: Sequence[Case]) -> str:
    rows = [["width", "replicas", *(NAMES[v] for v in VARIANTS), "uneven/even", "first call, s"]]
    for case in cases:
        milliseconds = [f"{statistics.median(case.rounds[v]):.2f}" for v in VARIANTS]
        first = " / ".join(f"{case.first[v]:.1f}" for v in (EVEN, UNEVEN, EAGER))
        relative = median_and_spread(case.relative)
        rows.append([str(case.width), str(case.replicas), *milliseconds, relative, first])
    return harness.markdown_table(rows)


def report(cases: Sequence[Case], versions: Sequence[str], rounds: int, steps: int) -> str:
    worst = max(statistics.median(case.relative) for case in cases)
    kept = "kept" if worst <= BUDGET else "not kept"
    return f"""# Steps on uneven batches

{table(cases)}

Measured: one training step of the MLP 784-H-H-10 of width H (float32, cross-entropy, SGD) under
`MirroredStrategy` on logical CPU devices, in milliseconds, each variant in a process of its own. The
global batch has 64 rows for width 64 and 256 for 512. "uneven": the last replica has 3 rows less.
"1+0+…": one replica has one row, the others none. "eager": the uneven batch with `strategy.run` outside
of `px.function`. Times are medians over rounds; "uneven/even" is the median (and range) of the ratios
in the same round. "first call" is the time of the first step, which traces and compiles: even /
uneven / eager.

The budget is that an uneven step takes at most {BUDGET} times as long as an even one. It is {kept}: the
largest median ratio is {worst:.2f}.

{rounds} rounds of {steps} steps for each variant (a tenth of it for the eager one), taking turns, on a
machine that other work shared: ratios mean more than milliseconds.

{harness.circumstances(versions)}

To repeat: `python benchmarks/uneven.py --rounds {rounds} --steps {steps}`.
"""


def main() -> int:
    parser = harness.options_parser("Time training steps on uneven batches.", 5)
    parser.add_argument("--steps", type=harness.positive, default=50, help="per round (default 50)")
    parser.add_argument("--replicas", type=harness.positive, nargs="+", default=[2, 4, 8])
    parser.add_argument("--widths", type=harness.positive, nargs="+", default=[64, 512])
    options = harness.parse(parser)

    def measured() -> str:
        versions: list[str] = []
        cases = [
            measure(replicas, width, options.rounds, options.steps, versions)
            for width in options.widths
            for replicas in options.replicas
        ]
        return report(cases, versions, options.rounds, options.steps)

    return harness.finish("uneven.md", measured, keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
