"""Collectives between processes: px.comm beside torch's gloo.

``python benchmarks/collectives.py`` makes an environment for torch on first use (see `peers.py`), runs
both side by side, prints tables and writes them to ``benchmarks/results/collectives.md``. The numbers
behind them are kept in ``collectives.json``, so that ``--only`` measures a part again and leaves the
rest as it is.

1. all_reduce: from 1 KB to 128 MB, of arrays of JAX, of NumPy arrays, and in place.
2. others: all_gather, broadcast, all_to_all and reduce_scatter, of a few sizes.
3. overlap: an all-reduce in flight while a jitted computation of the same length runs.

Each library has a process for each rank (see `_collectives_ranks.py`), and one library moves data at a
time. The numbers that they compute must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import _harness as harness
from _harness import HERE, RESULTS, ROUND_DEADLINE, markdown_table, median_and_spread, ratios, say

SECTIONS = ("all_reduce", "others", "overlap")
RANKS = (2, 4)
KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 32 * MB, 128 * MB)
OTHERS = ("all_gather", "broadcast", "all_to_all", "reduce_scatter")
SOME_SIZES = (KB, 64 * KB, MB, 32 * MB)
BUDGET_FROM = 64 * KB  # from here on, at least as fast as torch
OVERLAP_BYTES = 32 * MB
OVERLAP_BUDGET = 1.3
MOST_STEPS = 2000


@dataclass(frozen=True)
class Form:
    """A library, and what it is given."""

    library: str
    form: str

    @property
    def name(self) -> str:
        return "torch" if self.library == "torch" else self.form


TORCH = Form("torch", "in place")
JAX = Form("phalanx", "JAX arrays")
NUMPY = Form("phalanx", "NumPy arrays")
IN_PLACE = Form("phalanx", "in place")
FORMS = (TORCH, IN_PLACE, NUMPY, JAX)


class Library(harness.Ranks):
    """All ranks of a library."""

    def __init__(self, library: str, ranks: int) -> None:
        addresses = harness.free_addresses(ranks)
        options = [{"library": library, "rank": i, "addresses": addresses} for i in range(ranks)]
        script = str(HERE / "_collectives_ranks.py")
        python = harness.Variant(library, library, "torch" if library == "torch" else None).python
        super().__init__(
            f"{library}, {ranks} ranks", python, [[script, json.dumps(each)] for each in options]
        )

    def time(self, op: str, form: str, nbytes: int, steps: int) -> tuple[float, list[float]]:
        """Microseconds of an operation on the slowest rank, and the number that each rank got."""
        answers = self.ask(op, ROUND_DEADLINE, op=op, form=form, bytes=nbytes, steps=steps)
        seconds = max(a["seconds"] for a in answers)
        return 1e6 * seconds / steps, [a["number"] for a in answers]


# -- measuring -----------------------------------------------------------------------------------------


def compare(
    libraries: dict[str, Library], op: str, nbytes: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Microseconds by round of all forms, which take turns in an order that rotates."""
    steps, numbers = {}, {}
    for form in FORMS:
        trial, numbers[form.name] = libraries[form.library].time(op, form.form, nbytes, 3)
        steps[form] = max(2, min(MOST_STEPS, int(options.seconds * 1e6 / trial)))
    if len({str(n) for n in numbers.values()}) > 1:
        raise harness.BenchmarkError(f"{op} of {nbytes} bytes: the results differ: {numbers}")
    found: dict[str, list[float]] = {form.name: [] for form in FORMS}
    for turns in harness.rotated(FORMS, options.rounds):
        for form in turns:
            took, _ = libraries[form.library].time(op, form.form, nbytes, steps[form])
            found[form.name].append(took)
    medians = ", ".join(f"{name} {statistics.median(times):.0f}" for name, times in found.items())
    say(f"{op} {size(nbytes)}: {medians}")
    return found


def measure(options: argparse.Namespace, versions: list[str], kept: dict[str, Any]) -> None:
    for ranks in options.ranks:
        names = ["phalanx"] if options.only == ["overlap"] else ["torch", "phalanx"]
        say(f"{ranks} processes: starting {', '.join(names)}")
        with harness.started(names, lambda v, n=ranks: Library(v, n), versions) as libraries:
            if "all_reduce" in options.only:
                kept["all_reduce"][str(ranks)] = {
                    str(nbytes): compare(libraries, "all_reduce", nbytes, options) for nbytes in SIZES
                }
            if "others" in options.only:
                kept["others"][str(ranks)] = {
                    op: {str(nbytes): compare(libraries, op, nbytes, options) for nbytes in SOME_SIZES}
                    for op in OTHERS
                }
            if "overlap" in options.only and ranks == RANKS[0]:
                answers = libraries["phalanx"].ask("overlap", ROUND_DEADLINE, overlap=OVERLAP_BYTES)
                kept["overlap"] = [a["overlap"] for a in answers]
                say(f"overlap: {kept['overlap']}")


# -- reporting -----------------------------------------------------------------------------------------


def size(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def rows_of(found: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """One line per size: microseconds of all, and how many times as fast as torch Phalanx is."""
    ours = [v.name for v in FORMS if v is not TORCH]
    lines = [["size", *(f"{n}, us" for n in ("torch", *ours)), *(f"torch / {n}" for n in ours)]]
    for nbytes, times in found.items():
        cells = [f"{statistics.median(times[n]):.0f}" for n in ("torch", *ours)]
        relative = [median_and_spread(ratios(times["torch"], times[n])) for n in ours]
        lines.append([size(int(nbytes)), *cells, *relative])
    return lines


def slower(kept: dict[str, Any]) -> list[str]:
    """Where Phalanx is slower than torch although it must not be."""
    tables = {f"all_reduce, {n} processes": t for n, t in kept["all_reduce"].items()}
    for n, operations in kept["others"].items():
        tables |= {f"{op}, {n} processes": t for op, t in operations.items()}
    found = []
    for what, table in tables.items():
        for nbytes, times in table.items():
            for name in (v.name for v in FORMS if v is not TORCH):
                ratio = statistics.median(ratios(times["torch"], times[name]))
                if int(nbytes) >= BUDGET_FROM and ratio < 1:
                    found.append(f"{what}, {size(int(nbytes))}, {name}: {ratio:.2f}")
    return found


def overlap_text(parts: list[dict[str, list[float]]]) -> str:
    if not parts:
        return "Not measured."
    lines = [["rank", "beside the transfer", "transfer, ms", "that, ms", "both, ms", "both / longer"]]
    for rank, found in enumerate(parts):
        for other, both in (("computation", "both"), ("pause", "transfer in a pause")):
            times = [1000 * found[name][0] for name in ("transfer", other, both)]
            cells = [f"{t:.1f}" for t in times]
            lines.append([str(rank), other, *cells, f"{times[2] / max(times[:2]):.2f}"])
    used = [["rank", "transfer, ms", "computation, ms", "both, ms"]]
    used += [
        [str(rank), *(f"{1000 * found[n][1]:.1f}" for n in ("transfer", "computation", "both"))]
        for rank, found in enumerate(parts)
    ]
    cores = os.cpu_count() or 1
    needed = 1000 * sum(p["transfer"][1] + p["computation"][1] for p in parts)
    longest = 1000 * max(max(p["transfer"][0], p["computation"][0]) for p in parts)
    return f"""`all_reduce_` of {size(OVERLAP_BYTES)} with `async_op` between {len(parts)} processes,
then a chain of jitted matrix products of about the same length, or a pause of that length (which stands
for an accelerator that computes), then `wait`. Medians of the times of each rank. The budget is
{OVERLAP_BUDGET} times the longer of both.

{markdown_table(lines)}

What the processors computed for each rank:

{markdown_table(used)}

Transfer and computation of all ranks need {needed:.0f} ms of processors, which take at least
{needed / cores:.0f} ms on {cores} cores. That is {needed / cores / longest:.2f} times the longer of
both, however well they overlap."""


def report(kept: dict[str, Any]) -> str:
    all_reduce = "\n\n".join(
        f"{n} processes:\n\n{markdown_table(rows_of(table))}" for n, table in kept["all_reduce"].items()
    )
    others = "\n\n".join(
        f"`{op}`, {n} processes:\n\n{markdown_table(rows_of(table))}"
        for n, operations in kept["others"].items()
        for op, table in operations.items()
    )
    behind = slower(kept)
    met = "met everywhere" if not behind else "missed here: " + "; ".join(behind)
    return f"""# Collectives between processes

Microseconds of one operation on the slowest rank, medians over the rounds, and how many times as fast
as torch Phalanx is: the median of the ratios within a round (min..max). torch writes into tensors, as
`in place` does; results of the others are new arrays. Every call of Phalanx compares what all ranks are
about to do; torch compares nothing.

The budget is to be at least as fast as torch from {size(BUDGET_FROM)} on: {met}.

## all_reduce

{all_reduce}

## Other operations

The size is that of the larger side.

{others}

## Computing while data move

{overlap_text(kept["overlap"])}

## Circumstances

{harness.circumstances(kept["versions"])} The load average was {kept["load"]:.1f} before the first
process was started.
"""


def measure_and_report(options: argparse.Namespace) -> str:
    """Measure the chosen sections; the whole result as Markdown."""
    path = RESULTS / "collectives.json"
    kept: dict[str, Any] = {"all_reduce": {}, "others": {}, "overlap": [], "versions": []}
    if path.exists():
        kept = json.loads(path.read_text())
    kept["load"] = os.getloadavg()[0]
    versions: list[str] = []
    measure(options, versions, kept)
    kept["versions"] = list(dict.fromkeys([*kept["versions"], *versions]))
    if not options.quick:
        path.write_text(json.dumps(kept, indent=1) + "\n")
    return report(kept)


def main() -> int:
    parser = harness.options_parser("Time collectives between processes beside torch's.", 5)
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a turn takes, about")
    parser.add_argument("--ranks", type=harness.positive, nargs="+", default=list(RANKS))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = harness.parse(parser)
    return harness.finish("collectives.md", lambda: measure_and_report(options), keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
