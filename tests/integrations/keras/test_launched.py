"""Keras in jobs that `phalanx run` starts: real processes from the command to the files."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.integrations.keras.cases import FIT, X, Y, classifier
from tests.launching import run_script

PROGRAM = Path(__file__).with_name("launched.py")


def run(folder: Path, *words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """What a job says that runs `launched.py`."""
    kind, *more = words
    env = {"KERAS_BACKEND": "jax", "PHALANX_DEADLINE": "60"}
    return run_script(
        PROGRAM, kind, str(folder), *more, folder=folder, env=env, preload=["keras"], **settings
    )


def lines_of(job: subprocess.CompletedProcess[str], task: str) -> list[str]:
    start = f"[{task}] "
    return [line.removeprefix(start) for line in job.stdout.splitlines() if line.startswith(start)]


def arrays(path: Path) -> list[Any]:
    with np.load(path) as found:
        return [found[f"arr_{i}"] for i in range(4)]


def close(a: list[Any], b: list[Any]) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def on_one_device(**more: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = classifier(metrics=["accuracy"])
    model.fit(X, Y, **(FIT | {"shuffle": False} | more))
    return model


def test_two_workers_of_two_devices(tmp_path: Path) -> None:
    job = run(tmp_path, "together", workers=2, devices=2)
    assert job.returncode == 0, job.stderr
    one = on_one_device()
    for rank in (0, 1):
        close(arrays(tmp_path / f"{rank}.npz"), one.get_weights())
        with np.load(tmp_path / f"{rank}.npz") as found:
            np.testing.assert_allclose(found["rows"], one.predict(X, verbose=0), atol=1e-5)
        assert "4 replicas" in lines_of(job, f"worker {rank}")[-1]
    assert any("Epoch 4/4" in line for line in lines_of(job, "worker 0"))
    assert len(lines_of(job, "worker 1")) == 1  # what the program itself prints
    close(keras.models.load_model(tmp_path / "last.keras").get_weights(), one.get_weights())
    assert len(list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))) == 4
    assert len(list((tmp_path / "board" / "train").glob("events.out.tfevents.*"))) == 1


@pytest.mark.soak  # test_workers.py has it with processes that tests share
@pytest.mark.parametrize("how", ["dies", "raises", "interrupted"])
def test_a_worker_that_fails_is_named_and_weights_are_kept(tmp_path: Path, how: str) -> None:
    job = run(tmp_path, "together", how, workers=2)
    assert job.returncode != 0
    said = "\n".join(lines_of(job, "worker 0"))
    assert "kept: " in said, job.stderr
    assert "worker 1" in said
    keras.utils.set_random_seed(1)
    expected = classifier(metrics=["accuracy"])
    expected.fit(X[:48], Y[:48], **(FIT | {"epochs": 1, "shuffle": False}))
    close(arrays(tmp_path / "kept.npz"), expected.get_weights())
    if how == "raises":
        assert "a callback of one worker" in job.stderr


@pytest.mark.soak  # test_parameter_servers.py has it in one process
def test_parameter_servers(tmp_path: Path) -> None:
    job = run(tmp_path, "servers", workers=2, ps=1)
    assert job.returncode == 0, job.stderr
    said = lines_of(job, "chief 0")
    assert said[-1] == "40 steps, better True"  # none is lost, none counts twice
    assert any("Epoch 4/4" in line for line in said)
    assert not lines_of(job, "worker 0")
    assert not lines_of(job, "worker 1")
    weights = arrays(tmp_path / "chief.npz")
    close(keras.models.load_model(tmp_path / "4.keras").get_weights(), weights)
    assert len(list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))) == 4
    assert (tmp_path / "backup").exists()


@pytest.mark.soak
def test_a_worker_of_parameter_servers_may_die(tmp_path: Path) -> None:
    job = run(tmp_path, "servers", "dies", workers=2, ps=1, restarts=1)
    assert job.returncode == 0, job.stderr
    assert (tmp_path / "died").exists()
    steps, _, better = lines_of(job, "chief 0")[-1].partition(" steps, ")
    assert 40 <= int(steps) <= 42
    assert better == "better True"
    assert "SIGKILL" in job.stderr
