"""Pipelines: schedules side by side, against JAX by hand and torch.distributed.pipelining.

``python benchmarks/pipeline.py`` lets 2 and 4 stages compute the loss and the gradients of one MLP, and
writes a table to ``benchmarks/results/pipeline.md``. The variants take turns. Two more tables compare
the cuts of the search with all others.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import _harness as harness
from _harness import HERE, Child, Ranks, Variant, median_and_spread
from _pipeline_cuts import measured_table, proposed
from _pipeline_ranks import MICRO_BATCHES, Rank

CASES = [
    ("Phalanx, gpipe", "phalanx", "gpipe", 1),
    ("Phalanx, 1f1b", "phalanx", "1f1b", 1),
    ("Phalanx, interleaved", "phalanx", "interleaved", 2),
    ("Phalanx, zero_bubble_v", "phalanx", "zero_bubble_v", 2),
    ("Phalanx, 1f1b, a process per stage", "workers", "1f1b", 1),
    ("JAX by hand: scan and ppermute", "scan", "gpipe", 1),
    ("torch, ScheduleGPipe", "torch", "gpipe", 1),
    ("torch, Schedule1F1B", "torch", "1f1b", 1),
    ("torch, ScheduleInterleaved1F1B", "torch", "interleaved", 2),
]
BASE = "Phalanx, 1f1b"


def started(stack: ExitStack, name: str, rank: Rank) -> Child | Ranks:
    """The processes of one variant."""
    peer = "torch" if rank.variant == "torch" else None
    python = Variant(name, name, peer).python
    script = str(HERE / "_pipeline_ranks.py")
    if rank.variant in ("phalanx", "scan"):
        return stack.enter_context(Child(name, python, [script, json.dumps(asdict(rank))]))
    addresses = harness.free_addresses(rank.stages)
    ranks = [replace(rank, rank=i, addresses=addresses) for i in range(rank.stages)]
    commands = [[script, json.dumps(asdict(r))] for r in ranks]
    return stack.enter_context(Ranks(name, python, commands))


def side_by_side(options: Any, stages: int, versions: list[str]) -> str:
    """A table of all variants with some stages."""
    from phalanx.parallel import schedule

    cases = [c for c in CASES if c[1] != "torch" or "torch" in options.peers]
    memory: dict[str, float] = {}
    with ExitStack() as stack:
        children = {}
        for name, variant, kind, chunks in cases:
            rank = Rank(variant, kind, stages, chunks, options.width, options.rows)
            children[name] = started(stack, name, rank)
        for child in children.values():
            harness.list_versions(child, versions)
        steps = {name: harness.steps_for(child, options.seconds) for name, child in children.items()}
        times: dict[str, list[float]] = {name: [] for name in children}
        losses: dict[str, float] = {}
        for order in harness.rotated(list(children), options.rounds):
            for name in order:
                found = children[name].run(steps[name])
                times[name].append(found.milliseconds)
                losses[name] = found.loss
                memory[name] = max(memory.get(name, 0.0), found.megabytes)
    harness.check_same("The losses", losses, 1e-4)
    rows = [["variant", "ms per step", f"times {BASE}", "bubble", "held micro batches", "MB"]]
    for name, variant, kind, chunks in cases:
        made = schedule(kind, stages, MICRO_BATCHES, chunks)
        held = "all" if variant == "scan" else ""
        if variant in ("phalanx", "workers"):
            held = " ".join(f"{float(n):g}" for n in made.peak_micro_batches)
        against = harness.ratios(times[name], times[BASE])
        rows.append(
            [
                name,
                median_and_spread(times[name]),
                median_and_spread(against),
                f"{made.bubble():.1%}",
                held,
                f"{memory[name]:.0f}",
            ]
        )
    return harness.markdown_table(rows)


def report(options: Any) -> str:
    """The whole result."""
    versions: list[str] = []
    tables = [
        f"## {stages} stages\n\n{side_by_side(options, stages, versions)}" for stages in options.stages
    ]
    what = (
        f"The loss and the gradients of 8 layers of width {options.width}, {options.rows} rows in "
        f"{MICRO_BATCHES} micro batches. The bubble is that of the schedule; where stages have no "
        "cores of their own, waiting costs nothing, so times show what each schedule adds. MB is the "
        "most that all processes of a variant had, libraries included."
    )
    found = (
        "## Automatic cuts against all cuts\n\nAn MLP of 6 uneven layers in 1F1B. The prediction is "
        "compared with that of every cut, the time with that of every cut after a layer. "
        "Stages without cores of their own share the time, whatever the cut.\n\n"
        f"{measured_table(options.quick, options.rounds)}\n\n"
        "The dynamic program with descent, which is used where there are more than 300,000 cuts, on "
        f"random costs of 12 layers:\n\n{proposed(options.quick)}"
    )
    return "\n\n".join(["# Pipelines", what, *tables, found, harness.circumstances(versions)])


def main() -> int:
    parser = harness.options_parser(__doc__ or "", 5, ("torch",))
    parser.add_argument("--width", type=harness.positive, default=256)
    parser.add_argument("--rows", type=harness.positive, default=512)
    parser.add_argument("--stages", type=harness.positive, nargs="*", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    options = harness.parse(parser)
    return harness.finish("pipeline.md", lambda: report(options), not options.quick)


if __name__ == "__main__":
    sys.exit(main())
