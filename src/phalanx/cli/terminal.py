"""What ``phalanx run`` shows: the workers' lines with their names in front, and one bar for the job."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from phalanx.cluster.hub.facts import Task, describe_exit
from phalanx.cluster.hub.server import Hub
from phalanx.cluster.launch.job import JobOutcome
from phalanx.cluster.launch.output import printable
from phalanx.cluster.launch.policy import Reason

__all__ = ["JobView", "progress_text"]

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")


def progress_text(rows: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """How many workers have joined, and what they do, from the hub's table.

    >>> progress_text([
    ...     {"state": "joined", "phase": "step", "step": 12},
    ...     {"state": "joined", "phase": "step", "step": 11},
    ... ])
    (2, 'step 11-12')
    """
    here = [row for row in rows if row["state"] != "absent"]
    phases = Counter("done" if row["state"] == "left" else row["phase"] for row in here)
    steps = [row["step"] for row in here if row["step"] is not None]
    words = []
    if steps:
        low, high = min(steps), max(steps)
        words.append(f"step {high}" if low == high else f"step {low}-{high}")
    if set(phases) - {"step"} or not steps:
        words += [
            f"{count} in {phase}" if len(phases) > 1 else phase for phase, count in phases.items()
        ]
    return len(here), ", ".join(words)


class JobView:
    """Prints the lines of a job's processes, and shows a bar if the standard error is a terminal.

    Standard output and standard error stay apart. Lines are bytes, and go to files and pipes as they
    are. In a terminal, names are coloured and control characters other than colours are spelt out.
    """

    def __init__(
        self, tasks: Sequence[Task], name: str, stdout: IO[str], stderr: IO[str], bar: bool = True
    ) -> None:
        self._tasks = list(tasks)
        self._names = [f"[{task}]" for task in tasks]
        self._streams = (stdout, stderr)
        self._consoles = [_console(stream) for stream in self._streams]
        self._bar = _Bar(name, len(tasks), self._consoles[1]) if bar and stderr.isatty() else None
        if self._bar is not None and stdout.isatty():
            self._consoles[0] = self._consoles[1]  # one terminal: the bar must know of every line
        self.overwrite = any(console is not None for console in self._consoles)

    def begin(self, hub: Hub, attempt: int) -> None:
        """Show the bar of the job whose hub this is."""
        if self._bar is not None:
            self._bar.follow(hub)

    def line(self, index: int, error: bool, line: bytes) -> None:
        """Print a line of a process."""
        console, name = self._consoles[error], self._names[index]
        if console is None:
            _binary(self._streams[error]).write(b"%s %s\n" % (name.encode(), line))
        else:
            colour = _COLOURS[index % len(_COLOURS)]
            text = Text.assemble((name, colour), " ", Text.from_ansi(printable(line)))
            console.print(text, soft_wrap=True, highlight=False)

    def flush(self) -> None:
        """Let everything that was printed be seen."""
        for stream in self._streams:
            stream.flush()

    def failed(self, outcome: JobOutcome, again: bool) -> None:
        """Say why the job failed; the failed worker's own words come last."""
        self.flush()
        for line in _summary(outcome, self._tasks):
            self._say(line)
        if again:
            self._say("All processes are started again.")
            return
        self.close()
        if outcome.culprit is not None and outcome.report:
            self._say(f"The end of what {outcome.culprit} wrote:")
            self._print("\n".join(outcome.report))
        self.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _say(self, text: str) -> None:
        self._print(f"[phalanx] {text}")

    def _print(self, text: str) -> None:
        console = self._consoles[1]
        if console is None:
            _binary(self._streams[1]).write(f"{text}\n".encode())
        else:
            console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)


def _summary(outcome: JobOutcome, tasks: Sequence[Task]) -> Iterable[str]:
    gang = outcome.gang
    if gang.reason is Reason.TIMEOUT:
        yield "The job took too long and was ended."
    if gang.reason is Reason.INTERRUPT:
        yield "The job was interrupted."
    for task, code, by_itself in zip(tasks, gang.codes, gang.by_itself, strict=True):
        if code is None:
            yield f"{task} could not be ended."
        elif code != 0 and by_itself:
            yield f"{task} {describe_exit(code)}."
    # That a process ended was just said.
    if outcome.failure is not None and outcome.failure.kind not in ("exited", "raised"):
        yield outcome.failure.text


def _console(stream: IO[str]) -> Console | None:
    console = Console(file=stream)
    return console if console.is_terminal else None


def _binary(stream: IO[str]) -> IO[bytes]:
    stream.flush()
    return stream.buffer  # type: ignore[attr-defined]


class _Bar(Progress):
    """One line: how many workers have joined, and what they do."""

    def __init__(self, name: str, workers: int, console: Console | None) -> None:
        self._hub: Hub | None = None
        self._asked = 0.0
        super().__init__(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed:.0f}/{task.total:.0f} joined"),
            TextColumn("{task.fields[doing]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=5,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._line = self.add_task(name, total=workers, doing="")

    def follow(self, hub: Hub) -> None:
        """Show the job whose hub this is."""
        self._hub = hub
        self.start()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Ask the hub, from time to time, and draw."""
        if self._hub is not None and time.monotonic() - self._asked > 0.5:
            self._asked = time.monotonic()
            with contextlib.suppress(Exception):  # a hub that is being closed does not answer
                rows = self._hub.table().rows
                joined, doing = progress_text(rows)
                self.update(self._line, total=len(rows), completed=joined, doing=doing)
        yield self.make_tasks_table(self.tasks)
