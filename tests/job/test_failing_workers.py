"""Jobs of real processes: joined, killed, crashed, hanging, and leaving in any order."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.processes import wait_gone

from phalanx.job.hub.descriptions import Task
from phalanx.job.hub.server import Hub
from phalanx.job.observer import Observer
from phalanx.job.registry import find_job
from phalanx.net.addresses import listen

SECONDS = 90.0
HUB_DEATHS = 20
PROGRAM = Path(__file__).with_name("failing_worker.py")


class Worker:
    """A process and what it says."""

    def __init__(self, kind, scenario, addresses, rank, environ):
        cluster = {"worker": addresses}
        config = {"cluster": cluster, "task": {"type": "worker", "index": rank}}
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), kind, scenario],
            env={**environ, "TF_CONFIG": json.dumps(config)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines = queue.Queue()
        self.errors = []
        self.other_output = []
        self._threads = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_output(self):
        for line in self.process.stdout:
            try:
                self._lines.put(json.loads(line))
            except ValueError:
                self.other_output.append(line)
        self._lines.put(None)

    def _read_errors(self):
        self.errors.extend(self.process.stderr)

    def hear(self, what):
        """The next thing that the worker says, which must be this."""
        said = self._lines.get(timeout=SECONDS)
        assert said is not None, "it ended instead:\n" + "".join(self.errors)
        assert said["what"] == what, said
        return said

    def go(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self):
        """Wait for the end; returns the exit code and the standard error output."""
        code = self.process.wait(SECONDS)
        for thread in self._threads:
            thread.join(SECONDS)
        return code, "".join(self.errors)

    def close(self):
        self.process.kill()
        self.end()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()


@pytest.fixture
def environ(monkeypatch, tmp_path):
    """The environment of the workers: that of a user, and not of these tests."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in (*(n for n in os.environ if n.startswith("PHALANX_")), "XLA_FLAGS", "PJRT_NPROC"):
        monkeypatch.delenv(name, raising=False)
    return dict(os.environ)


@contextlib.contextmanager
def workers(kind, scenario, count, environ):
    sockets = [listen("127.0.0.1", 0) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(count):
            started.append(Worker(kind, scenario, addresses, rank, environ))
            stack.callback(started[-1].close)
        yield started


@contextlib.contextmanager
def launched(kind, scenario, count, environ, **options):
    """Workers whose hub is here, as it is in a launcher."""
    tasks = [Task("worker", i) for i in range(count)]
    with Hub(tasks, "secret", coordination=kind == "jax", **options) as hub:
        known = {**environ, "PHALANX_HUB": hub.address, "PHALANX_TOKEN": "secret"}
        with workers(kind, scenario, count, known) as started:
            yield hub, started


# -- members alone --------------------------------------------------------------------------------


def test_a_killed_worker_is_named_on_all_others_at_once(environ):
    with launched("light", "wait", 3, environ) as (hub, started):
        for worker in started:
            worker.hear("ready")
        begin = time.monotonic()
        started[1].process.kill()
        for worker in (started[0], started[2]):
            raised = worker.hear("raised")
            assert raised["time"] - begin < 5.0
            assert raised["kind"] == "WorkerLostError"
            assert f"worker 1 (pid {started[1].process.pid} on " in raised["text"]
            assert "It was at data.py:7 in load." in raised["text"]
            assert worker.end() == (0, "")
        assert hub.failure.task == "worker 1"


def test_a_stopped_worker_is_shown_as_silent(environ):
    with (
        launched("light", "wait", 2, environ) as (hub, started),
        Observer(hub.address, "secret") as observer,
    ):
        for worker in started:
            worker.hear("ready")
        end = time.monotonic() + SECONDS
        while not all("in exchange" in stack for stack in observer.stacks(timeout=3.5).values()):
            assert time.monotonic() < end
        started[1].process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, started[1].process.pid, os.WSTOPPED)
        stacks = observer.stacks(timeout=3.5)
        assert "in exchange" in stacks["worker 0"]
        assert stacks["worker 1"] == "It did not answer in time."
        row = hub.table().rows[1]
        assert row["quiet"] > 3
        assert hub.failure is None, "it may come back"
        started[1].process.send_signal(signal.SIGCONT)
        assert "in exchange" in observer.stacks(timeout=20.0)["worker 1"]


def test_workers_learn_that_the_hub_is_gone(environ):
    with launched("light", "wait", 2, environ) as (hub, started):
        for worker in started:
            worker.hear("ready")
        hub.close(timeout=0.0)
        for worker in started:
            raised = worker.hear("raised")
            assert raised["kind"] == "HubLostError"
            assert "has closed" in raised["text"]
            assert worker.end()[0] == 0


# -- with JAX --------------------------------------------------------------------------------------


def test_workers_without_a_launcher_compute_and_leave_in_any_order(environ):
    with workers("jax", "leave", 3, environ) as started:
        for rank, worker in enumerate(started):
            ready = worker.hear("ready")
            assert (ready["total"], ready["rank"]) == (6.0, rank)
        hub = find_job().pid
        for worker in (started[0], started[2], started[1]):
            worker.go()
            worker.hear("end")
            code, text = worker.end()
            assert (code, text) == (0, "")
            assert worker.other_output == []
        assert wait_gone([hub]) == []


def test_the_others_survive_the_death_of_the_first_worker(environ):
    codes = {}

    def cause_of_death(task):
        return codes[task.id]()

    options = {"cause_of_death": cause_of_death}
    with launched("jax", "survive", 3, environ, **options) as (_, started):
        codes.update({i: lambda w=w: w.process.wait(5) for i, w in enumerate(started)})
        for worker in started:
            worker.hear("ready")
        for worker in started[1:]:
            worker.go()
        begin = time.monotonic()
        started[0].process.kill()
        for worker in started[1:]:
            raised = worker.hear("raised")
            assert raised["time"] - begin < 5.0
            assert raised["kind"] == "WorkerLostError"
            assert "was killed by signal 9 (SIGKILL)" in raised["text"]
            assert worker.hear("still computes")["value"] == 3.0
            worker.hear("end")
            assert worker.end() == (0, "")


def survive_the_death_of_the_hub(environ):
    """All workers raise, compute on and come to their end, with or without a thread inside gloo."""
    with workers("jax", "survive", 2, environ) as started:
        for worker in started:
            worker.hear("ready")
        os.kill(find_job().pid, signal.SIGKILL)
        for worker in started:
            worker.go()
        for worker in started:
            raised = worker.hear("raised")
            assert raised["kind"] == "HubLostError"
            assert worker.hear("still computes")["value"] == 3.0
            worker.hear("end")
            assert worker.end() == (0, "")


def test_workers_survive_the_death_of_the_hub(environ):
    """Where JAX alone would abort them."""
    survive_the_death_of_the_hub(environ)


@pytest.mark.soak
@pytest.mark.parametrize("time", range(HUB_DEATHS))
def test_workers_survive_many_deaths_of_hubs(environ, time):
    survive_the_death_of_the_hub(environ)


def test_an_exception_on_one_worker_ends_all_with_its_traceback(environ):
    with workers("jax", "crash", 2, environ) as started:
        for worker in started:
            worker.hear("ready")
        code, text = started[1].end()
        assert code == 1
        assert text.count("Traceback") == 1
        assert "KeyError: 'boom'" in text
        code, text = started[0].end()
        assert code == 1
        assert "This is because the job has failed: worker 1 (pid" in text
        assert "raised KeyError: 'boom'" in text
        assert 'raise KeyError("boom")' in text


def test_a_hang_ends_at_the_deadline_with_the_stack_of_the_late_one(environ):
    with launched("jax", "hang", 2, environ) as (hub, started):
        for worker in started:
            worker.hear("ready")
        code, first = started[0].end()
        assert code == 1
        assert "DeadlineExceededError: worker 0 waited for 2 seconds" in first
        assert "phalanx: worker 0 waits for worker 1 at train.py:5 in step." in first
        assert "Late: worker 1 in phase 'input' at " in first
        assert "failing_worker.py" in first.split("Late: worker 1")[1].split(" in hang")[0]
        assert "sys.stdin.readline()" in first
        started[1].go()
        code, second = started[1].end()
        assert code == 1
        assert "DeadlineExceededError: worker 0 waited for 2 seconds" in second
        assert hub.failure.task == "worker 1"


def test_native_code_that_does_not_come_back_is_ended(environ):
    with workers("jax", "stuck", 2, environ) as started:
        for worker in started:
            worker.hear("ready")
        assert started[1].end()[0] == 1
        code, text = started[0].end()
        assert code == 70
        assert "worker 0 hangs in native code although the job has failed" in text
        assert "raised KeyError: 'boom'" in text
