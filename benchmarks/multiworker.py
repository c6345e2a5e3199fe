"""Several workers: MultiWorkerMirroredStrategy beside hand-written JAX, TensorFlow and torch.

``python benchmarks/multiworker.py`` makes environments for TensorFlow and torch on first use (see
`peers.py`), runs all variants side by side, prints tables and writes them to
``benchmarks/results/multiworker.md``. The numbers behind them are kept in ``multiworker.json``, so that
``--only`` measures a part again and leaves the rest as it is.

1. steps: training steps of an MLP.
2. reductions: one all-reduce of 4 KB, 1 MB and 32 MB.
3. start: from the start of the processes to the first step.
4. overhead: what it costs to compare programs between workers and to watch over them.

Each variant is a group of processes on this machine (see `_multiworker_ranks.py`), and one group
computes at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import _harness as harness
from _harness import RESULTS, ROUND_DEADLINE, START_DEADLINE, markdown_table, median_and_spread, say
from _mlp import BATCHES, CHECK_STEPS, CLASSES, INPUTS, LOSS_TOLERANCE, MAX_IN_FLIGHT
from _multiworker_ranks import Rank

SECTIONS = ("steps", "reductions", "start", "overhead")
WORKERS = 2
SIZES = {"4 KB": 4 << 10, "1 MB": 1 << 20, "32 MB": 32 << 20}
OVERHEAD_BUDGET = 0.01  # of a step that takes:
OVERHEAD_STEP = 5.0  # milliseconds
LEDGER_CALLS = 5000


@dataclass(frozen=True)
class Variant(harness.Variant):
    """One library, on some workers with some devices each."""

    workers: int = WORKERS
    devices: int = 1
    task: str | None = None


PHALANX = Variant("phalanx", "Phalanx")
HAND = Variant("hand", "hand-written JAX")
TENSORFLOW = Variant("tensorflow", "TensorFlow", peer="tensorflow")
TORCH = Variant("torch", "torch", peer="torch")
SINGLE = (PHALANX, HAND, TENSORFLOW, TORCH)

PHALANX_4 = Variant("phalanx", "Phalanx 2x2", devices=2)
HAND_4 = Variant("hand", "hand-written JAX 2x2", devices=2)
TORCH_4 = Variant("torch", "torch 4x1", workers=4, peer="torch")
DOUBLE = (PHALANX_4, HAND_4, TORCH_4)

EAGER = Variant("phalanx", "Phalanx, strategy.reduce", task="reduce")

LAYOUTS = {"2x1": SINGLE, "2x2": DOUBLE}
"""Workers times devices."""


# -- groups of processes -----------------------------------------------------------------------------


class Group(harness.Ranks):
    """All workers of a variant, with the times at which they came to points of their start."""

    def __init__(self, variant: Variant, task: str, number: int) -> None:
        addresses = harness.free_addresses(variant.workers)
        ranks = [
            Rank(variant.key, variant.task or task, number, i, addresses, variant.devices)
            for i in range(variant.workers)
        ]
        self.begun = time.monotonic()
        self.marks: list[dict[str, float]] = []
        self.runs = 0
        name = f"{variant.name}, {task} {number}"
        super().__init__(name, variant.python, [rank.command() for rank in ranks])

    def versions(self) -> str:
        """Wait until all ranks are ready; the versions of what the first one measures."""
        self.marks = [a["marks"] for a in self.receive("start", START_DEADLINE)]
        return super().versions()

    def run(self, steps: int) -> harness.Round:
        """Let all ranks make some steps; it takes as long as the slowest."""
        self.runs += 1
        return super().run(steps)


def compare(
    variants: Sequence[Variant],
    task: str,
    number: int,
    options: argparse.Namespace,
    versions: list[str],
    tolerance: float,
) -> dict[str, list[float]]:
    """Milliseconds per step, by round, of variants that take turns and must agree."""
    what = f"{task} {number}"
    say(f"{what}: starting {', '.join(v.name for v in variants)}")
    with harness.started(variants, lambda v: Group(v, task, number), versions) as groups:
        check(groups, what, tolerance, CHECK_STEPS if task == "step" else 1)
        steps = {v: harness.steps_for(group, options.seconds) for v, group in groups.items()}
        found: dict[str, list[float]] = {v.name: [] for v in variants}
        for done in harness.take_turns(groups, options.rounds, steps):
            for variant, turn in done.items():
                found[variant.name].append(turn.milliseconds)
            times = ", ".join(f"{v.name} {turn.milliseconds:.3f}" for v, turn in done.items())
            say(f"{what}: {times} ms")
        check(groups, what, tolerance, CHECK_STEPS if task == "step" else 1)
    return found


def check(groups: dict[Variant, Group], what: str, tolerance: float, steps: int) -> None:
    """Refuse to compare variants that do not compute the same thing."""
    results = {v.name: group.run(steps).loss for v, group in groups.items()}
    harness.check_same(what, results, tolerance)


# -- measuring ---------------------------------------------------------------------------------------


def measure_steps(options: argparse.Namespace, versions: list[str], found: dict[str, Any]) -> None:
    for width, layout in itertools.product(options.sizes, options.layouts):
        variants = harness.wanted(LAYOUTS[layout], options.peers)
        found[f"{width} {layout}"] = compare(variants, "step", width, options, versions, LOSS_TOLERANCE)


def measure_reductions(options: argparse.Namespace, versions: list[str], found: dict[str, Any]) -> None:
    for (name, nbytes), layout in itertools.product(SIZES.items(), options.layouts):
        variants = harness.wanted(LAYOUTS[layout], options.peers)
        if layout == "2x1":
            variants.append(EAGER)
        found[f"{name} {layout}"] = compare(variants, "all-reduce", nbytes, options, versions, 0.0)


def measure_start(options: argparse.Namespace, versions: list[str], found: dict[str, Any]) -> None:
    """Seconds from the start of the processes to points of their start, by round."""
    variants = harness.wanted(SINGLE, options.peers)
    for variant in variants:
        found[variant.name] = []
    for turns in harness.rotated(variants, options.rounds):
        for variant in turns:
            with Group(variant, "step", 64) as group:
                harness.list_versions(group, versions)
                ready = time.monotonic()
                group.run(1)
                done = time.monotonic()
            points = {name: max(m[name] for m in group.marks) for name in group.marks[0]}
            points |= {"ready": ready, "first step": done}
            seconds = {name: t - group.begun for name, t in points.items()}
            say(f"{variant.name}: {', '.join(f'{k} {s:.2f}' for k, s in seconds.items())} s")
            found[variant.name].append(seconds)


def measure_overhead(options: argparse.Namespace, versions: list[str], found: dict[str, Any]) -> None:
    with Group(PHALANX, "ledger", LEDGER_CALLS) as group:
        group.receive("start", START_DEADLINE)
        found["ledger"] = group.receive("ledger", ROUND_DEADLINE)
        say(f"ledger: {found['ledger']}")
    for width in (64, 512):
        with Group(PHALANX, "with and without", width) as group:
            harness.list_versions(group, versions)
            steps = harness.steps_for(group, options.seconds / 2)
            if group.runs % 2:
                group.run(steps)
            times = [group.run(steps).milliseconds for _ in range(4 * options.rounds)]
        found[str(width)] = {"with": times[::2], "without": times[1::2]}
        say(f"width {width}: {found[str(width)]}")


# -- reporting ---------------------------------------------------------------------------------------


def table_of_times(found: dict[str, Any], head: str, unit: str) -> str:
    """A table of medians for each layout: one line per measurement, one column per variant."""
    tables = []
    for layout in LAYOUTS:
        rows = {k.removesuffix(f" {layout}"): v for k, v in found.items() if k.endswith(f" {layout}")}
        if not rows:
            continue
        names = list(dict.fromkeys(name for times in rows.values() for name in times))
        ours, others = names[0], [n for n in names[1:] if not n.startswith("Phalanx")]
        lines = [[head, *(f"{n}, {unit}" for n in names), *(f"{ours} / {n}" for n in others)]]
        for label, times in rows.items():
            cells = [median_and_spread(times[n]) if n in times else "-" for n in names]
            relative = [harness.ratios(times[ours], times[n]) if n in times else [] for n in others]
            cells += [median_and_spread(r) if r else "-" for r in relative]
            lines.append([label, *cells])
        tables.append(f"{layout_words(layout)}\n\n{markdown_table(lines)}")
    return "\n\n".join(tables)


def layout_words(layout: str) -> str:
    workers, devices = layout.split("x")
    return f"{workers} workers with {devices} device{'s' if devices != '1' else ''} each:"


def steps_text(found: dict[str, Any]) -> str:
    batches = ", ".join(f"{batch} at {width}" for width, batch in BATCHES.items())
    return f"""Milliseconds per step: the median over the rounds (min..max), then the medians of the
ratios within a round; below 1, Phalanx is faster. The width is that of both hidden layers of an MLP
{INPUTS}-width-width-{CLASSES}; the global batch is {batches}.

{table_of_times(found, "width", "ms")}

- Phalanx: `px.function` around `strategy.run` of the step (`all_reduce` of the gradients, `assign_sub`)
  and `strategy.reduce` of the loss, under `MultiWorkerMirroredStrategy`.
- hand-written JAX: `jax.distributed` and `jax.jit` of `jax.shard_map`, with one `lax.psum` for each
  gradient and the loss, donated parameters, and at most {MAX_IN_FLIGHT} steps in flight.
- TensorFlow: `tf.function` around the same as for Phalanx, under its `MultiWorkerMirroredStrategy`.
- torch: `DistributedDataParallel` with gloo, one thread for each process. Its steps do not sum the loss
  over replicas. It has one device per process, so that 2x2 is four processes.

The losses of all variants agreed to {LOSS_TOLERANCE:g} of the loss after {CHECK_STEPS} steps, before
the first round and after the last."""


def reductions_text(found: dict[str, Any]) -> str:
    return f"""Milliseconds until one sum over all replicas has finished; one float32 array each.
Phalanx sums by `all_reduce` in a compiled `strategy.run`, TensorFlow the same, torch by `all_reduce` in
place; JAX by a jitted `lax.psum`. The sums of all variants were equal.

{table_of_times(found, "size", "ms")}"""


def start_text(found: dict[str, Any]) -> str:
    points = list(dict.fromkeys(p for rounds in found.values() for r in rounds for p in r))
    lines = [["seconds until", *found]]
    words = {
        "process": "Python runs, with NumPy",
        "JAX": "JAX is imported",
        "library": "the library is imported",
        "joined": "the workers have met",
        "ready": "variables and data are there",
        "first step": "the first steps are done",
    }
    for point in points:
        cells = [
            median_and_spread([r[point] for r in rounds]) if point in rounds[0] else "-"
            for rounds in found.values()
        ]
        lines.append([words[point], *cells])
    text = f"""From the start of {WORKERS} processes, of which the slowest counts, to points of their
start and to the end of the second training step at width 64.

{markdown_table(lines)}"""
    if PHALANX.name in found and HAND.name in found:
        ours, hand = found[PHALANX.name], found[HAND.name]
        last = "first step"
        extra = [a[last] - b[last] for a, b in zip(ours, hand, strict=True)]
        imports = [r["library"] - r["JAX"] for r in ours]
        meeting = [r["joined"] - r["library"] for r in ours]
        its = [r["joined"] - r["library"] for r in hand]
        text += f"""

Phalanx beyond hand-written JAX: {median_and_spread(extra)} s, of which importing it is
{median_and_spread(imports)} s. Until the workers have met, with the hub, the devices' connections and
a first sum, it takes {median_and_spread(meeting)} s; JAX alone, without connecting devices,
{median_and_spread(its)} s."""
    return text


def overhead_text(found: dict[str, Any]) -> str:
    ledger = found["ledger"]
    cost = [a["with"] - a["without"] for a in ledger]
    threads = max(a["threads"] for a in ledger)
    share = max(cost) / 1e3 / OVERHEAD_STEP + threads / 1e6
    verdict = "within" if share <= OVERHEAD_BUDGET else "**over**"
    rows = [["width", "with, ms", "without, ms", "with / without"]]
    for width in ("64", "512"):
        with_it, without = found[width]["with"], found[width]["without"]
        relative = harness.ratios(with_it, without)
        rows.append(
            [width, median_and_spread(with_it), median_and_spread(without), median_and_spread(relative)]
        )
    return f"""Comparing a known program with the other workers takes {max(cost):.2f} microseconds (the
median over {LEDGER_CALLS} calls of dispatching nothing, with and without). The threads that talk with
the hub and watch compute for {threads:.0f} microseconds per second. Together that is
{100 * share:.3f} % of a step of {OVERHEAD_STEP:g} ms: {verdict} {100 * OVERHEAD_BUDGET:g} %.

Training steps in rounds that take turns in the same processes, with and without comparing:

{markdown_table(rows)}"""


TITLES = {
    "steps": ("Training steps", steps_text),
    "reductions": ("One reduction", reductions_text),
    "start": ("Start", start_text),
    "overhead": ("Overhead of comparing and watching", overhead_text),
}


def report(kept: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    head = """# Several workers

All workers are on one machine and talk over loopback. Each variant is a group of processes, and one
group computes at a time; rounds take turns in an order that rotates. To repeat:
`python benchmarks/multiworker.py`."""
    parts = [head]
    for section, (title, text) in TITLES.items():
        if section in kept:
            parts += [f"## {title}", text(kept[section]["found"]), kept[section]["circumstances"]]
    return "\n\n".join(parts) + "\n"


# -- the command -------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    description = "Time training over several workers side by side."
    parser = harness.options_parser(description, 7, ["tensorflow", "torch"])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections")
    parser.add_argument("--sizes", type=int, nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a round takes, about")
    options = harness.parse(parser)
    if options.quick:
        options.seconds = 0.2
    return options


def measure(options: argparse.Namespace) -> str:
    """Measure the chosen sections; the whole result as Markdown."""
    path = RESULTS / "multiworker.json"
    kept = json.loads(path.read_text()) if path.exists() and not options.quick else {}
    measures = {
        "steps": measure_steps,
        "reductions": measure_reductions,
        "start": measure_start,
        "overhead": measure_overhead,
    }
    for section in options.only:
        load = os.getloadavg()[0]
        versions: list[str] = []
        found = kept.get(section, {}).get("found", {})
        measures[section](options, versions, found)
        about = (
            f"{options.rounds} rounds of about {options.seconds:g} s; "
            f"{harness.circumstances(versions)} "
            f"The load average was {load:.1f} before the first process was started."
        )
        kept[section] = {"found": found, "circumstances": about}
    if not options.quick:
        path.write_text(json.dumps(kept, indent=1) + "\n")
    return report(kept)


if __name__ == "__main__":
    chosen = parse_options()
    sys.exit(harness.finish("multiworker.md", lambda: measure(chosen), keep=not chosen.quick))
