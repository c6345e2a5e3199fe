"""Keras in jobs that `phalanx run` starts, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.integrations.keras.cases import FIT, X, Y, classifier

ROOT = Path(__file__).parents[3]


def run(tmp_path: Path, kind: str, *options: str) -> list[str]:
    program = Path(__file__).with_name("launched.py")
    environment = {
        "XDG_RUNTIME_DIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "run", *options, str(program), kind, str(tmp_path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_workers_of_a_job_equal_one_device(tmp_path: Path) -> None:
    said = run(tmp_path, "together", "-n", "2", "--devices-per-worker", "2")
    assert any("Epoch 4/4" in line for line in said)
    assert all(line.startswith("[worker 0]") for line in said if "Epoch" in line)
    keras.utils.set_random_seed(1)
    expected = classifier()
    expected.fit(X, Y, **(FIT | {"shuffle": False}))
    saved = keras.models.load_model(tmp_path / "4.keras").get_weights()
    for number in (0, 1):
        found = np.load(tmp_path / f"worker{number}.npz")
        for a, b, c in zip(found.values(), saved, expected.get_weights(), strict=True):
            np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(b, c, rtol=1e-5, atol=1e-5)


@pytest.mark.soak
def test_parameter_servers_of_a_job(tmp_path: Path) -> None:
    said = run(tmp_path, "on_servers", "-n", "2", "--ps", "1")
    assert said == ["[chief 0] 30 steps"]
    assert keras.models.load_model(tmp_path / "trained.keras").predict(X, verbose=0).shape == (50, 3)
