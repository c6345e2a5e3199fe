"""Optimizers take their part of a checkpoint also if the first step makes their variables."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px


class Training:
    """A variable and an optimizer under a strategy, which a checkpoint saves."""

    def __init__(self, shard: str | None = None, is_compiled: bool = False, shape: int = 3) -> None:
        self.strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        with self.strategy.scope():
            self.w = px.Variable(jnp.zeros(shape), name="w")
            sharding = px.train.OptimizerSharding(shard, threshold=0) if shard else None
            self.optimizer = px.train.Optimizer(optax.adam(0.1), "mean", shard=sharding)
        self.checkpoint = px.train.Checkpoint(w=self.w, nested={"optimizer": self.optimizer})

        def run() -> None:
            self.strategy.run(self._on_replica)

        self.step: Any = px.function(run) if is_compiled else run

    def _on_replica(self) -> None:
        self.optimizer.minimize(lambda: jnp.sum((self.w.value() - 1) ** 4), [self.w])

    def steps(self, count: int) -> Training:
        for _ in range(count):
            self.step()
        return self

    def state(self) -> list[Any]:
        return [x.numpy() for x in (self.w, *self.optimizer.variables)]


@pytest.mark.parametrize(("shard", "is_compiled"), [(None, False), (None, True), ("states", True)])
def test_a_training_goes_on_as_if_nothing_had_happened(
    shard: str | None, is_compiled: bool, tmp_path: Path
) -> None:
    path = Training(shard, is_compiled).steps(3).checkpoint.save(str(tmp_path / "x"))
    again = Training(shard, is_compiled)
    status = again.checkpoint.restore(path)
    status.assert_existing_objects_matched().assert_nontrivial_match()
    assert status.unused == [f"nested/optimizer/{i}" for i in range(4)]
    with pytest.raises(AssertionError, match="at its first step"):
        status.assert_consumed()
    shutil.rmtree(path)  # as retention may do before the first step
    before = again.checkpoint.save(str(tmp_path / "y"))  # it has the optimizer's part all the same
    again.steps(1)
    status.assert_consumed()
    expected = Training(shard, is_compiled).steps(5).state()
    for found, wanted in zip(again.steps(1).state(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    once_more = Training(shard, is_compiled)
    once_more.checkpoint.restore(before)
    for found, wanted in zip(once_more.steps(2).state(), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_first_step_that_fails_does_not_lose_it(tmp_path: Path) -> None:
    path = Training().steps(3).checkpoint.save(str(tmp_path / "x"))
    again = Training()
    again.checkpoint.restore(path)

    def fails() -> None:
        again._on_replica()
        raise ValueError("after the step")

    with pytest.raises(ValueError, match="after the step"):
        again.strategy.run(fails)
    assert int(again.optimizer.iterations) == 3
    for found, wanted in zip(again.steps(2).state(), Training().steps(5).state(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_does_not_fit_is_an_error_each_time(is_compiled: bool, tmp_path: Path) -> None:
    path = Training().steps(1).checkpoint.save(str(tmp_path / "x"))
    again = Training(is_compiled=is_compiled, shape=5)
    checkpoint = px.train.Checkpoint(nested={"optimizer": again.optimizer})
    checkpoint.restore(path)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"'nested/optimizer/2' .*float32\[5\].*float32\[3\] in the"
        ):
            again.step()
    assert again.w.numpy().tolist() == [0.0] * 5


def test_the_manager_says_what_it_did_not_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Training().steps(1)
    first.checkpoint.gone = px.Variable(1.0)
    px.train.CheckpointManager(first.checkpoint, str(tmp_path), 2).save()
    again = Training()
    again.checkpoint.new = px.Variable(2.0)
    px.train.CheckpointManager(again.checkpoint, str(tmp_path), 2).restore_or_initialize()
    said = [record.getMessage().partition("ckpt-1 ")[2] for record in caplog.records]
    assert said == [
        "was restored, but it has no values for new.",
        "was restored, but it has values that no object takes: gone.",
    ]
