"""Input pipelines: px.data beside tf.data and Grain.

``python benchmarks/data.py`` makes environments for TensorFlow and Grain on first use (see `peers.py`),
runs all variants side by side, prints tables and writes them to ``benchmarks/results/data.md``, with a
plot in ``data.png`` if Matplotlib is installed.

1. Examples per second of common pipelines over arrays, and of reading and parsing records.
2. Training steps that take their input from a distributed dataset, against step and input alone.
3. The memory that iterating a large dataset takes.

Each library has a process of its own (`_data_phalanx.py` and its siblings), and one of them works at a
time. A sum over the examples must be the same in all of them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _data_common as common
import _harness as harness
from _harness import HERE, Child, Variant, markdown_table, median_and_spread, ratios, say

DEADLINE = 180.0
MEAN_TOLERANCE = 1e-5  # relative
NOTHING = "-"
OVERLAP_BUDGET = 1.1
MEMORY_BATCHES = 2  # the budget: the batch in use and one more, and a number for each row
ROW_NUMBER = 4  # bytes
MEMORY_SLACK = 500_000  # bytes, for the numbers of the rows of one batch and for Python itself
OVERLAP_KINDS = {
    "waits": "waits, as for a disk",
    "computes": "computes in NumPy",
    "waits, crowded": "waits; the step has all processors",
    "computes, crowded": "computes; the step has all processors",
}
OVERLAP_PARTS = ("step", "input", "both, on demand", "both, reading ahead")


PHALANX = Variant("phalanx", "Phalanx")
TENSORFLOW = Variant("tensorflow", "tf.data", peer="tensorflow")
GRAIN = Variant("grain", "Grain", peer="grain")
LIBRARIES = (PHALANX, TENSORFLOW, GRAIN)

CASES = {
    "batch": "`batch`",
    "batch, all": "`batch`, every number read",
    "shuffle": "`shuffle` all, `batch`",
    "small shuffle": f"`shuffle` {common.SMALL_BUFFER:,}, `batch`",
    "cache": "`cache`, `shuffle` all, `batch`, `repeat`",
    "python map": "`map` of a Python function, `batch`",
    "native map": "the same, in tf.data's graph",
    "batch map": "`batch`, `map` of batches",
    "records": "TFRecord, `batch`",
    "parse": "TFRecord, `batch`, `parse_example`",
}
RECORD_CASES = ("records", "parse")

BUDGETS = {"batch": 3.0, "shuffle": 3.0, "python map": 1.0}
"""Phalanx must be at least this many times as fast as tf.data."""


# -- pipelines -----------------------------------------------------------------------------------


@dataclass
class Measurement:
    """One case: examples per second by round, for each setting of each library."""

    case: str
    rates: dict[tuple[Variant, str], list[float]] = field(default_factory=dict)

    def best(self, library: Variant) -> str | None:
        """The library's fastest setting, if it knows the case."""
        settings = {s: statistics.median(r) for (of, s), r in self.rates.items() if of is library}
        return max(settings, key=settings.__getitem__) if settings else None

    def rounds(self, library: Variant) -> list[float]:
        """Examples per second with the fastest setting."""
        setting = self.best(library)
        return [] if setting is None else self.rates[library, setting]


def run(child: Child, case: str, setting: str, epochs: int) -> dict[str, Any]:
    """Some epochs of one pipeline."""
    child.send(case=case, setting=setting, epochs=epochs)
    return child.receive(f"{case}, {setting}", DEADLINE)


def measure_pipelines(
    libraries: Sequence[Variant], rounds: int, seconds: float, folder: Path, versions: list[str]
) -> list[Measurement]:
    """Run all cases, each in rounds in which the libraries and their settings take turns."""

    def start(library: Variant) -> Child:
        arguments = [str(HERE / f"_data_{library.key}.py"), "pipelines", str(folder)]
        return Child(library.name, library.python, arguments)

    say(f"pipelines: starting {len(libraries)} processes")
    with harness.started(libraries, start, versions) as children:
        settings = {v: child.receive("settings", DEADLINE)["settings"] for v, child in children.items()}
        return [measure_case(case, children, settings, rounds, seconds) for case in CASES]


def measure_case(
    case: str,
    children: Mapping[Variant, Child],
    settings: Mapping[Variant, Mapping[str, Sequence[str]]],
    rounds: int,
    seconds: float,
) -> Measurement:
    order = [(v, s) for v in children for s in settings[v].get(case, ())]
    epochs, means = {}, {}
    for library, setting in order:
        trial = run(children[library], case, setting, 1)  # fills caches, starts threads
        means[library, setting] = trial["mean"]
        if trial["seconds"] < 4 * seconds:
            trial = run(children[library], case, setting, 1)
        epochs[library, setting] = max(1, round(seconds / trial["seconds"]))
    check_means(case, means)
    measurement = Measurement(case, {of: [] for of in order})
    for turns in harness.rotated(order, rounds):
        for library, setting in turns:
            done = run(children[library], case, setting, epochs[library, setting])
            measurement.rates[library, setting].append(done["examples"] / done["seconds"])
            means[library, setting] = done["mean"]
        check_means(case, means)
    shown = [(v.name, measurement.rounds(v)) for v in children]
    rates = ", ".join(f"{name} {statistics.median(r):,.0f}" for name, r in shown if r)
    say(f"{case}: {rates} examples/s")
    return measurement


def check_means(case: str, means: Mapping[tuple[Variant, str], float]) -> None:
    """Refuse to compare pipelines that do not give the same examples."""
    results = {f"{library.name}, {setting}": mean for (library, setting), mean in means.items()}
    harness.check_same(f"the means of the examples in the case '{case}'", results, MEAN_TOLERANCE)


# -- steps with input ------------------------------------------------------------------------------


@dataclass
class Overlap:
    """One kind of input: milliseconds per step by round, of each part; and of processor time."""

    kind: str
    wall: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in OVERLAP_PARTS})
    processor: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in OVERLAP_PARTS})

    def relative(self, part: str) -> list[float]:
        """The time with input over the longer of step and input alone, by round."""
        longer = [max(pair) for pair in zip(self.wall["step"], self.wall["input"], strict=True)]
        return ratios(self.wall[part], longer)

    def least(self) -> float:
        """What step and input take if all processors share their work."""
        work = statistics.median(self.processor["step"]) + statistics.median(self.processor["input"])
        return work / (os.cpu_count() or 1)

    def verdict(self) -> str:
        """Whether the time with input is within the budget, and whether it could be."""
        longer = max(statistics.median(self.wall[part]) for part in ("step", "input"))
        if statistics.median(self.relative("both, reading ahead")) <= OVERLAP_BUDGET:
            said = "met"
        elif self.least() > OVERLAP_BUDGET * longer:
            said = f"**missed**; the processors' share alone is {self.least() / longer:.2f}"
        else:
            said = "**missed**"
        return f"at most {OVERLAP_BUDGET:g}: {said}"


def measure_overlap(kind: str, rounds: int, steps: int) -> Overlap:
    overlap = Overlap(kind)
    arguments = [str(HERE / "_data_phalanx.py"), "overlap", kind]
    with Child(f"steps with input ({kind})", Path(sys.executable), arguments) as child:
        child.versions()
        for i, parts in enumerate(harness.rotated(OVERLAP_PARTS, rounds + 1)):
            for part in parts:
                child.send(what=part, steps=steps)
                done = child.receive(part, DEADLINE)
                if i > 0:  # the first round warms up
                    overlap.wall[part].append(1000 * done["wall"] / steps)
                    overlap.processor[part].append(1000 * done["processor"] / steps)
    times = ", ".join(f"{part} {statistics.median(t):.2f}" for part, t in overlap.wall.items())
    say(f"steps with input that {kind}: {times} ms")
    return overlap


# -- memory --------------------------------------------------------------------------------------


def measure_memory(libraries: Sequence[Variant], megabytes: int) -> dict[Variant, dict[str, float]]:
    """One library after the other, each if there is memory enough."""
    found = {}
    for library in libraries:
        # tf.data copies the arrays, and its shuffle buffer holds all rows once more.
        needed = (4 if library is TENSORFLOW else 2) * megabytes
        if available_megabytes() < needed:
            say(f"memory: {library.name} is left out, it needs {needed} MB")
            continue
        arguments = [str(HERE / f"_data_{library.key}.py"), "memory", str(megabytes)]
        with Child(f"memory of {library.name}", library.python, arguments) as child:
            child.versions()
            found[library] = child.receive("memory", DEADLINE)
        say(f"memory: {library.name} takes {found[library]['extra'] / 1e6:,.0f} MB")
    return found


def available_megabytes() -> float:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return math.inf


# -- reporting -----------------------------------------------------------------------------------


def rates_table(measurements: Sequence[Measurement], libraries: Sequence[Variant]) -> str:
    rows = [["pipeline", *(v.name for v in libraries)]]
    for m in measurements:
        rates = [[r / 1000 for r in m.rounds(v)] for v in libraries]
        rows.append([CASES[m.case], *(median_and_spread(r) if r else NOTHING for r in rates)])
    return markdown_table(rows)


def ratios_table(measurements: Sequence[Measurement], libraries: Sequence[Variant]) -> str:
    others = [v for v in libraries if v is not PHALANX]
    rows = [["pipeline", *(f"Phalanx / {v.name}" for v in others), "budget (tf.data)"]]
    for m in measurements:
        relative = {v: ratios(m.rounds(PHALANX), m.rounds(v)) if m.rounds(v) else [] for v in others}
        cells = [median_and_spread(r) if r else NOTHING for r in relative.values()]
        rows.append([CASES[m.case], *cells, verdict(m.case, relative.get(TENSORFLOW, []))])
    return markdown_table(rows)


def verdict(case: str, relative: Sequence[float]) -> str:
    if case not in BUDGETS or not relative:
        return NOTHING
    met = statistics.median(relative) >= BUDGETS[case]
    return f"at least {BUDGETS[case]:g}: {'met' if met else '**missed**'}"


def records_table(
    measurements: Sequence[Measurement], libraries: Sequence[Variant], size: float
) -> str:
    """Megabytes of the file per second; `size` is that of one record."""
    shown = [m for m in measurements if m.case in RECORD_CASES]
    able = [v for v in libraries if shown[0].rounds(v)]
    rows = [["MB/s", *(v.name for v in able)]]
    for m in shown:
        rates = [[r * size / 1e6 for r in m.rounds(v)] for v in able]
        rows.append([CASES[m.case], *map(median_and_spread, rates)])
    return markdown_table(rows)


def settings_table(measurements: Sequence[Measurement], libraries: Sequence[Variant]) -> str:
    rows = [["pipeline", *(v.name for v in libraries)]]
    rows += [[CASES[m.case], *(m.best(v) or NOTHING for v in libraries)] for m in measurements]
    return markdown_table(rows)


def overlap_table(overlaps: Sequence[Overlap]) -> str:
    head = ["input", *OVERLAP_PARTS, "processors' share"]
    rows = [head]
    for o in overlaps:
        times = [median_and_spread(o.wall[part]) for part in OVERLAP_PARTS]
        rows.append([OVERLAP_KINDS[o.kind], *times, f"{o.least():.2f}"])
    return markdown_table(rows)


def overlap_ratios_table(overlaps: Sequence[Overlap]) -> str:
    rows = [["input", "on demand / max(step, input)", "reading ahead / max(step, input)", "budget"]]
    for o in overlaps:
        demand, ahead = (o.relative(f"both, {how}") for how in ("on demand", "reading ahead"))
        shown = map(median_and_spread, (demand, ahead))
        rows.append([OVERLAP_KINDS[o.kind], *shown, o.verdict()])
    return markdown_table(rows)


def memory_table(memory: Mapping[Variant, Mapping[str, float]]) -> str:
    head = ["arrays", "a batch", "row numbers", "peak above the start", "seconds", "budget"]
    rows = [["library", *head]]
    for library, found in memory.items():
        sizes = [found["data"], found["batch"], ROW_NUMBER * found["rows"], found["extra"]]
        numbers = [f"{size / 1e6:,.1f}" for size in sizes]
        budget = MEMORY_BATCHES * found["batch"] + ROW_NUMBER * found["rows"] + MEMORY_SLACK
        met = "met" if found["extra"] <= budget else "**missed**"
        said = f"at most {budget / 1e6:.1f}: {met}" if library is PHALANX else NOTHING
        rows.append([library.name, *numbers, f"{found['seconds']:.1f}", said])
    return markdown_table(rows)


def report(
    measurements: Sequence[Measurement],
    overlaps: Sequence[Overlap],
    memory: Mapping[Variant, Mapping[str, float]],
    record_size: float,
    versions: Sequence[str],
    load: float,
    options: argparse.Namespace,
) -> str:
    """The whole result as Markdown."""
    libraries = harness.wanted(LIBRARIES, options.peers)
    peers = " ".join(["--peers", *options.peers])
    return f"""# Input pipelines

Thousands of examples per second: the median over {options.rounds} rounds (min..max). More is better.

{rates_table(measurements, libraries)}

Phalanx's rate relative to the others': the median (min..max) of the ratios within a round; above 1 is
faster.

{ratios_table(measurements, libraries)}

Measured: epochs over {common.ROWS:,} examples of {common.WIDTH} float32 numbers and an integer
label, in arrays, in batches of {common.BATCH}. Where a function is called for each example there are
{common.MAPPED_ROWS:,} of them. A Python loop takes the batches as NumPy arrays and sums the first
column of each and its labels, or all of its numbers in the second row of the tables; these sums agreed
in all libraries. With `batch` alone Phalanx's batches are views of the arrays, and copies with the
others; what it costs to read them is in the second row.

- The function that is mapped multiplies by a number. Phalanx and Grain call it as it is; tf.data calls
  it with `numpy_function`, and in the row below it, and for whole batches, has a graph operation.
- `cache` was filled before the first round; one iteration repeats {common.REPEATS} times. Grain is not
  measured there, nor with records.
- A small shuffle buffer is `WindowShuffleMapDataset` in Grain, which shuffles within windows.
- Records are `Example` messages of the same kind of examples: {common.RECORDS:,} in one file,
  {record_size:,.0f} bytes each.

{records_table(measurements, libraries, record_size)}

Each library ran with several settings in every round; the one with the best median counts:

{settings_table(measurements, libraries)}

## Steps with input

Milliseconds per training step of Phalanx: the median over {options.rounds} rounds (min..max). The step
alone uses 32 prepared batches in turn; the input alone is made and moved to the devices without
a step. Both together, by a step that waits for its result, is once with input made on demand (a buffer
of 0) and once with the reading ahead that `experimental_distribute_dataset` does by itself. In the
first rows the step is on one CPU device that has one processor, in the others on two that have all.

{overlap_table(overlaps)}

{overlap_ratios_table(overlaps)}

If reading ahead overlaps entirely, both take as long as the longer one. But step and input want
processors, of which there are {os.cpu_count()} here: the last column of the first table is the
processor time of step and input alone, divided by that number. Nothing can be faster than that. And a
step that computes on all processors waits for the slowest of them at each operation: where none is left
for the input, the time that the input computes is added to the step's, whichever library reads ahead.

## Memory

Megabytes: the most that was in use above the start, which is when the arrays are there but no dataset,
while one epoch of `shuffle(all).batch({common.MEMORY_BATCH})` was read.

{memory_table(memory)}

The budget is the batch in use, one more, the row numbers (one of 32 bits per example, which it takes
to know a random order of all of them), and half a megabyte for everything else.

## Circumstances

{harness.circumstances(versions)} Each library has a process of its own, and one works at a time; they
take turns in an order that rotates. The load average of the machine was {load:.1f} before the first
process was started; where rounds differ much, other work has taken part of it.

To repeat: `python benchmarks/data.py --rounds {options.rounds} {peers}`.
"""


def plot(measurements: Sequence[Measurement], path: Path) -> None:
    """A bar for each case and library, on a logarithmic axis."""
    pyplot = harness.pyplot()
    if pyplot is None:
        return
    figure, ax = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for i, library in enumerate(LIBRARIES):
        shown = [(j, m.rounds(library)) for j, m in enumerate(measurements) if m.rounds(library)]
        if not shown:
            continue
        medians, errors = harness.errors([r for _, r in shown])
        at = [j + 0.27 * (i - 1) for j, _ in shown]
        ax.barh(at, medians, 0.25, xerr=errors, label=library.name)
    ax.set_xscale("log")
    ax.set_yticks(range(len(measurements)), [CASES[m.case].replace("`", "") for m in measurements])
    ax.invert_yaxis()
    ax.set_xlabel("examples per second (higher is better)")
    ax.grid(axis="x", alpha=0.25)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    harness.say_written(path)


# -- the command -----------------------------------------------------------------------------------


def write_records(folder: Path) -> float:
    """Make the file of records; returns the size of one."""
    command = [sys.executable, str(HERE / "_data_phalanx.py"), "write", str(folder)]
    done = subprocess.run(command, check=False, timeout=DEADLINE, capture_output=True, text=True)
    if done.returncode:
        raise harness.BenchmarkError(f"The records could not be written:\n{done.stderr.strip()}")
    return (folder / common.RECORD_FILE).stat().st_size / common.RECORDS


def main() -> int:
    peers = ["tensorflow", "grain"]
    options = harness.parse(harness.options_parser("Time input pipelines side by side.", 5, peers))
    seconds, steps, megabytes = (0.05, 20, 256) if options.quick else (0.25, 150, 2048)
    pipelines: list[Measurement] = []

    def measured() -> str:
        versions: list[str] = []
        load = os.getloadavg()[0]
        libraries = harness.wanted(LIBRARIES, options.peers)
        memory = measure_memory(libraries, megabytes)
        overlaps = [measure_overlap(kind, options.rounds, steps) for kind in OVERLAP_KINDS]
        with tempfile.TemporaryDirectory() as folder:
            size = write_records(Path(folder))
            pipelines.extend(
                measure_pipelines(libraries, options.rounds, seconds, Path(folder), versions)
            )
        return report(pipelines, overlaps, memory, size, versions, load, options)

    failed = harness.finish("data.md", measured, keep=not options.quick)
    if not failed and not options.quick:
        plot(pipelines, harness.RESULTS / "data.png")
    return failed


if __name__ == "__main__":
    sys.exit(main())
