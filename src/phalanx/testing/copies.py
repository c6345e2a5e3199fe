"""Workers that are copies of one process, which has imported what they need."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence

from phalanx.errors import NotFoundError
from phalanx.job.launch import guard as guard_program
from phalanx.job.launch.worker_process import Guard
from phalanx.testing import template as program

__all__ = ["Copy", "Template", "find_template"]

_SECONDS = 60.0
_REAP_SECONDS = 5.0
_READ_AT_IMPORT = ("JAX_", "XLA_", "PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_")


class Template:
    """A process that has imported modules; it ends with this one.

    Args:
        modules: the names of the modules.
        environ: the environment in which they are imported.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        self._modules = list(modules)
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", program.__file__, str(theirs.fileno())],
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self.pid = self._process.pid
        program.send(self._socket, [sys.path, self._modules])
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def fork(self, environ: Mapping[str, str], descriptors: tuple[int, ...]) -> int:
        """Let it make a copy with these descriptors; returns the copy's process id."""
        with self._lock:
            try:
                program.send(self._socket, dict(environ), descriptors)
                answer = program.receive(self._socket)
            except OSError:
                answer = None
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_SECONDS)  # until it has written why
            self._errors.seek(0)
            shown = self._errors.read().decode("utf-8", "replace")
            self.close()
            raise NotFoundError(
                f"The modules to preload cannot be imported:\n{shown}\nReceived: {self._modules}"
            )
        return int(answer[0])

    def close(self) -> None:
        """End the process."""
        atexit.unregister(self.close)
        self._socket.close()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_REAP_SECONDS)
        self._errors.close()


class Copy:
    """One copy, which looks like a `phalanx.job.launch.worker_process.Process`."""

    def __init__(
        self,
        template: Template,
        environ: Mapping[str, str],
        guard: Guard,
        *,
        name: str,
        pass_fds: tuple[int, int],
    ) -> None:
        self._guard = guard
        self._mark = f"{guard.mark}/{name}/"
        self._lock = threading.Lock()
        self._code: int | None = None
        self._closed = False
        self._status, theirs = socket.socketpair()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        try:
            self.pid = template.fork(
                {**environ, guard_program.MARK: self._mark},
                (stdout, stderr, *pass_fds, theirs.fileno()),
            )
        except BaseException:
            os.close(self.stdout)
            os.close(self.stderr)
            self._status.close()
            raise
        finally:
            os.close(stdout)
            os.close(stderr)
            theirs.close()
        guard_program.mark_process(self.pid, self._mark)
        guard.watch(self.pid)
        self.exit_fd = self._status.fileno()
        for fd in (self.stdout, self.stderr):
            os.set_blocking(fd, False)

    @property
    def code(self) -> int | None:
        """The exit code, -n if signal n ended it, None while it runs."""
        with self._lock:  # several threads ask
            if self._code is None and not self._closed and self._is_readable(0.0):
                message = program.receive(self._status)
                if message is None:  # the template has been ended
                    self.send(signal.SIGKILL)
                self._code = -signal.SIGKILL if message is None else int(message[0])
            return self._code

    def _is_readable(self, seconds: float) -> bool:
        with contextlib.suppress(OSError, ValueError):  # another thread closes it
            return bool(select.select([self._status], [], [], seconds)[0])
        return False

    def wait(self, seconds: float) -> int | None:
        """The exit code, if the process ends within this time."""
        end = time.monotonic() + seconds
        while self.code is None and not self._closed and (left := end - time.monotonic()) > 0:
            self._is_readable(left)
        return self.code

    def send(self, signum: int) -> None:
        """Send a signal to the process and its children."""
        # Its number is taken until the template has seen the socket close.
        if not self._closed and not guard_program.send_to_group(self.pid, signum):
            with contextlib.suppress(ProcessLookupError):  # or it has no group of its own yet
                os.kill(self.pid, signum)

    def close(self) -> int | None:
        """Kill what is left of the process and its children, and forget it; returns the exit code."""
        if self._closed:
            return self._code
        self.send(signal.SIGKILL)
        guard_program.send_to_marked(self._mark, signal.SIGKILL)
        self.wait(_REAP_SECONDS)
        with self._lock:
            self._closed = True
            self._status.close()
        self._guard.forget(self.pid)
        for fd in (self.stdout, self.stderr):
            os.close(fd)
        return self._code


_templates: dict[tuple[object, ...], Template] = {}


def find_template(modules: Sequence[str], environ: Mapping[str, str]) -> Template | None:
    """The template for these modules, started if there is none; None where there cannot be any."""
    if not modules or not hasattr(os, "pidfd_open") or not hasattr(socket, "send_fds"):
        return None
    read = tuple(sorted((k, v) for k, v in environ.items() if k.startswith(_READ_AT_IMPORT)))
    key = (os.getpid(), tuple(modules), read)
    found = _templates.get(key)
    if found is not None and not found.is_alive:
        found.close()
        found = None
    if found is None:
        found = _templates[key] = Template(modules, environ)
    return found
