"""Parameter servers: closures per second of Phalanx's coordinator and of TensorFlow's.

``python benchmarks/parameter_server.py`` starts coordinators of both libraries, each with its own
workers and servers as processes of this machine, lets them take turns round by round, and writes a
table to ``benchmarks/results/parameter_server.md``.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import _harness as harness
from _harness import Child, markdown_table, ratios, say, spread
from _ps_common import CASES

BUDGETS = {"trivial": 40.0, "step": 5.0, "sparse": 6.0, "dense": 4.0, "read": 5.0}
"""How many times as many closures per second as TensorFlow's, with updates made exactly once."""

STEPS = {"trivial": 8000, "step": 1000, "sparse": 800, "dense": 300, "read": 300}
"""Closures of Phalanx in one round; TensorFlow runs fewer."""

PEERS_SHARE = {"trivial": 0.05, "step": 0.2, "sparse": 0.2, "dense": 0.3, "read": 0.3}


@dataclass(frozen=True)
class Variant(harness.Variant):
    """A library, and the options of its strategy."""

    options: tuple[str, ...] = ()

    def start(self, workers: int, servers: int) -> Child:
        """The coordinator's process."""
        script = "_ps_tensorflow.py" if self.peer else "_ps_phalanx.py"
        arguments = [str(harness.HERE / script), str(workers), str(servers), *self.options]
        return Child(self.name, self.python, arguments)

    def steps(self, case: str) -> int:
        """How many closures there are in a round."""
        return int(STEPS[case] * (PEERS_SHARE[case] if self.peer else 1))


OURS = Variant("phalanx", "Phalanx")
PEER = Variant("tensorflow", "TensorFlow", "tensorflow")
CHOICES = [
    Variant("exactly", "exactly once"),
    Variant("least", "at least once", options=("delivery=at_least_once",)),
    Variant("backup", "with backup workers", options=("backup_workers=1",)),
    Variant("snapshot", "snapshots", options=("durability=snapshot",)),
    Variant("log", "log", options=("durability=log",)),
    Variant("sync", "log on disk", options=("durability=log", "sync=True")),
]

Rates = dict[tuple[str, str], list[float]]
"""Closures per second of a variant and a case, round by round."""


def measured(
    variants: Sequence[Variant], workers: int, servers: int, rounds: int, versions: list[str]
) -> Rates:
    """Let variants take turns."""
    rates: Rates = {(v.key, case): [] for v in variants for case in CASES}
    with harness.started(variants, lambda v: v.start(workers, servers), versions) as children:
        for case in CASES:
            for variant, child in children.items():
                run(child, case, max(40, variant.steps(case) // 4))
            for order in harness.rotated(variants, rounds):
                for variant in order:
                    steps = variant.steps(case)
                    rates[variant.key, case].append(steps / run(children[variant], case, steps))
            found = (f"{v.name} {statistics.median(rates[v.key, case]):,.0f}/s" for v in variants)
            say(f"{workers} workers, {case}: {', '.join(found)}")
    return rates


def run(child: Child, case: str, steps: int) -> float:
    """Seconds that so many closures take."""
    child.send(case=case, steps=steps)
    answer = child.receive(f"{steps} closures of {case}", harness.ROUND_DEADLINE)
    return float(answer["seconds"])


def compared(results: Mapping[int, Rates]) -> str:
    """The table of both libraries."""
    rows = [["workers", "", "Phalanx, per second", "TensorFlow, per second", "ratio", "budget"]]
    for workers, rates in results.items():
        for case, what in CASES.items():
            these, those = rates[OURS.key, case], rates[PEER.key, case]
            found = ratios(these, those)
            is_met = statistics.median(found) >= BUDGETS[case]
            rows.append(
                [
                    str(workers),
                    what,
                    f"{statistics.median(these):,.0f}",
                    f"{statistics.median(those):,.0f}",
                    f"{statistics.median(found):.1f} ({spread(found)})",
                    f"{BUDGETS[case]:g}{'' if is_met else ', **missed**'}",
                ]
            )
    return markdown_table(rows)


def chosen(rates: Rates) -> str:
    """The table of options."""
    rows = [["", *(v.name for v in CHOICES)]]
    for case, what in CASES.items():
        medians = [statistics.median(rates[v.key, case]) for v in CHOICES]
        rest = [f"{rate:,.0f} ({rate / medians[0]:.2f})" for rate in medians[1:]]
        rows.append([what, f"{medians[0]:,.0f}", *rest])
    return markdown_table(rows)


def report(workers: Sequence[int], servers: int, rounds: int) -> str:
    """Measure everything, and describe it."""
    load = os.getloadavg()[0]
    versions: list[str] = []
    results = {n: measured([OURS, PEER], n, servers, rounds, versions) for n in workers}
    options = measured(CHOICES, 2, servers, rounds, versions)
    return f"""\
# Parameter servers

Closures per second over {servers} parameter servers: medians of {rounds} rounds in which the libraries
take turns, then the median (min..max) of the ratios within a round. Updates of Phalanx count exactly
once, those of TensorFlow at least once. All tasks are processes of one machine.

{compared(results)}

A training step reads both matrices, computes loss and gradients, and changes both. A sparse update
reads its rows first. A read sums what it has read; before each, another closure changes one row,
because Phalanx does not send a value again that has not changed.

What delivery and durability cost, with 2 workers: closures per second, and the ratio to the first
column.

{chosen(options)}

{harness.circumstances(versions)} The load average was {load:.1f} before the first process was
started.

To repeat: `python benchmarks/parameter_server.py --rounds {rounds}`.
"""


def main() -> int:
    parser = harness.options_parser("Compare coordinators of parameter servers.", 5)
    parser.add_argument("--workers", type=harness.positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--servers", type=harness.positive, default=2)
    options = harness.parse(parser)

    def measure() -> str:
        return report(options.workers, options.servers, options.rounds)

    return harness.finish("parameter_server.md", measure, keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
