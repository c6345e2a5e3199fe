"""Checkpoints: time to save and restore, against Orbax and TensorFlow, and what a step is held up.

``python benchmarks/checkpoint.py`` runs the libraries in turns, prints tables and writes them to
``benchmarks/results/checkpoint.md``.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence

import _harness as harness
from _harness import Child, Variant, median_and_spread, ratios, say

VARIANTS = (
    Variant("phalanx", "`px.train.Checkpoint`"),
    Variant("orbax", "`orbax.checkpoint.StandardCheckpointer`"),
    Variant("tensorflow", "`tf.train.Checkpoint`", "tensorflow"),
)
DEADLINE = 120.0

Times = dict[tuple[str, str], list[float]]


def measure(megabytes: int, variants: Sequence[Variant], rounds: int, versions: list[str]) -> Times:
    times: Times = {}
    with tempfile.TemporaryDirectory() as folder:

        def start(variant: Variant) -> Child:
            script = str(harness.HERE / "_checkpoint_child.py")
            return Child(variant.name, variant.python, [script, variant.key, folder, str(megabytes)])

        def ask(child: Child, variant: Variant, what: str) -> None:
            child.send(do=what)
            seconds = child.receive(what, DEADLINE)["seconds"]
            times.setdefault((variant.key, what), []).append(seconds)

        with harness.started(variants, start, versions) as children:
            for child in children.values():  # the first time is not counted
                for what in ("save", "restore"):
                    child.send(do=what)
                    child.receive(what, DEADLINE)
            for number, order in enumerate(harness.rotated(list(children), rounds)):
                for what in ("save", "restore"):
                    for variant in order:
                        ask(children[variant], variant, what)
                for what in ("call", "copy", "step", "all", "held"):
                    ask(children[VARIANTS[0]], VARIANTS[0], what)
                say(f"{megabytes} MB: round {number + 1} of {rounds} is done")
    return times


def table(megabytes: int, times: Times, variants: Sequence[Variant]) -> str:
    rows = [["", "save, s", "MB/s", "its time / ours", "restore, s", "MB/s", "its time / ours"]]
    for variant in variants:
        row = [variant.name]
        for what in ("save", "restore"):
            own, ours = times[variant.key, what], times["phalanx", what]
            middle = statistics.median(own)
            row += [f"{middle:.2f}", f"{megabytes / middle:.0f}", median_and_spread(ratios(own, ours))]
        rows.append(row)
    return harness.markdown_table(rows)


def held_up(times: Times) -> str:
    copy, call, step, every, held = (
        times["phalanx", what] for what in ("copy", "call", "step", "all", "held")
    )
    shown = [f"{1000 * statistics.median(x):.1f} ms" for x in (copy, call, step, every)]
    return (
        f"A copy of the state takes {shown[0]}. The call of an asynchronous save takes {shown[1]}: "
        f"{median_and_spread(ratios(call, copy))} of the copy. The step after it is {shown[2]} "
        f"longer than others: {median_and_spread(ratios(step, copy))}. After the state was only kept, "
        f"and not saved, it is {median_and_spread(ratios(held, copy))} copies longer. All steps until "
        f"the save is done, which share the cores with it, are together {shown[3]} longer: "
        f"{median_and_spread(ratios(every, copy))} copies."
    )


def report(sizes: Sequence[int], variants: Sequence[Variant], rounds: int) -> str:
    versions: list[str] = []
    parts = []
    for size in sizes:
        times = measure(size, variants, rounds, versions)
        parts.append(f"## {size} MB\n\n{table(size, times, variants)}\n\n{held_up(times)}\n")
    return f"""# Checkpoints

{chr(10).join(parts)}
Measured: 16 arrays of random float32 numbers on one CPU device. A save ends when the disk has all of it
(`fsync`, which Orbax and TensorFlow leave out, and which is added here for them). Files are read from
the system's cache. Phalanx computes and verifies checksums. Medians over {rounds} rounds in which the
libraries took turns, each in a process of its own.

Nothing is copied when an asynchronous save begins: the next step writes to new memory instead of
overwriting what is being saved. The save begins a moment later, when that step is over.

{harness.circumstances(versions)}

To repeat: `python benchmarks/checkpoint.py --sizes {" ".join(map(str, sizes))} --rounds {rounds}`.
"""


def main() -> int:
    parser = harness.options_parser("Time checkpoints.", 3, ["tensorflow"])
    parser.add_argument("--sizes", type=harness.positive, nargs="+", default=[100, 1000], help="in MB")
    options = harness.parse(parser)
    sizes = [20] if options.quick else options.sizes
    variants = harness.wanted(VARIANTS, options.peers)
    return harness.finish(
        "checkpoint.md", lambda: report(sizes, variants, options.rounds), keep=not options.quick
    )


if __name__ == "__main__":
    sys.exit(main())
