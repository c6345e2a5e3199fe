"""Whole elastic jobs: who is started, who is let in, who is missed, and how they end."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.job.elastic.protocol_worker import wait_for

from phalanx.cli import main
from phalanx.cli.arguments import wanted_workers, worker_range
from phalanx.errors import InvalidValueError
from phalanx.job.elastic import door
from phalanx.job.elastic.orders import WorkerLimits
from phalanx.job.hub import silent_members
from phalanx.job.launch import idleness
from phalanx.job.registry import find_job

WORKER = str(Path(__file__).with_name("protocol_worker.py"))


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def play(tmp_path: Path, plan: str, *options: str) -> int:
    folder = tmp_path / "marks"
    folder.mkdir()
    return main(["run", *options, "--", WORKER, str(folder), plan])


def test_a_lost_worker_is_replaced_by_one_that_joins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers 0 and 1 begin; 1 is killed; 0 goes on alone, and then together with 2."""
    plan = "1.1=137,0.1=lose,0.3=finish,2.3=finish"
    assert play(tmp_path, plan, "--workers", "1:2", "--restarts", "1") == 0
    out, err = capfd.readouterr()
    assert "0 in 1: worker 0, worker 1; the job begins" in out
    assert "0 in 2: worker 0; worker 1 was killed by signal 9 (SIGKILL)" in out
    assert "2 in 3: worker 0, worker 1; worker 1 has come" in out
    assert "worker 1 is started, and joins at the next common step." in err
    assert "Generation 2 of the workers (worker 1 was killed by signal 9 (SIGKILL))" in err


def test_too_few_workers_are_named_after_a_while(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--workers", "2:2", "--restarts", "0", "--wait", "3")
    assert play(tmp_path, "1.1=137,0.1=lose", *options) == 137
    err = capfd.readouterr().err
    assert "needs at least 2 workers and has 1 (worker 0): worker 1 was killed by signal 9" in err
    assert "No other came within 3 seconds." in err


def test_a_program_that_fails_ends_the_job(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play(tmp_path, "1.1=3,0.1=lose", "--workers", "1:2", "--grace", "0.1") == 3
    assert "worker 1 ended with exit code 3." in capfd.readouterr().err


def test_a_worker_with_a_notice_leaves_and_is_not_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert play(tmp_path, "1.1=notice,0.2=finish", "--workers", "1:2") == 0
    out, err = capfd.readouterr()
    assert "0 in 2: worker 0; worker 1 wants to leave" in out
    assert "is started" not in err


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_notice_that_comes_before_the_program_can_take_it_is_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], signum: int
) -> None:
    """While it imports, say: the signal ends the process, which is not replaced."""
    assert play(tmp_path, f"1.0={128 + signum},0.1=finish", "--workers", "1:2") == 0
    out, err = capfd.readouterr()
    assert "0 in 1: worker 0; " in out
    assert f"worker 1 was killed by signal {int(signum)}" in err
    assert "is started" not in err


def test_signals_that_end_workers_on_other_hosts_are_known(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There SIGUSR1 is a notice, too, and a crash of native code a loss. `sh` stands for ssh."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nexec sh -c "$3"\n')
    ssh.chmod(0o700)
    hosts = ("--hosts", "a,b,c", "--ssh", str(ssh), "--hub-address", "127.0.0.1")
    plan = f"1.0={128 + signal.SIGUSR1},2.1={128 + signal.SIGSEGV},0.1=lose,0.2=finish"
    options = (*hosts, "--python", sys.executable, "--workers", "1:3", "--restarts", "0")
    assert play(tmp_path, plan, *options) == 0
    out, err = capfd.readouterr()
    assert "worker 1 was killed by signal 10 (SIGUSR1). The job goes on without it." in err
    assert "0 in 2: worker 0; worker 2 was killed by signal 11 (SIGSEGV)" in out


def test_a_worker_that_leaves_is_replaced_if_too_few_were_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = "1.1=notice,0.2=finish,2.2=finish"
    assert play(tmp_path, plan, "-n", "2", "--workers", "2:3") == 0
    out, err = capfd.readouterr()
    assert "worker 2 is started" in err
    assert re.search("0 in 2: .*worker 0, .*worker 2; worker 1 wants to leave", out)


def test_a_worker_whose_connections_are_cut_comes_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Worker 1 loses its connection to the launcher, and then wants to leave: both are known."""
    assert play(tmp_path, "1.1=cut,0.2=finish", "--workers", "1:2") == 0
    out = capfd.readouterr().out
    assert "0 in 2: worker 0; worker 1 had lost its connections; worker 1 wants to leave" in out


def test_when_all_have_left_the_job_ends_as_they_did(tmp_path: Path) -> None:
    assert play(tmp_path, "0.1=notice", "--workers", "1:1", "--restarts", "0") == 143


def test_a_state_that_went_with_a_worker_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = "spread=1,1.1=137,0.1=lose"
    assert play(tmp_path, plan, "--workers", "1:2", "--restarts", "0") == 137
    assert "The state of the training is lost" in capfd.readouterr().err


def test_a_notice_to_the_launcher_reaches_all_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As schedulers of machines send it: SIGUSR1 to `phalanx run`, while both train."""
    with beside(tmp_path, ["0.1", "1.1"], lambda: os.kill(os.getpid(), signal.SIGUSR1)):
        assert play(tmp_path, "", "--workers", "1:2") == 143
    assert "0 in 2" not in capfd.readouterr().out


def test_a_job_that_is_asked_to_end_does_not_wait_for_replacements(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGTERM to `phalanx run`: the last ones to leave would hand their state over to others."""
    options = ("-n", "2", "--workers", "2:4", "--restarts", "3")
    with beside(tmp_path, ["0.1", "1.1"], lambda: os.kill(os.getpid(), signal.SIGTERM)):
        assert play(tmp_path, "", *options) == 143
    out, err = capfd.readouterr()
    assert "0 may go: left" in out
    assert "1 may go: left" in out
    assert "is started" not in err


def test_a_running_job_gets_more_workers_and_fewer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def resize() -> None:
        assert main(["resize", "2"]) == 0
        wait_for(tmp_path / "marks" / "1.2")
        assert main(["resize", "3"]) == 2
        assert main(["resize", "1", str(os.getpid())]) == 0
        assert main(["resize", "1", str(os.getpid()), "--job", "train.py"]) == 2

    with beside(tmp_path, ["0.1"], resize):
        assert play(tmp_path, "0.3=finish", "-n", "1", "--workers", "1:2") == 0
    out, err = capfd.readouterr()
    assert "2 wanted, of 1 to 2" in out
    assert f"Name the job once. Received: {os.getpid()} and --job train.py" in err
    assert "0 in 2: worker 0, worker 1; worker 1 has come" in out
    assert "This job has 1 to 2 workers. Received: 3" in err
    assert "0 in 3: worker 0; worker 1 is no longer wanted" in out


def test_a_worker_that_is_alone_is_explained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It has no hub, and that of the generation before has gone."""

    def explain() -> None:
        end = time.monotonic() + 10.0
        while (job := find_job()).address != job.door:
            assert time.monotonic() < end, "the hub of two workers is still what is asked"
            threading.Event().wait(0.01)
        assert main(["explain", "--job", str(os.getpid())]) == 0
        os.kill(os.getpid(), signal.SIGUSR1)

    with beside(tmp_path, ["0.2"], explain):
        assert play(tmp_path, "1.1=137,0.1=lose", "--workers", "1:2", "--restarts", "0") == 143
    out, err = capfd.readouterr()
    assert "There is no hub: one worker is alone, or they have not met yet." in out
    assert "\nworker 0 trains\n2 wanted, of 1 to 2\n" in out
    assert "worker 1 was killed by signal 9 (SIGKILL). The job goes on without it." in err
    assert "worker 0 ended with exit code 143.\n" in err  # and not that the job goes on


def test_a_frozen_worker_is_killed_and_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 stops (SIGSTOP), and does not say where it stands when the others do."""
    hasten(monkeypatch)
    plan = "1.1=freeze,0.1=lose,0.3=finish,2.3=finish"
    assert play(tmp_path, plan, "--workers", "1:2", "--restarts", "1") == 0
    out, err = capfd.readouterr()
    assert "worker 1 is ended. The others wait for it to stop, as workers come or go." in err
    assert "0 in 2: worker 0; worker 1 was ended, because it did not stop with the others" in out
    assert "2 in 3: worker 0, worker 1; worker 1 has come" in out


def test_a_worker_that_is_busy_on_its_own_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 is lost while worker 2 evaluates, say: its thread still speaks with the door."""
    hasten(monkeypatch)
    plan = "0.1=lose,1.1=137,2.1=busy,0.2=finish,2.2=finish"
    assert play(tmp_path, plan, "--workers", "2:3", "--restarts", "0", "--wait", "5") == 0
    out, err = capfd.readouterr()
    assert "is ended" not in err
    assert "0 in 2: worker 0, worker 2; worker 1 was killed by signal 9 (SIGKILL)" in out


def test_a_worker_that_freezes_while_the_others_come_to_their_end_is_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one does the end of the training again: it may have had to export the model."""
    monkeypatch.setattr(silent_members, "_LEAST", 0.5)
    monkeypatch.setattr(idleness, "_SECONDS", 0.3)
    options = ("--workers", "1:2", "--restarts", "0")
    assert play(tmp_path, "0.1=end,1.1=halt,0.2=finish", *options) == 0
    out, err = capfd.readouterr()
    assert "worker 1 is ended. Nothing has been heard of worker 1 (pid" in err
    assert "0 in 2: worker 0; worker 1 was ended, because nothing was heard of it at the end" in out


def test_a_worker_that_freezes_is_ended_although_another_one_is_lost_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub of worker 1 has a failure then, so it is the door that misses it."""
    hasten(monkeypatch)
    options = ("--workers", "1:3", "--restarts", "0", "--timeout", "30")
    assert play(tmp_path, "0.1=end,1.1=halt,2.1=miss,0.2=finish", *options) == 0
    out, err = capfd.readouterr()
    assert "worker 1 is ended. The others wait for it to stop, as workers come or go." in err
    assert "0 in 2: worker 0; worker 2 was killed by signal 9 (SIGKILL); worker 1 was ended" in out


def test_a_job_of_which_a_worker_is_lost_after_the_training_has_not_succeeded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What it had left to do is done by none, so the job must not end as if it were."""
    assert play(tmp_path, "0.1=fall,1.1=finish", "--workers", "1:2") == 137
    assert (
        "The training has ended, but not all that follows it has been done: "
        "worker 0 was killed by signal 9 (SIGKILL)."
    ) in capfd.readouterr().err


def test_a_worker_that_computes_and_cannot_answer_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 is lost while worker 2 imports its modules anew, say."""
    hasten(monkeypatch)
    monkeypatch.setattr(idleness, "_SECONDS", 0.2)
    plan = "0.1=lose,1.1=137,2.1=compute,0.2=finish,2.2=finish"
    assert play(tmp_path, plan, "--workers", "2:3", "--restarts", "0", "--wait", "5") == 0
    out, err = capfd.readouterr()
    assert "is ended" not in err
    assert "0 in 2: worker 0, worker 2; worker 1 was killed by signal 9 (SIGKILL)" in out


def test_a_worker_that_freezes_when_it_is_alone_does_not_keep_out_those_at_the_door(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hasten(monkeypatch)
    with beside(tmp_path, ["lost"], lambda: main(["resize", "2", "--job", str(os.getpid())])):
        plan = "checkpoint=1,0.1=freeze,1.2=finish"
        assert play(tmp_path, plan, "-n", "1", "--workers", "1:2", "--restarts", "0") == 0
    out, err = capfd.readouterr()
    assert "worker 0 is ended. It has been asked to stop, as workers come or go, and nothing" in err
    assert "1 in 2: worker 1; worker 1 has come; worker 0 was ended, because nothing was heard" in out


@pytest.mark.parametrize("then", ["freeze", "compute"])
def test_a_worker_that_has_left_keeps_a_job_that_is_over_only_while_it_does_something(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    hasten(monkeypatch)
    monkeypatch.setattr(idleness, "_SECONDS", 0.2)
    monkeypatch.setenv("PHALANX_DEADLINE", "1.2")
    options = ("--workers", "1:2", "--restarts", "0", "--timeout", "30")
    assert play(tmp_path, f"1.1=notice,1.gone={then},0.2=finish", *options) == 0
    out, err = capfd.readouterr()
    assert "1 may go: left" in out
    ended = "worker 1 is ended. None trains any more, and nothing has been heard of it for 1.2 seconds."
    assert (ended in err) == (then == "freeze")
    assert ("worker 1 is ended" in err) == (then == "freeze")


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give workers only a moment to say where they stand."""
    before = WorkerLimits.__init__
    monkeypatch.setattr(WorkerLimits, "__init__", functools.partialmethod(_hasty, before))
    monkeypatch.setattr(door, "_ASK_EVERY", 0.0)
    monkeypatch.setattr(door, "_FROZEN", 0.5)  # what counts at most if this process has to wait


def _hasty(self: Any, before: Any, *args: Any, **how: Any) -> None:
    before(self, *args, **how, stopping=1.0)


@contextlib.contextmanager
def beside(tmp_path: Path, marks: Sequence[str], act: Callable[[], Any]) -> Iterator[None]:
    """Do something in another thread when workers have made their marks."""

    def wait_and_act() -> None:
        for mark in marks:
            wait_for(tmp_path / "marks" / mark)
        act()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(wait_and_act)
        yield
        done.result()


def test_programs_that_do_not_expect_it_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import phalanx as px\npx.MultiWorkerMirroredStrategy()\n")
    assert main(["run", "-n", "1", "--workers", "1:2", str(script)]) == 1
    assert "px.train.elastic(function, batch_size=...)" in capfd.readouterr().err


def test_numbers_of_workers() -> None:
    assert wanted_workers([worker_range("2:8")]).first == 8
    assert wanted_workers([worker_range("3"), worker_range("2:8")]).first == 3
    assert not wanted_workers([worker_range("3")]).is_range
    with pytest.raises(InvalidValueError, match="-n 9"):
        wanted_workers([(9, None), (2, 8)])
    with pytest.raises(InvalidValueError, match="one range"):
        wanted_workers([(1, 2), (2, 8)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workers", "2", "--wait", "3"], "--workers MIN:MAX"),
        (["--workers", "1:2", "--ps", "1"], "give one number"),
        (["--workers", "1:2", "--engine", "ray"], "come and go"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options, WORKER]) == 2
    assert said in capfd.readouterr().err
