"""One process of a job: in a session of its own, ended together with its children."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from phalanx.errors import NotFoundError
from phalanx.job.hub.descriptions import signal_name
from phalanx.job.launch import guard as guard_program
from phalanx.runtime.formatting import shown

_REAP_SECONDS = 5.0


def shell_code(code: int) -> int:
    """The exit code as a shell gives it: 128 + n for a process that signal n ended.

    >>> shell_code(3), shell_code(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code


def describe_code(code: int) -> str:
    """An exit code in words.

    >>> describe_code(3), describe_code(-9)
    ('exit code 3', 'signal SIGKILL')
    """
    return f"exit code {code}" if code >= 0 else f"signal {signal_name(-code) or -code}"


class Guard:
    """A small process that ends the job's processes if this one dies without a word."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self._lock = threading.Lock()
        # Without a mark of its own: where a job runs inside a job, the outer one must not end the
        # guard of the inner one, which then could not do its work.
        environ = {name: value for name, value in os.environ.items() if name != guard_program.MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard_program.__file__],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._tell(f"mark {self.mark}")

    def watch(self, group: int) -> None:
        """A process group of the job has begun."""
        self._tell(f"+{group}")

    def forget(self, group: int) -> None:
        """A process group of the job has ended."""
        self._tell(f"-{group}")

    def close(self) -> None:
        """The job is over; end the guard."""
        self._tell("bye")
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_REAP_SECONDS)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _tell(self, message: str) -> None:
        assert self._process.stdin is not None
        # The guard may have been killed: the job goes on without it.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{message}\n".encode())
            self._process.stdin.flush()


class Running(Protocol):
    """A process that runs here or elsewhere, as the launcher sees it."""

    @property
    def stdout(self) -> int:
        """A descriptor of its standard output, which does not block."""

    @property
    def stderr(self) -> int:
        """A descriptor of its standard error, which does not block."""

    @property
    def exit_fd(self) -> int | None:
        """A descriptor that is readable when it has ended, if there is one."""

    @property
    def code(self) -> int | None:
        """The exit code, -n if signal n ended it, None while it runs."""

    def wait(self, seconds: float) -> int | None:
        """The exit code, if it ends within this time."""

    def send(self, signum: int) -> None:
        """Send a signal to it and its children."""

    def write(self, data: bytes) -> None:
        """Write to its standard input."""

    def close(self) -> int | None:
        """Kill what is left of it, and forget it; returns the exit code."""


class Process:
    """A running process, with its standard output and error as pipes that do not block.

    The process leads a session of its own, so that Ctrl-C in the terminal does not reach it and signals
    reach all its children.

    `guard` ends it if this process dies; `name` is what it is called within the job. With `stdin` its
    input is a pipe, else it has none.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        guard: Guard,
        *,
        name: str,
        cwd: str | None = None,
        stdin: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._guard = guard
        self._mark = f"{guard.mark}/{name}/"
        self._closed = False
        try:
            self._popen = subprocess.Popen(
                list(argv),
                env={**environ, guard_program.MARK: self._mark},
                cwd=cwd,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=tuple(pass_fds),
            )
        except OSError as error:
            raise NotFoundError(
                f"The program cannot be started: {error.strerror}. Received: {shown(argv[0])}"
            ) from error
        guard_program.mark_process(self.pid, self._mark)
        guard.watch(self.pid)
        self.exit_fd = _exit_fd(self.pid)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.stdout = self._popen.stdout.fileno()
        self.stderr = self._popen.stderr.fileno()
        for fd in (self.stdout, self.stderr):
            os.set_blocking(fd, False)

    @property
    def pid(self) -> int:
        """The id of the process, and of its process group."""
        return self._popen.pid

    @property
    def code(self) -> int | None:
        """The exit code, -n if signal n ended it, None while it runs; does not reap it."""
        if self._popen.returncode is not None:
            return self._popen.returncode
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # other code has waited for all children
            return self._popen.wait()
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def wait(self, seconds: float) -> int | None:
        """The exit code, if the process ends within this time; does not reap it."""
        deadline = time.monotonic() + seconds
        while self.code is None and (left := deadline - time.monotonic()) > 0:
            if self.exit_fd is None:
                time.sleep(min(left, 0.01))
            else:
                with contextlib.suppress(OSError, ValueError):  # another thread closes it
                    select.select([self.exit_fd], [], [], left)
        return self.code

    def send(self, signum: int) -> None:
        """Send a signal to the process and its children."""
        # As long as the leader is not reaped, its number belongs to no other group.
        if self._popen.returncode is None:
            guard_program.send_to_group(self.pid, signum)

    def write(self, data: bytes) -> None:
        """Write to the standard input, if the process still reads it."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._popen.stdin.write(data)
            self._popen.stdin.flush()

    def close(self) -> int | None:
        """Kill what is left of the process and its children, and forget it; returns the exit code."""
        if self._closed:
            return self._popen.returncode
        self._closed = True
        self.send(signal.SIGKILL)
        guard_program.send_to_marked(self._mark, signal.SIGKILL)
        # A process in an uninterruptible system call outlives even SIGKILL; do not wait forever.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_REAP_SECONDS)
            self._guard.forget(self.pid)
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self.exit_fd is not None:
            os.close(self.exit_fd)
        return self._popen.returncode


def _exit_fd(pid: int) -> int | None:
    """A file descriptor that is readable when the process has ended, where the system has such."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
