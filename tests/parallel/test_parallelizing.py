"""`parallelize`: the same loss and the same step in all modes, and equal to one device."""

from __future__ import annotations

import functools
import re
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from tests.parallel.hlo import sent
from tests.parallel.models import (
    MODES,
    after,
    batch,
    check_close,
    mlp,
    mlp_parameters,
    state_of,
    step,
)

import phalanx as px
from phalanx.errors import (
    InvalidOptionsError,
    InvalidTypeError,
    InvalidValueError,
    PhalanxError,
    UnsupportedError,
)
from phalanx.execution.throttle import MAX_IN_FLIGHT, THROTTLE
from phalanx.parallel import Layout, Plan, parallelize, parallelizing, shard, value_and_grad
from phalanx.parallel.communication import compiler_options
from phalanx.parallel.context import options_in_force
from phalanx.parallel.options import ParallelOptions, changed

PARAMS = mlp_parameters()
BATCHES = [batch(24, seed=1), batch(24, seed=2), batch(10, seed=3)]


@functools.cache
def expected() -> Any:
    """What one device computes, by plain JAX."""
    gradient = jax.value_and_grad(mlp)(PARAMS, *BATCHES[0])
    return gradient, after(jax.jit(step), state_of(PARAMS), BATCHES)


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        ("stand_alone", 2),
        *((m, n) for m in MODES[1:] for n in (2, 6)),
        *(pytest.param(m, n, marks=pytest.mark.soak) for m in MODES[1:] for n in (4, 8)),
    ],
    ids=str,
)
def test_every_mode_equals_one_device(mode: str, count: int) -> None:
    """Loss, gradients, and steps of which the last batch cannot be divided by all devices."""
    where: Any = {"devices": jax.devices()[:count], "parallel_mode": mode, "gradients_mean": True}
    gradient, (state, losses) = expected()
    loss = parallelize(mlp, (PARAMS, *BATCHES[0]), **where)
    check_close(loss.value_and_grad(PARAMS, *BATCHES[0]), gradient)
    if count == 8:
        check_close(loss(PARAMS, *BATCHES[0]), gradient[0])
    program = parallelize(step, (state_of(PARAMS), *BATCHES[0]), **where)
    found, values = after(program, state_of(PARAMS), BATCHES)
    check_close(values, losses)
    check_close(found, state)


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(MODES),
    st.sampled_from([2, 3, 4]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 30),
)
def test_random_models_equal_one_device(
    mode: str, count: int, depth: int, width: int, rows: int
) -> None:
    random = np.random.default_rng(rows)

    def array(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32) / 2

    params = [(array(width, width), array(width)) for _ in range(depth)]
    x = array(rows, width)

    def loss(params: Any, x: Any) -> Any:
        for kernel, bias in params:
            x = jax.nn.gelu(x @ kernel + bias)
        return jnp.sum(x**2)

    program = parallelize(loss, (params, x), devices=jax.devices()[:count], parallel_mode=mode)
    check_close(program.value_and_grad(params, x), jax.value_and_grad(loss)(params, x))


def test_sums_are_the_default_as_in_mindspore() -> None:
    args = (PARAMS, *BATCHES[0])
    where: Any = {"devices": jax.devices()[:4], "parallel_mode": "data_parallel"}
    value, gradients = parallelize(mlp, args, **where).value_and_grad(*args)
    mean = expected()[0]
    check_close(value, mean[0] * 4)
    check_close(gradients, jax.tree.map(lambda g: g * 4, mean[1]))


def test_small_gradients_travel_together() -> None:
    """Three gradients and the loss in one all-reduce, without XLA's help."""
    program = parallelize(
        step, (state_of(PARAMS), *BATCHES[0]), parallel_mode="data_parallel", devices=jax.devices()[:2]
    )
    text = program.lower(state_of(PARAMS), *BATCHES[0]).as_text()
    assert text.count("stablehlo.all_reduce") == 1


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"comm_fusion": {"openstate": False}}, 4),
        ({"comm_fusion": {"allreduce": {"mode": "size", "config": 0}}}, 4),
        ({"comm_fusion": {"allreduce": {"mode": "size", "config": 1}}}, 1),
        ({"comm_fusion": {"allreduce": {"mode": "index", "config": [0, 1]}}}, 3),
        ({"all_reduce_fusion_config": [1, 7]}, 2),
    ],
    ids=str,
)
def test_options_say_which_gradients_travel_together(options: Any, count: int) -> None:
    """The loss travels with the last ones, or alone."""
    program = parallelize(
        step,
        (state_of(PARAMS), *BATCHES[0]),
        parallel_mode="data_parallel",
        devices=jax.devices()[:2],
        **options,
    )
    lowered = program.lower(state_of(PARAMS), *BATCHES[0])
    assert lowered.as_text().count("stablehlo.all_reduce") == count
    assert lowered.compile().as_text().count(" all-reduce(") == count  # XLA leaves them so
    inside = jax.jit(program)(state_of(PARAMS), *BATCHES[0])  # where it has no options of its own
    check_close(inside, program(state_of(PARAMS), *BATCHES[0]))


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"comm_fusion": {"openstate": False}}, 4),
        ({"comm_fusion": {"allgather": {"mode": "size", "config": 1}}}, 1),
        ({"all_reduce_fusion_config": [1]}, 4),
    ],
    ids=str,
)
def test_options_say_whether_xla_packs_sums(options: Any, count: int) -> None:
    """In a mode in which XLA makes the packs; its CPU compiler packs all or nothing."""
    where: Any = {"parallel_mode": "semi_auto_parallel", "devices": jax.devices()[:2]}
    args = state_of(PARAMS), *BATCHES[0]
    compiled = parallelize(step, args, **where, **options).lower(*args).compile().as_text()
    assert compiled.count(" all-reduce(") == count


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        (
            {"comm_fusion": {"openstate": False}},
            {"all_reduce": 0, "all_gather": 0, "reduce_scatter": 0},
        ),
        ({"comm_fusion": {"allgather": {"mode": "size", "config": 2}}}, {"all_gather": 2 << 20}),
        ({"all_reduce_fusion_config": [1]}, {"all_reduce": 0}),
    ],
    ids=str,
)
def test_gpus_pack_by_size(options: Any, expected: Any) -> None:
    """By the names that XLA has for it, which it checks on every machine."""
    wanted = changed(ParallelOptions(), {"parallel_mode": "auto_parallel", **options})
    found = compiler_options(wanted, "gpu")
    names = expected and {f"xla_gpu_{k}_combine_threshold_bytes": n for k, n in expected.items()}
    assert found == names
    if found:
        assert float(jax.jit(lambda x: x + 1, compiler_options=found)(1.0)) == 2
        assert compiler_options(wanted, "tpu") == {}


def test_a_step_with_local_gradients_is_refused() -> None:
    def wrong(params: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(mlp)(params, x, y)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    with pytest.raises(InvalidValueError, match="would differ between devices"):
        parallelize(wrong, (PARAMS, *BATCHES[0]), parallel_mode="data_parallel")


def test_uneven_batches_are_divided() -> None:
    """Every device computes its part: three examples, or two; or one, or none."""
    where: Any = {"devices": jax.devices()[:4], "parallel_mode": "data_parallel"}
    program = parallelize(step, (state_of(PARAMS), *BATCHES[0]), gradients_mean=True, **where)
    for rows, parts in ((10, {3, 2}), (3, {1})):
        x, y = (array[:rows] for array in BATCHES[0])
        text = program.lower(state_of(PARAMS), x, y).as_text()
        products = [line for line in text.splitlines() if "dot_general" in line]
        assert {
            int(n) for line in products for n in re.findall(r"<(\d+)x6xf32>, tensor<6x24", line)
        } == parts
        assert text.count("stablehlo.all_reduce") == 1
        check_close(program(state_of(PARAMS), x, y), jax.jit(step)(state_of(PARAMS), x, y))
    x = np.arange(240, dtype=np.float32).reshape(10, 24)
    predict = parallelize(
        lambda w, x: (x @ w, jnp.mean(x)), (PARAMS["down"], x), gradients_mean=True, **where
    )
    check_close(predict(PARAMS["down"], x), (x @ PARAMS["down"], x.mean()))
    total = parallelize(lambda w, x: jnp.sum(x @ w), (PARAMS["down"], x), **where)
    check_close(total(PARAMS["down"], x), jnp.sum(x @ PARAMS["down"]))


def test_what_depends_on_the_rows_of_a_device_is_computed_whole() -> None:
    def rows(w: Any, x: Any) -> Any:
        if x.shape[0] < 2:
            raise ValueError("at least two rows are needed")
        return jnp.sum(x * w)

    program = parallelize(
        rows, (np.float32(2), np.ones(8)), devices=jax.devices()[:4], parallel_mode="data_parallel"
    )
    assert float(program(np.float32(2), np.ones(5))) == 10.0
    with pytest.raises(ValueError, match="at least two rows"):
        program(np.float32(2), np.ones(1))


def test_parts_that_cannot_be_joined_are_computed_whole() -> None:
    """A loss that gathers its parameters: for some numbers of rows together, for others one by one."""
    args = (PARAMS, *BATCHES[2])
    program = parallelize(
        mlp,
        args,
        devices=jax.devices()[:4],
        parallel_mode="data_parallel",
        gradients_mean=True,
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0, "optimizer_level": "level3"},
    )
    check_close(program(*args), mlp(*args))


def test_results_of_each_device_are_joined() -> None:
    program = parallelize(
        lambda w, x: (x @ w, jnp.sum(x)),
        (np.ones((4, 2), np.float32), np.ones((8, 4), np.float32)),
        parallel_mode="data_parallel",
    )
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    rows, total = program(np.ones((4, 2), np.float32), x)
    assert rows.sharding.spec == P("replica")
    check_close((rows, total), (x @ np.ones((4, 2), np.float32), x.sum()))


# -- hybrid_parallel -------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_layerwise_parameters_stay_on_their_devices(mean: bool) -> None:
    """An embedding of which each device has some rows; the step itself looks them up everywhere."""
    table = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    head = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
    ids = np.arange(24, dtype=np.int32) * 5 % 16
    params = {"table": table, "head": head}

    def plain(params: Any, ids: Any) -> Any:
        return jnp.sum(jnp.tanh(params["table"][ids] @ params["head"]) ** 2) / (4 if mean else 1)

    def local(params: Any, ids: Any) -> Any:
        everywhere = jax.lax.all_gather(ids, "replica", tiled=True)
        rows = params["table"].shape[0]
        mine = everywhere - rows * jax.lax.axis_index("replica")
        is_here = (mine >= 0) & (mine < rows)
        found = jnp.where(is_here[:, None], params["table"][jnp.clip(mine, 0, rows - 1)], 0)
        vectors = jax.lax.psum_scatter(found, "replica", scatter_dimension=0, tiled=True)
        return jnp.sum(jnp.tanh(vectors @ params["head"]) ** 2)

    def update(loss: Any) -> Any:
        def run(params: Any, ids: Any) -> Any:
            value, gradients = value_and_grad(loss)(params, ids)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

        return run

    program = parallelize(
        update(local),
        (params, ids),
        devices=jax.devices()[:4],
        parallel_mode="hybrid_parallel",
        layerwise_parallel=["table"],
        gradients_mean=mean,
    )
    found, value = program(params, ids)
    wanted, total = update(plain)(params, ids)
    check_close((found, value), (wanted, total))
    assert found["table"].sharding.spec == P("replica")
    assert found["table"].addressable_shards[0].data.shape == (4, 4)
    if not mean:  # a batch that does not divide: two parts of three, or one of five
        for rows in (6, 5):
            found, value = program(found, ids[:rows])
            wanted, total = update(plain)(wanted, ids[:rows])
            check_close((found, value), (wanted, total))
            assert found["table"].addressable_shards[0].data.shape == (4, 4)


@pytest.mark.parametrize(
    "options",
    [
        {"parallel_mode": "hybrid_parallel"},
        {
            "parallel_mode": "data_parallel",
            "enable_parallel_optimizer": True,
            "parallel_optimizer_config": {"parallel_optimizer_threshold": 0},
        },
    ],
    ids=["hybrid", "data"],
)
def test_means_of_means_are_exact_for_batches_that_do_not_divide(options: Any) -> None:
    """Statistics of a batch by `pmean`, in parts of three, three, two and two, would be wrong."""

    def normalized(mean: Any) -> Any:
        def run(w: Any, x: Any) -> Any:
            value, gradient = value_and_grad(
                lambda w, x: jnp.mean(jnp.tanh((x - mean(jnp.mean(x, 0))) @ w) ** 2)
            )(w, x)
            return w - gradient, value

        return run

    program = parallelize(
        normalized(lambda m: jax.lax.pmean(m, "replica")),
        (PARAMS["down"], np.ones((8, 24), np.float32)),
        devices=jax.devices()[:4],
        gradients_mean=True,
        **options,
    )
    x = np.random.default_rng(0).normal(size=(10, 24)).astype(np.float32)
    wanted = normalized(lambda m: m)(PARAMS["down"], x)
    found = program(PARAMS["down"], x)
    check_close(found, wanted)
    assert found[0].sharding == program.arguments[0]
    text = program.lower(PARAMS["down"], x).as_text()
    assert "tensor<5x24xf32>" in text  # two parts of five rows


# -- semi_auto_parallel ----------------------------------------------------------------------------


def test_given_layouts_are_kept_and_the_rest_follows() -> None:
    layout = Layout((2, 2), ("data", "model"))
    program = parallelize(
        step,
        (state_of(PARAMS), *BATCHES[0]),
        devices=jax.devices()[:4],
        parallel_mode="semi_auto_parallel",
        parameter_plan={"up/kernel": layout("None", "model"), "down": layout("model", "None")},
        dataset_strategy=(layout("data", "None"), layout("data", "None")),
    )
    (params, slots), _ = program(state_of(PARAMS), *BATCHES[0])
    assert program.layouts["down"] == P("model", None)
    for tree in (params, slots[0].mu):
        assert tree["up"]["kernel"].sharding.spec == P(None, "model")
        assert tree["down"].sharding.shard_shape((24, 4)) == (12, 4)
    assert program.arguments[1].spec == P("data", None)
    check_close((params, slots), jax.jit(step)(state_of(PARAMS), *BATCHES[0])[0])


@pytest.mark.parametrize(
    ("strategy", "part"),
    [("data_parallel", (3, 6)), ("full_batch", (24, 6)), (((4, 2), (8, 1)), (6, 3))],
    ids=str,
)
def test_batches_are_cut_as_the_dataset_strategy_says(strategy: Any, part: Any) -> None:
    program = parallelize(
        mlp,
        (PARAMS, *BATCHES[0]),
        parallel_mode="semi_auto_parallel",
        dataset_strategy=strategy,
        global_rank=3,
    )
    x = program.place(PARAMS, *BATCHES[0])[1]
    assert program.held(x).shape == part
    check_close(program(PARAMS, *BATCHES[0]), expected()[0][0])


def test_wrong_dataset_strategies() -> None:
    where: Any = {"parallel_mode": "semi_auto_parallel"}
    with pytest.raises(InvalidValueError, match="size 2 is not equal to dataset strategy size 1"):
        parallelize(mlp, (PARAMS, *BATCHES[0]), dataset_strategy=((8, 1),), **where)
    with pytest.raises(
        InvalidValueError, match="item size 2 is not equal to dataset strategy item size 3"
    ):
        parallelize(mlp, (PARAMS, *BATCHES[0]), dataset_strategy=((8, 1, 1), (8, 1)), **where)
    with pytest.raises(InvalidValueError, match="cannot be divisible by param_strategy"):
        parallelize(mlp, (PARAMS, *BATCHES[0]), dataset_strategy=((1, 4), (1, 4)), **where)


def test_shard_lays_out_what_goes_in_and_out() -> None:
    def loss(params: Any, x: Any, y: Any) -> Any:
        up = shard(jnp.matmul, ((2, 1), (1, 4)), ((2, 4),))
        down = shard(jnp.matmul, ((2, 4), (4, 1)))
        hidden = jnp.tanh(up(x, params["up"]["kernel"]) + params["up"]["bias"])
        return jnp.mean((down(hidden, params["down"]) - y) ** 2)

    args = (PARAMS, *BATCHES[0])
    program = parallelize(loss, args, parallel_mode="semi_auto_parallel")
    check_close(program.value_and_grad(*args), expected()[0])
    plain = parallelize(mlp, args, parallel_mode="semi_auto_parallel")
    kinds = [sent(p.lower(*args).compile(), 8) for p in (program, plain)]
    assert kinds[0] != kinds[1]
    for mode in ("stand_alone", "data_parallel"):  # where layouts do not count
        other = parallelize(loss, args, parallel_mode=mode, gradients_mean=True)
        check_close(other(*args), expected()[0][0])


# -- auto_parallel ---------------------------------------------------------------------------------


def test_a_plan_is_found_kept_and_read_from_a_file(tmp_path: Any) -> None:
    args = (PARAMS, *BATCHES[0])
    where: Any = {"devices": jax.devices()[:4], "parallel_mode": "auto_parallel"}
    first = parallelize(mlp, args, search_mode="dynamic_programming", **where)
    assert first.plan is not None
    assert first.plan.mode == "exact"
    first.plan.save(tmp_path / "plan.json")
    again = parallelize(mlp, args, plan=str(tmp_path / "plan.json"), **where)
    assert again.plan == Plan.load(tmp_path / "plan.json")
    path = str(tmp_path / "folder" / "strategy.json")
    groups = str(tmp_path / "groups.json")
    saved = parallelize(step, (state_of(PARAMS), *BATCHES[0]), strategy_ckpt_save_file=path, **where)
    loaded = parallelize(mlp, args, strategy_ckpt_load_file=path, group_ckpt_save_file=groups, **where)
    assert loaded.plan == saved.plan
    assert saved.plan is not None
    assert saved.plan.mode == "recursive_programming"
    semi = parallelize(
        mlp,
        args,
        devices=jax.devices()[:4],
        parallel_mode="semi_auto_parallel",
        strategy_ckpt_load_file=path,
    )
    assert {n: tuple(s) for n, s in semi.layouts.items()} == {
        n: tuple(t.spec) for n, t in saved.plan.parameters.items()
    }
    check_close(semi(*args), expected()[0][0])


def test_layouts_in_a_search() -> None:
    mesh = Layout((2, 2), ("data", "model")).mesh()
    args = (PARAMS, *BATCHES[0])
    where: Any = {"parallel_mode": "auto_parallel", "mesh": mesh}
    pinned = parallelize(
        mlp, args, parameter_plan={"down": P("model")}, dataset_strategy="full_batch", **where
    )
    assert pinned.layouts["down"] == P("model")
    assert pinned.arguments[1].spec == P()
    check_close(pinned.value_and_grad(*args), expected()[0])
    counted = parallelize(mlp, args, dataset_strategy=((4, 1), (4, 1)), **where)
    assert counted.arguments[1].spec == P(("data", "model"))


def test_without_all_to_all_there_is_none() -> None:
    """`enable_alltoall` is off unless it is set, as in MindSpore."""

    def loss(w: Any, x: Any) -> Any:
        rows = jax.lax.with_sharding_constraint(x @ w, jax.NamedSharding(mesh, P("x")))
        columns = jax.lax.with_sharding_constraint(rows * 2, jax.NamedSharding(mesh, P(None, "x")))
        return jnp.sum(jnp.tanh(columns))

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    args = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    kinds = []
    for enabled in (False, True):
        program = parallelize(
            loss, args, mesh=mesh, parallel_mode="auto_parallel", enable_alltoall=enabled
        )
        assert program.plan is not None
        kinds.append({c.kind for c in program.plan.collectives})
    assert "all-to-all" not in kinds[0]
    assert "all-to-all" in kinds[1]


@pytest.mark.parametrize("enabled", [False, True])
def test_given_layouts_change_without_all_to_all_too(enabled: bool) -> None:
    """A cut that moves from rows to columns, directly and behind a product; forwards and backwards."""

    def loss(w: Any, x: Any) -> Any:
        rows = shard(jnp.tanh, ((4, 1),), ((4, 1),))(x)
        columns = shard(jnp.sin, ((1, 4),), ((1, 4),))(rows * 2)
        again = shard(jnp.sin, ((4, 1),))(columns)
        return jnp.sum(shard(jnp.cos, ((1, 4),))(again @ w))

    args = np.ones((8, 8), np.float32), np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    program = parallelize(
        value_and_grad(loss),
        args,
        devices=jax.devices()[:4],
        parallel_mode="semi_auto_parallel",
        enable_alltoall=enabled,
    )
    kinds = sent(program.lower(*args).compile(), 4)
    assert ("all-to-all" in kinds) == enabled
    assert kinds["all-gather"] > 0
    check_close(program(*args), jax.value_and_grad(loss)(*args))


def test_what_jit_traced_elsewhere_is_not_used() -> None:
    """JAX keeps what it traced outside, and in other modes; a step must not get that."""

    @jax.jit
    def jitted(w: Any, x: Any) -> Any:
        value, gradient = value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
        return w - 0.1 * gradient, value

    w, x = np.ones((4, 4), np.float32), np.arange(32, dtype=np.float32).reshape(8, 4) / 10
    alone = jitted(w, x)
    level = {"parallel_optimizer_threshold": 0, "optimizer_level": "level2"}
    for factor, options in (
        (1, {"parallel_mode": "data_parallel", "gradients_mean": True}),
        (4, {"parallel_mode": "data_parallel", "gradients_mean": False}),
        (1, {"parallel_mode": "data_parallel", "gradients_mean": True, **_sliced(level)}),
        (1, {"parallel_mode": "semi_auto_parallel"}),
        (4, {"parallel_mode": "semi_auto_parallel", "loss_repeated_mean": False}),
        (1, {"parallel_mode": "auto_parallel"}),
    ):
        program = parallelize(jitted, (w, x), devices=jax.devices()[:4], **options)
        check_close(w - program(w, x)[0], (w - alone[0]) * factor)
        if "enable_parallel_optimizer" in options:
            assert "reduce_scatter" in program.lower(w, x).as_text()


def _sliced(config: dict[str, Any]) -> dict[str, Any]:
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}


def test_what_jit_traced_with_other_options_is_not_used() -> None:
    """Also outside of `parallelize`: of the process, and of a block."""
    double = jax.jit(shard(lambda x: x * 2, ((4,),), ((4,),)))
    x = np.ones(8, np.float32)

    def parts() -> int:
        return len(double(x).sharding.device_set)

    found = [parts()]
    semi: Any = {"parallel_mode": "semi_auto_parallel", "device_num": 4}
    px.set_auto_parallel_context(**semi)
    found.append(parts())
    with options_in_force(ParallelOptions()):
        found.append(parts())
    px.reset_auto_parallel_context()
    found.append(parts())
    with options_in_force(ParallelOptions(**semi)):
        found.append(parts())
    assert found == [1, 4, 1, 1, 4]
    assert double._cache_size() == 2  # what was traced before serves again


def test_functions_that_are_not_trained_are_laid_out_too() -> None:
    x, _ = BATCHES[0]

    def predict(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]

    program = parallelize(
        predict, (PARAMS, x), devices=jax.devices()[:4], parallel_mode="auto_parallel"
    )
    check_close(program(PARAMS, x), predict(PARAMS, x))


# -- options that change programs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "level"),
    [
        ("semi_auto_parallel", "level1"),
        ("semi_auto_parallel", "level2"),
        ("semi_auto_parallel", "level3"),
        ("auto_parallel", "level3"),
    ],
)
def test_parallel_optimizers_keep_the_state_in_parts(mode: str, level: str) -> None:
    state = state_of(PARAMS)
    where: Any = {"devices": jax.devices()[:4], "parallel_mode": mode, "enable_alltoall": True}
    if mode == "auto_parallel":  # where plans would have cut parameters anyway
        where |= {"parameter_plan": {name: P() for name in ("up/kernel", "up/bias", "down")}}
    program = parallelize(
        step,
        (state, *BATCHES[0]),
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0, "optimizer_level": level},
        **where,
    )
    (params, slots), loss = program(state, *BATCHES[0])
    whole = jax.jit(step)(state, *BATCHES[0])
    check_close(((params, slots), loss), whole)
    for tree in (params, slots[0].nu):
        assert tree["down"].sharding.shard_shape((24, 4)) == (6, 4)
        assert tree["up"]["kernel"].sharding.shard_shape((6, 24)) == (6, 24)  # 6 rows on 4 devices
    text = program.lower(state, *BATCHES[0]).as_text()
    assert ("optimization_barrier" in text) == (level == "level3")  # of what is computed again
    if mode == "semi_auto_parallel":
        # The three gradients; then the parameters, their gradients, and `down` again for the gradient.
        expected = {"level1": 0, "level2": 3, "level3": 3 + 3 + 3 + 1}
        assert text.count("sharding_constraint") == expected[level]
    held = program.lower(state, *BATCHES[0]).compile().memory_analysis().argument_size_in_bytes
    plain = parallelize(step, (state, *BATCHES[0]), **where).lower(state, *BATCHES[0]).compile()
    saved = (
        3 * 4 * (24 * 4 + 24) * 3 // 4
    )  # of parameters and two slots, three quarters of `down`, `bias`
    assert plain.memory_analysis().argument_size_in_bytes - held == saved


def test_small_parts_of_the_state_and_groups_of_devices() -> None:
    state = state_of(PARAMS)
    where: Any = {"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": True}
    small = parallelize(step, (state, *BATCHES[0]), **where)  # all below 64 KB
    assert small.arguments[0][0]["down"].spec == P()
    grouped = parallelize(
        step,
        (state, *BATCHES[0]),
        parallel_optimizer_config={"parallel_optimizer_threshold": 0},
        optimizer_weight_shard_size=2,
        **where,
    )
    assert grouped.arguments[0][0]["down"].spec == P("d2", None)


def test_losses_inside_functions_and_loops_of_a_step() -> None:
    """A parallel optimizer finds them in functions of `jax.jit`, and refuses loops in its own words."""
    config = {"parallel_optimizer_threshold": 0, "optimizer_level": "level2"}
    where: Any = {
        "parallel_mode": "data_parallel",
        "devices": jax.devices()[:2],
        "gradients_mean": True,
        "enable_parallel_optimizer": True,
        "parallel_optimizer_config": config,
    }

    def looping(state: Any, x: Any, y: Any) -> Any:
        return jax.lax.scan(lambda s, _: step(s, x, y), state, length=2)

    args = (state_of(PARAMS), *BATCHES[0])
    check_close(parallelize(jax.jit(step), args, **where)(*args), jax.jit(step)(*args))
    for threshold in (0, 64):  # divided, or all whole
        config["parallel_optimizer_threshold"] = threshold
        with pytest.raises(UnsupportedError, match=r"inside `scan`.*micro_batches"):
            parallelize(looping, args, **where)(*args)
    program = parallelize(step, args, **where)
    whole = jax.jit(lambda s, x, y: jax.lax.scan(lambda s, _: program(s, x, y), s, length=2))
    check_close(whole(*args), jax.jit(looping)(*args))


@pytest.mark.parametrize("mode", MODES[1:])
def test_sums_over_devices_in_32_bits(mode: str) -> None:
    """Products that are summed over devices come in 32 bits, in the gradient too."""
    w, x = jnp.ones((4, 4), jnp.bfloat16), jnp.ones((8, 4), jnp.bfloat16)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(x @ w)

    def run(w: Any, x: Any) -> Any:
        return value_and_grad(loss)(w, x)

    results = []
    for forced in (False, True):
        program = parallelize(
            run,
            (w, x),
            parallel_mode=mode,
            force_fp32_communication=forced,
            gradient_fp32_sync=False,
        )
        text = program.lower(w, x).as_text()
        dots = [line for line in text.splitlines() if "dot_general" in line]
        assert dots
        assert all(("xf32>" in line.rpartition("->")[2]) == forced for line in dots)
        results.append(program(w, x))
    check_close(*results)


# -- creating, other pytrees, and what is refused --------------------------------------------------


def test_a_model_is_created_in_parts() -> None:
    """No device ever holds a whole parameter, not even while it is made."""
    args = mlp_parameters(64, 512, 64), *batch(8, 64, 64)
    program = parallelize(
        mlp,
        args,
        parallel_mode="semi_auto_parallel",
        parameter_plan={"up/kernel": (1, 8), "up/bias": (8,), "down": (8, 1)},
    )

    def make(key: Any) -> Any:
        one, two = jax.random.split(key)
        return {
            "up": {"kernel": jax.random.normal(one, (64, 512)), "bias": jnp.zeros(512)},
            "down": jax.random.normal(two, (512, 64)),
        }

    made = program.create(make, jax.random.key(0))
    check_close(made, make(jax.random.key(0)))
    assert {s.data.shape for s in made["down"].addressable_shards} == {(64, 64)}
    creation = jax.jit(make, out_shardings=program.arguments[0]).lower(jax.random.key(0)).compile()
    held = creation.memory_analysis()
    assert held.output_size_in_bytes + held.temp_size_in_bytes < 4 * 64 * 512  # of one parameter
    with pytest.raises(InvalidValueError, match="not like argument 0"):
        program.create(lambda: 1.0)


def test_many_steps_wait_for_each_other_and_programs_go_into_larger_ones() -> None:
    args = (PARAMS, *BATCHES[0])
    program = parallelize(mlp, args, parallel_mode="data_parallel", gradients_mean=True)
    for _ in range(3 * MAX_IN_FLIGHT):
        value = program(*args)
        assert THROTTLE.in_flight <= MAX_IN_FLIGHT
    inside = jax.jit(lambda *args: program(*args) * 2)(*args)
    assert float(inside) == pytest.approx(2 * float(value))
    assert not any(isinstance(t, jax.core.Tracer) for t in THROTTLE._tokens)


def test_what_a_step_returned_goes_into_the_next_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array is looked at twice; others still go to their devices."""
    program = parallelize(
        step, (state_of(PARAMS), *BATCHES[0]), parallel_mode="auto_parallel", devices=jax.devices()[:4]
    )
    state, *rows = program.place(state_of(PARAMS), *BATCHES[0])
    state, _ = program(state, *rows)
    before = state
    with monkeypatch.context() as patch:
        patch.setattr(parallelizing, "placed", None)
        state, _ = program(state, *rows)
        with pytest.raises(TypeError, match="not callable"):
            program(before, *BATCHES[0])
    check_close(state, program(before, *BATCHES[0])[0])
    whole = jax.device_put(before, jax.devices()[0])
    check_close(state, program(whole, *rows)[0])


def test_nests_with_other_things_in_them() -> None:
    model = equinox.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    x = np.ones((8, 4), np.float32)

    def loss(model: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(model)(x) ** 2)

    for mode in ("data_parallel", "auto_parallel"):
        program = parallelize(loss, (model, x), parallel_mode=mode, gradients_mean=True)
        check_close(program(model, x), loss(model, x))


@pytest.mark.parametrize("mode", ["data_parallel", "auto_parallel"])
def test_random_keys_in_the_state(mode: str) -> None:
    """As libraries of layers keep them for dropout."""

    def loss(params: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(params["key"], 0.5, (x.shape[1],))
        return jnp.mean((jnp.where(kept, x, 0) @ params["w"]) ** 2)

    def update(params: Any, x: Any) -> Any:
        def of_weights(w: Any, x: Any) -> Any:
            return loss({**params, "w": w}, x)

        value, gradient = value_and_grad(of_weights)(params["w"], x)
        return {"w": params["w"] - gradient, "key": jax.random.split(params["key"])[0]}, value

    params = {"w": np.ones((8, 4), np.float32), "key": jax.random.key(3)}
    x = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    program = parallelize(update, (params, x), parallel_mode=mode, gradients_mean=True)
    found, value = program(*program(params, x)[:1], x)
    wanted, expected_value = jax.jit(update)(*jax.jit(update)(params, x)[:1], x)
    check_close((found["w"], value), (wanted["w"], expected_value))
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(wanted["key"])).all()


def test_options_that_do_not_go_together() -> None:
    args = (PARAMS, *BATCHES[0])
    with pytest.raises(UnsupportedError, match="pipeline_stages=2"):
        parallelize(mlp, args, parallel_mode="semi_auto_parallel", pipeline_stages=2)
    with pytest.raises(InvalidOptionsError, match="device_num=9, and there are 8 devices"):
        parallelize(mlp, args, parallel_mode="data_parallel", device_num=9)
    with pytest.raises(InvalidOptionsError, match="parameter_plan is for semi_auto_parallel"):
        parallelize(mlp, args, parallel_mode="data_parallel", parameter_plan={"down": (2, 1)})
    with pytest.raises(InvalidValueError, match="Did you mean 'down'"):
        parallelize(mlp, args, parallel_mode="semi_auto_parallel", parameter_plan={"dawn": (2, 1)})


def test_meshes_of_jax_are_taken() -> None:
    """Those of `jax.make_mesh`, whose axes are for types, where no layout is cut, and in plans."""
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    for options in (
        {"parallel_mode": "auto_parallel", "parameter_plan": {"down": (1, 1)}},
        {"parallel_mode": "semi_auto_parallel", "parameter_plan": {"down": P("x")}},
    ):
        where: Any = {"mesh": mesh, "gradients_mean": True, **options}
        program = parallelize(mlp, (PARAMS, *BATCHES[0]), **where)
        check_close(program(PARAMS, *BATCHES[0]), mlp(PARAMS, *BATCHES[0]))
        assert set(program.mesh.axis_types) == {jax.sharding.AxisType.Auto}
    plan = parallelize(mlp, (PARAMS, *BATCHES[0]), mesh=mesh, parallel_mode="auto_parallel").plan
    assert plan is not None
    args = jax.device_put((PARAMS, *BATCHES[0]), plan.shardings(mesh).arguments((PARAMS, *BATCHES[0])))
    check_close(jax.jit(px.parallel.apply(mlp, plan, mesh))(*args), mlp(PARAMS, *BATCHES[0]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": []}, "one device or more"),
        ({"devices": 4}, "one device or more"),
        ({"parameters": None}, "`parameters` are numbers of some of them"),
        ({"donate_argnums": 7}, "`donate_argnums` are numbers of some of them"),
    ],
)
def test_bad_calls(options: Any, words: str) -> None:
    with pytest.raises(PhalanxError, match=words):
        parallelize(mlp, (PARAMS, *BATCHES[0]), parallel_mode="data_parallel", **options)


def test_layouts_that_cut_nothing_need_no_mesh() -> None:
    args = (PARAMS, *BATCHES[0])
    where: Any = {"parallel_mode": "auto_parallel", "devices": jax.devices()[:2]}
    program = parallelize(mlp, args, parameter_plan={"down": (1, 1)}, **where)
    assert program.layouts["down"] == P()
    with pytest.raises(InvalidTypeError, match="Received: 'x'"):
        parallelize(mlp, args, parameter_plan={"down": "x"}, **where)  # type: ignore[dict-item]
    with pytest.raises(InvalidValueError, match="call `place` first"):
        program.held(PARAMS["down"])


def test_the_context_says_what_is_not_given() -> None:
    args = (PARAMS, *BATCHES[0])
    px.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=2)
    try:
        program = parallelize(mlp, args)
        assert (program.mode, program.mesh.size) == ("data_parallel", 2)
        check_close(program(*args), expected()[0][0])
    finally:
        px.reset_auto_parallel_context()
    assert parallelize(mlp, args).mode == "stand_alone"
