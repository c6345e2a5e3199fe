"""Phalanx beside an earlier state of itself: what has become slower, and what faster.

``python benchmarks/regression.py REVISION`` checks out a revision into a temporary folder, runs the
same programs with that code and with the code of this folder, one after the other, round by round, and
writes a table to ``benchmarks/results/regression.md``.

Each variant is a child process (this file again, as ``regression.py child CASE SOURCES``), and one of
them computes at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _harness as harness
from _child import Parent
from _harness import HERE, Child, median_and_spread
from _regression_steps import mlp_step

ROOT = HERE.parent
LIMIT = 1.03
"""How much longer anything may take."""

Timed = Callable[[int], float]
"""Runs a program so many times, and says how many seconds that took."""


# -- what is run: the children -----------------------------------------------------------------------


def timed(step: Callable[[], Any]) -> Timed:
    """Calls a function, and waits for what the last call returned."""
    import jax

    def run(steps: int) -> float:
        begin, result = time.perf_counter(), None
        for _ in range(steps):
            result = step()
        jax.block_until_ready(jax.tree.leaves(result))
        return time.perf_counter() - begin

    return run


def training(replicas: int, width: int, batch: int, compiled: bool = True) -> Timed:
    import phalanx as px

    px.config.ensure_cpu_devices(replicas)
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    return timed(mlp_step(px, strategy, width, batch, compiled))


def calls(variables: int) -> Timed:
    """A compiled function that does next to nothing."""
    import jax.numpy as jnp

    import phalanx as px

    held = [px.Variable(jnp.zeros(4)) for _ in range(variables)]
    ones = jnp.ones(4)

    def step() -> Any:
        return [v.assign_add(ones) for v in held][-1].value()

    return timed(px.function(step))


def pipeline(build: Callable[[Any], Any]) -> Timed:
    """The elements of a dataset; a step is one of them."""
    import phalanx as px

    px.config.ensure_cpu_devices(2)
    dataset = build(px)

    def run(steps: int) -> float:
        elements = iter(dataset)
        begin = time.perf_counter()
        for _ in range(steps):
            next(elements)
        return time.perf_counter() - begin

    return run


def rows(px: Any) -> Any:
    import numpy as np

    numbers = np.arange(400_000, dtype=np.float32).reshape(-1, 4)
    dataset = px.data.Dataset.from_tensor_slices(numbers).shuffle(10_000, seed=1).repeat()
    return dataset.map(lambda x: x * 2 + 1).batch(64).prefetch(2)


def distributed_rows(px: Any) -> Any:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    return strategy.experimental_distribute_dataset(rows(px))


def run_on_worker(case: str, steps: int) -> float:
    """Goes to the workers, where another module keeps what was compiled."""
    import _regression_steps

    return _regression_steps.on_worker(case, steps)


def workers(case: str) -> Timed:
    import phalanx as px

    cluster = px.testing.MultiProcess(workers=2, devices=1).__enter__()  # until this process ends
    return lambda steps: max(cluster.run(run_on_worker, case, steps, timeout=600.0))


CASES: dict[str, Callable[[], Timed]] = {
    "compiled step, width 64, 2 replicas": lambda: training(2, 64, 64),
    "compiled step, width 64, 4 replicas": lambda: training(4, 64, 64),
    "compiled step, width 512, 2 replicas": lambda: training(2, 512, 256),
    "compiled step, width 2048, 2 replicas": lambda: training(2, 2048, 256),
    "eager step, width 64, 2 replicas": lambda: training(2, 64, 64, compiled=False),
    "call with 1 variable": lambda: calls(1),
    "call with 6 variables": lambda: calls(6),
    "shuffled, mapped batch of 64 rows": lambda: pipeline(rows),
    "the same, distributed over 2 replicas": lambda: pipeline(distributed_rows),
    "compiled step, width 64, 2 workers": lambda: workers("train 64"),
    "compiled step, width 512, 2 workers": lambda: workers("train 512"),
    "compiled step, width 2048, 2 workers": lambda: workers("train 2048"),
    "px.comm.all_reduce of 1 KB, 2 workers": lambda: workers("reduce 256"),
    "px.comm.all_reduce of 4 MB, 2 workers": lambda: workers("reduce 1048576"),
}


def child_main(case: str, sources: str) -> None:
    """Answer the parent's commands until it closes the pipe."""
    sys.path.insert(0, sources)
    import jax

    import phalanx

    if not Path(phalanx.__file__).is_relative_to(sources):
        raise harness.BenchmarkError(f"phalanx is not that of {sources}")
    run = CASES[case]()
    parent = Parent({"JAX": jax.__version__})
    for command in parent:
        parent.say(seconds=run(command["steps"]), loss=0.0)


# -- the parent --------------------------------------------------------------------------------------


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The sources of a revision, in a folder that is removed again."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "revision"
        command = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run(
            [*command, "add", "--detach", str(place), revision], check=True, capture_output=True
        )
        try:
            yield place / "src"
        finally:
            subprocess.run([*command, "remove", "--force", str(place)], check=True)


def measure(case: str, sources: dict[str, Path], options: argparse.Namespace) -> list[list[float]]:
    """Milliseconds per step of each variant, round by round."""
    found: dict[str, list[float]] = {name: [] for name in sources}

    def start(name: str) -> Child:
        arguments = [__file__, "child", case, str(sources[name])]
        return Child(f"{case} ({name})", Path(sys.executable), arguments)

    with harness.started(list(sources), start, []) as children:
        for child in children.values():
            child.run(3)  # compiles
        count = min(harness.steps_for(child, options.seconds, 1) for child in children.values())
        for done in harness.take_turns(children, options.rounds, dict.fromkeys(children, count)):
            for name, turn in done.items():
                found[name].append(turn.milliseconds)
    return list(found.values())


def report(options: argparse.Namespace) -> str:
    """Measure all cases; the whole result as Markdown."""
    table = [["", "before, ms", "now, ms", "now / before", ""]]
    with checked_out(options.revision) as earlier:
        sources = {"before": earlier, "now": ROOT / "src"}
        for case in (c for c in CASES if any(part in c for part in options.only)):
            before, now = measure(case, sources, options)
            change = harness.ratios(now, before)
            # The fastest rounds are those that nothing else on the machine has disturbed.
            least = min(now) / min(before)
            verdict = "" if min(least, statistics.median(change)) <= LIMIT else f"**over** {LIMIT}"
            shown = f"{median_and_spread(change)}, fastest {least:.2f}"
            table.append([case, median_and_spread(before), median_and_spread(now), shown, verdict])
            harness.say(" | ".join(table[-1]))
    return f"""# Beside an earlier state

Milliseconds per step or call, now and at revision {options.revision}: the median of {options.rounds}
rounds (min..max), and the same of the ratios within a round; below 1 is faster now. Then the ratio of
the fastest rounds.

{harness.markdown_table(table)}

{harness.circumstances([])}
"""


def main() -> int:
    parser = harness.options_parser("Compare Phalanx with an earlier revision of itself.", 11)
    parser.add_argument("revision", help="what to compare with, such as a commit")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cases to run")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a turn takes, about")
    options = harness.parse(parser)
    return harness.finish("regression.md", lambda: report(options), keep=not options.quick)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child_main(*sys.argv[2:])
    else:
        sys.exit(main())
