"""What ``phalanx run`` shows: the workers' lines with their names in front, and one bar for the job."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from phalanx.job.elastic.orders import Generation
from phalanx.job.hub.descriptions import Task, describe_exit
from phalanx.job.hub.server import Hub
from phalanx.job.launch.exit_policy import EndReason
from phalanx.job.launch.launcher import JobOutcome
from phalanx.job.launch.output import printable

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
        self._out, self._err = (_destination(stream, tasks) for stream in (stdout, stderr))
        self._bar: _Bar | None = None
        if bar and stderr.isatty() and isinstance(self._err, _Screen):
            self._bar = _Bar(name, len(tasks), self._err.console)
            if stdout.isatty():
                self._out = self._err  # one terminal: the bar must know of every line
        self.overwrite = any(isinstance(place, _Screen) for place in (self._out, self._err))

    def begin(self, hub: Hub, attempt: int) -> None:
        """Show the bar of the job whose hub this is."""
        if self._bar is not None:
            self._bar.follow(hub)

    def line(self, index: int, error: bool, line: bytes) -> None:
        """Print a line of a process."""
        (self._err if error else self._out).line(index, line)

    def flush(self) -> None:
        """Let everything that was printed be seen."""
        self._out.flush()
        self._err.flush()

    def restarts(self, task: Task, code: int, count: int) -> None:
        """Say that a process is started again."""
        self._say(f"{task} {describe_exit(code)}. It is started again ({count}).")

    def goes_on(self, task: Task, code: int) -> None:
        """Say that the job goes on without a process."""
        self._say(f"{task} {describe_exit(code)}. The job goes on without it.")

    def kills(self, task: Task, why: str) -> None:
        """Say why a process is ended."""
        self._say(f"{task} is ended. {why}")

    def generation(self, generation: Generation, names: Sequence[str]) -> None:
        """Say who trains from now on, and why that has changed."""
        if generation.number == 1:
            return
        who = f"{', '.join(names)}" if len(names) > 1 else f"{names[0]} alone"
        where = "from memory" if generation.source is not None else "from the last checkpoint"
        step = f"at step {generation.step}, {where}" if generation.step else where
        self._say(
            f"Generation {generation.number} of the workers ({generation.reason}): {who}, {step}."
        )

    def starts(self, task: Task) -> None:
        """Say that a process is started while the job runs."""
        self._say(f"{task} is started, and joins at the next common step.")

    def _say(self, text: str) -> None:
        self.flush()
        self._err.text(f"[phalanx] {text}")
        self.flush()

    def failed(self, outcome: JobOutcome, again: bool) -> None:
        """Say why the job failed; the failed worker's own words come last."""
        self.flush()
        lines = [f"[phalanx] {line}" for line in _summary(outcome, self._tasks)]
        if again:
            lines.append("[phalanx] All processes are started again.")
        elif outcome.culprit is not None and outcome.report:
            lines += [f"[phalanx] The end of what {outcome.culprit} wrote:", *outcome.report]
        if not again:
            self.close()
        self._err.text("\n".join(lines))
        self.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


class _File:
    """A file, a pipe, or something in memory."""

    def __init__(self, stream: IO[str], names: Sequence[str]) -> None:
        self._stream = stream
        self._names = [name.encode() for name in names]

    def line(self, index: int, line: bytes) -> None:
        binary = getattr(self._stream, "buffer", None)
        data = b"%s %s\n" % (self._names[index], line)
        if binary is None:
            self._stream.write(data.decode("utf-8", "backslashreplace"))
        else:
            self._stream.flush()
            binary.write(data)

    def text(self, text: str) -> None:
        self._stream.write(f"{text}\n")

    def flush(self) -> None:
        self._stream.flush()


class _Screen:
    """A terminal. Lines are gathered until the flush, because drawing the bar anew takes a while."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self.console = console
        self._names = []
        self._pending: list[str] = []
        for i, name in enumerate(names):
            with console.capture() as coloured:
                console.print(Text(name, _COLOURS[i % len(_COLOURS)]), end="")
            self._names.append(coloured.get())

    def line(self, index: int, line: bytes) -> None:
        text = printable(line)
        end = _RESET if "\x1b" in text else ""
        self._pending.append(f"{self._names[index]} {text}{end}")

    def text(self, text: str) -> None:
        self._pending.append(text)

    def flush(self) -> None:
        if self._pending:
            self.console.print(_Raw("\n".join(self._pending)), soft_wrap=True, end="")
            self._pending.clear()


_RESET = "\x1b[0m"


class _Raw:
    """Text that goes to the terminal as it is."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(f"{self._text}\n")


def _destination(stream: IO[str], tasks: Sequence[Task]) -> _File | _Screen:
    names = [f"[{task}]" for task in tasks]
    console = Console(file=stream)
    return _Screen(console, names) if console.is_terminal else _File(stream, names)


def _summary(outcome: JobOutcome, tasks: Sequence[Task]) -> Iterable[str]:
    processes = outcome.processes
    if processes.reason is EndReason.TIMEOUT:
        yield "The job took too long and was ended."
    if processes.reason is EndReason.INTERRUPT:
        yield "The job was interrupted."
    told = set()
    for task, code, by_itself in zip(tasks, processes.codes, processes.by_itself, strict=True):
        if code is None:
            yield f"{task} could not be ended."
        elif code != 0 and by_itself:
            yield f"{task} {describe_exit(code)}."
            told.add(str(task))
    failure = outcome.failure
    if failure is not None and not (failure.kind in ("exited", "raised") and failure.task in told):
        yield failure.text


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
