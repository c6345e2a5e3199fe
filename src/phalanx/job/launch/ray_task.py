"""What an actor of Ray does for one task: it holds the task's process, and passes on what it prints."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.job.launch.ports import PortReservation
from phalanx.job.launch.worker_process import Guard, Process

_CHUNK = 1 << 16
_LOOK_EVERY = 1.0  # seconds

Output = tuple[list[tuple[bool, bytes]], int | None]


class RayTask:
    """The process of one task. If the actor dies, a guard ends the process.

    Ray makes an actor of this class; several of its threads call the methods at the same time.
    """

    def __init__(self) -> None:
        self._guard = Guard()
        self._reservation = PortReservation(1)
        self._process: Process | None = None
        self._open: set[int] = set()

    def place(self) -> tuple[str, str, int]:
        """The node, the address of its machine, and a free port on it."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node, str(ray.util.get_node_ip_address()), self._reservation.ports[0]

    def start(self, name: str, argv: Sequence[str], environ: Mapping[str, str], cwd: str) -> None:
        """Start the process; one that is left from before is ended."""
        self.end()
        self._process = Process(
            argv,
            {**os.environ, **environ},
            self._guard,
            name=name,
            cwd=cwd if os.path.isdir(cwd) else None,
        )
        self._open = {self._process.stdout, self._process.stderr}

    def read(self, seconds: float) -> Output:
        """What the process has printed, to its standard error or not, and its exit code at the end.

        Waits for so many seconds if there is nothing to tell.
        """
        process = self._process
        if process is None:
            return [], -int(signal.SIGKILL)
        end = time.monotonic() + seconds
        while True:
            code = process.code
            if printed := self._printed(process):
                return printed, None
            left = end - time.monotonic()
            if code is not None or left <= 0:
                return [], code
            waits = [*self._open, *([] if process.exit_fd is None else [process.exit_fd])]
            with contextlib.suppress(OSError, ValueError):  # another thread ends the process
                select.select(waits, [], [], min(left, _LOOK_EVERY))

    def _printed(self, process: Process) -> list[tuple[bool, bytes]]:
        found = []
        for fd in list(self._open):
            with contextlib.suppress(BlockingIOError):
                if data := os.read(fd, _CHUNK):
                    found.append((fd == process.stderr, data))
                else:
                    self._open.discard(fd)
        return found

    def send(self, signum: int) -> None:
        """Send a signal to the process and its children."""
        if self._process is not None:
            self._process.send(signum)

    def end(self) -> None:
        """Kill what is left of the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def pid(self) -> int:
        """The process of the actor itself."""
        return os.getpid()


def remote_class(ray: Any) -> Any:
    """The class as Ray's; it is not restarted by Ray, because the launcher counts restarts."""
    return ray.remote(max_restarts=0, max_concurrency=4)(RayTask)
