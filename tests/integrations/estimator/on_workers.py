"""A program for `phalanx run`: an estimator trains on workers, with or without parameter servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import phalanx as px
from tests.integrations.estimator.cases import input_fn, made, model_fn, weights


def synchronous(folder: Path) -> None:
    """Workers train together; an evaluator follows."""
    estimator = made(folder, px.MultiWorkerMirroredStrategy, save_checkpoints_secs=1e-4)
    results = px.estimator.train_and_evaluate(
        estimator,
        px.estimator.TrainSpec(input_fn, max_steps=7),
        px.estimator.EvalSpec(input_fn, steps=None),
    )
    if estimator.config.task_type == "evaluator":
        assert results is not None
        print(f"loss {results['loss']:.6f} at {results['global_step']}", flush=True)
        return
    assert results is None
    assert weights(estimator)["global_step"] == 7
    estimator.train(input_fn, steps=1)  # a second time, with the same processes
    loss = estimator.evaluate(input_fn)["loss"]  # together

    class Stops(px.estimator.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            run_context.request_stop()

    before = weights(estimator)["global_step"]
    hooks = [] if estimator.config.is_chief else [Stops()]  # one worker asks, and all stop
    estimator.train(input_fn, hooks, steps=50)
    assert weights(estimator)["global_step"] == before + 1
    saved = sorted(path.name for path in folder.glob("model.ckpt-*"))
    print(f"chief {estimator.config.is_chief}, loss {loss:.6f}, {saved}", flush=True)


def asynchronous(folder: Path) -> None:
    """Workers train at their own pace on the variables of parameter servers."""
    config = px.estimator.RunConfig(
        train_distribute=px.experimental.ParameterServerStrategy,
        save_checkpoints_steps=20,
        tf_random_seed=3,
    )
    params = {"per_example": True, "rate": 0.05}
    estimator = px.estimator.Estimator(model_fn, str(folder), config, params)
    specs = px.estimator.TrainSpec(input_fn, max_steps=60), px.estimator.EvalSpec(input_fn)
    results = px.estimator.train_and_evaluate(estimator, *specs)
    if config.task_type == "evaluator":
        assert results is not None
        print(f"evaluated {results['global_step'] >= 60}, {results['loss'] < 0.4}", flush=True)
        return
    assert results is None
    if config.is_chief:
        results = estimator.evaluate(input_fn)
        assert results["global_step"] >= 60, results
        assert results["loss"] < 0.4, results
        print(f"trained {results['accuracy'] > 0.8}", flush=True)


if __name__ == "__main__":
    {"synchronous": synchronous, "asynchronous": asynchronous}[sys.argv[1]](Path(sys.argv[2]))
