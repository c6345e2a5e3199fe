"""``phalanx plan`` and ``phalanx bench hardware``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.cli import main

MODULE = """
import jax, jax.numpy as jnp

def small():
    shapes = [(64, 256), (8, 64)]
    return lambda w, x: jnp.sum(x @ w), tuple(jax.ShapeDtypeStruct(s, "float32") for s in shapes)

def wrong():
    return 3

number = 4
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "planned_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_plan_is_printed_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "planned_here:small", "--devices", "2", "--hardware", "H100", "--explain", "w"]
    assert main([*command, "--save", "p.json", "--html", "p.html"]) == 0
    printed = capsys.readouterr().out
    assert "Plan for x=2 of H100" in printed
    assert "w float32[64, 256] is" in printed
    assert "Plan for planned_here:small" in (folder / "p.html").read_text()
    saved = px.parallel.Plan.load("p.json")
    assert saved.mesh.size == 2
    assert main(["plan", "--load", "p.json"]) == 0
    assert capsys.readouterr().out.strip() == str(saved)
    assert main(["plan", "planned_here:small", "--hardware", "H100", "--pins", "p.json"]) == 0
    assert saved.diff(saved) == []


def test_hardware_is_measured_and_used(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.runtime.devices.set_cpu_device_count", lambda count: None)

    def timed(program: Any, x: Any, rounds: int) -> float:
        program(x)
        return 1e-6 + x.nbytes * 1e-9  # what a clock says depends on what else the machine does

    monkeypatch.setattr("phalanx.cli.bench_hardware.best", timed)
    monkeypatch.setattr("phalanx.cli.bench_hardware._WIDTHS", (64, 128))
    assert main(["bench", "hardware", "--rounds", "3", "--name", "here", "--json", "hw.json"]) == 0
    assert "here: matrix products float32" in capsys.readouterr().out
    found = px.parallel.load_hardware("hw.json")
    assert found.device.bandwidth == pytest.approx(1e9)  # two devices share what there is
    assert found.inner.beta == pytest.approx(2e-9 / 16)  # eight sums took as long as one here
    assert not found.reduce_scatter
    assert main(["plan", "planned_here:small", "--devices", "2", "--hardware", "hw.json"]) == 0
    assert "of here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("planned_here", "MODULE:FUNCTION"),
        ("no_such_module:small", "No module named"),
        ("planned_here:none", "no such function"),
        ("planned_here:number", "no such function"),
        ("planned_here:wrong", "must return a pair"),
    ],
)
def test_what_cannot_be_planned(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert main(["plan", name]) == 2
    assert message in capsys.readouterr().err
