"""``phalanx bench collectives``: how long collectives take, in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import comm
from phalanx.cli.arguments import positive
from phalanx.cli.bench_hardware import add_hardware_parser
from phalanx.errors import InvalidValueError
from phalanx.execution.function import function
from phalanx.runtime import devices
from phalanx.strategies.mirrored import MirroredStrategy

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
_PATIENCE = 1.0  # seconds for all repetitions of one size
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    where: str  # 'replicas' or 'workers'
    ranks: int  # how many there are
    op: str  # the operation
    size: int  # bytes; of the result of all_gather, of every rank's input else
    count: int  # elements in them
    type: str  # their dtype
    time: float  # microseconds of one operation

    @property
    def algbw(self) -> float:
        """Gigabytes per second, as the caller sees it."""
        return self.size / self.time / 1e3

    @property
    def busbw(self) -> float:
        """Gigabytes per second that a connection has to carry, whatever the number of ranks.

        >>> Row("workers", 4, "all_reduce", 4_000_000, 1_000_000, "float32", 1000.0).busbw
        6.0
        """
        return self.algbw * bus_factor(self.op, self.ranks)


def bus_factor(op: str, ranks: int) -> float:
    """What nccl-tests multiplies with, so that numbers compare between numbers of ranks."""
    if op == "broadcast":
        return 1.0
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1) / ranks


def add_bench_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx bench`` to the command line."""
    bench = commands.add_parser("bench", help="measure how fast things are here")
    kinds = bench.add_subparsers(dest="what", required=True, metavar="what")
    parser = kinds.add_parser("collectives", help="operations between replicas and between workers")
    parser.add_argument("--replicas", type=positive, default=2, help="in one process (default: 2)")
    parser.add_argument("--workers", type=positive, default=2, help="processes (default: 2)")
    parser.add_argument("--where", choices=["replicas", "workers", "both"], default="both")
    parser.add_argument("--op", action="append", choices=OPERATIONS, help="default: all of them")
    parser.add_argument("--from", dest="smallest", type=size, default=1 << 10, metavar="SIZE")
    parser.add_argument("--to", dest="largest", type=size, default=256 << 20, metavar="SIZE")
    parser.add_argument("--factor", type=positive, default=4, help="between sizes (default: 4)")
    parser.add_argument("--iterations", type=positive, default=20, help="at most (default: 20)")
    parser.add_argument("--plot", action="store_true", help="draw the bandwidths")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to a file, too")
    parser.set_defaults(function=run)
    add_hardware_parser(kinds)


def size(text: str) -> int:
    """A number of bytes, such as 4K, 64M or 1000.

    >>> size("4K"), size("2MB")
    (4096, 2097152)
    """
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None or not 4 <= int(match[1]) * _UNITS[match[2]] <= 1 << 34:
        raise argparse.ArgumentTypeError(f"must be a size such as 4K or 64M, not {text}")
    return int(match[1]) * _UNITS[match[2]]


def run(options: argparse.Namespace) -> int:
    """Measure, and print the table."""
    if options.largest < options.smallest or options.factor < 2:
        raise InvalidValueError(
            "The sizes must grow: --to must not be less than --from, and --factor at least 2. "
            f"Received: {options.smallest}, {options.largest} and {options.factor}"
        )
    if "PHALANX_BENCH_ROWS" in os.environ:
        return _as_worker(options, Path(os.environ["PHALANX_BENCH_ROWS"]))
    print(heading(), flush=True)
    rows: list[Row] = []
    if options.where != "workers":
        devices.set_cpu_device_count(options.replicas)
        for row in measure("replicas", options.replicas, _replica_programs, options):
            print(line(row), flush=True)
            rows.append(row)
    if options.where != "replicas":
        for row in _start_workers(options):
            print(line(row), flush=True)
            rows.append(row)
    if options.plot:
        print(plot(rows))
    if options.json:
        table = [{**asdict(r), "algbw": r.algbw, "busbw": r.busbw} for r in rows]
        Path(options.json).write_text(json.dumps(table, indent=1) + "\n")
    return 0


# -- measuring ---------------------------------------------------------------------------------------

Programs = Callable[[int, str, int], Callable[[], Any]]
"""From the number of ranks, an operation and the number of elements: a function that runs it once."""


def measure(where: str, ranks: int, make: Programs, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of all operations and sizes."""
    for op in options.op or OPERATIONS:
        wanted = options.smallest
        while wanted <= options.largest:
            count = max(ranks, wanted // 4 // ranks * ranks)
            seconds = _time(make(ranks, op, count), options.iterations)
            yield Row(where, ranks, op, count * 4, count, "float32", seconds * 1e6)
            wanted *= options.factor


def _time(once: Callable[[], Any], most: int) -> float:
    once()  # compiles
    start = time.perf_counter()
    once()
    first = time.perf_counter() - start
    # All workers must repeat it as often, so that they take the slowest of them.
    slowest = float(comm.all_reduce(np.array([first]), "max")[0][0])
    repetitions = max(1, min(most, int(_PATIENCE / max(slowest, 1e-9))))
    start = time.perf_counter()
    for _ in range(repetitions):
        once()
    return (time.perf_counter() - start) / repetitions


_CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: comm.all_reduce(x)[0],
    "all_gather": lambda x: comm.all_gather_into_tensor(x)[0],
    "reduce_scatter": lambda x: comm.reduce_scatter_tensor(x)[0],
    "broadcast": lambda x: comm.broadcast(x)[0],
    "all_to_all": lambda x: comm.all_to_all_single(x)[0],
}


def _length(ranks: int, op: str, count: int) -> int:
    return count // ranks if op == "all_gather" else count


def _replica_programs(ranks: int, op: str, count: int) -> Callable[[], Any]:
    strategy = MirroredStrategy([f"CPU:{i}" for i in range(ranks)])
    x = strategy.experimental_distribute_values_from_function(
        lambda _: jnp.ones(_length(ranks, op, count), jnp.float32)
    )
    program = function(lambda x: strategy.run(_CALLS[op], args=(x,)))
    return lambda: jax.block_until_ready(strategy.experimental_local_results(program(x)))


def _worker_programs(ranks: int, op: str, count: int) -> Callable[[], Any]:
    x = jnp.ones(_length(ranks, op, count), jnp.float32)
    return lambda: _CALLS[op](x)


# -- workers -----------------------------------------------------------------------------------------


def _start_workers(options: argparse.Namespace) -> list[Row]:
    """Run this command as a job, whose first worker writes the rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "phalanx", "run", "-n", str(options.workers), "--no-progress"]
        command += ["-m", "phalanx", "bench", "collectives", "--iterations", str(options.iterations)]
        command += ["--from", str(options.smallest), "--to", str(options.largest)]
        command += ["--factor", str(options.factor)]
        for op in options.op or ():
            command += ["--op", op]
        environment = os.environ | {"PHALANX_BENCH_ROWS": str(path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not path.exists():
            raise InvalidValueError(f"The workers failed. Received:\n{done.stdout}{done.stderr}")
        return [Row(**row) for row in json.loads(path.read_text())]


def _as_worker(options: argparse.Namespace, path: Path) -> int:
    comm.init()
    ranks = comm.get_world_size()
    rows = list(measure("workers", ranks, _worker_programs, options))
    if comm.get_rank() == 0:
        path.write_text(json.dumps([asdict(row) for row in rows]))
    return 0


# -- showing -----------------------------------------------------------------------------------------


def heading() -> str:
    """The first lines of the table."""
    names = ["where", "ranks", "op", "size", "count", "type", "time", "algbw", "busbw"]
    units = ["", "", "", "(B)", "(elements)", "", "(us)", "(GB/s)", "(GB/s)"]
    return f"# {_columns(names)}\n# {_columns(units)}"


def line(row: Row) -> str:
    """A row of the table."""
    numbers = [f"{row.time:.1f}", f"{row.algbw:.3f}", f"{row.busbw:.3f}"]
    return "  " + _columns(
        [row.where, str(row.ranks), row.op, str(row.size), str(row.count), row.type, *numbers]
    )


def _columns(texts: Sequence[str]) -> str:
    widths = [8, 5, 14, 11, 11, 8, 12, 9, 9]
    return " ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True))


def plot(rows: Sequence[Row]) -> str:
    """The bandwidths as bars, on one scale."""
    most = max((row.busbw for row in rows), default=0.0) or 1.0
    lines = []
    for row in rows:
        name = f"{row.where} {row.op} {row.size}".rjust(36)
        lines.append(f"{name} {'#' * round(40 * row.busbw / most)} {row.busbw:.3f}")
    return "\n".join(["", "busbw (GB/s)", *lines])
