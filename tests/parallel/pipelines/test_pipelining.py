"""Models in stages compute what they compute whole."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec as P
from tests.parallel.pipelines import models
from tests.parallel.pipelines.models import Model

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.named_schedules import SCHEDULES
from phalanx.parallel.pipelines.pipelined import Pipelined
from phalanx.parallel.pipelines.pipelining import pipeline
from phalanx.parallel.pipelines.schedule import PipelineAction, PipelineSchedule
from phalanx.parallel.pipelines.stages import Stage, balanced, split
from phalanx.runtime import compat

DEVICES = [f"CPU:{i}" for i in range(4)]


def piped(model: Model, stages: int, schedule: Any, micro_batches: int, **options: Any) -> Pipelined:
    return pipeline(
        model.parts,
        schedule,
        micro_batches,
        loss=model.loss,
        shared=model.shared,
        devices=DEVICES[:stages],
        **options,
    )


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            np.asarray(one, "float32"), np.asarray(other, "float32"), rtol=tolerance, atol=tolerance
        )


def assert_like_whole(model: Model, pipe: Pipelined, rows: int, tolerance: float = 1e-5) -> None:
    batch = model.batch(rows)
    found = pipe.value_and_grad(pipe.place(model.params), *batch)
    expected = jax.jit(jax.value_and_grad(model.whole))(model.params, *batch)
    assert_close(found, tuple(expected), tolerance)


THIN = [
    ("gpipe", 2, 2, 1),
    ("1f1b", 4, 5, 1),
    ("interleaved", 2, 4, 2),
    ("zero_bubble_v", 2, 3, 2),
    ("seqpipe", 2, 3, 2),
    ("seqvpp", 2, 4, 2),
    ("seqsmartvpp", 2, 4, 2),
]
FULL = [
    (name, stages, micro_batches, chunks)
    for name, stages, micro_batches, chunks in itertools.product(SCHEDULES, (2, 4), range(2, 9), (1, 2))
    if not (name == "interleaved" and chunks == 1)
    and not (name in ("seqvpp", "seqsmartvpp") and (chunks == 1 or micro_batches < stages))
    and not (name == "zero_bubble_v" and chunks == 1)
]


def assert_peak(pipe: Pipelined) -> None:
    each = -(-8 // pipe.schedule.micro_batches)
    if -(-8 // each) == pipe.schedule.micro_batches:  # no micro batch of 8 rows is empty
        assert pipe.peak_live == pipe.schedule.peak_live


@pytest.mark.parametrize(("name", "stages", "micro_batches", "chunks"), THIN)
def test_gradients_are_those_of_the_whole_model(
    name: str, stages: int, micro_batches: int, chunks: int
) -> None:
    parts = stages * chunks
    model = models.language(parts) if parts > 2 else models.equal(parts)
    pipe = piped(model, stages, name, micro_batches, chunks=chunks)
    assert_like_whole(model, pipe, 8)
    assert_peak(pipe)


@functools.cache
def whole_steps(kind: str, parts: int) -> tuple[Model, Any, list[float], Any]:
    """A model, its first gradients on one device, its losses in 20 steps, and its last parameters."""
    model = KINDS[kind](parts)
    losses, params = model.trained(optax.adam(1e-2), rows=8, steps=20)
    gradients = jax.jit(jax.grad(model.whole))(model.params, *model.batch(8))
    return model, gradients, losses, params


@functools.cache
def programs(kind: str, stages: int, chunks: int, placement: Any, splits: bool) -> dict[str, Any]:
    """The programs of chunks and of updates, which all schedules with the same places have alike."""
    return {}


KINDS: dict[str, Callable[[int], Model]] = {
    "equal": models.equal,
    "tied": models.language,
    "heterogeneous": lambda parts: models.language(parts, tied=False),
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "stages", "micro_batches", "chunks"), FULL)
def test_twenty_steps_are_those_of_the_whole_model_in_all_cases(
    name: str, stages: int, micro_batches: int, chunks: int, kind: str
) -> None:
    model, wanted, losses, whole = whole_steps(kind, stages * chunks)
    pipe = piped(model, stages, name, micro_batches, chunks=chunks)
    made = programs(kind, stages, chunks, pipe.schedule.placement, pipe.schedule.splits_backward)
    pipe._maker.made = made.setdefault("chunks", pipe._maker.made)
    optimizer = made.setdefault("optimizer", pipe.optimizer(optax.adam(1e-2), donate=True))
    params = pipe.place(jax.tree.map(np.asarray, model.params))
    state = optimizer.init(params)
    for i, expected in enumerate(losses):
        value, gradients = pipe.value_and_grad(params, *model.batch(8 - i % 2))
        if i == 0:
            assert_close(gradients, wanted)
            assert_peak(pipe)
        params, state = optimizer.update(gradients, state, params)
        np.testing.assert_allclose(value, expected, rtol=1e-4)
    assert_close(params, whole, 1e-3)


@st.composite
def valid_schedules(draw: Any) -> PipelineSchedule:
    """Any order in which stages can do all there is to do."""
    stages, micro_batches, chunks = draw(st.integers(1, 2)), draw(st.integers(1, 3)), 1
    if stages == 2:
        chunks = draw(st.integers(1, 2))
    loop = [p % stages for p in range(stages * chunks)]
    placement = draw(st.permutations(loop))
    splits, rng = draw(st.booleans()), draw(st.randoms(use_true_random=False))
    homes = [[p for p, at in enumerate(placement) if at == stage] for stage in range(stages)]
    kinds = "FBW" if splits else "FB"
    left = [(k, m, p) for k in kinds for m in range(micro_batches) for p in range(len(placement))]
    done: set[Any] = set()

    def is_ready(kind: str, micro: int, position: int) -> bool:
        if kind == "W":
            return ("B", micro, position) in done
        if kind == "F":
            return position == 0 or ("F", micro, position - 1) in done
        after = position + 1 == len(placement) or ("B", micro, position + 1) in done
        return after and ("F", micro, position) in done

    orders: list[list[PipelineAction]] = [[] for _ in range(stages)]
    while left:
        chosen = rng.choice([x for x in left if is_ready(*x)])
        left.remove(chosen)
        done.add(chosen)
        kind, micro, position = chosen
        stage = placement[position]
        orders[stage].append(PipelineAction(kind, micro, homes[stage].index(position)))
    return PipelineSchedule("random", orders, micro_batches, chunks, 1, placement)


def check_random(made: PipelineSchedule, rows: int, seed: int) -> None:
    model = models.mixed(made.positions, seed)
    pipe = piped(model, made.stages, made, made.micro_batches, chunks=made.chunks)
    assert_like_whole(model, pipe, rows)
    if all(-(-rows // made.micro_batches) * i < rows for i in range(made.micro_batches)):
        assert pipe.peak_live == made.peak_live


@given(valid_schedules(), st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=3)
def test_random_schedules_of_random_models_are_exact(
    made: PipelineSchedule, rows: int, seed: int
) -> None:
    check_random(made, rows, seed)


@pytest.mark.soak
@given(valid_schedules(), st.integers(1, 7), st.integers(0, 99))
@settings(max_examples=40)
def test_many_random_schedules_of_random_models_are_exact(
    made: PipelineSchedule, rows: int, seed: int
) -> None:
    check_random(made, rows, seed)


def test_loops_give_gradients_of_weights_apart() -> None:
    model = models.loops(4)
    pipe = piped(model, 2, "zero_bubble_v", 2)
    assert_like_whole(model, pipe, 4)
    made = [r for r in pipe._maker.made.values() if r.chunk.position]  # the first has no input
    programs = [p for r in made for p in r._programs.values()]
    counts = [tuple(_products(half.jaxpr) for half in p.halves[:2]) for p in programs]
    assert set(counts) == {(1, 1)}


def _products(jaxpr: Any) -> int:
    inner = sum(_products(x) for eqn in jaxpr.eqns for x in compat.sub_jaxprs(eqn))
    return inner + sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)


@pytest.mark.parametrize("recompute", [True, jax.checkpoint_policies.dots_saveable])
def test_what_is_computed_again_is_the_same(recompute: Any) -> None:
    model = models.equal(2)
    assert_like_whole(model, piped(model, 2, "1f1b", 2, recompute=recompute), 4)


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputing_keeps_inputs_only(recompute: bool) -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "gpipe", 2, recompute=recompute)
    pipe.value_and_grad(pipe.place(model.params), *model.batch(4))
    programs = [p for r in pipe._maker.made.values() for p in r._programs.values()]
    kept = [sum(number is None for number in p.sources) for p in programs]
    assert all(n == 0 for n in kept) == recompute


@pytest.mark.parametrize("rows", [5, 3])
def test_uneven_micro_batches_count_by_their_rows(rows: int) -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 4)  # micro batches of 2 2 1 0 rows, or of 1 1 1 0
    assert_like_whole(model, pipe, rows)


def test_sums_and_metrics_are_those_of_the_batch() -> None:
    def loss(y: Any, target: Any) -> Any:
        error = jnp.sum((y - target) ** 2)
        return error, {"rows": jnp.asarray(len(y)), "largest": jnp.sum(jnp.abs(y))}

    model = models.equal(2)
    pipe = pipeline(
        model.parts, "1f1b", 3, loss=loss, devices=DEVICES[:2], reduction="sum", has_aux=True
    )
    batch = model.batch(7)
    (value, metrics), gradients = pipe.value_and_grad(pipe.place(model.params), *batch)

    def whole(params: Any, x: Any, target: Any) -> Any:
        for p in params:
            x = models.layer(p, x)
        return loss(x, target)

    expected = jax.value_and_grad(whole, has_aux=True)(model.params, *batch)
    assert_close((value, gradients), (expected[0][0], expected[1]))
    assert int(metrics["rows"]) == 7
    np.testing.assert_allclose(metrics["largest"], expected[0][1]["largest"], rtol=1e-5)


def test_gradients_of_16_bits_are_summed_in_32() -> None:
    model = models.equal(2, "bfloat16")
    pipe = piped(model, 2, "gpipe", 8)
    batch = model.batch(64)
    _, gradients = pipe.value_and_grad(pipe.place(model.params), *batch)
    parts = [
        jax.jit(jax.grad(model.whole))(model.params, *(x[i : i + 8] for x in batch))
        for i in range(0, 64, 8)
    ]
    wide = jax.tree.map(lambda *gs: sum(np.asarray(g, "float32") for g in gs) / 8, *parts)
    expected = jax.tree.map(lambda g: g.astype("bfloat16"), wide)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("name", "chunks"), [("seqsmartvpp", 2)])
def test_slices_of_sequences_carry_what_later_ones_need(name: str, chunks: int) -> None:
    model = models.attention(2 * chunks)
    pipe = pipeline(
        [Stage(models.attend_on, carries=True)] * (2 * chunks),
        name,
        2,
        loss=model.loss,
        chunks=chunks,
        slices=2,
        devices=DEVICES[:2],
    )
    assert_like_whole(model, pipe, 4)


def test_slices_of_different_lengths() -> None:
    model = models.attention(2)
    stages = [Stage(models.attend_on, carries=True)] * 2
    pipe = pipeline(stages, "seqpipe", 1, loss=model.loss, slices=4, devices=DEVICES[:2])
    assert_like_whole(model, pipe, 2)  # 6 positions in slices of 2 2 1 1
    params = pipe.place(model.params)
    x, target = model.batch(2)
    expected = x
    for p in model.params:
        expected = models.attend(p, expected)
    np.testing.assert_allclose(pipe.predict(params, x), expected, rtol=1e-5, atol=1e-5)
    assert float(pipe(params, x, target)) == pytest.approx(
        float(model.loss(expected, target)), rel=1e-5
    )  # type: ignore[misc]


def test_a_schedule_of_ones_own_is_carried_out() -> None:
    F, B, W = (lambda m, kind=kind: PipelineAction(kind, m) for kind in "FBW")
    rows = [[F(0), F(1), B(1), B(0), W(0), W(1)], [F(0), F(1), B(1), W(1), B(0), W(0)]]
    model = models.equal(2)
    pipe = piped(model, 2, PipelineSchedule("mine", rows, 2), 2)
    assert_like_whole(model, pipe, 4)


def test_stages_cut_batches_and_parameters_on_meshes_of_their_own() -> None:
    devices = np.asarray(jax.devices()[:8]).reshape(2, 2, 2)
    model = models.language(4)
    layouts = [{}, {"up": P(None, "model"), "down": P("model")}] * 2
    pipe = pipeline(
        model.parts,
        "interleaved",
        2,
        shared=model.shared,
        chunks=2,
        mesh=Mesh(devices, ("stage", "data", "model")),
        layouts=layouts,
    )
    params = pipe.place(model.params)
    assert params[1]["up"].sharding.shard_shape(params[1]["up"].shape) == (8, 8)
    assert {d.id for d in params[1]["up"].devices()} == {4, 5, 6, 7}
    value, gradients = pipe.value_and_grad(params, *model.batch(8))
    assert_close((value, gradients), jax.value_and_grad(model.whole)(model.params, *model.batch(8)))
    assert gradients[1]["up"].sharding.is_equivalent_to(params[1]["up"].sharding, 2)
    text = next(
        iter(pipe._maker.made[1, 2, True]._programs.values())
    ).chunk.place.mesh  # the mesh of the second stage
    assert dict(text.shape) == {"data": 2, "model": 2}


def test_parameters_are_made_where_they_are_used() -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 2)
    made = pipe.create([lambda i=i: jax.tree.map(lambda x: x + i, model.params[i]) for i in range(2)])
    for i, nest in enumerate(made):
        assert {d.id for x in jax.tree.leaves(nest) for d in x.devices()} == {i}
    assert_close(made[1], jax.tree.map(lambda x: x + 1, model.params[1]))


def test_predictions_keep_the_order_of_examples() -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 3)
    params, (x, _) = pipe.place(model.params), model.batch(7)
    expected = models.layer(model.params[1], models.layer(model.params[0], x))
    np.testing.assert_allclose(pipe.predict(params, x), expected, rtol=1e-5)
    copies = pipe.predict(params, x, broadcast=True)
    assert [{d.id for d in copy.devices()} for copy in copies] == [{0}, {1}]
    with pytest.raises(InvalidValueError, match="Give the loss apart"):
        piped(models.language(3), 3, "1f1b", 2).predict(params, x)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"stages": []}, InvalidTypeError, "stages must be a list of at least one"),
        ({"stages": [1]}, InvalidTypeError, "A stage is a function"),
        ({"chunks": 2}, InvalidValueError, "their number must divide"),
        ({"devices": DEVICES[:2]}, InvalidValueError, "multiple of the number of stages"),
        ({"reduction": "max"}, InvalidValueError, "'mean' or 'sum'"),
        ({"shared": {"w": (0, 5)}}, InvalidValueError, "two or more of the 3 stages"),
        ({"layouts": [{}]}, InvalidValueError, "layouts for 1"),
        ({"loss": 3}, InvalidTypeError, "loss must be a function"),
        ({"schedule": "x"}, InvalidValueError, "Known schedules"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], kind: type, message: str) -> None:
    given: dict[str, Any] = {"stages": [models.layer] * 3, "devices": DEVICES[:3], "micro_batches": 2}
    with pytest.raises(kind, match=message):
        pipeline(**{**given, **change})


def test_wrong_batches_and_parameters_are_refused() -> None:
    model = models.equal(2)
    pipe = piped(model, 2, "1f1b", 2)
    x, target = model.batch(4)
    with pytest.raises(InvalidValueError, match="a nest for each of the 2 stages"):
        pipe.value_and_grad(model.params[:1], x, target)
    with pytest.raises(InvalidValueError, match="the same number of examples"):
        pipe.value_and_grad(model.params, x, target[:2])
    with pytest.raises(InvalidValueError, match="at least one example"):
        pipe.value_and_grad(model.params, x[:0], target[:0])
    with pytest.raises(InvalidTypeError, match="Parameters must be real"):
        pipe.value_and_grad([{"w": np.ones((8, 8), int), "b": np.ones(8)}, model.params[1]], x, target)
    whole = pipeline([models.layer] * 2, "1f1b", 2, devices=DEVICES[:2])
    with pytest.raises(InvalidValueError, match="must return one real number"):
        whole.value_and_grad(model.params, x)


def test_layers_are_cut_into_stages_of_equal_cost() -> None:
    assert balanced([1, 1, 1, 1, 1], 2) in ([2, 3], [3, 2])
    assert balanced([5, 1, 1, 1], 3) == [1, 1, 2]
    with pytest.raises(InvalidValueError, match="can be cut into 1 to 2 stages"):
        balanced([1, 1], 3)
    model = models.equal(4)
    stages = split(model.parts, 2)
    pipe = pipeline(stages, "1f1b", 2, loss=model.loss, devices=DEVICES[:2])
    params = pipe.grouped(model.params)
    assert [len(own) for own in params] == [2, 2]
    value, _ = pipe.value_and_grad(params, *model.batch(4))
    np.testing.assert_allclose(value, model.whole(model.params, *model.batch(4)), rtol=1e-5)
    with pytest.raises(InvalidValueError, match="parameters for 3 layers"):
        pipe.grouped(model.params[:3])
    with pytest.raises(InvalidTypeError, match="split takes a list of layers"):
        split(model.whole, 2)  # type: ignore[arg-type]
