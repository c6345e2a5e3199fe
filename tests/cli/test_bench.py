"""``phalanx bench collectives``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli import main
from phalanx.cli.bench import Row, bus_factor, line, plot


def test_the_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor("all_reduce", n) for n in (2, 4)] == [1.0, 1.5]
    assert [bus_factor("all_gather", n) for n in (2, 4)] == [0.5, 0.75]
    assert bus_factor("broadcast", 8) == 1.0


def test_a_row_and_its_bar() -> None:
    row = Row("workers", 4, "reduce_scatter", 1_000_000, 250_000, "float32", 500.0)
    assert (row.algbw, row.busbw) == (2.0, 1.5)
    assert line(row).split() == [
        *("workers", "4", "reduce_scatter", "1000000", "250000", "float32", "500.0", "2.000", "1.500")
    ]
    assert plot([row]).endswith("#" * 40 + " 1.500")


def test_replicas_and_workers_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.runtime.devices.set_cpu_device_count", lambda count: None)
    path = tmp_path / "rows.json"
    arguments = ["--from", "1K", "--to", "4K", "--iterations", "2", "--op", "all_reduce"]
    assert main(["bench", "collectives", *arguments, "--plot", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert [(r["where"], r["size"]) for r in rows] == [
        *(("replicas", 1024), ("replicas", 4096), ("workers", 1024), ("workers", 4096))
    ]
    assert all(r["time"] > 0 and r["busbw"] > 0 for r in rows)
    output = capsys.readouterr().out
    assert "algbw" in output
    assert "busbw (GB/s)" in output


@pytest.mark.parametrize("bad", [["--from", "1X"], ["--op", "dance"], ["--to", "0"]])
def test_bad_arguments(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["bench", "collectives", *bad])
    assert done.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_sizes_must_grow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "collectives", "--from", "4K", "--to", "1K"]) == 2
    assert "must grow" in capsys.readouterr().err
