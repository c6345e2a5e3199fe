"""MindSpore's cells and options of pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.parallel.pipelines import models
from tests.parallel.pipelines.test_pipelining import DEVICES, assert_close

import phalanx as px
from phalanx.errors import InvalidKeyError, InvalidOptionsError, InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.cells import (
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    PipelineCell,
    PipelineGradReducer,
)
from phalanx.parallel.pipelines.stages import Stage


@pytest.fixture(autouse=True)
def _fresh_context() -> Iterator[None]:
    px.reset_auto_parallel_context()
    yield
    px.reset_auto_parallel_context()


def error(p: Any, x: Any, target: Any) -> Any:
    return models.mse(models.layer(p, x), target)


NET = {"a": models.layer, "b": models.layer, "c": models.layer, "d": error}
PARAMS = dict(zip(NET, models.equal(4).params, strict=True))
BATCH = models.equal(4).batch(8)


def whole(params: Any, x: Any, target: Any) -> Any:
    for name in "abc":
        x = models.layer(params[name], x)
    return error(params["d"], x, target)


def expected() -> Any:
    return jax.value_and_grad(whole)(PARAMS, *BATCH)


def stages(count: int = 2, **more: Any) -> None:
    px.set_auto_parallel_context(parallel_mode="semi_auto_parallel", pipeline_stages=count, **more)


def config(scheduler: str) -> dict[str, Any]:
    return {"pipeline_interleave": True, "pipeline_scheduler": scheduler}


def test_layers_are_cut_by_name() -> None:
    stages()
    cell = PipelineCell(NET, 2, {"a": 0, "b": 1}, devices=DEVICES[:2])
    assert_close(cell.value_and_grad(PARAMS, *BATCH), expected())
    assert cell.pipelined.schedule.name == "1f1b"
    assert float(cell(PARAMS, *BATCH)) == pytest.approx(float(expected()[0]), rel=1e-5)
    placed = cell.place(PARAMS, *BATCH)
    assert [next(iter(placed[n]["w"].devices())).id for n in NET] == [0, 1, 1, 1]


@pytest.mark.parametrize("scheduler", ["1f1b", "zero_bubble_v"])
def test_segments_are_chunks(scheduler: str) -> None:
    stages(pipeline_segments=2, pipeline_config=config(scheduler))
    where = (
        {"a": 0, "b": 1, "c": 0, "d": 1} if scheduler == "1f1b" else {"a": 0, "b": 1, "c": 1, "d": 0}
    )
    cell = Pipeline(NET, 2, where, {"a": 0, "c": 1}, devices=DEVICES[:2])
    assert_close(cell.value_and_grad(PARAMS, *BATCH), expected())
    made = cell.pipelined.schedule
    assert (made.name, made.chunks) == ("interleaved" if scheduler == "1f1b" else scheduler, 2)


def test_layers_that_carry_are_run_on_slices() -> None:
    model = models.attention(2)
    carrying = Stage(models.attend_on, carries=True)
    net = {"a": carrying, "b": carrying, "loss": lambda _, y, target: models.mse(y, target)}
    params = {"a": model.params[0], "b": model.params[1], "loss": {}}
    stages(pipeline_config=config("seqpipe"))
    cell = PipelineCell(net, 2, {"a": 0, "b": 1}, slices=2, devices=DEVICES[:2])
    value, gradients = cell.value_and_grad(params, *model.batch(4))
    wanted = jax.jit(jax.value_and_grad(model.whole))(model.params, *model.batch(4))
    assert_close((value, [gradients["a"], gradients["b"]]), tuple(wanted))
    assert cell.pipelined.schedule.slices == 2
    with pytest.raises(InvalidValueError, match="slices need layers by name"):
        PipelineCell(whole, 2, slices=2, devices=DEVICES[:2])(PARAMS, *BATCH)


def test_attributes_of_layers_say_stages_and_results_are_broadcast() -> None:
    def second(p: Any, x: Any) -> Any:
        return models.layer(p, x)

    second.pipeline_stage = 1  # type: ignore[attr-defined]
    stages(pipeline_result_broadcast=True)
    cell = PipelineCell({"a": models.layer, "b": second}, 2, devices=DEVICES[:2])
    params = {n: PARAMS[n] for n in "ab"}
    copies = cell.predict(params, BATCH[0])
    wanted = models.layer(params["b"], models.layer(params["a"], BATCH[0]))
    assert [next(iter(x.devices())).id for x in copies] == [0, 1]
    np.testing.assert_allclose(copies[0], wanted, rtol=1e-5)


def test_functions_are_cut_automatically() -> None:
    stages(2, device_num=2)
    cell = PipelineCell(whole, 4)
    assert_close(cell.value_and_grad(PARAMS, *BATCH), expected())
    assert cell.plan is not None
    assert cell.plan.pipeline is not None
    assert cell.plan.pipeline.stages == 2


def test_the_number_of_stages_is_chosen_if_asked_for() -> None:
    px.set_auto_parallel_context(
        parallel_mode="auto_parallel",
        search_mode="recursive_programming",
        auto_pipeline=True,
        pipeline_stages=2,
    )
    cell = PipelineCell(NET, 2, devices=DEVICES[:2])
    assert_close(cell.value_and_grad(PARAMS, *BATCH), expected())
    assert cell.pipelined.schedule.stages in (1, 2)
    assert "next best" in str(cell.plan)


def test_auto_parallel_has_stages_of_its_own() -> None:
    cell = PipelineCell(NET, 2, {"a": 0, "c": 1}, devices=DEVICES[:2])
    target = px.parallel.AutoParallel(cell)
    target.pipeline(2, interleave=True, scheduler="gpipe")
    assert_close(target.value_and_grad(PARAMS, *BATCH), expected())
    assert cell.pipelined.schedule.name == "gpipe"
    assert px.get_auto_parallel_context("pipeline_stages") == 1


def test_parts_of_batches_give_the_same_loss() -> None:
    batch = tuple(x[:7] for x in BATCH)
    wanted = jax.value_and_grad(whole)(PARAMS, *batch)
    accumulated = GradAccumulation(whole, 3)
    assert_close(accumulated.value_and_grad(PARAMS, *batch), wanted)
    assert float(accumulated(PARAMS, *batch)) == pytest.approx(float(wanted[0]), rel=1e-5)
    interleaved = MicroBatchInterleaved(whole, 3)
    assert_close(jax.jit(jax.value_and_grad(interleaved))(PARAMS, *batch), wanted)


def test_gradients_are_divided_by_the_scale_of_the_loss() -> None:
    with pytest.raises(InvalidOptionsError, match="stand_alone can not use PipelineGradReducer"):
        PipelineGradReducer([])
    stages()
    assert PipelineGradReducer([], 2.0)({"w": jnp.float32(4)}) == {"w": jnp.float32(2)}


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (
            lambda: PipelineCell(NET, "2"),
            InvalidTypeError,
            "For 'PipelineCell', the argument 'micro_size' must be integer, but got the type : <class",
        ),
        (
            lambda: Pipeline(NET, 0),
            InvalidValueError,
            "For 'Pipeline', the argument 'micro_size' must be large than 0, but got 0.",
        ),
        (
            lambda: PipelineCell(3, 2),
            InvalidTypeError,
            "For 'PipelineCell', the argument 'network' must cell type, but got the type : <class",
        ),
        (
            lambda: PipelineCell(NET, 2, {"z": 0}),
            InvalidKeyError,
            "the argument 'stage_config' : {'z': 0} is not found in 'network' : ['a', 'b', 'c', 'd']",
        ),
        (
            lambda: MicroBatchInterleaved(whole, 1.5),
            InvalidTypeError,
            "For 'MicroBatchInterleaved', the argument 'interleave_num' must be integer, but got the",
        ),
        (
            lambda: GradAccumulation(whole, -1),
            InvalidValueError,
            "For 'GradAccumulation', the argument 'micro_size' must be large than 0, but got -1.",
        ),
    ],
)
def test_wrong_arguments_have_the_texts_of_mindspore(make: Any, kind: type, text: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert text in str(caught.value)


def test_options_that_do_not_fit_are_refused() -> None:
    cell = PipelineCell(NET, 2, {"a": 0, "b": 1}, devices=DEVICES[:2])
    px.set_auto_parallel_context(parallel_mode="data_parallel", pipeline_stages=2)
    with pytest.raises(InvalidOptionsError, match="To enable the pipeline parallel"):
        cell(PARAMS, *BATCH)
    stages(4)
    with pytest.raises(InvalidOptionsError, match="cannot be divided by pipeline_stages=4"):
        cell(PARAMS, *BATCH)
    with pytest.raises(InvalidValueError, match="as many micro batches as stages"):
        PipelineCell(NET, 2, {"a": 0, "b": 1}, devices=DEVICES)(PARAMS, *BATCH)
    stages(2)
    for where, text in (({"a": 1, "b": 0}, "order of the model"), ({"a": 0}, "none for stage 1")):
        with pytest.raises(InvalidValueError, match=text):
            PipelineCell(NET, 2, where, devices=DEVICES[:2])(PARAMS, *BATCH)
    with pytest.raises(InvalidValueError, match="There are 2 stages"):
        PipelineCell(NET, 2, {"a": 2}, devices=DEVICES[:2])(PARAMS, *BATCH)
