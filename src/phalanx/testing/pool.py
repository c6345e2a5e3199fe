"""Worker processes that wait for functions to run, and the thread that listens to them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.job.launch.worker_process import Guard, Process
from phalanx.net.wakeup import Wakeup
from phalanx.runtime.shipping import frame, split_frames
from phalanx.testing.copies import Copy, Template

__all__ = ["Pool", "Worker"]

_CHILD = str(Path(__file__).with_name("child.py"))
_CHUNK = 1 << 20
_MOST_READS = 64
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0


class Worker:
    """One process: what it has written, and what it is still to be told."""

    def __init__(
        self, index: int, environ: Mapping[str, str], guard: Guard, template: Template | None
    ) -> None:
        self.index = index
        orders, self.orders = os.pipe()
        self.replies, replies = os.pipe()
        self.process: Process | Copy
        fds = (orders, replies)
        try:
            if template is None:
                argv = [sys.executable, "-P", _CHILD, str(orders), str(replies)]
                self.process = Process(argv, environ, guard, name=str(index), pass_fds=fds)
            else:
                self.process = Copy(template, environ, guard, name=str(index), pass_fds=fds)
        finally:
            os.close(orders)
            os.close(replies)
        for fd in (self.orders, self.replies):
            os.set_blocking(fd, False)
        self.outgoing = bytearray(frame(sys.path))
        self.incoming = bytearray()
        self.written = {self.process.stdout: bytearray(), self.process.stderr: bytearray()}
        self.ready = False
        self.code: int | None = None

    @property
    def stdout(self) -> bytes:
        """What the process has written to its standard output."""
        return bytes(self.written[self.process.stdout])

    @property
    def stderr(self) -> bytes:
        """What the process has written to its standard error."""
        return bytes(self.written[self.process.stderr])

    def fds(self) -> list[int]:
        """What can be read."""
        exit_fd = self.process.exit_fd
        return [*self.written, self.replies, *([] if exit_fd is None else [exit_fd])]


class Pool:
    """The workers by their index. All callbacks come from one thread, with `changed` held.

    Args:
        reply: called with a worker's index and each message that it sends.
        death: called with a worker's index when its process has ended.
        template: what the workers are copies of, if they are.
    """

    def __init__(
        self,
        reply: Callable[[int, Any], None],
        death: Callable[[int, int], None],
        template: Template | None = None,
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.workers: dict[int, Worker] = {}
        self._reply = reply
        self._death = death
        self._template = template
        self._guard = Guard()
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._stop = False
        self._thread = threading.Thread(target=self._listen, name="phalanx-processes", daemon=True)
        self._thread.start()

    def start(self, index: int, environ: Mapping[str, str]) -> Worker:
        """Start a worker; one with the same index must have been ended before."""
        with self.changed:
            worker = Worker(index, environ, self._guard, self._template)
            self.workers[index] = worker
            for fd in worker.fds():
                self._selector.register(fd, selectors.EVENT_READ, worker)
            self._selector.register(worker.orders, selectors.EVENT_WRITE, worker)
        self._wakeup.ring()
        return worker

    def send(self, index: int, message: Any) -> None:
        """Send a message to a worker; it is written by the listening thread."""
        with self.changed:
            worker = self.workers[index]
            if worker.code is None:
                worker.outgoing += frame(message)
                self._unregister(worker.orders)
                self._selector.register(worker.orders, selectors.EVENT_WRITE, worker)
        self._wakeup.ring()

    def wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until something is so; returns whether it is."""
        with self.changed:
            return self.changed.wait_for(condition, max(0.0, deadline - time.monotonic()))

    def end(self, indices: Iterable[int], graceful: bool) -> None:
        """End workers: let them finish by themselves, or kill them."""
        with self.changed:
            living = [i for i in indices if i in self.workers and self.workers[i].code is None]
            for i in living:
                self.workers[i].process.send(signal.SIGCONT if graceful else signal.SIGKILL)
                if graceful:
                    self.send(i, None)
        deadline = time.monotonic() + _END_SECONDS
        if not self.wait(lambda: all(self.workers[i].code is not None for i in living), deadline):
            for i in living:
                self.workers[i].process.send(signal.SIGKILL)
            self.wait(lambda: all(self.workers[i].code is not None for i in living), deadline + 5.0)

    def close(self) -> None:
        """Kill what is left, and end the thread."""
        self.end(list(self.workers), graceful=False)
        self._stop = True
        self._wakeup.ring()
        self._thread.join(timeout=30.0)
        self._selector.close()
        self._wakeup.close()
        self._guard.close()

    # -- the thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stop:
            polling = any(w.process.exit_fd is None and w.code is None for w in self.workers.values())
            events = self._selector.select(_POLL_SECONDS if polling else None)
            with self.changed:
                for key, mask in events:
                    if key.data is None:
                        self._wakeup.clear()
                    else:
                        self._serve(key.data, key.fd, mask)
                if polling:
                    for worker in list(self.workers.values()):
                        self._notice_exit(worker)
                self.changed.notify_all()

    def _serve(self, worker: Worker, fd: int, mask: int) -> None:
        if worker.code is not None:
            return  # ended by an earlier event of the same round
        if mask & selectors.EVENT_WRITE:
            self._write(worker)
        elif fd == worker.process.exit_fd:
            self._notice_exit(worker)
        elif fd == worker.replies:
            self._take_replies(worker)
        elif self._drain(fd, worker.written[fd]):
            self._unregister(fd)

    def _write(self, worker: Worker) -> None:
        try:
            while worker.outgoing:
                del worker.outgoing[: os.write(worker.orders, worker.outgoing[:_CHUNK])]
        except BlockingIOError:
            return
        except OSError:  # it does not read any more: it ends, or has closed everything
            worker.outgoing.clear()
        self._unregister(worker.orders)

    def _take_replies(self, worker: Worker) -> None:
        if self._drain(worker.replies, worker.incoming):
            self._unregister(worker.replies)
        messages = split_frames(worker.incoming)
        if messages:  # what it wrote before it replied is in the pipes by now
            for fd, text in worker.written.items():
                self._drain(fd, text)
        for message in messages:
            self._reply(worker.index, message)

    def _notice_exit(self, worker: Worker) -> None:
        code = worker.process.code
        if code is None or worker.code is not None:
            return
        self._take_replies(worker)
        for fd, text in worker.written.items():
            self._drain(fd, text)
        for fd in (*worker.fds(), worker.orders):
            self._unregister(fd)
        worker.code = code
        worker.process.close()
        os.close(worker.orders)
        os.close(worker.replies)
        self._death(worker.index, code)

    def _unregister(self, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    @staticmethod
    def _drain(fd: int, text: bytearray) -> bool:
        """Read what there is, but not forever; returns whether the other end is closed."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS):
                data = os.read(fd, _CHUNK)
                if not data:
                    return True
                text += data
        return False
