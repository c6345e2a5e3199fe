"""Fault schedules over 2 to 4 workers that train: what became of each, and how long it took.

``python benchmarks/faults.py --schedules 1000`` plays random schedules over ``examples/sabotage.py``,
prints tables and writes them to ``benchmarks/results/faults.md``. With ``--log FILE`` each schedule is
a line of JSON as soon as it was played, and those in the file are not played a second time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _harness as harness
from _child import phalanx_versions
from _harness import say

PROGRAM = [str(harness.HERE.parent / "examples" / "sabotage.py"), "--checkpoints", "{folder}"]
STEPS = 24
DEADLINE = 5.0
CACHE = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def laboratory() -> Any:
    from phalanx.testing import faults

    here = str(harness.HERE)  # has a module keras, which workers must not find
    sys.path[:] = [place for place in sys.path if place != here]
    sys.path.append(str(harness.HERE / "_preload"))
    options = {"preload": ["phalanx", "optax", "laboratory_cache"], "timeout": 300.0}
    return faults.Laboratory(PROGRAM, DEADLINE, options)


def play(first: int, count: int, at_once: int, log: Path | None) -> list[dict[str, Any]]:
    from phalanx.testing import faults

    known = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    found = [row for row in known if first <= row["seed"] < first + count]
    done = {row["seed"] for row in found}
    schedules = [
        faults.random_job_schedule(seed, steps=STEPS, deadline=DEADLINE)
        for seed in range(first, first + count)
        if seed not in done
    ]
    place = laboratory()
    begun = time.monotonic()
    for number, verdict in enumerate(place.play_all(schedules, at_once), 1):
        found.append(row_of(verdict))
        if log is not None:
            with log.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
        if verdict.violations:
            say(f"{verdict}\n{verdict.run.schedule.code()}\n{verdict.run.output[-2000:]}")
        if number % 10 == 0:
            minutes = (time.monotonic() - begun) / 60
            say(f"{number} of {len(schedules)} schedules, {minutes:.1f} minutes")
    return sorted(found, key=lambda row: row["seed"])


def row_of(verdict: Any) -> dict[str, Any]:
    history = verdict.run.history
    happened = []
    for life, event in history.faults():
        times = [None, None]
        if history.has_ended_attempt(life, event):
            times = [history.named(life, event), history.recovered(life, event)]
        happened.append([event["kind"], event["phase"], *times])
    return {
        "seed": verdict.run.schedule.seed,
        "workers": verdict.run.schedule.workers,
        "planned": len(verdict.run.schedule.faults),
        "happened": happened,
        "attempts": history.attempts,
        "outcome": verdict.outcome,
        "violations": list(verdict.violations),
        "codes": [e["codes"] for e in history.launcher if e["event"] == "failed"],
        "seconds": verdict.run.seconds,
    }


def spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    ordered = sorted(values)
    ninetieth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{statistics.median(ordered):.2f}, {ninetieth:.2f}, {ordered[-1]:.2f}"


def kinds_table(rows: Sequence[dict[str, Any]]) -> str:
    table = [["fault", "happened", "named after, s", "next step after, s"]]
    happened = [fault for row in rows for fault in row["happened"]]
    for kind in sorted({fault[0] for fault in happened}):
        mine = [fault for fault in happened if fault[0] == kind]
        columns = [[x[i] for x in mine if x[i] is not None] for i in (2, 3)]
        table.append([kind, str(len(mine)), *map(spread, columns)])
    return harness.markdown_table(table)


def phases_table(rows: Sequence[dict[str, Any]]) -> str:
    counted = Counter((fault[0], fault[1]) for row in rows for fault in row["happened"])
    phases = sorted({phase for _, phase in counted})
    lines = [["", *phases]]
    for kind in sorted({kind for kind, _ in counted}):
        lines.append([kind, *(str(counted[kind, phase] or "") for phase in phases)])
    return harness.markdown_table(lines)


def outcomes_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        ["workers", "schedules", "right", "wrong", "restarts", "processes that ended with code 70"]
    ]
    for workers in sorted({row["workers"] for row in rows}):
        mine = [row for row in rows if row["workers"] == workers]
        wrong = sum(bool(row["violations"]) for row in mine)
        restarts = sum(row["attempts"] - 1 for row in mine)
        stuck = sum(code == 70 for row in mine for codes in row["codes"] for code in codes)
        lines.append([str(x) for x in (workers, len(mine), len(mine) - wrong, wrong, restarts, stuck)])
    return harness.markdown_table(lines)


def wrong_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for problem in row["violations"]:
            yield f"* seed {row['seed']}: {problem.splitlines()[0][:300]}"


def report(options: argparse.Namespace) -> str:
    rows = play(options.first, options.schedules, options.at_once, options.log)
    happened = sum(len(row["happened"]) for row in rows)
    wrong = "\n".join(wrong_lines(rows)) or "Nothing."
    return f"""# Faults

{len(rows)} random schedules over `examples/sabotage.py`: {STEPS} steps, a checkpoint after every
fourth, and {happened} faults that happened. A schedule is right if the job succeeds, every example
counts once in each epoch, the final model is that of the undisturbed job, no complete checkpoint is
lost or mixed up, damage is found, each failure is named in time, and no process, port or file is left.

{outcomes_table(rows)}

## Times

Median, 90th percentile and longest, in seconds. "Named" is from the fault to the first word of a
process or of the launcher that names the worker. A frozen or slow worker is named only if it was away
for longer than the deadline of {DEADLINE:g} seconds; the hub waits for its stack half a second more.
The next step is that of the slowest worker after the restart of all processes, which here are copies
of a process that has imported JAX and find compiled programs in a cache: new processes need the seconds
of their imports and of compiling on top.

{kinds_table(rows)}

## Where faults happened

{phases_table(rows)}

## What was wrong

{wrong}

{harness.circumstances([", ".join(f"{name} {x}" for name, x in phalanx_versions().items())])}

To repeat: `python benchmarks/faults.py --schedules {options.schedules} --first {options.first}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Play fault schedules.")
    parser.add_argument("--schedules", type=harness.positive, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--at-once", type=harness.positive, default=2, help="jobs at the same time")
    parser.add_argument("--log", type=Path, help="a file for what was played already")
    parser.add_argument("--quick", action="store_true", help="four schedules; only printed")
    options = parser.parse_args()
    options.schedules = 4 if options.quick else options.schedules
    os.environ.update({name: os.environ.get(name, value) for name, value in CACHE.items()})
    cache = str(harness.HERE.parent / ".cache" / "programs")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    return harness.finish("faults.md", lambda: report(options), keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
