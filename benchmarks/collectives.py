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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _harness import (
    HERE,
    RESULTS,
    ROUND_DEADLINE,
    BenchmarkError,
    Child,
    circumstances,
    markdown_table,
    median_and_spread,
    positive,
    ratios,
    say,
    started,
    write_result,
)
from multiworker import free_ports
from peers import PeerError, peer_python

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
class Variant:
    """A library, and what it is given."""

    library: str
    form: str

    @property
    def name(self) -> str:
        return "torch" if self.library == "torch" else self.form


TORCH = Variant("torch", "in place")
JAX = Variant("phalanx", "JAX arrays")
NUMPY = Variant("phalanx", "NumPy arrays")
IN_PLACE = Variant("phalanx", "in place")
VARIANTS = (TORCH, IN_PLACE, NUMPY, JAX)


class Gang:
    """All ranks of a library; behaves like one `Child`."""

    def __init__(self, library: str, ranks: int) -> None:
        python = peer_python("torch") if library == "torch" else Path(sys.executable)
        addresses = [f"127.0.0.1:{port}" for port in free_ports(ranks)]
        self._stack = ExitStack()
        self._ranks: list[Child] = []
        for rank in range(ranks):
            options = json.dumps({"library": library, "rank": rank, "addresses": addresses})
            arguments = [str(HERE / "_collectives_ranks.py"), options]
            child = Child(f"{library}, rank {rank} of {ranks}", python, arguments)
            self._ranks.append(self._stack.enter_context(child))

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.kill()
        self._stack.close()

    def versions(self) -> str:
        """Wait until all ranks are ready; the versions of what the first one measures."""
        first, *_ = [r.versions() for r in self._ranks]
        return first

    def ask(self, **command: Any) -> list[dict[str, Any]]:
        """Give all ranks a command; their answers."""
        for rank in self._ranks:
            rank.send(**command)
        return [r.receive(str(command), ROUND_DEADLINE) for r in self._ranks]

    def run(self, op: str, form: str, nbytes: int, steps: int) -> tuple[float, list[float]]:
        """Microseconds of an operation on the slowest rank, and the number that each rank got."""
        answers = self.ask(op=op, form=form, bytes=nbytes, steps=steps)
        seconds = max(a["seconds"] for a in answers)
        return 1e6 * seconds / steps, [a["number"] for a in answers]


# -- measuring -----------------------------------------------------------------------------------------


def compare(gangs: dict[str, Gang], op: str, nbytes: int, options: Any) -> dict[str, list[float]]:
    """Microseconds by round of all variants, which take turns in an order that rotates."""
    steps, numbers = {}, {}
    for variant in VARIANTS:
        trial, numbers[variant.name] = gangs[variant.library].run(op, variant.form, nbytes, 3)
        steps[variant] = max(2, min(MOST_STEPS, int(options.seconds * 1e6 / trial)))
    if len({str(n) for n in numbers.values()}) > 1:
        raise BenchmarkError(f"{op} of {nbytes} bytes: the results differ: {numbers}")
    found: dict[str, list[float]] = {v.name: [] for v in VARIANTS}
    for i in range(options.rounds):
        turn = i % len(VARIANTS)
        for v in VARIANTS[turn:] + VARIANTS[:turn]:
            found[v.name].append(gangs[v.library].run(op, v.form, nbytes, steps[v])[0])
    say(
        f"{op} {size(nbytes)}: {', '.join(f'{k} {statistics.median(t):.0f}' for k, t in found.items())}"
    )
    return found


def measure(options: argparse.Namespace, versions: list[str], kept: dict[str, Any]) -> None:
    for ranks in options.ranks:
        libraries = [v for v in ("torch", "phalanx") if v != "torch" or options.only != ["overlap"]]
        say(f"{ranks} processes: starting {', '.join(libraries)}")
        with started(libraries, lambda v, n=ranks: Gang(v, n), versions) as gangs:  # type: ignore[misc]
            if "all_reduce" in options.only:
                kept["all_reduce"][str(ranks)] = {
                    str(nbytes): compare(gangs, "all_reduce", nbytes, options) for nbytes in SIZES
                }
            if "others" in options.only:
                kept["others"][str(ranks)] = {
                    op: {str(nbytes): compare(gangs, op, nbytes, options) for nbytes in SOME_SIZES}
                    for op in OTHERS
                }
            if "overlap" in options.only and ranks == RANKS[0]:
                answers = gangs["phalanx"].ask(overlap=OVERLAP_BYTES)
                kept["overlap"] = [a["overlap"] for a in answers]
                say(f"overlap: {kept['overlap']}")


# -- reporting -----------------------------------------------------------------------------------------


def size(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"


def rows_of(found: dict[str, dict[str, list[float]]]) -> list[list[str]]:
    """One line per size: microseconds of all, and how many times as fast as torch Phalanx is."""
    ours = [v.name for v in VARIANTS if v is not TORCH]
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
            for name in (v.name for v in VARIANTS if v is not TORCH):
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

{circumstances(kept["versions"])} The load average was {kept["load"]:.1f} before the first process was
started.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="how long a turn takes, about")
    parser.add_argument("--ranks", type=positive, nargs="+", default=list(RANKS))
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args()
    path = RESULTS / "collectives.json"
    kept: dict[str, Any] = {"all_reduce": {}, "others": {}, "overlap": [], "versions": []}
    if path.exists():
        kept = json.loads(path.read_text())
    kept["load"] = os.getloadavg()[0]
    versions: list[str] = []
    try:
        measure(options, versions, kept)
    except (BenchmarkError, PeerError) as error:
        say(str(error))
        return 1
    kept["versions"] = list(dict.fromkeys([*kept["versions"], *versions]))
    path.write_text(json.dumps(kept, indent=1) + "\n")
    text = report(kept)
    print(text)
    write_result("collectives.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
