"""What the benchmarks share: child processes, rounds in which they take turns, and result files.

A benchmark compares variants, each in a process of its own. The children stay alive; the parent tells
them in turn to run a round of steps, so that only one computes at a time and a busy spell of the
machine hits all of them alike. The children's side of the conversation is `_eager_common.serve`.

Only the standard library is needed here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"

START_DEADLINE = 300.0
ROUND_DEADLINE = 120.0  # and two seconds for each step
STOP_DEADLINE = 10.0

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}

V = TypeVar("V")


class BenchmarkError(RuntimeError):
    """The benchmark has no result."""


# -- children -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """What a child did in one turn."""

    steps: int
    seconds: float
    loss: float

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
        return Round(steps, answer["seconds"], answer["loss"])

    def last_words(self) -> str:
        """What the child has written to its standard error output."""
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return ". It wrote:\n" + "\n".join(text.splitlines()[-20:]) if text else ", without a word"


@contextmanager
def started(
    variants: Sequence[V], start: Callable[[V], Child], versions: list[str]
) -> Iterator[dict[V, Child]]:
    """All variants' children, ready to run; adds to `versions` what has not been listed yet."""
    with ExitStack() as stack:
        children = {v: stack.enter_context(start(v)) for v in variants}
        for child in children.values():
            listed = child.versions()
            if listed not in versions:
                versions.append(listed)
        yield children


def take_turns(
    children: Mapping[V, Child], rounds: int, steps: Mapping[V, int]
) -> Iterator[dict[V, Round]]:
    """Let the children run, one at a time, in an order that rotates; yields after every round."""
    order = list(children)
    for i in range(rounds):
        turn = i % len(order)
        done = {v: children[v].run(steps[v]) for v in order[turn:] + order[:turn]}
        yield {v: done[v] for v in order}


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


def say_written(path: Path) -> None:
    """Tell where a result is."""
    say(f"Written to {path.relative_to(HERE.parent)}")


def say(text: str) -> None:
    """Progress goes to standard error."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """A positive number given on the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1. Received: {text}")
    return number
