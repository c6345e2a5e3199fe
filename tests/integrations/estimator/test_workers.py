"""Estimators over several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.estimator.cases import input_fn, made
from tests.launching import run_script


def run(tmp_path: Path, kind: str, **tasks: Any) -> list[str]:
    program = Path(__file__).with_name("on_workers.py")
    done = run_script(program, kind, str(tmp_path), folder=tmp_path, evaluator=True, **tasks)
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_workers_together_and_an_evaluator(tmp_path: Path) -> None:
    told = run(tmp_path, "synchronous", workers=2)
    alone = made(tmp_path / "alone").train(input_fn, steps=7)
    at_seven = alone.evaluate(input_fn)["loss"]
    alone.train(input_fn, steps=1)
    at_eight = alone.evaluate(input_fn)["loss"]
    alone.train(input_fn, steps=1)
    at_nine = alone.evaluate(input_fn)["loss"]
    said = {line.partition("] ")[0][1:]: line.partition("] ")[2] for line in told}
    assert set(said) == {"evaluator 0", "worker 0", "worker 1"}
    step = int(said["evaluator 0"].rpartition(" ")[2])
    assert step in (7, 8, 9)  # the evaluator may be late
    assert float(said["evaluator 0"].split()[1]) == pytest.approx(
        {7: at_seven, 8: at_eight, 9: at_nine}[step], abs=2e-5
    )
    for number, chief in ((0, True), (1, False)):
        text = said[f"worker {number}"]
        assert text.startswith(f"chief {chief}, ")
        assert text.endswith(str([f"model.ckpt-{i}" for i in range(5, 10)]))
        assert float(text.split()[3].rstrip(",")) == pytest.approx(at_eight, abs=2e-5)
    assert (tmp_path / "eval" / "evaluations.jsonl").read_text().count("\n") >= 1


def test_a_chief_a_worker_a_parameter_server_and_an_evaluator(tmp_path: Path) -> None:
    told = run(tmp_path, "asynchronous", ps=1)
    assert told == ["[chief 0] trained True", "[evaluator 0] evaluated True, True"]
    assert "global_step" in (tmp_path / "eval" / "evaluations.jsonl").read_text()
