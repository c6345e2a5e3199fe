"""Clusters of real processes: results, exceptions, deaths, and no process left behind."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.processes import wait_gone

import phalanx as px
from phalanx.runtime.shipping import frame, split_frames

TEN = 10


class OwnError(Exception):
    def __init__(self, where: str, code: int) -> None:
        super().__init__(where, code)
        self.code = code


class BadError(Exception):
    """One that cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def index() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def pause() -> None:
    threading.Event().wait(120)


KINDS = {"new": (), "copies": ("json",)}
kind = "new"


@pytest.fixture(scope="module", autouse=True, params=KINDS)
def each_kind(request: pytest.FixtureRequest) -> None:
    """All tests run with new processes, and with copies of one."""
    global kind  # noqa: PLW0603 - what a module-wide parameter is
    kind = request.param


def cluster_of(**options: Any) -> px.testing.MultiProcess:
    return px.testing.MultiProcess(preload=KINDS[kind], **options)


@pytest.fixture(scope="module")
def shared(each_kind: None) -> Iterator[px.testing.MultiProcess]:
    with cluster_of(workers=2) as cluster:
        yield cluster


# -- results -------------------------------------------------------------------------------------


def test_every_worker_runs_the_function(shared: px.testing.MultiProcess) -> None:
    assert shared.run(index) == [0, 1]
    assert shared.run(lambda a, b: (a, b, index()), 1, b="x") == [(1, "x", 0), (1, "x", 1)]
    assert shared.run(functools.partial(max, 3), 7) == [7, 7]
    assert len(set(shared.run(os.getpid))) == 2


def test_closures_and_what_the_module_has_go_along(shared: px.testing.MultiProcess) -> None:
    offset = {"by": 5}

    def use() -> tuple[int, bool]:
        return TEN * index() + offset["by"], __name__ in sys.modules

    assert shared.run(use) == [(5, False), (15, False)]


def test_processes_are_reused(shared: px.testing.MultiProcess) -> None:
    assert shared.run(os.getpid) == shared.run(os.getpid) == shared.pids


def test_large_arguments_and_results(shared: px.testing.MultiProcess) -> None:
    data = os.urandom(1 << 20) * 30
    assert shared.run(lambda x: x[::-1], data) == [data[::-1]] * 2


def test_output_is_collected_by_worker(shared: px.testing.MultiProcess) -> None:
    def talk(word: str) -> None:
        print(word, index())
        sys.stdout.write("no end of line")
        print("oh", index(), file=sys.stderr)

    shared.run(talk, "earlier")
    outcomes = shared.start(talk, "now").results(timeout=30)
    assert [o.stdout for o in outcomes] == ["now 0\nno end of line", "now 1\nno end of line"]
    assert [o.stderr for o in outcomes] == ["oh 0\n", "oh 1\n"]
    assert "earlier 1\n" in shared.stdout(1)
    assert "now 1\n" in shared.stdout(1)
    assert "oh 0\n" in shared.stderr(0)


def test_much_output_does_not_block(shared: px.testing.MultiProcess) -> None:
    outcomes = shared.start(lambda: print("x" * 3_000_000)).results(timeout=30)
    assert [len(o.stdout) for o in outcomes] == [3_000_001] * 2


def test_the_cluster_is_described_as_a_real_one(shared: px.testing.MultiProcess) -> None:
    configs, hubs, tokens = zip(
        *shared.run(lambda: [os.environ[k] for k in ("TF_CONFIG", "PHALANX_HUB", "PHALANX_TOKEN")]),
        strict=True,
    )
    configs = [json.loads(config) for config in configs]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert [c["task"] for c in configs] == [{"type": "worker", "index": i} for i in (0, 1)]
    assert len(set(configs[0]["cluster"]["worker"])) == 2
    assert set(hubs) == {shared.hub.address}
    assert len(set(tokens)) == 1
    assert len(tokens[0]) >= 16


def test_each_process_has_its_devices() -> None:
    def devices() -> tuple[int, str]:
        import jax

        return len(jax.devices("cpu")), os.environ["WORD"]

    with cluster_of(workers=2, devices=3, env={"WORD": "yes"}) as cluster:
        assert cluster.run(devices) == [(3, "yes")] * 2


def test_chief_and_parameter_servers() -> None:
    def task() -> dict[str, Any]:
        return json.loads(os.environ["TF_CONFIG"])["task"]

    with cluster_of(workers=1, ps=1, chief=True) as cluster:
        assert cluster.names == ["chief 0", "worker 0", "ps 0"]
        assert [t["type"] for t in cluster.run(task)] == ["chief", "worker", "ps"]


def test_without_reuse_every_run_has_new_processes() -> None:
    with cluster_of(workers=1, reuse=False) as cluster:
        pids = cluster.run(os.getpid) + cluster.run(os.getpid)
    assert len(set(pids)) == 2
    assert wait_gone(pids) == []


# -- failures ------------------------------------------------------------------------------------


def test_an_exception_names_the_worker_and_has_its_traceback(shared: px.testing.MultiProcess) -> None:
    def fail_on_one() -> int:
        if index() == 1:
            raise OwnError("in worker one", 7)
        return 5

    before = shared.pids
    with pytest.raises(px.errors.WorkerFailedError, match="worker 1 raised OwnError") as caught:
        shared.run(fail_on_one)
    assert isinstance(caught.value.__cause__, OwnError)
    assert caught.value.__cause__.code == 7
    assert "in fail_on_one" in str(caught.value)
    assert "child.py" not in str(caught.value)
    outcomes = shared.start(fail_on_one).results(timeout=30)
    assert (outcomes[0].value, outcomes[0].error) == (5, None)
    assert isinstance(outcomes[1].error, px.errors.WorkerFailedError)
    assert shared.pids == before


def test_the_failures_of_others_are_noted(shared: px.testing.MultiProcess) -> None:
    def fail() -> None:
        raise KeyError(f"of {index()}")

    with pytest.raises(px.errors.WorkerFailedError) as caught:
        shared.run(fail)
    assert len(caught.value.__notes__) == 1
    assert {str(caught.value)[:8], caught.value.__notes__[0][:8]} == {"worker 0", "worker 1"}


def test_what_cannot_be_sent_back_is_an_error(shared: px.testing.MultiProcess) -> None:
    with pytest.raises(px.errors.WorkerFailedError, match=r"raised TypeError.*pickle"):
        shared.run(threading.Lock)

    def bad() -> None:
        raise BadError("first", "second")

    with pytest.raises(px.errors.WorkerFailedError, match="raised BadError: firstsecond"):
        shared.run(bad)


def test_what_cannot_be_sent_there_is_an_error(shared: px.testing.MultiProcess) -> None:
    with pytest.raises(px.errors.InvalidTypeError, match="sent to another process"):
        shared.run(print, threading.Lock())
    with pytest.raises(px.errors.InvalidTypeError, match="must be a function"):
        shared.run(3)  # type: ignore[arg-type]


def test_a_death_is_an_error_and_the_next_run_has_a_new_cluster() -> None:
    def die() -> None:
        print("almost", file=sys.stderr, flush=True)
        if index() == 0:
            os._exit(7)

    with cluster_of(workers=2) as cluster:
        before = cluster.pids
        with pytest.raises(px.errors.WorkerLostError, match=r"worker 0 .*exit code 7(.|\n)*almost"):
            cluster.run(die)
        assert cluster.run(index) == [0, 1]
        assert set(cluster.pids).isdisjoint(before)
        assert wait_gone(before) == []


def test_leaving_python_ends_the_process() -> None:
    with cluster_of(workers=1) as cluster:
        (outcome,) = cluster.start(sys.exit, 3).results(timeout=30)
    assert outcome.exit_code == 3


def test_those_that_are_late_are_shown_and_killed() -> None:
    def late() -> int:
        return index() if index() == 0 else pause()  # type: ignore[return-value]

    with cluster_of(workers=2) as cluster:
        before = cluster.pids
        with pytest.raises(px.errors.DeadlineExceededError, match=r"on worker 1\.") as caught:
            cluster.run(late, timeout=0.5)
        assert re.search(r"in pause\n.*in late\n", str(caught.value))
        assert wait_gone(before[1:]) == []
        assert cluster.run(index) == [0, 1]


# -- faults --------------------------------------------------------------------------------------


def test_kill_and_restart() -> None:
    def work(limit: float) -> str:
        print("at work", flush=True)
        if "PHALANX_GO" in os.environ or index() == 0:
            return f"done by {index()}"
        return str(threading.Event().wait(limit))

    with cluster_of(workers=2) as cluster:
        handle = cluster.start(work, 60)
        cluster.wait_for_output(1, "at work")
        assert not handle.done
        old = cluster.pids[1]
        cluster.kill(1)
        assert not cluster.alive(1)
        outcomes = handle.results(timeout=30)
        assert outcomes[0].value == "done by 0"
        assert outcomes[1].exit_code == -signal.SIGKILL
        with pytest.raises(px.errors.WorkerLostError, match="SIGKILL"):
            handle.result(timeout=30)
        cluster._environs[1]["PHALANX_GO"] = "1"
        cluster.restart(1)
        assert handle.result(timeout=30) == ["done by 0", "done by 1"]
        assert cluster.pids[1] != old
        assert cluster.stdout(1).count("at work") == 2


def test_stop_and_go_on(shared: px.testing.MultiProcess) -> None:
    shared.stop(1)
    handle = shared.start(index)
    with pytest.raises(px.errors.DeadlineExceededError, match="worker 1:\nIt does not answer"):
        handle.result(timeout=0.3)
    shared.cont(1)
    assert handle.result(timeout=30) == [0, 1]


def test_the_hub_learns_of_a_death() -> None:
    with cluster_of(workers=2) as cluster:
        cluster.kill(1)
        failure = cluster.hub.failure
        assert failure is not None
        assert "worker 1" in failure.text
        assert "SIGKILL" in failure.text


# -- wrong use -----------------------------------------------------------------------------------


def test_wrong_numbers() -> None:
    with pytest.raises(px.errors.InvalidValueError, match="at least one worker"):
        px.testing.MultiProcess(workers=0)
    with pytest.raises(px.errors.InvalidValueError, match="devices"):
        px.testing.MultiProcess(devices=0)
    with pytest.raises(px.errors.InvalidValueError, match="names of modules"):
        px.testing.MultiProcess(preload=[3])  # type: ignore[list-item]


def test_wrong_workers(shared: px.testing.MultiProcess) -> None:
    for method in (shared.kill, shared.stop, shared.alive, shared.stdout):
        with pytest.raises(px.errors.InvalidValueError, match=r"from 0 to 1\. Received: 2"):
            method(2)


def test_a_cluster_that_is_not_open() -> None:
    with pytest.raises(px.errors.FailedPreconditionError, match="not open"):
        px.testing.MultiProcess().run(index)


def test_one_function_at_a_time(shared: px.testing.MultiProcess) -> None:
    shared.stop(0)
    handle = shared.start(index)
    with pytest.raises(px.errors.FailedPreconditionError, match="still run another"):
        shared.start(index)
    shared.cont(0)
    assert handle.result(timeout=30) == [0, 1]


def test_text_that_never_comes(shared: px.testing.MultiProcess) -> None:
    with pytest.raises(px.errors.DeadlineExceededError, match="should print 'never'"):
        shared.wait_for_output(0, "never", timeout=0.05)


# -- nothing is left behind ----------------------------------------------------------------------


def test_processes_end_with_the_block_and_so_do_their_children() -> None:
    def spawn() -> int:
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        return child.pid

    with cluster_of(workers=2) as cluster:
        pids = cluster.pids + cluster.run(spawn)
    assert wait_gone(pids) == []


def test_busy_processes_are_killed_when_the_block_ends() -> None:
    with cluster_of(workers=1) as cluster:
        handle = cluster.start(pause)
        pids = cluster.pids
    assert wait_gone(pids) == []
    assert handle.results()[0].exit_code == -signal.SIGKILL


def test_processes_end_if_their_parent_is_killed() -> None:
    program = """
import signal, subprocess, sys
import phalanx as px
from phalanx.testing import copies

def work():
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    signal.pause()

with px.testing.MultiProcess(workers=1, preload=sys.argv[1:]) as cluster:
    cluster.start(work)
    cluster.wait_for_output(0, "\\n")
    templates = [template.pid for template in copies._templates.values()]
    print(*cluster.pids, *templates, cluster.stdout(0), flush=True)
    signal.pause()
"""
    command = [sys.executable, "-c", program, *KINDS[kind]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2 + len(KINDS[kind])
    assert wait_gone(pids) == []


# -- copies ---------------------------------------------------------------------------------------


def test_copies_have_imported_what_was_asked_for() -> None:
    names = ["this_module_is_not_there"]
    with (
        pytest.raises(px.errors.NotFoundError, match=r"No module named 'this_module(.|\n)*Received"),
        px.testing.MultiProcess(workers=1, preload=names) as cluster,
    ):
        cluster.run(index)

    def is_there() -> bool:
        return "wave" in sys.modules

    with px.testing.MultiProcess(workers=2, preload="wave") as cluster:
        assert cluster.run(is_there) == [True, True]
        first = cluster.run(os.getppid)
    with px.testing.MultiProcess(workers=2, preload=["wave"]) as cluster:
        assert cluster.run(os.getppid) == first
    with px.testing.MultiProcess(workers=2, preload=["wave"], env={"JAX_LOG": "1"}) as cluster:
        assert set(cluster.run(os.getppid)).isdisjoint(first)


def test_copies_of_a_template_that_was_killed() -> None:
    with cluster_of(workers=2) as cluster:
        parents = set(cluster.run(os.getppid)) - {os.getpid()}
        handle = cluster.start(pause)
        pids = cluster.pids
        for pid in parents:
            os.kill(pid, signal.SIGKILL)
        if parents:
            assert [o.exit_code for o in handle.results(30.0)] == [-signal.SIGKILL] * 2
    assert wait_gone([*pids, *parents]) == []
    with cluster_of(workers=2) as cluster:
        assert cluster.run(index) == [0, 1]


# -- messages ------------------------------------------------------------------------------------


def test_messages_come_in_pieces() -> None:
    messages = [b"x" * n for n in (0, 1, 7, 8, 9, 1000)] + [{"a": [1, None]}]
    data, taken = bytearray(), []
    for byte in b"".join(frame(m) for m in messages):
        data.append(byte)
        taken += split_frames(data)
    assert taken == messages
    assert not data
