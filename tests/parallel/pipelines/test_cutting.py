"""Functions cut into stages, and the search for the best cuts."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from tests.parallel import gpt
from tests.parallel.pipelines import models
from tests.parallel.pipelines.test_pipelining import DEVICES, assert_close

import phalanx as px
from phalanx.errors import InvalidValueError, ResourceExhaustedError
from phalanx.parallel.pipelines.cut_search import (
    StageCosts,
    best_cuts,
    candidate,
    search_pipeline,
    stage_costs,
)
from phalanx.parallel.pipelines.cutting import cut_function, flattened
from phalanx.parallel.pipelines.named_schedules import schedule
from phalanx.parallel.pipelines.pipelining import pipeline
from phalanx.parallel.searching import searched_hardware


def mlp(params: Any, x: Any, target: Any) -> Any:
    mask = jnp.arange(x.shape[1]) > 0  # which no stage hands over
    for p in params:
        w = p["w"].astype("float32")  # nor casts of parameters
        x = jax.nn.relu(jnp.where(mask, x, 0.0) @ w) + x
    return jnp.mean((x - target) ** 2)


def arguments(layers: int, rows: int = 8) -> tuple[Any, Any]:
    r = np.random.default_rng(0)
    params = [{"w": jnp.asarray(r.normal(size=(8, 8)) / 3, jnp.float32)} for _ in range(layers)]
    return params, tuple(np.asarray(r.normal(size=(rows, 8)), "float32") for _ in range(2))


def test_cuts_are_where_one_tensor_goes_on() -> None:
    params, batch = arguments(3)
    flat = flattened(mlp, params, batch)
    shapes = [v.aval.shape for v in flat.crossing]
    assert len(flat.cuts) >= 3
    assert (8, 8) in shapes
    residual = [i for i, e in enumerate(flat.equations) if e.primitive.name == "dot_general"]
    assert not set(residual[1:]) & set(flat.cuts)  # x goes on beside the product


@pytest.mark.parametrize("rows", [8, 7])
def test_a_function_in_stages_has_the_same_gradients(rows: int) -> None:
    params, batch = arguments(4, rows)
    micro = tuple(x[:2] for x in batch)
    flat = flattened(mlp, params, micro)
    adds = [i for i in flat.cuts if flat.equations[i].primitive.name == "add"]
    cut = cut_function(mlp, params, micro, adds[1:3])
    assert [len(p) for p in cut.split(params)] == [2, 1, 1]
    pipe = pipeline(cut.stages, "1f1b", 4, shared=cut.shared, devices=DEVICES[:3])
    value, gradients = pipe.value_and_grad(pipe.place(cut.split(params)), *batch)
    expected = jax.value_and_grad(mlp)(params, *batch)
    assert_close((value, cut.joined(gradients)), expected)


def test_tied_parameters_of_a_function_are_shared() -> None:
    model = models.language(3)
    batch = model.batch(4)
    flat = flattened(model.whole, model.params, batch)
    hidden = (4, models.LENGTH, models.WIDTH)
    place = next(c for c, v in zip(flat.cuts, flat.crossing, strict=True) if v.aval.shape == hidden)
    cut = cut_function(model.whole, model.params, batch, [place])
    assert cut.shared == {"0/embedding": (0, 1)}
    pipe = pipeline(cut.stages, "gpipe", 1, shared=cut.shared, devices=DEVICES[:2])
    value, gradients = pipe.value_and_grad(pipe.place(cut.split(model.params)), *batch)
    assert_close((value, cut.joined(gradients)), jax.value_and_grad(model.whole)(model.params, *batch))


def test_wrong_cuts_are_refused() -> None:
    params, batch = arguments(2)
    flat = flattened(mlp, params, batch)
    wrong = next(i for i in range(len(flat.equations)) if i not in flat.cuts)
    with pytest.raises(InvalidValueError, match="can be cut after the equations"):
        cut_function(mlp, params, batch, [wrong])
    with pytest.raises(InvalidValueError, match="returns one number"):
        flattened(lambda p, x: (x, x), params, batch[:1])


costs = st.lists(st.integers(1, 9), min_size=4, max_size=8)


@given(costs, st.sampled_from(["1f1b", "gpipe", "interleaved"]), st.integers(2, 5), st.integers(0, 3))
def test_the_best_cut_is_that_of_all(
    seconds: list[int], name: str, micro_batches: int, transfer: int
) -> None:
    made = schedule(name, 2, micro_batches)
    count = len(seconds)
    transfers = tuple(float((i * 7) % 3 * transfer) / 10 for i in range(count - 1))
    zeros = (0.0,) * count
    known = StageCosts(tuple(range(count - 1)), tuple(map(float, seconds)), zeros, zeros, transfers)
    every = itertools.combinations(known.cuts, made.positions - 1)
    best = min(candidate(known, made, cuts).seconds for cuts in every)
    all_of_them, proposed = (best_cuts(known, made, float("inf"), most) for most in (300, 0))
    assert all_of_them is not None
    assert all_of_them.seconds == best
    assert proposed is not None
    assert proposed.seconds <= best * 1.2


def uneven(params: Any, x: Any, target: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - target) ** 2)


def uneven_arguments(layers: int) -> tuple[Any, Any]:
    widths = [64, 256, 32, 128, 128, 16, 64, 192, 64][: layers + 1]
    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in itertools.pairwise(widths)]
    return params, tuple(jax.ShapeDtypeStruct((256, n), "float32") for n in (64, widths[-1]))


def small_gpt() -> tuple[Any, Any, Any]:
    params, *batch = gpt.arguments(blocks=2, width=32, vocabulary=64, batch=16, length=8)
    return gpt.loss_of(2), params, tuple(batch)


def best_of_all(function: Any, params: Any, batch: Any, plan: Any, name: str) -> float:
    """The least latency of all cuts, each timed by itself."""
    count = plan.pipeline.micro_batches
    made = schedule(name, plan.pipeline.stages, count)
    micro = tuple(jax.ShapeDtypeStruct((x.shape[0] // count, *x.shape[1:]), x.dtype) for x in batch)
    flat = flattened(function, params, micro)
    known = stage_costs(flat, plan, searched_hardware("CPU"), 2.0)
    every = itertools.combinations(known.cuts, made.positions - 1)
    return min(candidate(known, made, cuts).seconds for cuts in every)


@pytest.mark.parametrize(
    ("model", "name", "stages"),
    [("mlp", "1f1b", 4), ("mlp", "interleaved", 2), ("gpt", "zero_bubble_v", 2), ("gpt", "gpipe", 2)],
)
def test_models_are_cut_where_it_is_best_of_all(model: str, name: str, stages: int) -> None:
    function, params, batch = (uneven, *uneven_arguments(8)) if model == "mlp" else small_gpt()
    plan = search_pipeline(
        function, params, batch, stages, "CPU", micro_batches=8, stages=stages, schedules=[name]
    )
    assert plan.pipeline is not None
    assert plan.pipeline.seconds == best_of_all(function, params, batch, plan, name)


def test_stages_and_schedules_are_the_best_of_all() -> None:
    params, batch = uneven_arguments(4)

    def plan(stages: Any, names: Any) -> Any:
        given = {"micro_batches": 4, "stages": stages, "schedules": names}
        return search_pipeline(uneven, params, batch, 2, "CPU", **given)

    names = ["1f1b", "gpipe", "interleaved"]
    best, *every = plan(None, names), plan(1, ["1f1b"]), *(plan(2, [name]) for name in names)
    for found in every:
        name = found.pipeline.schedule
        assert found.pipeline.seconds == best_of_all(uneven, params, batch, found, name)
    assert best.pipeline.seconds == min(found.pipeline.seconds for found in every)


def test_memory_moves_cuts_and_is_never_exceeded() -> None:
    made = schedule("1f1b", 2, 4)  # the first stage holds two micro batches, the last one
    known = StageCosts((0, 1, 2), (1.0,) * 4, (10.0,) * 4, (0.0,) * 4, (0.0,) * 3)
    free, tight = best_cuts(known, made, 1e9), best_cuts(known, made, 30)
    assert free is not None
    assert (free.cuts, free.memory) == ((1,), (40.0, 20.0))
    assert tight is not None
    assert (tight.cuts, tight.memory) == ((0,), (20.0, 30.0))
    assert best_cuts(known, made, 15) is None


def test_a_searched_pipeline_runs_and_is_part_of_the_plan(tmp_path: Any) -> None:
    params, batch = arguments(4)
    plan = search_pipeline(
        mlp, params, batch, 2, "CPU", micro_batches=4, stages=2, schedules=["1f1b", "gpipe"]
    )
    found = plan.pipeline
    assert found is not None
    assert (found.stages, found.micro_batches, len(found.parts)) == (2, 4, 2)
    assert sorted(n for part in found.parts for n in part.parameters) == [f"{i}/w" for i in range(4)]
    assert "Pipeline of 2 stages, " in str(plan)
    assert "next best: 2 stages, " in str(plan)
    assert "Pipeline of 2 stages" in plan.to_html()
    assert f"<title>stage 0: F0, 0 to {found.picture.split('F0, 0 to ')[1][:4]}" in plan.to_html()
    plan.save(tmp_path / "plan.json")
    assert px.parallel.Plan.load(tmp_path / "plan.json") == plan
    micro = tuple(x[:2] for x in batch)
    cut = cut_function(mlp, params, micro, found.cuts)
    pipe = pipeline(cut.stages, found.schedule, 4, shared=cut.shared, devices=DEVICES[:2])
    value, _ = pipe.value_and_grad(pipe.place(cut.split(params)), *batch)
    np.testing.assert_allclose(value, mlp(params, *batch), rtol=1e-5)


def test_actions_cost_what_their_equations_do() -> None:
    params, batch = arguments(2)
    plan = search_pipeline(mlp, params, batch, 1, "CPU", micro_batches=1, stages=1)
    flat = flattened(mlp, params, batch)
    known = stage_costs(flat, plan, searched_hardware("CPU"), 2.0)
    products = [i for i, e in enumerate(flat.equations) if e.primitive.name == "dot_general"]
    first, second = (known.shares[i] for i in products)
    assert first == pytest.approx((1 / 2, 0, 1 / 2))  # the batch has no gradient
    assert second == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    costs = known.actions(())
    assert sum(costs.forward + costs.input + costs.weight) == pytest.approx(sum(known.seconds))  # type: ignore[operator]


def test_a_pipeline_that_does_not_fit_is_refused() -> None:
    params, batch = arguments(2)
    with pytest.raises(ResourceExhaustedError, match="No pipeline of 2 stages fits"):
        search_pipeline(mlp, params, batch, 2, "CPU", stages=2, memory=10)
    with pytest.raises(InvalidValueError, match="must divide the 2 devices"):
        search_pipeline(mlp, params, batch, 2, "CPU", stages=3)
