"""Real processes that run and end together."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import wait_gone

import phalanx as px
from phalanx.job.launch import guard
from phalanx.job.launch.exit_policy import EndReason, ExitPolicy, Patience
from phalanx.job.launch.process_group import Command, GroupOutcome, Interrupts, run_process_group
from phalanx.job.launch.worker_process import Guard, Process

# Patient with those that end by themselves, which may take long on a busy machine.
PATIENT = Patience(peers=0.2, interrupt=60, terminate=60, kill=5)
QUICK = Patience(peers=0.2, interrupt=0.5, terminate=0.5, kill=5)
CHILD = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True)\n"
WAIT = "import threading; threading.Event().wait(100)\n"


class Lines:
    """Collects lines, and calls a function for each."""

    overwrite = False

    def __init__(self, hear: Callable[[int, bytes], None] | None = None) -> None:
        self.out: dict[int, list[bytes]] = defaultdict(list)
        self.err: dict[int, list[bytes]] = defaultdict(list)
        self._hear = hear

    def line(self, index: int, error: bool, line: bytes) -> None:
        (self.err if error else self.out)[index].append(line)
        if self._hear is not None:
            self._hear(index, line)

    def flush(self) -> None:
        pass


def commands(*programs: str) -> list[Command]:
    return [
        Command(f"p{i}", [sys.executable, "-S", "-c", program], dict(os.environ))
        for i, program in enumerate(programs)
    ]


def run(
    *programs: str, lines: Lines | None = None, patience: Patience = PATIENT, **options: object
) -> tuple[GroupOutcome, Lines]:
    lines = lines or Lines()
    outcome = run_process_group(commands(*programs), lines, patience=patience, **options)  # type: ignore[arg-type]
    return outcome, lines


def test_all_succeed_and_the_streams_stay_apart() -> None:
    program = "import sys; print('out {0}'); print('err {0}', file=sys.stderr)"
    outcome, lines = run(program.format(0), program.format(1))
    assert (outcome.exit_code, outcome.codes) == (0, [0, 0])
    assert [lines.out[i] for i in (0, 1)] == [[b"out 0"], [b"out 1"]]
    assert [lines.err[i] for i in (0, 1)] == [[b"err 0"], [b"err 1"]]
    assert outcome.tails == [["err 0"], ["err 1"]]


def test_the_first_failure_ends_the_others() -> None:
    outcome, _ = run(WAIT, "raise SystemExit(7)", WAIT)
    assert outcome.exit_code == 7
    assert outcome.first_failure == 1
    assert outcome.codes == [-signal.SIGTERM, 7, -signal.SIGTERM]
    assert outcome.by_itself == [False, True, False]


def test_signals_are_codes() -> None:
    outcome, _ = run("import os; os.kill(os.getpid(), 9)")
    assert outcome.exit_code == 137


def test_those_that_want_to_stay_are_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w').close()\n"
    )
    ending = f"open({str(ready)!r}).read(); raise SystemExit(3)"
    outcome, _ = run(stubborn + WAIT, ending, patience=QUICK)
    assert outcome.exit_code == 3
    assert outcome.codes == [-signal.SIGKILL, 3]


def test_children_do_not_stay() -> None:
    outcome, lines = run(CHILD, CHILD + WAIT, CHILD + "raise SystemExit(1)")
    assert outcome.exit_code == 1
    pids = [int(lines.out[i][0]) for i in range(3) if lines.out[i]]
    assert len(pids) >= 2
    assert wait_gone(pids) == []


def test_children_that_left_the_session_do_not_stay_either() -> None:
    escape = CHILD.replace("['sleep', '1000']", "['sleep', '1000'], start_new_session=True")
    outcome, lines = run(escape)
    assert outcome.exit_code == 0
    assert wait_gone([int(lines.out[0][0])]) == []


ALONE = "['env', '-i', 'setsid', 'sleep', '1000']"
DAEMON = "['env', '-i', 'setsid', 'sh', '-c', 'sleep 1000 & echo $!']"


def test_children_without_an_environment_do_not_stay_either() -> None:
    escape = CHILD.replace("['sleep', '1000']", ALONE)
    daemon = f"import subprocess; print(subprocess.check_output({DAEMON}).decode(), flush=True)\n"
    daemon = daemon.replace("1000 &", "1000 > /dev/null &")
    outcome, lines = run(escape, escape + "import os; os._exit(3)", daemon)
    assert outcome.exit_code == 3
    pids = [int(lines.out[i][0]) for i in range(3) if lines.out[i]]
    assert len(pids) >= 2
    assert wait_gone(pids) == []


def test_the_timeout() -> None:
    outcome, _ = run(WAIT, "pass", timeout=0.3)
    assert outcome.exit_code == 124
    assert outcome.reason is EndReason.TIMEOUT


def test_servers_are_ended_at_the_end() -> None:
    outcome, _ = run("pass", WAIT, ending=ExitPolicy([True, False], PATIENT))
    assert outcome.exit_code == 0
    assert outcome.codes == [0, -signal.SIGTERM]


def interrupt_when_all_are_there(count: int, signum: int) -> Lines:
    there: set[int] = set()

    def hear(index: int, line: bytes) -> None:
        if line == b"ready":
            there.add(index)
            if len(there) == count:
                os.kill(os.getpid(), signum)

    return Lines(hear)


READY = "print('ready', flush=True)\n"


def test_ctrl_c_reaches_all() -> None:
    before = signal.getsignal(signal.SIGINT)
    # An interrupt during an import, even if it is caught, lets CPython end as if it was not.
    clean = (
        "import threading\n"
        f"try:\n    {READY.strip()}\n    {WAIT.strip()}\nexcept KeyboardInterrupt:\n    print('bye')\n"
    )
    with Interrupts() as interrupts:
        lines = interrupt_when_all_are_there(2, signal.SIGINT)
        outcome, _ = run(clean, READY + WAIT, lines=lines, interrupts=interrupts)
    assert outcome.reason is EndReason.INTERRUPT
    assert outcome.codes == [0, -signal.SIGINT]
    assert outcome.exit_code == 130
    assert lines.out[0][-1] == b"bye"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_cannot_be_ignored_for_ever() -> None:
    deaf = "import signal\nfor s in (2, 15): signal.signal(s, signal.SIG_IGN)\n" + READY + WAIT
    with Interrupts() as interrupts:
        lines = interrupt_when_all_are_there(1, signal.SIGINT)
        outcome, _ = run(deaf, lines=lines, interrupts=interrupts, patience=QUICK)
    assert outcome.codes == [-signal.SIGKILL]
    assert outcome.exit_code == 130


def test_sigterm_is_passed_on() -> None:
    with Interrupts() as interrupts:
        lines = interrupt_when_all_are_there(1, signal.SIGTERM)
        outcome, _ = run(READY + WAIT, lines=lines, interrupts=interrupts)
    assert outcome.codes == [-signal.SIGTERM]
    assert outcome.exit_code == 143


def test_a_second_signal_frees_a_thread_that_does_not_look() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.take() == [signal.SIGINT]


def test_nobody_reads_any_more() -> None:
    def broken(index: int, line: bytes) -> None:
        raise BrokenPipeError

    outcome, _ = run(READY + WAIT, lines=Lines(broken))
    assert outcome.codes == [-signal.SIGTERM]
    assert outcome.exit_code == 141


def test_an_error_of_ours_leaves_no_process() -> None:
    pids: list[int] = []

    def fail(index: int, line: bytes) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(READY + WAIT, lines=Lines(fail), started=lambda _, process: pids.append(process.pid))
    assert wait_gone(pids) == []


def test_a_program_that_cannot_be_started_leaves_no_process() -> None:
    missing = Command("bad", ["/no/such/program"], {})
    with pytest.raises(px.errors.NotFoundError, match="/no/such/program"):
        run_process_group([*commands(WAIT), missing], Lines(), patience=PATIENT)


def test_junk_and_long_lines_and_no_line_end() -> None:
    program = (
        "import os, sys\n"
        "os.write(1, bytes(range(256)) + b'\\n')\n"
        "os.write(1, b'y' * 3_000_000 + b'\\n')\n"
        "os.write(2, b'no end')"
    )
    outcome, lines = run(program)
    assert outcome.exit_code == 0
    everything = b"".join(lines.out[0])
    assert everything.startswith(bytes(range(10)))
    assert everything.endswith(b"y" * 3_000_000)
    assert lines.err[0] == [b"no end"]


def test_partial_lines_are_shown_while_the_process_runs() -> None:
    seen = threading.Event()

    def hear(index: int, line: bytes) -> None:
        assert line == b"Continue? "
        seen.set()
        os.kill(os.getpid(), signal.SIGTERM)

    with Interrupts() as interrupts:
        outcome, _ = run(
            "import os; os.write(1, b'Continue? ')\n" + WAIT,
            lines=Lines(hear),
            interrupts=interrupts,
            timeout=30,
        )
    assert seen.is_set()
    assert outcome.reason is EndReason.INTERRUPT


def test_a_worker_that_writes_without_end_does_not_stop_the_end() -> None:
    flood = "import os\nwhile True: os.write(1, b'x' * 60000 + b'\\n')"
    outcome, _ = run(flood, flood, timeout=0.3)
    assert outcome.exit_code == 124


def test_without_file_descriptors_for_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.job.launch.worker_process._exit_fd", lambda pid: None)
    outcome, lines = run("print('x')", "raise SystemExit(2)")
    assert outcome.exit_code == 2
    assert lines.out[0] == [b"x"]


# -- the guard -----------------------------------------------------------------------------------


def test_a_mark_finds_processes_wherever_they_are() -> None:
    with Guard() as own:
        process = Process(["sleep", "1000"], dict(os.environ), own, name="a")
        try:
            assert guard.marked(own.mark) == [process.pid]
            assert guard.marked(own.mark + "/b") == []
            guard.end_all(own.mark, [])
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.close()
        assert process.code == -signal.SIGTERM


def test_a_stopped_process_is_asked_to_end_as_well() -> None:
    """It comes to its end at once, in place of waiting for the signal that none survives."""
    program = f"""
import os, signal
def end(*_):
    print("goes", flush=True)
    os._exit(4)
signal.signal(signal.SIGTERM, end)
print("stops", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
{WAIT}"""
    patience = Patience(peers=0.0, terminate=60)
    with Interrupts() as interrupts:
        sink = Lines(
            lambda index, line: signal.raise_signal(signal.SIGTERM) if line == b"stops" else None
        )
        outcome = run_process_group(commands(program), sink, patience=patience, interrupts=interrupts)
    assert outcome.codes == [4]
    assert sink.out[0] == [b"stops", b"goes"]
    with Guard() as own:
        process = Process(["sleep", "1000"], dict(os.environ), own, name="a")
        process.send(signal.SIGSTOP)
        try:
            guard.end_all(own.mark, [])
            assert process.wait(10) == -signal.SIGTERM
        finally:
            process.close()


def test_without_its_guard_a_job_goes_on() -> None:
    with Guard() as own:
        own._process.kill()
        own._process.wait(10)
        process = Process(["true"], dict(os.environ), own, name="a")
        assert process.wait(10) == 0
        assert process.close() == 0


def test_the_guard_of_a_job_within_a_job_is_not_ended_with_the_outer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(guard.MARK, "outer/worker 0/")
    with Guard() as inner:
        process = Process(["sleep", "1000"], dict(os.environ), inner, name="a")
        try:
            assert guard.marked("outer") == []
            assert guard.marked(inner.mark) == [process.pid]
        finally:
            process.close()
