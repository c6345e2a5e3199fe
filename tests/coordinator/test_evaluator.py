"""The evaluator beside a training."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.launching import run_script

import phalanx as px


def trained(folder: Path, w: px.Variable) -> px.train.CheckpointManager:
    return px.train.CheckpointManager(px.train.Checkpoint(w=w, step=px.Variable(0)), str(folder), 2)


def test_each_new_checkpoint_once_and_the_last_in_any_case(tmp_path: Path) -> None:
    w, own = px.Variable(0.0), px.Variable(-1.0)
    manager = trained(tmp_path, w)
    results: list[tuple[str, Any]] = []
    told = threading.Semaphore(0)

    def on_result(path: str, result: Any) -> None:
        results.append((Path(path).name, result))
        told.release()

    evaluator = px.coordinator.SidecarEvaluator(
        px.train.Checkpoint(w=own),
        lambda: {"w": own.read_value()},
        str(tmp_path),
        on_result=on_result,
        log_dir=str(tmp_path / "log"),
        timeout=60,
    )
    returned: list[Any] = []
    thread = threading.Thread(target=lambda: returned.extend(evaluator.start()))
    thread.start()
    for i in range(3):
        w.assign(float(i))
        manager.save()
        assert told.acquire(timeout=60)
    w.assign(10.0)
    manager.save()
    evaluator.stop()
    thread.join(60)
    assert [(name, float(r["w"])) for name, r in results] == [
        ("ckpt-1", 0.0),
        ("ckpt-2", 1.0),
        ("ckpt-3", 2.0),
        ("ckpt-4", 10.0),
    ]
    assert [name for name, _ in returned] == [name for name, _ in results]
    lines = [json.loads(x) for x in (tmp_path / "log" / "evaluations.jsonl").read_text().splitlines()]
    assert lines[-1] == {"checkpoint": "ckpt-4", "result": {"w": 10.0}}


def test_a_checkpoint_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    w = px.Variable(1.0)
    manager = trained(tmp_path, w)
    manager.save()
    real = px.train.Checkpoint(w=w)

    class Slow(px.train.Checkpoint):
        def restore(self, save_path: str | None, options: Any = None) -> px.train.CheckpointStatus:
            if save_path is not None and save_path.endswith("ckpt-1"):
                manager.save()
                shutil.rmtree(save_path)
            return real.restore(save_path)

    evaluator = px.coordinator.SidecarEvaluator(Slow(w=w), lambda: 1, str(tmp_path), 1, timeout=60)
    assert evaluator.start() == [("ckpt-2", 1)]


def test_a_training_that_saves_nothing(tmp_path: Path) -> None:
    evaluator = px.coordinator.SidecarEvaluator(
        px.train.Checkpoint(w=px.Variable(1.0)), lambda: 1, str(tmp_path), timeout=0.01
    )
    with pytest.raises(px.errors.DeadlineExceededError, match=str(tmp_path)):
        evaluator.start()
    evaluator.stop()
    assert evaluator.start() == []


def test_what_it_needs(tmp_path: Path) -> None:
    checkpoint = px.train.Checkpoint(w=px.Variable(1.0))
    with pytest.raises(TypeError, match="Checkpoint"):
        px.coordinator.SidecarEvaluator("x", lambda: 1, "y")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="evaluate_fn"):
        px.coordinator.SidecarEvaluator(checkpoint, 1, "y")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_evaluations"):
        px.coordinator.SidecarEvaluator(checkpoint, lambda: 1, "y", 0)


PROGRAM = """
import json, os, sys
import phalanx as px

task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
folder = sys.argv[1]
w = px.Variable(0.0)
checkpoint = px.train.Checkpoint(w=w)
if task == "evaluator":
    evaluator = px.coordinator.SidecarEvaluator(checkpoint, lambda: float(w), folder, timeout=60)
    open(os.path.join(folder, "waiting"), "w").close()
    print("evaluated", evaluator.start()[-1], flush=True)
elif task == "chief":
    bell = __import__("threading").Event()
    while not os.path.exists(os.path.join(folder, "waiting")):
        bell.wait(0.01)
    manager = px.train.CheckpointManager(checkpoint, folder, max_to_keep=1)
    for i in range(5):
        w.assign(float(i))
        manager.save()
else:
    px.Server(px.cluster_resolver.TFConfigClusterResolver().cluster_spec(), task, 0).join()
"""


def test_a_whole_job_with_an_evaluator(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    done = run_script(script, str(folder), folder=tmp_path, ps=1, evaluator=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[evaluator 0] evaluated ('ckpt-5', 4.0)\n"


def test_sigterm_ends_it_after_the_last_checkpoint(tmp_path: Path) -> None:
    w = px.Variable(1.0)
    manager = trained(tmp_path, w)
    manager.save()

    def evaluate() -> int:
        if manager.latest_checkpoint is not None and manager.latest_checkpoint.endswith("ckpt-1"):
            manager.save()
            signal.raise_signal(signal.SIGTERM)
        return 1

    before = signal.getsignal(signal.SIGTERM)
    evaluator = px.coordinator.SidecarEvaluator(
        px.train.Checkpoint(w=w), evaluate, str(tmp_path), timeout=60
    )
    assert evaluator.start() == [("ckpt-1", 1), ("ckpt-2", 1)]
    assert signal.getsignal(signal.SIGTERM) is before
