"""``phalanx chaos``: play random schedules of faults over a user's own program, and judge it."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phalanx.cli.arguments import count, positive, seconds, worker_range
from phalanx.cli.run import quiet_jax
from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.testing.faults.elastic_schedules import random_elastic_schedule
from phalanx.testing.faults.exploring import JobVerdict, Laboratory
from phalanx.testing.faults.job_history import JobHistory
from phalanx.testing.faults.jobs import (
    ELASTIC_FAULTS,
    JOB_FAULTS,
    JobSchedule,
    random_job_schedule,
)

__all__ = ["add_chaos_parser"]

_INTERRUPTED = 130  # what shells give for Ctrl-C

_DESCRIPTION = """\
Run a program undisturbed, and then under random schedules of faults: workers are killed, frozen and
slowed down, they raise, are told that their machine goes away, lose their connections, find damaged
checkpoints or a full disk. After a failure the job is started again, as phalanx run --restarts does. A
schedule is right if the job succeeds, each failure was named in time, no process, port or half written
file is left, and the checkpoints are whole. Programs that call px.testing.faults.record are checked for
examples that count twice or not at all, too, and for another final state than undisturbed. {folder} in
the arguments of the program stands for a new folder in each run; a program without it runs in such a
folder.
"""


def add_chaos_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx chaos`` to the command line."""
    parser = commands.add_parser(
        "chaos",
        help="play random faults over a program, and see whether it survives them",
        description=_DESCRIPTION,
        usage="phalanx chaos [options] script.py [arguments ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--schedules", type=positive, default=10, metavar="N", help="how many (default: %(default)s)"
    )
    parser.add_argument(
        "-n",
        "--workers",
        type=worker_range,
        default=(0, None),
        metavar="N or MIN:MAX",
        help="MIN:MAX plays an elastic job, in which workers come and go (default: 2, 3 or 4)",
    )
    parser.add_argument("--seed", type=count, default=0, help="of the first one (default: 0)")
    parser.add_argument(
        "--faults",
        metavar="KIND,…",
        help=f"what may go wrong (default: {','.join(JOB_FAULTS)}; of elastic jobs: "
        f"{','.join(ELASTIC_FAULTS)})",
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help="of the program (default: as many as undisturbed)"
    )
    parser.add_argument(
        "--restarts", type=count, metavar="K", help="default: as often as faults end the job"
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=15.0,
        metavar="S",
        help="how long workers wait for each other (default: %(default)g seconds)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="how long one job may take (default: %(default)g seconds)",
    )
    parser.add_argument("--devices-per-worker", type=positive, metavar="D", help="logical CPU devices")
    parser.add_argument(
        "--shrink",
        type=count,
        default=20,
        metavar="N",
        help="jobs to play to make the first schedule that fails smaller (default: %(default)s)",
    )
    parser.add_argument("--history", metavar="FOLDER", help="write the histories as lines of JSON")
    parser.add_argument("script", nargs=argparse.REMAINDER, help="the program and its arguments")
    parser.set_defaults(function=chaos)


def chaos(options: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit code."""
    words = options.script[1:] if options.script[:1] == ["--"] else options.script
    if not words:
        raise InvalidValueError("Say which program to run: phalanx chaos train.py. Received: nothing")
    known = JOB_FAULTS if options.workers[1] is None else ELASTIC_FAULTS
    kinds = list(known) if options.faults is None else [x for x in options.faults.split(",") if x]
    if not kinds or set(kinds) - set(known):
        raise InvalidValueError(
            f"--faults must be of {', '.join(known)}. Received: {shown(options.faults)}"
        )
    laboratory = Laboratory(
        words,
        options.deadline,
        {
            "timeout": options.timeout,
            "devices": options.devices_per_worker,
            "restarts": options.restarts,
        },
    )
    console = Console(file=sys.stdout)
    with quiet_jax():
        verdicts = _play(laboratory, options, kinds, console)
        is_whole = len(verdicts) == options.schedules
        console.print(table(verdicts))
        wrong = [verdict for verdict in verdicts if verdict.violations]
        console.print(summary(verdicts), highlight=False)
        if wrong:
            _explain(laboratory, wrong[0], options.shrink if is_whole else 0, console)
    if wrong:
        return 1
    return 0 if is_whole else _INTERRUPTED


def _play(
    laboratory: Laboratory, options: argparse.Namespace, kinds: Sequence[str], console: Console
) -> list[JobVerdict]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: list[JobVerdict] = []
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        bar = progress.add_task("undisturbed", total=options.schedules)
        number, most = options.workers
        first = laboratory.undisturbed(most or number or 2)
        steps = options.steps or _steps(first.history)
        console.print(f"Undisturbed: {first.seconds:.1f} s, {steps} steps", highlight=False)
        for seed in range(options.seed, options.seed + options.schedules):
            how: dict[str, Any] = {"kinds": kinds, "steps": steps, "deadline": options.deadline}
            how["phases"] = first.history.phases()
            if most is None:
                schedule = random_job_schedule(seed, number or None, **how)
            else:
                saves = bool(first.history.all("save"))
                schedule = random_elastic_schedule(seed, most, least=number, saves=saves, **how)
            progress.update(bar, description=f"seed {seed}")
            try:
                verdict = laboratory.play(schedule)
            except KeyboardInterrupt:  # what was played before counts
                console.print(f"Interrupted in seed {seed}.", highlight=False)
                break
            found.append(verdict)
            _keep(verdict, options.history)
            progress.advance(bar)
            if verdict.violations or not console.is_terminal:
                console.print(f"seed {seed}: {verdict.outcome}", highlight=False)
    return found


def _steps(history: JobHistory) -> int:
    """How many steps a worker has begun, at least two."""
    counted = Counter(life.worker for life, _ in history.all("step"))
    return max([2, *counted.values()])


def _keep(verdict: JobVerdict, folder: str | None) -> None:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder, f"seed-{verdict.run.schedule.seed}.jsonl")
        path.write_text(verdict.run.history.lines())


def table(verdicts: Sequence[JobVerdict]) -> Table:
    """Schedules, what became of them, and how long it took."""
    shown_table = Table(title="Fault schedules")
    for name in ("seed", "workers", "faults that happened", "outcome"):
        shown_table.add_column(name)
    for name in ("named after", "next step after"):
        shown_table.add_column(name, justify="right")
    for verdict in verdicts:
        schedule: JobSchedule = verdict.run.schedule
        happened = ", ".join(verdict.happened) or "none"
        style = "red" if verdict.violations else None
        times = [_seconds(verdict.detection), _seconds(verdict.recovery)]
        shown_table.add_row(
            str(schedule.seed), str(schedule.workers), happened, verdict.outcome, *times, style=style
        )
    return shown_table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def summary(verdicts: Sequence[JobVerdict]) -> str:
    """The verdict over all schedules, in a line or two."""
    wrong = [verdict for verdict in verdicts if verdict.violations]
    happened = sum(len(verdict.happened) for verdict in verdicts)
    words = [f"{len(verdicts) - len(wrong)} of {len(verdicts)} schedules are right; {happened} faults."]
    if empty := sum(not verdict.happened for verdict in verdicts):
        words.append(f"In {empty} of them no fault was reached.")
    for what, values in (
        ("Named", [v.detection for v in verdicts]),
        ("The next step came", [v.recovery for v in verdicts]),
    ):
        known = [value for value in values if value is not None]
        if known:
            middle, longest = statistics.median(known), max(known)
            words.append(f"{what} after {middle:.2f} s (median), {longest:.2f} s at most.")
    return " ".join(words)


def _explain(laboratory: Laboratory, first: JobVerdict, most: int, console: Console) -> None:
    console.print(f"\n{first}", highlight=False, markup=False, soft_wrap=True)
    smallest = first
    if most:
        console.print(f"Looking for a smaller schedule that fails, in {most} jobs at most …")
        failed: list[JobVerdict] = []
        try:
            smallest = laboratory.shrink(first.run.schedule, most, failed.append)
        except KeyboardInterrupt:
            smallest = next((x for x in reversed(failed) if x.violations), first)
            console.print("Interrupted.")
        console.print(
            f"\nThe smallest that was found: {smallest}", highlight=False, markup=False, soft_wrap=True
        )
    code = smallest.run.schedule.code()
    console.print(f"\nAs code:\n\n{code}\n", highlight=False, markup=False)
    console.print("The end of its output:", highlight=False)
    console.print(smallest.run.output[-3000:], highlight=False, markup=False, soft_wrap=True)
