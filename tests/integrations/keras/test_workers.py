"""Keras over two workers of two devices each: real processes, which the tests share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

import phalanx as px
from tests.integrations.keras import cases, on_workers
from tests.integrations.keras.cases import FIT, X, Y

HERE = [
    "metrics_validation_and_class_weights",
    "dropout_and_layer_normalization",
    "several_steps_per_execution",
    "subclassed_and_not_built",
    "dataset",
    "distributed_dataset",
    "datasets_from_function",
    "generator",
]
OTHERS = [name for name in cases.CASES if name not in HERE]


def cluster_of(**env: str) -> px.testing.MultiProcess:
    env = {"KERAS_BACKEND": "jax", "PHALANX_DEADLINE": "30"} | env
    preload = ("tests.integrations.keras.on_workers",)
    return px.testing.MultiProcess(2, 2, env=env, preload=preload)


@pytest.fixture(scope="module")
def cluster() -> Iterator[px.testing.MultiProcess]:
    with cluster_of() as opened:
        yield opened


def check(cluster: px.testing.MultiProcess, name: str) -> None:
    found, other = cluster.run(on_workers.run, name)
    assert on_workers.close(found["weights"], other["weights"])
    cases.assert_close(name, found, cases.run(name))


@pytest.mark.parametrize("name", HERE)
def test_workers_equal_one_device(cluster: px.testing.MultiProcess, name: str) -> None:
    check(cluster, name)


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_workers_equal_one_device_in_all(cluster: px.testing.MultiProcess, name: str) -> None:
    check(cluster, name)


def test_one_worker_writes_and_prints(cluster: px.testing.MultiProcess, tmp_path: Path) -> None:
    before = [len(cluster.stdout(i)) for i in range(2)]
    found, other = cluster.run(on_workers.train_with_files, str(tmp_path))
    assert on_workers.close(found[0], other[0])
    assert found[1] == other[1] == pytest.approx(0.025)
    said = [cluster.stdout(i)[n:] for i, n in enumerate(before)]
    assert "Epoch 2/2" in said[0]
    assert "Epoch" not in said[1]
    files = {p.name for p in tmp_path.iterdir()}
    assert files == {"1.keras", "2.keras", "log.csv", "backup"}
    assert on_workers.close(keras.models.load_model(tmp_path / "2.keras").get_weights(), found[0])
    epochs, weights = zip(*cluster.run(on_workers.go_on, str(tmp_path)), strict=True)
    assert epochs == ([2, 3], [2, 3])
    assert on_workers.close(*weights)


@pytest.mark.soak  # Orbax takes three seconds
def test_orbax_checkpoints_of_several_workers(cluster: px.testing.MultiProcess, tmp_path: Path) -> None:
    found, other = cluster.run(on_workers.train_with_orbax, str(tmp_path))
    assert on_workers.close(found, other)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "3"]
    loaded = on_workers.functional()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Orbax recommends what Keras does not do
        loaded.load_weights(tmp_path)
    assert on_workers.close(found, loaded.get_weights())


# A process that goes on after an error is missed only when the deadline is over.
@pytest.mark.parametrize("how", ["dies", pytest.param("raises", marks=pytest.mark.soak)])
def test_a_failing_worker_is_named_and_weights_are_kept(how: str) -> None:
    keras.utils.set_random_seed(1)
    expected = cases.classifier()
    expected.fit(X[:48], Y[:48], **(FIT | {"epochs": 1, "shuffle": False}))
    with cluster_of() as cluster:
        run = cluster.start(on_workers.fails, how)
        said, weights = run.results(60)[0].value
    assert "worker 1" in said
    assert on_workers.close(weights, expected.get_weights())
