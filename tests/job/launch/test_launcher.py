"""Whole jobs: the hub, restarts, who is to blame, and hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from tests.processes import wait_gone

from phalanx.job.hub import silent_members
from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.hub.server import Hub
from phalanx.job.launch import idleness
from phalanx.job.launch.exit_policy import EndReason, Patience
from phalanx.job.launch.launcher import Hosts, Job, JobOutcome, judge, run_job
from phalanx.job.launch.process_group import GroupOutcome
from phalanx.job.launch.task_environment import job_tasks
from phalanx.job.observer import Observer
from phalanx.job.registry import running_jobs


class View:
    """Collects what a job shows."""

    overwrite = False

    def __init__(self) -> None:
        self.lines: list[tuple[int, bool, str]] = []
        self.hubs: list[str] = []
        self.changes: list[str] = []
        self.failures: list[tuple[JobOutcome, bool]] = []

    def begin(self, hub: Hub, attempt: int) -> None:
        self.hubs.append(hub.address)

    def line(self, index: int, error: bool, line: bytes) -> None:
        self.lines.append((index, error, line.decode()))

    def flush(self) -> None:
        pass

    def restarts(self, task: Task, code: int, count: int) -> None:
        self.changes.append(f"{task} again: {code}, {count}")

    def goes_on(self, task: Task, code: int) -> None:
        self.changes.append(f"without {task}: {code}")

    def kills(self, task: Task, why: str) -> None:
        self.changes.append(f"{task} is ended: {why}")

    def failed(self, outcome: JobOutcome, again: bool) -> None:
        self.failures.append((outcome, again))

    def printed(self) -> list[str]:
        return [line for _, error, line in self.lines if not error]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def job(program: str, workers: int = 2, **options: object) -> Job:
    argv = [sys.executable, "-S", "-c", textwrap.dedent(program)]
    patience = Patience(peers=0.2, interrupt=0.5, terminate=5, kill=5)
    return Job(argv, job_tasks(workers), "test.py", patience=patience, **options)  # type: ignore[arg-type]


def test_each_process_knows_who_it_is_and_where_the_hub_is() -> None:
    view = View()
    outcome = run_job(
        job(
            """
            import json, os
            names = ["TF_CONFIG", "PHALANX_HUB", "PHALANX_TOKEN", "PHALANX_RESTART"]
            print(json.dumps([os.environ[n] for n in names + ["JAX_NUM_CPU_DEVICES"]]))
            """,
            devices=2,
        ),
        view,
    )
    assert outcome.exit_code == 0
    assert view.failures == []
    rows = [json.loads(line) for line in view.printed()]
    tasks = sorted(json.loads(row[0])["task"]["index"] for row in rows)
    assert tasks == [0, 1]
    assert {row[1] for row in rows} == set(view.hubs)
    assert len({row[2] for row in rows}) == 1
    assert {(row[3], row[4]) for row in rows} == {("0", "2")}


TASK = """
import json, os, signal, sys, threading
task = json.loads(os.environ["TF_CONFIG"])["task"]
me = f"{task['type']} {task['index']}"
count = int(os.environ["PHALANX_RESTART"])
folder = sys.argv[1]

def file(name):
    return os.path.join(folder, name)

def wait_for(name):
    for _ in range(6000):
        if os.path.exists(file(name)):
            return
        threading.Event().wait(0.01)
    sys.exit(f"{me}: {name} is missing")

def note(name):
    open(file(name), "w").close()

def serve():
    threading.Event().wait(100)
    sys.exit("nobody ends this")
"""


def cluster_job(program: str, folder: Path, *, evaluator: bool = False, **options: object) -> Job:
    argv = [sys.executable, "-S", "-c", TASK + textwrap.dedent(program), str(folder)]
    patience = Patience(peers=0.2, interrupt=0.5, terminate=5, kill=5, finish=5)
    tasks = job_tasks(2, 1, chief=True, evaluator=evaluator)
    return Job(argv, tasks, "test.py", patience=patience, **options)  # type: ignore[arg-type]


def test_a_worker_and_a_server_are_started_again_on_their_own(tmp_path: Path) -> None:
    view = View()
    outcome = run_job(
        cluster_job(
            """
            print(me, count, flush=True)
            if me == "chief 0":
                for name in ("worker 1", "ps 0"):
                    wait_for(name)
            elif me in ("worker 1", "ps 0"):
                if count < 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                note(me)
                serve()
            else:
                serve()
            """,
            tmp_path,
            restarts=2,
        ),
        view,
    )
    assert outcome.exit_code == 0
    assert sorted(view.changes) == [
        "ps 0 again: -9, 1",
        "ps 0 again: -9, 2",
        "worker 1 again: -9, 1",
        "worker 1 again: -9, 2",
    ]
    assert sorted(view.printed()) == [
        "chief 0 0",
        *(f"ps 0 {i}" for i in range(3)),
        "worker 0 0",
        *(f"worker 1 {i}" for i in range(3)),
    ]
    assert len(view.hubs) == 1


def test_a_coordinator_is_started_again_and_the_others_stay(tmp_path: Path) -> None:
    view = View()
    program = """
        print(me, count, flush=True)
        if me != "chief 0":
            serve()
        sys.exit(3 if count == 0 else 0)
        """
    assert run_job(cluster_job(program, tmp_path, restarts=1), view).exit_code == 0
    assert view.changes == ["chief 0 again: 3, 1"]
    assert {"chief 0 0", "chief 0 1"} <= set(view.printed())
    assert not {"worker 0 1", "worker 1 1", "ps 0 1"} & set(view.printed())


def test_the_job_goes_on_without_a_worker_but_not_without_all(tmp_path: Path) -> None:
    program = """
        if me == "worker 0":
            sys.exit(5)
        if me != "chief 0":
            serve()
        wait_for("noticed")
        """

    class Noticing(View):
        def goes_on(self, task: Task, code: int) -> None:
            super().goes_on(task, code)
            (tmp_path / "noticed").touch()

    view: View = Noticing()
    assert run_job(cluster_job(program, tmp_path), view).exit_code == 0
    assert view.changes == ["without worker 0: 5"]
    view = View()
    program = """
        if task["type"] == "worker":
            sys.exit(5)
        serve()
        """
    outcome = run_job(cluster_job(program, tmp_path), view)
    assert outcome.exit_code == 5
    assert outcome.culprit is not None
    assert outcome.culprit.type == "worker"
    assert len(view.changes) == 1


def test_a_server_that_fails_for_good_ends_the_job(tmp_path: Path) -> None:
    view = View()
    program = "sys.exit(7) if task['type'] == 'ps' else serve()"
    outcome = run_job(cluster_job(program, tmp_path, restarts=1), view)
    assert (outcome.exit_code, str(outcome.culprit)) == (7, "ps 0")
    assert view.changes == ["ps 0 again: 7, 1"]


def test_an_evaluator_comes_to_its_end_after_the_others(tmp_path: Path) -> None:
    view = View()
    program = """
        if me == "evaluator 0":
            assert "evaluator" not in json.loads(os.environ["TF_CONFIG"])["cluster"]
            ended = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
            note("ready")
            ended.wait(60)
            print("the last evaluation", flush=True)
        elif me == "chief 0":
            wait_for("ready")
        else:
            serve()
        """
    assert run_job(cluster_job(program, tmp_path, evaluator=True), view).exit_code == 0
    assert view.printed() == ["the last evaluation"]


def test_a_job_is_announced_while_it_runs(runtime: Path) -> None:
    found = []

    class Watching(View):
        def line(self, index: int, error: bool, line: bytes) -> None:
            (path,) = runtime.glob("phalanx/*.json")
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            (running,) = running_jobs()
            with Observer(running.address, running.token) as observer:
                found.append((running, observer.table().rows))

    assert run_job(job("print('x')", workers=1), Watching()).exit_code == 0
    ((running, rows),) = found
    assert running.name == "test.py"
    assert running.pid == os.getpid()
    assert [row["worker"] for row in rows] == ["worker 0"]
    assert list(runtime.glob("phalanx/*.json")) == []


def test_restarts_start_everything_anew() -> None:
    view = View()
    outcome = run_job(
        job(
            """
            import json, os, sys
            config = json.loads(os.environ["TF_CONFIG"])
            restart, token = os.environ["PHALANX_RESTART"], os.environ["PHALANX_TOKEN"]
            print(json.dumps([restart, config["cluster"], token]), flush=True)
            sys.exit(5 if restart != "2" and config["task"]["index"] else 0)
            """,
            restarts=3,
        ),
        view,
    )
    assert outcome.exit_code == 0
    assert [(o.exit_code, again) for o, again in view.failures] == [(5, True), (5, True)]
    rows = [json.loads(line) for line in view.printed()]
    by_attempt = {k: [r for r in rows if r[0] == str(k)] for k in range(3)}
    assert len(by_attempt[2]) == 2
    assert len({json.dumps(r[1]) for r in rows}) == 3
    assert len({r[2] for r in rows}) == 3
    assert len(set(view.hubs)) == 3


FROZEN_AT_ITS_END = """
import json, os, signal, sys
from phalanx.job.hub.client import Member
task = json.loads(os.environ["TF_CONFIG"])["task"]
member = Member(os.environ["PHALANX_HUB"], os.environ["PHALANX_TOKEN"], "worker", task["index"])
member.wait_joined(60)
freezes = task["index"] == 1 and os.environ["PHALANX_RESTART"] == "0"
if freezes and sys.argv[1] == "before":
    os.kill(os.getpid(), signal.SIGSTOP)
if task["index"] == 1 and sys.argv[1] == "computes":
    sum(range(2 * 10**8))  # without a moment for other threads
member.come_to_end(0.5)
if sys.argv[1] == "after":
    member.meet("the others, when all were heard", 60)
    if freezes:
        os.kill(os.getpid(), signal.SIGSTOP)
member.leave()
"""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members are given up soon when nothing is heard of them."""
    monkeypatch.setattr(silent_members, "_LEAST", 0.5)
    monkeypatch.setattr(idleness, "_SECONDS", 0.3)


def ending(how: str) -> Job:
    return replace(job(FROZEN_AT_ITS_END), argv=[sys.executable, "-c", FROZEN_AT_ITS_END, how])


@pytest.mark.usefixtures("soon")
def test_a_worker_that_computes_is_not_ended_although_nothing_is_heard_of_it() -> None:
    view = View()
    assert run_job(ending("computes"), view).exit_code == 0
    assert view.changes == []


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_in_which_only_a_frozen_worker_is_left_comes_to_its_end(when: str) -> None:
    program = ending(when)
    view = View()
    outcome = run_job(program, view)
    assert (outcome.exit_code, str(outcome.culprit)) == (137, "worker 1")
    assert outcome.processes.by_itself == [True, False]
    assert outcome.failure is not None
    assert "worker 1" in outcome.failure.text
    (said,) = view.changes
    assert re.match(r"worker 1 is ended: Nothing .* worker 1 \(pid \d+ .*\) for 0.5 seconds", said)
    assert run_job(replace(program, restarts=1), view).exit_code == 0


def test_restarts_end() -> None:
    view = View()
    assert run_job(job("raise SystemExit(6)", restarts=2), view).exit_code == 6
    assert [again for _, again in view.failures] == [True, True, False]


def test_a_timeout_is_not_restarted() -> None:
    view = View()
    outcome = run_job(job("import signal; signal.pause()", restarts=5, timeout=0.3), view)
    assert outcome.exit_code == 124
    assert len(view.failures) == 1


def test_the_failed_process_and_its_last_words() -> None:
    program = """
        import json, os, threading
        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            raise ValueError("the reason")
        threading.Event().wait(100)
        """
    outcome = run_job(job(program, workers=3), View())
    assert outcome.culprit == Task("worker", 1)
    assert outcome.report[-1] == "ValueError: the reason"


def test_the_hub_knows_better_who_failed_first() -> None:
    tasks = job_tasks(3)
    tails = [["victim"], ["Traceback (most recent call last):", "E: x"], []]
    by_itself = [True, True, False]
    processes = GroupOutcome(1, [1, 9, -15], EndReason.FAILURE, 0, by_itself, tails)
    plain = judge(tasks, processes, None)
    assert (plain.culprit, plain.exit_code) == (tasks[0], 1)
    blamed = judge(tasks, processes, Failure("raised", "…", "worker 1"))
    assert (blamed.culprit, blamed.exit_code, blamed.report) == (tasks[1], 9, tails[1])
    ended_by_us = judge(tasks, processes, Failure("deadline", "…", "worker 2"))
    assert (ended_by_us.culprit, ended_by_us.exit_code) == (tasks[2], 1)
    unknown = judge(tasks, processes, Failure("mismatch", "…", ""))
    assert unknown.culprit == tasks[0]


# -- hosts: a program in place of ssh runs the command on this machine -----------------------------


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """Takes ``host -- command`` as ssh does, writes down the host, and runs the command in a shell."""
    script = tmp_path / "ssh"
    script.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(tmp_path))}/log\nexec sh -c "$3"\n')
    script.chmod(0o700)
    return str(script)


def remote_job(program: str, ssh: str, hosts: str, **options: object) -> Job:
    workers = len(hosts.split(","))
    return job(
        program,
        workers=workers,
        hosts=Hosts(hosts, ssh, "127.0.0.1"),
        python=sys.executable,
        environ={"GIVEN": "yes"},
        **options,
    )


def test_jobs_on_hosts(ssh: str, tmp_path: Path) -> None:
    view = View()
    program = """
        import json, os, subprocess, sys, threading
        config = json.loads(os.environ["TF_CONFIG"])
        print(os.environ["GIVEN"], config["cluster"], os.getcwd())
        print("token", len(os.environ["PHALANX_TOKEN"]), file=sys.stderr)
        print("pids", os.getpid(), subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        if config["task"]["index"] == 1:
            open("both").read()
            os.kill(os.getpid(), 9)
        open("both", "w").close()
        threading.Event().wait(100)
        """
    os.mkfifo(tmp_path / "both")
    outcome = run_job(remote_job(program, ssh, "me@a,b:7", cwd=str(tmp_path)), view)
    assert outcome.exit_code == 128 + signal.SIGKILL
    assert outcome.processes.codes == [128 + signal.SIGTERM, -signal.SIGKILL]
    words = [line.split() for line in view.printed() if line.startswith("pids")]
    others = [line for line in view.printed() if not line.startswith("pids")]
    assert others == [f"yes {{'worker': ['a:12300', 'b:7']}} {tmp_path}"] * 2
    assert {line for _, error, line in view.lines if error} == {"token 32"}
    assert len(words) == 2
    assert wait_gone([int(word) for line in words for word in line[1:]]) == []
    log = (tmp_path / "log").read_text()
    assert sorted(line.split()[0] for line in log.splitlines()) == ["b", "me@a"]
    assert "TOKEN" not in log
