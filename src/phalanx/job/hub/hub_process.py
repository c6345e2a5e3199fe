"""A hub in a process of its own, next to the first worker, for jobs without a launcher.

It outlives that worker, so that the others learn how it ended, and so that JAX, which aborts processes
whose coordination service vanishes, leaves them alone. It ends when all workers have come and gone, or
when the first is gone and no other is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import ClusterEnvironmentError, DeadlineExceededError, PhalanxError
from phalanx.job.hub.descriptions import Task
from phalanx.job.hub.server import Hub

_POLL = 0.1
_PROGRAM = f"""
import sys
sys.path.append({str(Path(__file__).parents[3])!r})
from phalanx.job.hub.hub_process import serve
serve()
"""


class HubProcess:
    """Starts a hub in a child process; `close` lets go of it, and it ends with the job.

    `advertised` is the name under which the others reach it, and `name` what the job is called for
    `phalanx explain`.
    """

    def __init__(
        self,
        expected: Sequence[Task],
        token: str,
        host: str,
        port: int,
        *,
        advertised: str,
        name: str,
        timeout: float = 60.0,
    ) -> None:
        order = {
            "expected": [[task.type, task.id, task.address] for task in expected],
            "token": token,
            "host": host,
            "port": port,
            "advertised": advertised,
            "name": name,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        answer = self._start(json.dumps(order), timeout)
        if "address" not in answer:
            self.close()
            raise ClusterEnvironmentError(str(answer.get("error", "The hub's process did not start.")))
        self.address = str(answer["address"])

    def _start(self, order: str, timeout: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        with contextlib.suppress(OSError):
            stdin.write(order.encode() + b"\n")
            stdin.flush()
        answers = select.poll()
        answers.register(stdout, select.POLLIN)
        if not answers.poll(timeout * 1000):
            self._process.kill()
            self._process.wait()
            raise DeadlineExceededError(f"The hub's process did not start within {timeout:g} seconds.")
        with stdout:
            line = stdout.readline()  # it is written at once
        return dict(json.loads(line)) if line else {}

    def close(self) -> None:
        """Let go of the process. It ends as soon as all workers are gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # It is on its own from now on: without this, Python would complain that it still runs.
        self._process.returncode = self._process.poll() or 0


def serve() -> None:
    """Serve the hub that is described on the standard input until its job is over."""
    from phalanx.job.registry import RunningJob, announced

    order = json.loads(sys.stdin.readline())
    expected = [Task(kind, index, address) for kind, index, address in order["expected"]]
    try:
        hub = Hub(
            expected, order["token"], order["host"], order["port"], advertised=order["advertised"]
        ).start()
    except PhalanxError as error:
        _answer({"error": str(error)})
        return
    job = RunningJob(os.getpid(), order["name"], hub.address, order["token"])
    with announced(job):
        _answer({"address": hub.address})
        parent_ended = _end_of(sys.stdin.buffer.fileno())
        while not hub.wait_over(_POLL):
            if parent_ended.is_set() and not hub.is_used:
                break
    hub.close(timeout=0.0)


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
    sys.stdout.close()
    os.close(1)


def _end_of(descriptor: int) -> threading.Event:
    """An event that is set when the process that started this one is gone."""
    ended = threading.Event()

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 4096):
                pass
        ended.set()

    threading.Thread(target=read, daemon=True).start()
    return ended
