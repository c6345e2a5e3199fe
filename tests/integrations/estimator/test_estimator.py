"""Estimators in one process: the same numbers under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from tests.integrations.estimator.cases import ROWS, X, Y, input_fn, made, model_fn, weights


def mirrored(count: int) -> px.Strategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(count)])


def close(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert set(a) == set(b)
    for name, value in a.items():
        np.testing.assert_allclose(value, b[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """Seven steps on one device: weights, results and predictions."""
    estimator = made(tmp_path_factory.mktemp("reference")).train(input_fn, steps=7)
    predicted = [p["logits"] for p in estimator.predict(input_fn)]
    return weights(estimator), estimator.evaluate(input_fn), np.stack(predicted)


STRATEGIES: dict[str, Callable[[], px.Strategy]] = {
    "mirrored 4": lambda: mirrored(4),
    "central": lambda: px.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_numbers_do_not_depend_on_the_strategy(
    tmp_path: Path, reference: tuple[Any, Any, Any], kind: str
) -> None:
    estimator = made(tmp_path, STRATEGIES[kind], per_example=kind != "central")
    assert estimator.train(input_fn, steps=7) is estimator
    close(weights(estimator), reference[0])
    assert weights(estimator)["seen"] == 8 + 8 + 6 + 8 + 8 + 6 + 8
    results = estimator.evaluate(input_fn)
    close(results, reference[1])
    assert results["same"] == results["accuracy"] == pytest.approx(results["mean"])
    close({"p": np.stack([p["logits"] for p in estimator.predict(input_fn)])}, {"p": reference[2]})


def test_the_first_batch_may_leave_replicas_empty(tmp_path: Path) -> None:
    def small() -> Any:
        return px.data.Dataset.from_tensor_slices(({"x": X[:5]}, Y[:5])).batch(2).repeat()

    wanted = weights(made(tmp_path / "one").train(small, steps=4))
    close(weights(made(tmp_path / "four", mirrored(4), False).train(small, steps=4)), wanted)


def test_training_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, reference: tuple[Any, Any, Any]
) -> None:
    def rest(mode: str) -> Any:
        return input_fn(mode).skip(4)

    estimator = made(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=2)
    assert estimator.latest_checkpoint() is None
    estimator.train(input_fn, steps=4)
    assert sorted(p.name for p in tmp_path.glob("model.ckpt-*")) == ["model.ckpt-2", "model.ckpt-4"]
    again = made(tmp_path, mirrored(2))  # another process, another strategy
    again.train(rest, max_steps=7)
    close(weights(again), reference[0])
    before = again.latest_checkpoint()
    again.train(input_fn, max_steps=7)  # done already
    assert again.latest_checkpoint() == before
    estimator.train(input_fn, steps=1)  # which has older values in memory
    assert weights(estimator)["global_step"] == 8
    old = estimator.evaluate(input_fn, checkpoint_path=before, name="old")
    assert old["global_step"] == 7
    assert list((tmp_path / "eval_old").glob("events.out.tfevents.*"))
    assert "optimizer/0" in estimator.get_variable_names()


def test_a_run_that_failed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    class Fails(px.estimator.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            raise OSError("no")

    estimator = made(tmp_path)
    with pytest.raises(OSError, match="no"):
        estimator.train(input_fn, [Fails()], steps=5)
    estimator.train(input_fn, steps=2)
    close(weights(estimator), weights(made(tmp_path / "new").train(input_fn, steps=2)))


def test_the_data_may_end_and_a_warm_start(tmp_path: Path) -> None:
    first = made(tmp_path / "a", px.OneDeviceStrategy("CPU:1")).train(lambda: input_fn("eval"))
    assert weights(first)["global_step"] == 3
    config = px.estimator.RunConfig(model_dir=str(tmp_path / "b"))
    params = {"per_example": True, "rate": 0.0}
    second = px.estimator.Estimator(
        model_fn, config=config, params=params, warm_start_from=first.latest_checkpoint()
    )
    second.train(input_fn, steps=1)
    np.testing.assert_array_equal(weights(second)["out/w"], weights(first)["out/w"])
    assert weights(second)["global_step"] == 1


def test_input_functions_of_one_pipeline(tmp_path: Path, reference: tuple[Any, Any, Any]) -> None:
    def per_replica(input_context: px.InputContext) -> Any:
        size = input_context.get_per_replica_batch_size(8)
        return px.data.Dataset.from_tensor_slices(({"x": X}, Y)).batch(size)

    estimator = made(tmp_path, mirrored(2)).train(per_replica, steps=2)
    close(weights(estimator), weights(made(tmp_path / "one").train(input_fn, steps=2)))


def test_predictions_of_batches_and_of_keys(tmp_path: Path) -> None:
    estimator = made(tmp_path).train(input_fn, steps=1)
    rows = list(estimator.predict(input_fn, predict_keys=["class"]))
    assert len(rows) == ROWS
    assert set(rows[0]) == {"class"}
    batches = list(estimator.predict(input_fn, yield_single_examples=False))
    assert [len(b["class"]) for b in batches] == [8, 8, 6]
    with pytest.raises(ValueError, match="predict_keys"):
        next(estimator.predict(input_fn, predict_keys=["nothing"]))


def test_hooks_see_every_step_and_may_stop(tmp_path: Path, caplog: Any) -> None:
    called: list[str] = []

    class Watch(px.estimator.SessionRunHook):
        def begin(self) -> None:
            called.append("begin")

        def after_create_session(self, session: Any, coord: Any) -> None:
            called.append(f"at {session.global_step}")

        def before_run(self, run_context: Any) -> None:
            called.append("before")

        def after_run(self, run_context: Any, run_values: Any) -> None:
            assert np.isfinite(float(run_values.results["loss"]))
            called.append(f"after {run_values.results['global_step']}")

        def end(self, session: Any) -> None:
            called.append(f"seen {session.variable_value('seen')}")

    estimator = made(tmp_path, log_step_count_steps=1, save_summary_steps=1)
    counter = px.estimator.StepCounterHook(every_n_steps=2)
    hooks = [
        Watch(),
        px.estimator.StopAtStepHook(num_steps=2),
        px.estimator.LoggingTensorHook({"b": "hidden/bias"}, every_n_iter=5, at_end=True),
        px.estimator.NanTensorHook(),
        counter,
        px.estimator.CheckpointSaverHook(save_steps=1),
    ]
    with caplog.at_level("INFO", logger="phalanx"):
        estimator.train(input_fn, hooks)
    assert called == ["begin", "at 0", "before", "after 1", "before", "after 2", "seen 16.0"]
    assert "b = [" in caplog.text
    assert "loss = " in caplog.text
    assert counter.steps_per_second
    assert sorted(p.name for p in tmp_path.glob("model.ckpt-*")) == ["model.ckpt-1", "model.ckpt-2"]
    (events,) = tmp_path.glob("events.out.tfevents.*")
    assert b"loss" in events.read_bytes()
    estimator.train(input_fn, [px.estimator.StopAtStepHook(last_step=3)])
    assert weights(estimator)["global_step"] == 3


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    def nan_fn(features: Any, labels: Any, mode: str) -> Any:
        w = px.estimator.get_variable("w", ())
        loss = w + jnp.nan
        return px.estimator.EstimatorSpec(mode, loss=loss, train_op=optax.sgd(0.1))

    estimator = px.estimator.Estimator(nan_fn, str(tmp_path))
    with pytest.raises(px.errors.DataLossError, match="not a number at step 1"):
        estimator.train(input_fn, [px.estimator.NanTensorHook()], steps=2)
    hook = px.estimator.NanTensorHook(fail_on_nan_loss=False)
    assert int(estimator.train(input_fn, [hook], steps=2).get_variable_value("global_step")) == 1


def test_train_and_evaluate_in_one_process(tmp_path: Path) -> None:
    evaluated: list[int] = []

    class Note(px.estimator.SessionRunHook):
        def end(self, session: Any) -> None:
            evaluated.append(session.global_step)

    estimator = made(tmp_path, mirrored(2), save_checkpoints_steps=2)
    results = px.estimator.train_and_evaluate(
        estimator,
        px.estimator.TrainSpec(input_fn, max_steps=5),
        px.estimator.EvalSpec(input_fn, None, "x", [Note()], start_delay_secs=0, throttle_secs=0),
    )
    assert evaluated == [2, 4, 5]
    assert results is not None
    close(results, estimator.evaluate(input_fn))
    throttled = px.estimator.EvalSpec(input_fn, hooks=[Note()])
    px.estimator.train_and_evaluate(estimator, px.estimator.TrainSpec(input_fn, max_steps=9), throttled)
    assert evaluated == [2, 4, 5, 9]


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    estimator = made(tmp_path)
    with pytest.raises(px.errors.NotFoundError, match="train first"):
        estimator.evaluate(input_fn)
    with pytest.raises(ValueError, match="steps or max_steps"):
        estimator.train(input_fn, steps=1, max_steps=1)
    with pytest.raises(ValueError, match="gives no batch"):
        estimator.train(lambda: px.data.Dataset.range(0).batch(1), steps=1)
    with pytest.raises(TypeError, match="dataset of batches"):
        estimator.train(lambda: (X, Y), steps=1)
    with pytest.raises(TypeError, match="first dimension"):
        px.estimator.Estimator(_linear, str(tmp_path)).train(
            lambda: px.data.Dataset.range(3).map(float), steps=1
        )
    with pytest.raises(px.errors.ContextError, match="in a model_fn"):
        px.estimator.get_variable("w", ())
    with pytest.raises(TypeError, match="train_op"):
        px.estimator.EstimatorSpec("train", loss=1.0, train_op=1)
    with pytest.raises(ValueError, match="needs loss and train_op"):
        px.estimator.EstimatorSpec("train")
    with pytest.raises(ValueError, match="different folders"):
        px.estimator.Estimator(_linear, "a", px.estimator.RunConfig("b"))
    with pytest.raises(TypeError, match="model_fn must return"):
        px.estimator.Estimator(lambda features, labels: 1, str(tmp_path)).train(input_fn, steps=1)
    with pytest.raises(ValueError, match="no argument `labels`"):
        px.estimator.Estimator(lambda features: 1, str(tmp_path)).train(input_fn, steps=1)


def _linear(features: Any, labels: Any, mode: str) -> Any:
    w = px.estimator.get_variable("w", ())
    return px.estimator.EstimatorSpec(mode, loss=w * features, train_op=optax.sgd(0.1))
