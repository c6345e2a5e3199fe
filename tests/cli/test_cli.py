"""The command line."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

import phalanx as px
from phalanx.cli import main
from phalanx.cli.demo import run_demo


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert px.__version__ in capsys.readouterr().out


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["dance"])
    assert done.value.code == 2
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--replicas", "0"], ["--replicas", "x"], ["--epochs", "-1"]])
def test_bad_numbers(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["demo", *bad])
    assert done.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_the_demo_learns() -> None:
    output = io.StringIO()
    assert run_demo(replicas=8, epochs=3, console=Console(file=output, width=120)) == 0
    text = output.getvalue()
    assert "MirroredStrategy (8 replicas)" in text
    assert "CPU:7" in text
    assert "Both runs learned the same model." in text


def test_the_command_itself() -> None:
    code = "import sys; from phalanx.cli import main; sys.exit(main(['demo', '--epochs', '3']))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 replicas" in done.stdout
    assert "eagerly" not in done.stderr  # although the last batch of each epoch is uneven
