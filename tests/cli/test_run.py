"""``phalanx run``, ``explain`` and ``doctor``, as a user types them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.processes import wait_gone

import phalanx as px
from phalanx.cli import main
from phalanx.cli.terminal import JobView, progress_text
from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.launch.exit_policy import EndReason
from phalanx.job.launch.launcher import JobOutcome
from phalanx.job.launch.process_group import GroupOutcome

Script = Callable[[str], str]
COMMAND = [sys.executable, "-m", "phalanx"]


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(program: str) -> str:
        path = tmp_path / "train.py"
        path.write_text("import json, os, sys\n" + textwrap.dedent(program))
        return str(path)

    return write


INDEX = "index = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"


# -- this machine --------------------------------------------------------------------------------


def test_names_stand_in_front_and_streams_stay_apart(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(INDEX + "print('out', index, sys.argv[1:])\nprint('err', index, file=sys.stderr)")
    assert main(["run", "-n", "2", path, "--help", "-n", "9"]) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        "[worker 0] out 0 ['--help', '-n', '9']",
        "[worker 1] out 1 ['--help', '-n', '9']",
    ]
    assert sorted(err.splitlines()) == ["[worker 0] err 0", "[worker 1] err 1"]


def test_the_failed_workers_traceback_is_the_last_thing_printed(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    path = script(
        INDEX
        + """
def deep():
    raise ValueError("the reason")

if index == 1:
    deep()
import threading
threading.Event().wait(100)
"""
    )
    assert main(["run", "-n", "3", "--grace", "0.1", path]) == 1
    err = capfd.readouterr().err
    assert err.endswith('    raise ValueError("the reason")\nValueError: the reason\n')
    assert "[phalanx] worker 1 ended with exit code 1." in err
    assert "[phalanx] worker 0" not in err  # that one was ended by us


def test_exit_codes(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(INDEX + "sys.exit(int(sys.argv[1]) if index == 1 else 0)")
    assert main(["run", "-n", "2", path, "0"]) == 0
    assert main(["run", "-n", "2", path, "42"]) == 42
    path = script("os.kill(os.getpid(), 9)")
    assert main(["run", path]) == 137
    assert "SIGKILL" in capfd.readouterr().err


def test_servers_and_a_chief(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(
        """
        task = json.loads(os.environ["TF_CONFIG"])["task"]
        print(task["type"], flush=True)
        if task["type"] != "chief":
            import threading
            threading.Event().wait(100)
        """
    )
    assert main(["run", "-n", "1", "--ps", "1", "--chief", path]) == 0
    assert "[chief 0] chief" in capfd.readouterr().out


def test_options_reach_the_processes(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    path = script("print(*(os.environ[name] for name in sys.argv[1:]))")
    options = ["--devices-per-worker", "3", "--retain-memory", "--env", "A=b c"]
    names = ["JAX_NUM_CPU_DEVICES", "MALLOC_ARENA_MAX", "A", "PHALANX_RESTART"]
    assert main(["run", *options, path, *names]) == 0
    assert capfd.readouterr().out == "[worker 0] 3 1 b c 0\n"


def test_the_program_of_the_guide(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "launching.md").read_text()
    program = re.findall(r"```python\n# train.py\n(.*?)```", guide, re.DOTALL)[0]
    expected = re.findall(r"```text\n(.*?)```", guide, re.DOTALL)[0]
    assert main(["run", "-n", "2", "--devices-per-worker", "2", script(program)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if "[Gloo]" not in line) == expected.splitlines()


def test_the_reference_lists_every_option(capfd: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    sections = re.findall(r"^## `phalanx (.*)`$", page, re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z]+) ", capfd.readouterr().out, re.MULTILINE)
    assert sorted({section.split()[0] for section in sections}) == sorted(commands)
    for command in sections:
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        options = set(re.findall(r"--[a-z][a-z-]+", capfd.readouterr().out)) - {"--help"}
        section = page.split(f"## `phalanx {command}`")[1].split("\n## ")[0]
        assert [option for option in sorted(options) if option not in section] == []


def test_restarts(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    path = script("sys.exit(os.environ['PHALANX_RESTART'] != '1')")
    assert main(["run", "--restarts", "1", path]) == 0
    assert capfd.readouterr().err.count("started again") == 1


def test_modules(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-n", "1", "-m", "json.tool", "--help"]) == 0
    assert "[worker 0] usage: " in capfd.readouterr().out


def test_the_timeout(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    path = script("import signal; signal.pause()")
    assert main(["run", "--timeout", "0.3", path]) == 124
    assert "took too long" in capfd.readouterr().err


def test_a_dry_run_starts_nothing(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    path = script("print('started')")
    assert main(["run", "-n", "2", "--dry-run", path, "a b"]) == 0
    out = capfd.readouterr().out
    assert "started" not in out
    assert out.count("# worker") == 2
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    words = [shlex.split(line) for line in lines]
    assert all(w[-1] == "a b" and w[-2] == path for w in words)
    (config,) = (w for w in words[1] if w.startswith("TF_CONFIG="))
    assert json.loads(config.partition("=")[2])["task"] == {"type": "worker", "index": 1}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "Say which program to run"),
        (["-m"], "Say which program to run"),
        (["/no/such/file.py"], "no such file"),
        (["-n", "0", __file__], "at least one worker"),
        (["--env", "NO_SUCH_VARIABLE", __file__], "NAME=VALUE"),
        (["--hosts", "a b", __file__], "Hosts are names"),
        (["--resolver", "tfconfig", "--task", "x", __file__], "worker:1"),
    ],
)
def test_wrong_use_is_said(
    bad: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["run", *bad]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("bad", [["--timeout", "-1"], ["-n", "x"], ["--unknown"], ["--restarts", "-2"]])
def test_wrong_options_are_said(bad: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["run", *bad, __file__])
    assert done.value.code == 2
    assert bad[0] in capfd.readouterr().err


def test_what_nobody_reads_is_not_written(script: Script) -> None:
    path = script("print('one', flush=True)\nimport signal; signal.pause()")
    with subprocess.Popen(
        [*COMMAND, "run", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.wait(60) == 128 + signal.SIGPIPE


# -- signals -------------------------------------------------------------------------------------

WAITING = """
import subprocess, threading
print(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid, flush=True)
threading.Event().wait(100)
"""


@pytest.fixture
def launcher(script: Script) -> Iterator[subprocess.Popen[str]]:
    """A job of two workers that wait, in a launcher of its own."""
    command = [*COMMAND, "run", "-n", "2", script(WAITING)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def pids_of(launcher: subprocess.Popen[str]) -> list[int]:
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline() for _ in range(2)]
    return [int(word) for line in lines for word in line.partition("]")[2].split()]


def test_ctrl_c(launcher: subprocess.Popen[str]) -> None:
    pids = pids_of(launcher)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130
    assert "The job was interrupted." in err
    assert "KeyboardInterrupt" in err
    assert len(pids) == 4
    assert wait_gone(pids) == []


def test_the_launcher_is_killed(launcher: subprocess.Popen[str]) -> None:
    pids = pids_of(launcher)
    launcher.kill()
    assert len(pids) == 4
    assert wait_gone(pids) == []


def test_a_job_explains_itself(
    launcher: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    pids_of(launcher)
    assert main(["explain", "--no-stacks"]) == 0
    assert "worker 1" in capfd.readouterr().out
    assert main(["explain", "train.py"]) == 0
    assert main(["explain", "other.py"]) == 2
    assert f"Running: {launcher.pid} (train.py)" in capfd.readouterr().err


# -- other machines ------------------------------------------------------------------------------


def test_the_process_becomes_a_task(script: Script) -> None:
    path = script("print(os.getpid(), os.environ['TF_CONFIG'], os.environ['JAX_NUM_CPU_DEVICES'])")
    config = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}
    options = ["--resolver", "tfconfig", "--devices-per-worker", "2", "--task", "worker:0"]
    with subprocess.Popen(
        [*COMMAND, "run", *options, path],
        env=os.environ | {"TF_CONFIG": json.dumps(config)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        out, _ = process.communicate(timeout=60)
    pid, _, rest = out.partition(" ")
    assert int(pid) == process.pid
    assert rest.endswith(" 2\n")
    assert json.loads(rest[:-3]) == {**config, "task": {"type": "worker", "index": 0}}


def test_a_dry_run_of_a_task(
    script: Script, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-2")
    options = ["--resolver", "sagemaker", "--resolver-arg", "port=99", "--dry-run"]
    assert main(["run", *options, script("")]) == 0
    out = capfd.readouterr().out
    assert "algo-1:99" in out
    assert '"index": 1' in out


def test_a_dry_run_on_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--hosts", "a,me@b:7", "--dry-run", "train.py"]) == 0
    out = capfd.readouterr().out
    assert "ssh -o BatchMode=yes me@b -- " in out
    assert '["a:12300", "b:7"]' in out


def test_doctor(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["doctor"]) == 0
    assert px.__version__ in capfd.readouterr().out
    monkeypatch.setenv("TF_CONFIG", "{")
    assert main(["doctor"]) == 1
    assert main(["doctor", "--resolver", "tfconfig"]) == 2


@pytest.mark.parametrize("command", ["run", "explain", "doctor"])
def test_help(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([command, "--help"])
    assert done.value.code == 0
    assert "exit code is 0" in re.sub(r"\s+", " ", capfd.readouterr().out)


# -- in a terminal -------------------------------------------------------------------------------


def test_in_a_terminal_there_are_colours_and_a_bar(script: Script) -> None:
    path = script(INDEX + "print('\\x1b[2Jhello', index, '\\x1b[31mred\\x1b[0m \\r over')")
    screen, terminal = pty.openpty()
    environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100"}
    environ.pop("NO_COLOR", None)
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "2", path], stdout=terminal, stderr=terminal, env=environ
    ) as process:
        os.close(terminal)
        shown = read_screen(screen, time.monotonic() + 60)
        assert process.wait(60) == 0
    os.close(screen)
    assert re.search(r"\x1b\[[0-9;]*m\[worker 0\]\x1b\[0m", shown)
    assert "hello" not in shown  # it was overwritten
    assert "over" in shown
    assert "/2 joined" in shown
    assert "train.py" in shown


def read_screen(screen: int, deadline: float) -> str:
    data = b""
    while select.select([screen], [], [], deadline - time.monotonic())[0]:
        try:
            data += os.read(screen, 1 << 16)
        except OSError:  # the other end is closed
            break
    return data.decode()


def test_bytes_go_to_files_as_they_are(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        view = JobView([Task("worker", 0)], "x", out, err)
        assert not view.overwrite
        view.line(0, False, b"\xff\x00\x1b[2J")
        view.line(0, True, b"oh")
        view.flush()
        view.close()
    assert (tmp_path / "out").read_bytes() == b"[worker 0] \xff\x00\x1b[2J\n"
    assert (tmp_path / "err").read_bytes() == b"[worker 0] oh\n"


def test_what_is_said_of_a_failure(tmp_path: Path) -> None:
    tasks = [Task("worker", 0), Task("worker", 1)]

    def said(codes: list[int | None], failure: Failure, again: bool = False) -> list[str]:
        by_itself = [code is not None for code in codes]
        processes = GroupOutcome(1, codes, EndReason.FAILURE, 0, by_itself, [[], []])
        with (tmp_path / "err").open("w") as err:
            outcome = JobOutcome(1, processes, tasks[0], failure, ["Traceback", "E: x"])
            JobView(tasks, "x", err, err).failed(outcome, again)
        return (tmp_path / "err").read_text().splitlines()

    early = Failure("exited", "worker 1 ended with exit code 0 before it joined.", "worker 1")
    own = "[phalanx] worker 0 ended with exit code 1."
    last = ["[phalanx] The end of what worker 0 wrote:", "Traceback", "E: x"]
    assert said([1, 0], early) == [own, f"[phalanx] {early.text}", *last]
    raised = Failure("raised", "a long text", "worker 0")
    assert said([1, 0], raised) == [own, *last]
    assert said([1, None], raised, again=True) == [
        own,
        "[phalanx] worker 1 could not be ended.",
        "[phalanx] All processes are started again.",
    ]


def test_what_the_bar_says() -> None:
    def row(state: str, phase: str = "", step: int | None = None) -> dict[str, object]:
        return {"state": state, "phase": phase, "step": step}

    assert progress_text([row("absent"), row("absent")]) == (0, "")
    assert progress_text([row("joined", "start"), row("absent")]) == (1, "start")
    assert progress_text([row("joined", "step", 3), row("joined", "input", 4)]) == (
        2,
        "step 3-4, 1 in step, 1 in input",
    )
    assert progress_text([row("left", "done", 9)]) == (1, "step 9, done")
