"""How gradients travel: what each option changes in the program, and that numbers stay the same."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px

SIZES = [40_000, 100, 200, 50, 25]
_COLLECTIVE = re.compile(
    r'"stablehlo\.(all_reduce|reduce_scatter|all_gather)".*?: \(tensor<([^>]*)>\)', re.S
)


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


def program(
    communication: px.train.GradientCommunication | None,
    shard: Any = None,
    dtype: Any = jnp.float32,
    sizes: tuple[int, ...] = tuple(SIZES),
    aggregate: str = "sum",
    counts: bool = False,
) -> Any:
    """The collectives of a step with the types of their operands, before XLA merges any.

    With `counts`, the number of sums that XLA leaves. It also checks the step's numbers.
    """
    strategy = two()
    with strategy.scope():
        variables = [px.Variable(jnp.zeros(n, dtype)) for n in sizes]
        optimizer = px.train.Optimizer(
            optax.sgd(1.0), aggregate, shard=shard, communication=communication
        )
    optimizer.build(variables)

    def step() -> None:
        context = px.get_replica_context()
        assert context is not None
        scale = (context.replica_id_in_sync_group + 1).astype(dtype)
        grads = [scale * (jnp.arange(v.size) % 8).astype(dtype) for v in variables]
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    run = px.function(lambda: strategy.run(step))
    run()
    for v in variables:
        expected = (np.arange(v.size) % 8) * (-3.0 if aggregate == "sum" else -1.5)
        np.testing.assert_array_equal(v.numpy().astype(np.float32), expected)
    if counts:
        return run.lower().compile().as_text().count(" all-reduce(")
    return _COLLECTIVE.findall(run.lower().as_text())


def fused(name: str, mode: str, config: Any) -> px.train.GradientCommunication:
    return px.train.GradientCommunication.from_options({name: {"mode": mode, "config": config}})


def lengths(found: list[tuple[str, str]], kind: str = "all_reduce") -> list[int]:
    """How many elements enter each collective of a kind."""
    operands = [re.findall(r"\d+(?=x)", operand) for each, operand in found if each == kind]
    return [int(np.prod([int(n) for n in dims])) for dims in operands]


def test_fusion_of_sums() -> None:
    options = px.train.GradientCommunication.from_options
    assert lengths(program(None)) == [40_000, 375]  # small ones together
    assert lengths(program(fused("allreduce", "auto", None))) == [40_375]
    assert lengths(program(fused("allreduce", "size", 1), sizes=(250_000, 20_000, 5))) == [
        250_000,
        20_005,
    ]
    assert lengths(program(options({"openstate": False}))) == SIZES
    # As MindSpore has it: packs end after the gradients 1 and 3.
    assert lengths(program(fused("allreduce", "index", [1, 3]))) == [40_100, 250, 25]
    assert lengths(program(options(all_reduce_fusion_config=[0]))) == [40_000, 375]


def test_xla_leaves_packs_as_they_are() -> None:
    """Unless the strategy chose them."""
    assert program(None, counts=True) == 1
    assert program(
        px.train.GradientCommunication.from_options({"openstate": False}), counts=True
    ) == len(SIZES)
    assert program(fused("allreduce", "index", [1, 3]), counts=True) == 3


def test_fusion_of_slices() -> None:
    shard = px.train.OptimizerSharding("gradients", threshold=0)
    found = program(fused("reducescatter", "auto", None), shard)
    assert lengths(found, "reduce_scatter") == [40_376]  # with one element of padding
    assert lengths(found, "all_gather") == [20_000, 188]
    found = program(fused("allgather", "auto", None), shard)
    assert lengths(found, "reduce_scatter") == [40_000, 376]
    assert lengths(found, "all_gather") == [20_188]
    found = program(px.train.GradientCommunication.from_options({"openstate": False}), shard)
    assert lengths(found, "reduce_scatter") == [*SIZES[:-1], 26]
    assert lengths(found, "all_gather") == [20_000, 50, 100, 25, 13]


def test_sums_in_float32() -> None:
    wide = px.train.GradientCommunication(float32=True)
    for shard, kind in ((None, "all_reduce"), ("gradients", "reduce_scatter")):
        if shard is not None:
            shard = px.train.OptimizerSharding(shard, threshold=0)  # noqa: PLW2901
        for communication, dtype in ((None, "bf16"), (wide, "f32")):
            found = program(communication, shard, jnp.bfloat16, sizes=(100,))
            assert [operand[-len(dtype) :] for each, operand in found if each == kind] == [dtype]


def test_a_mean_divides_after_the_sum() -> None:
    """The same collectives: MindSpore's gradients_mean is one division more."""
    for shard in (None, px.train.OptimizerSharding("gradients", threshold=0)):
        assert program(None, shard, aggregate="mean") == program(None, shard)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_local_norms_are_told(compiled: bool) -> None:
    told: dict[tuple[str, int], float] = {}

    def tell(name: str, replica: int, norm: float) -> None:
        told[name, replica] = norm

    strategy = two()
    with strategy.scope():
        v, t = px.Variable(jnp.zeros(2), name="v"), px.Variable(jnp.zeros((3, 1)), name="t")
        communication = px.train.GradientCommunication.from_options(local_norms=tell)
        optimizer = px.train.Optimizer(optax.sgd(1.0), communication=communication)

    def step() -> None:
        context = px.get_replica_context()
        assert context is not None
        scale = context.replica_id_in_sync_group + 1.0
        rows = px.IndexedSlices(jnp.full((2, 1), scale), jnp.array([0, 0]), (3, 1))
        optimizer.apply_gradients([(jnp.array([3.0, 4.0]) * scale, v), (rows, t)])

    run = px.function(lambda: strategy.run(step)) if compiled else lambda: strategy.run(step)
    run()
    jax.effects_barrier()
    assert told == {("v:0", 0): 5.0, ("v:0", 1): 10.0, ("t:0", 0): 2.0, ("t:0", 1): 4.0}
    if compiled:
        assert "callback" in run.lower().as_text()  # type: ignore[attr-defined]


def test_a_mode_that_does_not_exist() -> None:
    for name, mode in (("allreduce", "bogus"), ("allgather", "index")):
        with pytest.raises(px.errors.InvalidValueError, match="mode of fusion"):
            fused(name, mode, [1])


def test_parameters_are_broadcast_from_the_first_replica() -> None:
    strategy = two()
    with strategy.scope():
        v, total = (
            px.Variable([1.0, 2.0]),
            px.Variable(0.0, synchronization=px.VariableSynchronization.ON_READ),
        )
    v.values[1].assign([7.0, 8.0])
    alone = px.Variable(3.0)
    before = px.function(lambda: strategy.run(lambda: v.value() + 0.0)).lower()
    assert _COLLECTIVE.findall(before.as_text()) == []
    run = px.function(lambda: strategy.run(lambda: px.train.broadcast_parameters([v, total, alone])))
    run()
    assert _COLLECTIVE.findall(run.lower().as_text()) == [("all_reduce", "2xf32")]
    assert [x.numpy().tolist() for x in v.values] == [[1.0, 2.0]] * 2
    v.values[1].assign([7.0, 8.0])
    strategy.run(lambda: px.train.broadcast_parameters([v]))
    assert [x.numpy().tolist() for x in v.values] == [[1.0, 2.0]] * 2
    with pytest.raises(px.errors.InvalidTypeError, match="list of px"):
        px.train.broadcast_parameters([1.0])  # type: ignore[list-item]


def test_a_repeated_loss_counts_once() -> None:
    strategy = two()
    with strategy.scope():
        w = px.Variable(3.0)

    def step(mean: bool) -> Any:
        context = px.get_replica_context()
        assert context is not None
        loss, gradient = px.value_and_grad(lambda: px.train.repeated_loss(w * w, 2, mean), w)()
        return loss, context.all_reduce("sum", gradient)

    for mean, expected in ((True, 6.0), (False, 12.0)):
        run = px.function(lambda: strategy.run(step, args=(mean,)))
        loss, gradient = run()
        assert {float(x) for x in strategy.experimental_local_results(loss)} == {9.0}
        assert {float(x) for x in strategy.experimental_local_results(gradient)} == {expected}
    with pytest.raises(px.errors.InvalidValueError, match="repeats"):
        px.train.repeated_loss(1.0, 0)
