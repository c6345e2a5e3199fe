"""Parameter servers: closures per second of Phalanx's coordinator and of TensorFlow's.

``python benchmarks/parameter_server.py`` starts coordinators of both libraries, each with its own
workers and servers as processes of this machine, lets them take turns round by round, and writes
tables to ``benchmarks/results/parameter_server.md``: both libraries, what delivery, staleness, backup
workers and durability cost, where the time goes, and what Ray costs. It takes about eight minutes on
two quiet processors, and less with fewer ``--rounds``; ``--quick`` takes two. ``--only sparse``
compares the libraries in some cases alone, and prints that without writing it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import _harness as harness
from _harness import Child, markdown_table, ratios, say, spread
from _ps_common import CASES, LAUNCHED, MARK
from peers import BenchmarkError, peer_python

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
DEFAULT = Variant("exactly", "exactly once")
CHOICES = [
    [
        Variant("least", "at least once", options=("delivery=at_least_once",)),
        Variant("backup", "with backup workers", options=("backup_workers=1",)),
        Variant("fresh", "staleness 0", options=("max_staleness=0",)),
        Variant("stale", "staleness 4", options=("max_staleness=4",)),
    ],
    [
        Variant("snapshot", "snapshots", options=("durability=snapshot",)),
        Variant("log", "log", options=("durability=log",)),
        Variant("sync", "log on disk", options=("durability=log", "sync=True")),
    ],
]
"""Options that are measured together, each time beside the default ones."""
CHOSEN = ("step", "sparse", "dense")
"""The cases to which these options matter."""

JOBS = ("coordinator", "worker", "ps")
LAUNCH_DEADLINE = 300.0  # seconds for a job that `phalanx run` starts


class Taken(NamedTuple):
    """What a round has taken: closures per second, and microseconds of processors for each of them."""

    rate: float
    processors: Mapping[str, float]


Rates = dict[tuple[str, str], list[Taken]]
"""What a variant and a case have taken, round by round."""


def measured(
    variants: Sequence[Variant],
    workers: int,
    servers: int,
    rounds: int,
    versions: list[str],
    cases: Sequence[str] = tuple(CASES),
) -> Rates:
    """Let variants take turns."""
    rates: Rates = {(v.key, case): [] for v in variants for case in cases}
    with harness.started(variants, lambda v: v.start(workers, servers), versions) as children:
        for case in cases:
            for variant, child in children.items():
                run(child, case, max(40, variant.steps(case) // 4))
            for order in harness.rotated(variants, rounds):
                for variant in order:
                    taken = run(children[variant], case, variant.steps(case))
                    rates[variant.key, case].append(taken)
            found = (f"{v.name} {median_rate(rates[v.key, case]):,.0f}/s" for v in variants)
            say(f"{workers} workers, {case}: {', '.join(found)}")
    return rates


def run(child: Child, case: str, steps: int) -> Taken:
    """What so many closures take."""
    child.send(case=case, steps=steps)
    answer = child.receive(f"{steps} closures of {case}", harness.ROUND_DEADLINE)
    processors = {job: 1e6 * x / steps for job, x in answer["processors"].items()}
    return Taken(steps / float(answer["seconds"]), processors)


def median_rate(taken: Sequence[Taken]) -> float:
    """Closures per second."""
    return statistics.median(x.rate for x in taken)


def compared(results: Mapping[int, Rates]) -> str:
    """The table of both libraries."""
    rows = [["workers", "", "Phalanx, per second", "TensorFlow, per second", "ratio", "budget"]]
    for workers, rates in results.items():
        for case, what in _measured_cases(rates).items():
            these, those = ([x.rate for x in rates[v.key, case]] for v in (OURS, PEER))
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


def chosen(results: Mapping[int, Sequence[Rates]]) -> str:
    """The table of options: the rate of each, and its ratio to the rate of the default ones."""
    rows = [["workers", "", DEFAULT.name, *(v.name for group in CHOICES for v in group)]]
    for workers, groups in results.items():
        for case in CHOSEN:
            usual = [x for rates in groups for x in rates[DEFAULT.key, case]]
            row = [str(workers), CASES[case], f"{median_rate(usual):,.0f}"]
            for group, rates in zip(CHOICES, groups, strict=True):
                base = [x.rate for x in rates[DEFAULT.key, case]]
                for variant in group:
                    found = [x.rate for x in rates[variant.key, case]]
                    ratio = statistics.median(ratios(found, base))
                    row.append(f"{statistics.median(found):,.0f} ({ratio:.2f})")
            rows.append(row)
    return markdown_table(rows)


def spent(results: Mapping[int, Rates]) -> str:
    """The table of processor time."""
    rows = [["workers", "", "library", "coordinator", "workers' time", "servers' time", "all"]]
    for workers, rates in results.items():
        for case, what in _measured_cases(rates).items():
            for variant in (OURS, PEER):
                taken = [x.processors for x in rates[variant.key, case]]
                times = [statistics.median(x.get(job, 0.0) for x in taken) for job in JOBS]
                numbers = [f"{x:,.0f}" for x in (*times, sum(times))]
                rows.append([str(workers), what, variant.name, *numbers])
    return markdown_table(rows)


def _measured_cases(rates: Rates) -> dict[str, str]:
    return {case: what for case, what in CASES.items() if (OURS.key, case) in rates}


def comparison(workers: Sequence[int], servers: int, rounds: int, cases: Sequence[str]) -> str:
    """Both libraries in some cases."""
    results = {n: measured([OURS, PEER], n, servers, rounds, [], cases) for n in workers}
    return f"{compared(results)}\n\n{spent(results)}"


# -- Ray ---------------------------------------------------------------------------------------------


def launched(engine: str, python: Path, rounds: int) -> tuple[float, dict[str, float]]:
    """Run a job with `phalanx run`: the seconds that it takes in all, and closures per second."""
    source = str(harness.HERE.parent / "src")
    command = [str(python), "-m", "phalanx", "run", "--engine", engine, "-n", "2", "--ps", "2"]
    command += ["--env", f"PYTHONPATH={source}", "--env", "JAX_PLATFORMS=cpu"]
    if engine == "ray":
        for job in ("chief", "worker", "ps"):
            command += ["--ray-resources", f"{job}:CPU=0.1"]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, str(harness.HERE / "_ps_phalanx.py"), "launched", str(rounds)],
                env={**os.environ, "PYTHONPATH": source, "XDG_RUNTIME_DIR": folder},
                capture_output=True,
                text=True,
                timeout=LAUNCH_DEADLINE,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise BenchmarkError(f"phalanx run --engine {engine}: not done in time") from late
        seconds = time.perf_counter() - begin
    if done.returncode:
        raise BenchmarkError(f"phalanx run --engine {engine} failed:\n{done.stderr[-2000:]}")
    found = [json.loads(x.split(MARK, 1)[1]) for x in done.stdout.splitlines() if MARK in x]
    return seconds, {x["case"]: statistics.median(x["rates"]) for x in found}


def on_ray(rounds: int) -> str:
    """The table of jobs with and without Ray; says so if Ray is not to be had."""
    try:
        python = peer_python("ray")
        found = {engine: launched(engine, python, rounds) for engine in ("processes", "ray")}
    except BenchmarkError as error:
        say(f"Without Ray: {error}")
        return "Ray was not to be had."
    rows = [["", "`phalanx run`", "`phalanx run --engine ray`"]]
    for case in LAUNCHED:
        plain, ray = (found[engine][1][case] for engine in ("processes", "ray"))
        rows.append([f"{CASES[case]}, per second", f"{plain:,.0f}", f"{ray:,.0f} ({ray / plain:.2f})"])
    whole = [found[engine][0] for engine in ("processes", "ray")]
    rows.append(["the whole job, seconds", *(f"{x:.1f}" for x in whole)])
    say(f"Ray: {found}")
    return markdown_table(rows)


def report(workers: Sequence[int], servers: int, rounds: int) -> str:
    """Measure everything, and describe it."""
    load = os.getloadavg()[0]
    versions: list[str] = []
    results = {n: measured([OURS, PEER], n, servers, rounds, versions) for n in workers}
    few = max(1, rounds // 2)
    options = {
        n: [measured([DEFAULT, *group], n, servers, few, versions, CHOSEN) for group in CHOICES]
        for n in workers
    }
    ray = on_ray(rounds)
    return f"""\
# Parameter servers

Closures per second over {servers} parameter servers: medians of {rounds} rounds in which the libraries
take turns, then the median (min..max) of the ratios within a round. Updates of Phalanx count exactly
once, those of TensorFlow at least once. All tasks are processes of one machine.

{compared(results)}

A training step reads both matrices, computes loss and gradients, and changes both. A sparse update
reads its rows first. A read sums what it has read; before each, another closure changes one row,
because Phalanx does not send a value again that has not changed.

What delivery, staleness, backup workers and durability cost: closures per second, medians of {few}
rounds, and the ratio to the default options in the same rounds.

{chosen(options)}

With staleness 0 closures run one after the other, whatever the number of workers. Each update of 4 MB
is 4 MB of log: more than a disk takes at this rate.

Where the time goes: microseconds of processors for each closure, of all tasks of a kind together.

{spent(results)}

What Ray costs, with 2 workers: it places the processes, and their messages do not go through it. Each
job was started once.

{ray}

{harness.circumstances(versions)} The load average was {load:.1f} before the first process was
started.

To repeat: `python benchmarks/parameter_server.py --rounds {rounds}`.
"""


def main() -> int:
    parser = harness.options_parser("Compare coordinators of parameter servers.", 5)
    parser.add_argument("--workers", type=harness.positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--servers", type=harness.positive, default=2)
    parser.add_argument("--only", nargs="+", choices=CASES, help="cases to compare, and nothing else")
    options = harness.parse(parser)
    chosen = options.workers, options.servers, options.rounds

    def measure() -> str:
        return comparison(*chosen, options.only) if options.only else report(*chosen)

    return harness.finish("parameter_server.md", measure, keep=not (options.quick or options.only))


if __name__ == "__main__":
    sys.exit(main())
