"""Elastic training: seconds from the death of a worker to the next step, against torchrun.

``python benchmarks/elastic.py`` starts jobs of three workers in turns, of which the last kills itself
in the middle (SIGKILL), prints a table and writes it to ``benchmarks/results/elastic.md``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import _harness as harness
from _child import phalanx_versions
from _harness import Variant, median_and_spread, ratios, say
from peers import BenchmarkError

WORKERS = 3
DEADLINE = 180.0  # seconds for a job
_END = 10.0  # seconds for a job that is terminated
CHILD = str(harness.HERE / "_elastic_child.py")


@dataclass(frozen=True)
class Way(Variant):
    """One way to go on after a death."""

    command: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    library: str = "phalanx"
    goes_on: str = ""


_RUN = ("-m", "phalanx", "run", "--no-progress")
_ELASTIC = (*_RUN, "--workers", f"1:{WORKERS}", "--restarts", "0")
_TORCHRUN = (
    *("-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(WORKERS)),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "127.0.0.1"),
    *("--max-restarts", "3", "--monitor-interval", "0.1"),  # seconds; it needs one restart
)
# Else workers that start again share a store with those before, and find their old addresses in it.
_TORCH_ENVIRON = (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"), ("GLOO_SOCKET_IFNAME", "lo"))
WAYS = (
    Way("elastic", "`phalanx run --workers 1:3`", None, _ELASTIC, (), "phalanx", "2, same processes"),
    Way(
        *("anew", "the same, Python starts anew", None, _ELASTIC),
        *((("PHALANX_ELASTIC_RESTART", "1"),), "phalanx", "2, new interpreters"),
    ),
    Way(
        *("restarts", "`phalanx run -n 3 --restarts 1`", None),
        *((*_RUN, "-n", str(WORKERS), "--restarts", "1"), (("SAVES", "1"),)),
        *("phalanx", "3, from a checkpoint"),
    ),
    Way(
        *("torchrun", "`torchrun --max-restarts 3`", "torch", _TORCHRUN, _TORCH_ENVIRON),
        *("torch", "3, from a checkpoint"),
    ),
)


def seconds_to_next_step(way: Way) -> float:
    """Run a job, and look up when the next step after the death has ended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(way.python), *way.command, CHILD, way.library, folder]
        environ = {**os.environ, **harness.ENVIRONMENT, **dict(way.environ), "OMP_NUM_THREADS": "1"}
        code, output = run(command, environ)
        if code:
            raise BenchmarkError(f"{way.name}: {code}\n{output[-3000:]}")
        lines = [line.split() for path in Path(folder).glob("*.times") for line in path.open()]
    death = [float(at) for at, what, _ in lines if what == "death"]
    if len(death) != 1:
        raise BenchmarkError(f"{way.name}: {len(death)} workers died")
    dead_step = min(int(step) for _, what, step in lines if what == "death")
    after = [float(at) for at, what, step in lines if what == "step" and int(step) >= dead_step]
    return min(at for at in after if at > death[0]) - death[0]


def run(command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Run a job with a deadline; returns what is wrong with its end, and what it printed."""
    with tempfile.TemporaryFile("w+") as file:
        how = {"stdout": file, "stderr": file, "env": dict(environ), "start_new_session": True}
        with subprocess.Popen(command, **how) as job:  # type: ignore[call-overload]
            try:
                code = job.wait(DEADLINE)
                wrong = f"exit code {code}" if code else ""
            except subprocess.TimeoutExpired:
                wrong = f"it has not ended after {DEADLINE:g} seconds"
                job.terminate()  # launchers end their workers then
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(_END)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
        file.seek(0)
        return wrong, file.read()


def report(ways: Sequence[Way], rounds: int) -> str:
    times: dict[str, list[float]] = {way.key: [] for way in ways}
    for number, order in enumerate(harness.rotated(list(ways), rounds)):
        for way in order:
            times[way.key].append(seconds_to_next_step(way))
        shown = ", ".join(f"{key} {found[-1]:.2f} s" for key, found in times.items())
        say(f"Round {number + 1} of {rounds}: {shown}")
    rows = [["", "workers afterwards", "seconds to the next step", "its time / ours"]]
    for way in ways:
        share = median_and_spread(ratios(times[way.key], times["elastic"]))
        rows.append([way.name, way.goes_on, median_and_spread(times[way.key]), share])
    return f"""# Elastic training: from the death of a worker to the next step

{WORKERS} workers with one CPU device each train 784-512-512-10 by Adam; in the middle, the last one
kills itself (SIGKILL). The time ends when the first worker has made the next step. It includes noticing
the death, forming the workers anew, restoring the state and compiling the step. The median of {rounds}
rounds, and their range.

{harness.markdown_table(rows)}

The first two go on with the survivors, from their memory. The others start all processes again, and
restore a checkpoint that was saved after each step.

{harness.circumstances([f"{name} {number}" for name, number in phalanx_versions().items()])}
"""


def main() -> int:
    options = harness.parse(harness.options_parser(__doc__.splitlines()[0], 7, ["torch"]))
    ways = harness.wanted(WAYS, options.peers)
    return harness.finish("elastic.md", lambda: report(ways, options.rounds), not options.quick)


if __name__ == "__main__":
    sys.exit(main())
