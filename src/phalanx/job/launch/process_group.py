"""Runs the processes of a job together: passes on what they print, and ends them together."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from phalanx.job.launch.exit_policy import DEFAULT_PATIENCE, EndReason, ExitPolicy, Patience
from phalanx.job.launch.output import LineSplitter, Tail
from phalanx.job.launch.remote import code_from_agent
from phalanx.job.launch.worker_process import Guard, Process, Running
from phalanx.net.wakeup import Wakeup

_LINGER_SECONDS = 1.0
"""How long the children of a process that has ended may clean up."""
_CHUNK = 1 << 16
_POLL_SECONDS = 0.05
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Command:
    """A process to start: its name, program, environment and folder.

    With `remote` the process speaks for one on another host: it is given this text at first, and then
    the names of signals, one in each line, instead of the signals themselves.
    """

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    cwd: str | None = None
    remote: str | None = None


Spawn = Callable[[int, Command, Guard], Running]
"""Starts the process of a command, with its index."""


def spawn_here(index: int, command: Command, guard: Guard) -> Running:
    """Start a process on this machine."""
    return Process(
        command.argv,
        command.environ,
        guard,
        name=command.name,
        cwd=command.cwd,
        stdin=command.remote is not None,
    )


@dataclass(frozen=True)
class GroupOutcome:
    """How a job ended.

    `codes` are the exit codes of the processes, -n if signal n ended one and None if it could not be
    ended; `by_itself` says which of them ended without a signal from us. `tails` are the last lines
    that each wrote to its standard error.
    """

    exit_code: int
    codes: list[int | None]
    reason: EndReason | None
    first_failure: int | None
    by_itself: list[bool]
    tails: list[list[str]] = field(repr=False)


class Sink(Protocol):
    """Takes what the processes print."""

    overwrite: bool
    """Whether a carriage return overwrites the line, as in a terminal."""

    def line(self, index: int, error: bool, line: bytes) -> None:
        """A process wrote a line, to its standard error or output."""

    def flush(self) -> None:
        """No more lines for now."""


class Controller(Protocol):
    """Starts and ends processes of a group while it runs."""

    wakeup: Wakeup
    """Rings when there is something to do."""

    @property
    def is_busy(self) -> bool:
        """Whether a process will be started although none may be left."""

    def attend(self, group: ProcessGroup) -> None:
        """Do what there is to do; called after whatever the group does."""


class Interrupts:
    """Collects the signals that ask this process to end, instead of dying of them, and notices.

    Only the main thread gets signals; elsewhere there are none to collect. If a second signal comes
    while the first has not been taken, the thread is stuck in a write, and is freed by a
    KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._pending: list[int] = []
        self._previous: dict[int, Any] = {}
        self.wakeup = Wakeup()

    def take(self) -> list[int]:
        """The signals that have come since the last call."""
        self.wakeup.clear()
        pending, self._pending = self._pending, []
        return pending

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self.wakeup.close()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._pending and signum != signal.SIGUSR1:
            raise KeyboardInterrupt
        self._pending.append(signum)
        self.wakeup.ring()


def run_process_group(
    commands: Sequence[Command],
    sink: Sink,
    *,
    ending: ExitPolicy | None = None,
    patience: Patience = DEFAULT_PATIENCE,
    timeout: float | None = None,
    interrupts: Interrupts | None = None,
    started: Callable[[int, Running], None] | None = None,
    exited: Callable[[int, int], None] | None = None,
    again: Callable[[int, int, int], Command] | None = None,
    noticed: Callable[[], None] | None = None,
    spawn: Spawn = spawn_here,
    controller: Controller | None = None,
) -> GroupOutcome:
    """Start all commands and wait until all have ended; none outlives the call.

    The first failure ends the others. So does a signal to this process, if `interrupts` collects them,
    and the timeout.

    Args:
        commands: what to start.
        sink: takes what they print.
        ending: when the job is over; the default waits for the success of all commands.
        patience: how long processes may take to end, without `ending`.
        timeout: how many seconds the job may take.
        interrupts: where signals to this process are collected.
        started: called with the index of each process that was started, also again, and the process.
        exited: called with the index and the exit code of each process that ends while the job runs
            and is not started again.
        again: called with the index and the exit code of a process that is to be started again, and
            how often it has been; says what to start.
        noticed: called when SIGUSR1 says that machines will be taken away soon.
        spawn: starts processes.
        controller: starts more of them, or ends some, while the job runs.
    """
    ending = ending or ExitPolicy([True] * len(commands), patience)
    with (
        Guard() as guard,
        contextlib.closing(ProcessGroup(sink, ending, guard, spawn, started, exited, again)) as group,
    ):
        for index, command in enumerate(commands):
            group.start(index, command)
        group.run(interrupts, timeout, noticed, controller)
        group.close()
        return group.outcome()


class _Member:
    """One process of the group, with its streams."""

    def __init__(self, command: Command, process: Running, overwrite: bool) -> None:
        self.process = process
        self.splitters = {
            fd: LineSplitter(overwrite) for fd in (self.process.stdout, self.process.stderr)
        }
        self.open = set(self.splitters)
        self.tail = Tail()
        self.code: int | None = None
        self.linger_until = 0.0
        self.closed = False
        self._remote = command.remote is not None
        if command.remote is not None:
            self.process.write(f"{command.remote}\n".encode())

    @property
    def exit_code(self) -> int | None:
        """The exit code, -n if signal n ended it, also on another host; None while it runs."""
        code = self.process.code
        return code_from_agent(code) if self._remote and code is not None else code

    def send(self, signum: int) -> None:
        if self._remote:
            self.process.write(f"{signal.Signals(signum).name}\n".encode())
        if not self._remote or signum == signal.SIGKILL:
            self.process.send(signum)


class ProcessGroup:
    """The loop that reads, waits and signals."""

    def __init__(
        self,
        sink: Sink,
        ending: ExitPolicy,
        guard: Guard,
        spawn: Spawn,
        started: Callable[[int, Running], None] | None,
        exited: Callable[[int, int], None] | None,
        again: Callable[[int, int, int], Command] | None,
    ) -> None:
        self.members: list[_Member] = []
        self._sink, self._ending, self._guard, self._spawn = sink, ending, guard, spawn
        self._started, self._exited, self._again = started, exited, again
        self._reader_is_gone = False
        self._selector = selectors.DefaultSelector()

    def start(self, index: int, command: Command) -> None:
        """Start a process, or start it again."""
        process = self._spawn(index, command, self._guard)
        member = _Member(command, process, self._sink.overwrite)
        self.members[index : index + 1] = [member]
        for fd in (*member.open, process.exit_fd):
            if fd is not None:
                self._selector.register(fd, selectors.EVENT_READ, index)
        if self._started is not None:
            self._started(index, process)

    def run(
        self,
        interrupts: Interrupts | None,
        timeout: float | None,
        noticed: Callable[[], None] | None = None,
        controller: Controller | None = None,
    ) -> None:
        """Read, wait and signal until all processes have ended."""
        for source in (interrupts, controller):
            if source is not None:
                self._selector.register(source.wakeup, selectors.EVENT_READ)
        give_up = None if timeout is None else time.monotonic() + timeout
        while not self._finished(now := time.monotonic(), controller):
            for key, _ in self._selector.select(self._seconds_to_wait(now, give_up)):
                if key.data is not None:
                    self._handle(key.data, key.fd)
            now = time.monotonic()
            signals = [] if interrupts is None else interrupts.take()
            if signal.SIGUSR1 in signals and noticed is not None:
                noticed()
            self._decide(now, [s for s in signals if s != signal.SIGUSR1], give_up)
            for index, member in enumerate(self.members):
                if not member.closed:
                    self._look_after(index, member, now)
            if controller is not None:
                controller.attend(self)
            self._write(self._sink.flush)

    def free_index(self, limit: int) -> int | None:
        """Where a process could be started: in place of one that has ended, or after the last."""
        free = [index for index, member in enumerate(self.members) if member.closed]
        return min(free, default=len(self.members) if len(self.members) < limit else None)

    def kill(self, index: int) -> bool:
        """End a process at once, unless it has ended; returns whether it had not."""
        is_there = self.members[index].code is None
        if is_there:
            self._ending.kills(index)
            self.members[index].send(signal.SIGKILL)
        return is_there

    def close(self) -> None:
        """Kill whatever is left; nothing is, unless there was an error."""
        for index, member in enumerate(self.members):
            self._close_member(index, member)
        self._selector.close()

    def outcome(self) -> GroupOutcome:
        """How the processes have ended."""
        ending = self._ending
        return GroupOutcome(
            exit_code=ending.exit_code,
            codes=ending.codes,
            reason=ending.reason,
            first_failure=ending.first_failure,
            by_itself=ending.by_itself,
            tails=[member.tail.lines for member in self.members],
        )

    def _finished(self, now: float, controller: Controller | None) -> bool:
        if all(member.closed for member in self.members):
            return controller is None or not controller.is_busy
        cannot_be_ended = any(member.code is None for member in self.members)
        return cannot_be_ended and self._ending.over(now)

    def _seconds_to_wait(self, now: float, give_up: float | None) -> float | None:
        times = [self._ending.deadline, give_up if self._ending.reason is None else None]
        for member in self.members:
            if not member.closed:
                times += [splitter.deadline for splitter in member.splitters.values()]
                times.append(None if member.code is None else member.linger_until)
                times.append(now + _POLL_SECONDS if member.process.exit_fd is None else None)
        return min((max(0.0, t - now) for t in times if t is not None), default=None)

    def _decide(self, now: float, signals: list[int], give_up: float | None) -> None:
        for signum in signals:
            self._ending.interrupt(signum, now)
        if give_up is not None and now >= give_up:
            self._ending.timeout(now)
        if signum := self._ending.signal(now):
            for member in self.members:
                if member.code is None:
                    member.send(signum)

    def _handle(self, index: int, fd: int) -> None:
        member = self.members[index]
        if fd in member.open:
            self._read(index, member, fd)
        elif fd == member.process.exit_fd:
            self._notice_exit(index, member)

    def _look_after(self, index: int, member: _Member, now: float) -> None:
        if member.process.exit_fd is None:
            self._notice_exit(index, member)
        for fd, splitter in member.splitters.items():
            self._pass_on(index, fd, splitter.flush(now))
        if member.code is not None and (not member.open or now >= member.linger_until):
            self._close_member(index, member)
            if self._ending.goes_on(index):
                self._start_again(index, member)

    def _start_again(self, index: int, member: _Member) -> None:
        assert member.code is not None
        if self._ending.reason is not None or self._again is None:  # the job ends: it does not
            self._ending.exited(index, member.code, time.monotonic())
        else:
            self.start(index, self._again(index, member.code, self._ending.restarted[index]))

    def _notice_exit(self, index: int, member: _Member) -> None:
        code = member.exit_code
        if code is None or member.code is not None:
            return
        if member.process.exit_fd is not None:
            self._selector.unregister(member.process.exit_fd)
        now = time.monotonic()
        member.code = code
        member.linger_until = now + _LINGER_SECONDS
        self._ending.exited(index, code, now)
        is_news = self._ending.reason is not EndReason.DONE and not self._ending.goes_on(index)
        if self._exited is not None and is_news:
            self._exited(index, code)

    def _read(self, index: int, member: _Member, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._pass_on(index, fd, member.splitters[fd].feed(data, time.monotonic()))
        else:
            self._selector.unregister(fd)
            member.open.discard(fd)

    def _close_member(self, index: int, member: _Member) -> None:
        if member.closed:
            return
        member.closed = True
        for fd, splitter in member.splitters.items():
            self._pass_on(index, fd, splitter.flush(0.0, force=True))
        for fd in member.open:
            self._selector.unregister(fd)
        member.open.clear()
        if member.code is None and member.process.exit_fd is not None:
            self._selector.unregister(member.process.exit_fd)
        member.process.close()

    def _pass_on(self, index: int, fd: int, lines: list[bytes]) -> None:
        member = self.members[index]
        error = fd == member.process.stderr
        for line in lines:
            if error:
                member.tail.add(line)
            self._write(self._sink.line, index, error, line)

    def _write(self, write: Callable[..., None], *args: Any) -> None:
        """Write; if the reader is gone, end the job quietly."""
        if self._reader_is_gone:
            return
        try:
            write(*args)
        except BrokenPipeError:
            self._reader_is_gone = True
            self._ending.interrupt(signal.SIGPIPE, time.monotonic())
