"""What the benchmarks share: options, child processes, rounds in which they take turns, result files.

A benchmark compares variants, each in a process of its own. The children stay alive; the parent tells
them in turn to run a round of steps, so that only one computes at a time and a busy spell of the
machine hits all of them alike. The children's side of the conversation is in `_child.py`.

Only the standard library is needed here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from peers import BenchmarkError, peer_python, say

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

START_DEADLINE = 300.0
ROUND_DEADLINE = 120.0  # and two seconds for each step
STOP_DEADLINE = 10.0

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}

V = TypeVar("V")
W = TypeVar("W", bound="Variant")
C = TypeVar("C", bound="Child | Ranks")


# -- variants and options -------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One way to do it, or one library to do it with, and whose Python it needs."""

    key: str
    name: str
    peer: str | None = None

    @property
    def python(self) -> Path:
        """The interpreter that has the library; makes its environment if there is none."""
        return peer_python(self.peer) if self.peer else Path(sys.executable)


def wanted(variants: Sequence[W], peers: Sequence[str]) -> list[W]:
    """The variants that need no other library, or one of these."""
    return [v for v in variants if v.peer is None or v.peer in peers]


def options_parser(description: str, rounds: int, peers: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options that benchmarks share; `rounds` is the default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=positive, default=rounds, help=f"default {rounds}")
    if peers:
        parser.add_argument(
            "--peers",
            nargs="*",
            choices=peers,
            default=peers,
            help="libraries to compare with (default all; none if empty)",
        )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="2 short rounds, to see that everything works; the result is printed only",
    )
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options that were given."""
    options = parser.parse_args()
    options.rounds = 2 if options.quick else options.rounds
    return options


def positive(text: str) -> int:
    """A positive number given on the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number


def finish(name: str, report: Callable[[], str], keep: bool = True) -> int:
    """Measure, print the result and write it to a file, if it is to be kept; the exit code."""
    try:
        text = report()
    except (BenchmarkError, subprocess.TimeoutExpired) as error:
        say(f"error: {error}")
        return 1
    print(text)
    if keep:
        write_result(name, text)
    return 0


# -- children -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What a child did in one turn."""

    steps: int
    seconds: float
    loss: float
    megabytes: float = 0.0  # the most that its processes ever had, libraries included

    @property
    def milliseconds(self) -> float:
        """Per step."""
        return 1000 * self.seconds / self.steps


class Child:
    """A variant's process, started as ``python *arguments``; a context manager that ends it."""

    def __init__(self, name: str, python: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._unread = b""
        self._process = subprocess.Popen(
            [str(python), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env=os.environ | ENVIRONMENT,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._end()
        finally:
            self._errors.close()

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.terminate()
            self._process.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            say(f"{self.name} does not stop within {STOP_DEADLINE:.0f} s and is killed")
            self._process.kill()
            self._process.wait(STOP_DEADLINE)
        finally:
            self._process.stdin.close()
            self._process.stdout.close()

    def kill(self) -> None:
        """End the process at once; for those that take their time after a friendly signal."""
        self._process.kill()

    def send(self, **command: Any) -> None:
        """Give the child a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
        except BrokenPipeError:
            raise BenchmarkError(f"{self.name} is gone{self.last_words()}") from None

    def receive(self, what: str, deadline: float) -> dict[str, Any]:
        """The child's next answer, which must come within `deadline` seconds.

        Lines that are no answers are left out: libraries may print while they start.
        """
        give_up = time.monotonic() + deadline
        while True:
            line = self._line(what, deadline, give_up)
            if line.startswith(b"{"):
                return json.loads(line)

    def _line(self, what: str, deadline: float, give_up: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = give_up - time.monotonic()
                if left <= 0 or not selector.select(left):
                    late = f"{self.name}: no answer to '{what}' within {deadline:.0f} s"
                    raise BenchmarkError(late + self.last_words())
                read = os.read(self._process.stdout.fileno(), 65536)
                if not read:
                    raise BenchmarkError(f"{self.name} ended during '{what}'{self.last_words()}")
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def versions(self) -> str:
        """The child's first answer, when it is ready: the versions of what it measures."""
        found = self.receive("start", START_DEADLINE)["versions"]
        return ", ".join(f"{name} {version}" for name, version in found.items())

    def run(self, steps: int) -> Round:
        """Train for some steps, starting from the initial parameters."""
        self.send(steps=steps)
        answer = self.receive(f"run {steps} steps", ROUND_DEADLINE + 2.0 * steps)
        return Round(steps, answer["seconds"], answer["loss"], answer.get("megabytes", 0.0))

    def last_words(self) -> str:
        """What the child has written to its standard error output."""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return ". It wrote:\n" + "\n".join(text.splitlines()[-20:]) if text else ", without a word"


class Ranks:
    """The processes of one variant that compute together; behaves like one `Child`."""

    def __init__(self, name: str, python: Path, commands: Sequence[Sequence[str]]) -> None:
        self.name = name
        self._stack = ExitStack()
        self._ranks = [
            self._stack.enter_context(Child(f"{name}, rank {i}", python, command))
            for i, command in enumerate(commands)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.kill()
        self._stack.close()

    def versions(self) -> str:
        """Wait until all ranks are ready; the versions of what the first one measures."""
        with self._explained():
            first, *_ = [r.versions() for r in self._ranks]
        return first

    def ask(self, what: str, deadline: float, **command: Any) -> list[dict[str, Any]]:
        """Give all ranks a command; their answers."""
        for rank in self._ranks:
            rank.send(**command)
        return self.receive(what, deadline)

    def run(self, steps: int) -> Round:
        """Let all ranks make some steps; it takes as long as the slowest."""
        answers = self.ask(f"run {steps} steps", ROUND_DEADLINE + 2.0 * steps, steps=steps)
        loss = statistics.fmean(a["loss"] for a in answers)
        held = sum(a.get("megabytes", 0.0) for a in answers)
        return Round(steps, max(a["seconds"] for a in answers), loss, held)

    def receive(self, what: str, deadline: float) -> list[dict[str, Any]]:
        """The next answer of each rank."""
        with self._explained():
            return [r.receive(what, deadline) for r in self._ranks]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Show what all ranks have written if one fails, because another may be the cause."""
        try:
            yield
        except BenchmarkError as error:
            words = "\n".join(f"{r.name}{r.last_words()}" for r in self._ranks)
            raise BenchmarkError(f"{error}\n{words}") from None


def free_addresses(count: int) -> tuple[str, ...]:
    """Addresses at which no process listens at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)


# -- measuring ----------------------------------------------------------------------------------


@contextmanager
def started(
    variants: Sequence[V], start: Callable[[V], C], versions: list[str]
) -> Iterator[dict[V, C]]:
    """All variants' children, ready to run; adds to `versions` what has not been listed yet."""
    with ExitStack() as stack:
        children = {v: stack.enter_context(start(v)) for v in variants}
        for child in children.values():
            list_versions(child, versions)
        yield children


def list_versions(child: Child | Ranks, versions: list[str]) -> None:
    """Wait until a child is ready; adds to `versions` what has not been listed yet."""
    listed = child.versions()
    if not any(listed in others for others in versions):
        # The hand-written variants say less than those of the same library.
        versions[:] = [*(v for v in versions if v not in listed), listed]


def rotated(order: Sequence[V], rounds: int) -> Iterator[Sequence[V]]:
    """What takes turns, round by round, beginning with another one each time."""
    for i in range(rounds):
        turn = i % len(order)
        yield [*order[turn:], *order[:turn]]


def take_turns(
    children: Mapping[V, Child | Ranks], rounds: int, steps: Mapping[V, int]
) -> Iterator[dict[V, Round]]:
    """Let the children run, one at a time, in an order that rotates; yields after every round."""
    for order in rotated(list(children), rounds):
        done = {v: children[v].run(steps[v]) for v in order}
        yield {v: done[v] for v in children}


def steps_for(child: Child | Ranks, seconds: float, least: int = 3) -> int:
    """How many steps a child that is warm can make in about this time."""
    trial = child.run(3)
    while trial.seconds < seconds / 5:
        trial = child.run(4 * trial.steps)
    return max(least, round(trial.steps * seconds / trial.seconds))


def check_same(what: str, results: Mapping[str, float], tolerance: float) -> None:
    """Refuse to compare variants that do not compute the same thing, up to a relative tolerance."""
    first = next(iter(results.values()))
    if not all(math.isclose(x, first, rel_tol=tolerance) for x in results.values()):
        listing = "\n".join(f"  {name}: {x:.6f}" for name, x in results.items())
        raise BenchmarkError(f"{what}: the results differ by more than {tolerance:g}:\n{listing}")


# -- reporting ----------------------------------------------------------------------------------


def ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """What one variant took relative to another, round by round."""
    return [a / b for a, b in zip(these, those, strict=True)]


def spread(numbers: Sequence[float]) -> str:
    """The smallest and the largest of some numbers."""
    return f"{min(numbers):.2f}..{max(numbers):.2f}"


def median_and_spread(numbers: Sequence[float]) -> str:
    """The median of some numbers, with their range."""
    return f"{statistics.median(numbers):.2f} ({spread(numbers)})"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def circumstances(versions: Sequence[str]) -> str:
    """Versions, machine and date."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    machine = f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}"
    return f"{'; '.join(versions)}; {machine}; {today}."


def write_result(name: str, text: str) -> None:
    """Keep a result among the files of the project."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(text)
    say_written(RESULTS / name)


def pyplot() -> Any:
    """Matplotlib's, which draws into files; None if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        say("Matplotlib is not installed: there is no plot")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def errors(rounds: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Medians, and how far the rounds lie below and above each of them."""
    medians = [statistics.median(r) for r in rounds]
    below = [a - min(r) for a, r in zip(medians, rounds, strict=True)]
    above = [max(r) - a for a, r in zip(medians, rounds, strict=True)]
    return medians, [below, above]


def say_written(path: Path) -> None:
    """Tell where a result is."""
    say(f"Written to {path.relative_to(HERE.parent)}")
