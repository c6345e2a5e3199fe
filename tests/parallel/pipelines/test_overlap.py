"""Activations travel while others are computed, and none is waited for before it is needed."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tests.parallel.pipelines import models
from tests.parallel.pipelines.test_pipelining import DEVICES

from phalanx.parallel.pipelines.pipelining import pipeline
from phalanx.parallel.pipelines.schedule import PipelineAction
from phalanx.parallel.pipelines.stage_steps import StageStep
from phalanx.parallel.pipelines.stages import StagePlace


def test_a_step_is_under_way_before_its_first_action_has_ended(monkeypatch: Any) -> None:
    """All copies between devices are begun while the first micro batch is still computed."""
    order: list[str] = []
    perform, put = StageStep.perform, StagePlace.put_rows

    def performed(step: StageStep, action: PipelineAction) -> None:
        order.append(f"{action} of {step._stage}")
        perform(step, action)

    def copied(place: StagePlace, nest: Any) -> Any:
        if any(isinstance(x, jax.Array) for x in jax.tree.leaves(nest)):  # no part of the batch
            order.append("copy")
        return put(place, nest)

    def slow(p: Any, x: Any) -> Any:
        turns, x = x
        # JAX runs cheap programs in the thread of the caller; products of matrices are not cheap.
        spent = jax.lax.fori_loop(0, turns[0], lambda _, y: y @ y / 256, jnp.ones((256, 256)))
        return models.layer(p, x + 0 * jax.lax.stop_gradient(spent[0, 0]))

    model = models.equal(2)
    x, target = model.batch(4)
    pipe = pipeline([slow, models.layer], "1f1b", 2, loss=models.mse, devices=DEVICES[:2])
    params = pipe.place(model.params)

    def value(turns: int) -> Any:
        given = np.full(4, turns, np.int32), x
        return pipe.value_and_grad(params, given, target)[0]

    value(1).block_until_ready()  # compiles
    monkeypatch.setattr(StageStep, "perform", performed)
    monkeypatch.setattr(StagePlace, "put_rows", copied)
    for attempt in range(6):  # a busy machine may let this thread wait
        order.clear()
        found = value(20 << 2 * attempt)
        if not found.is_ready():
            break
    else:
        raise AssertionError("each step had ended before all of it was begun")
    wanted = []  # each copy begins when what it copies was started, not when it is needed
    for stage, action in pipe.schedule.issue_order:
        wanted += [f"{action} of {stage}", *["copy"] * ((stage, action.kind) in ((0, "F"), (1, "B")))]
    assert order == wanted
    np.testing.assert_allclose(found, model.whole(model.params, x, target), rtol=1e-5)


def test_a_micro_batch_reaches_the_next_stage_while_another_is_computed() -> None:
    """Stage 0 ends micro batch 1 only after stage 1 has begun 0."""
    began = threading.Event()
    came: list[bool] = []

    def first(x: Any) -> Any:
        came.append(not came or began.wait(60))
        return x

    def last(x: Any) -> Any:
        began.set()
        return x

    def stage(callback: Any) -> Any:
        @jax.custom_jvp
        def through(x: Any) -> Any:
            return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        through.defjvp(lambda xs, dots: (through(*xs), *dots))
        return lambda p, x: models.layer(p, through(x))

    model = models.equal(2)
    pipe = pipeline([stage(first), stage(last)], "gpipe", 2, loss=models.mse, devices=DEVICES[:2])
    batch = model.batch(4)
    (value, _), timeline = pipe.recorded(pipe.place(model.params), *batch)
    assert came == [True, True]
    np.testing.assert_allclose(value, model.whole(model.params, *batch), rtol=1e-5)
    spans = {(t.stage, str(t.action)): t for t in timeline.actions}
    assert spans[1, "F0"].start < spans[0, "F1"].end
