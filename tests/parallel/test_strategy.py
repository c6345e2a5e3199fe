"""`AutoParallelStrategy`: one replica over several devices."""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from tests.parallel.hlo import sent
from tests.parallel.models import check_close
from tests.parameter_server.jobs import Job

import phalanx as px
from phalanx.errors import ContextError, InvalidOptionsError, InvalidValueError
from phalanx.parallel import Layout, laid_out_variable, shard, step_options, value_and_grad
from phalanx.parallel.storing import made_in_parts
from phalanx.parallel.wide_sums import with_wide_results

RANDOM = np.random.default_rng(0)
ROWS, LABELS = (RANDOM.normal(size=(21, n)).astype(np.float32) for n in (6, 4))
UP, DOWN = (RANDOM.normal(size=s).astype(np.float32) * 0.4 for s in ((6, 24), (24, 4)))


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return jnp.sum((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2) / 8


def train(strategy: px.Strategy, planned: bool = False) -> Any:
    """Two epochs of three batches, of which the last has five rows; and the last batch itself."""
    with strategy.scope():
        up = px.Variable(lambda: jnp.asarray(UP), name="up")
        down = px.Variable(DOWN, name="down")
        optimizer = px.train.Optimizer(optax.adam(0.01))

    def step(x: Any, y: Any) -> Any:
        if planned:
            params = {"up": up.value(), "down": down.value()}
            loss, found = value_and_grad(loss_of)(params, x, y)
            gradients = found["up"], found["down"]
        else:
            loss, gradients = px.value_and_grad(
                lambda: loss_of({"up": up, "down": down}, x, y), [up, down]
            )()
        optimizer.apply_gradients(zip(gradients, [up, down], strict=True))
        return loss

    @px.function
    def train_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    dataset = px.data.Dataset.from_tensor_slices((ROWS, LABELS)).batch(8)
    batches = strategy.experimental_distribute_dataset(dataset)
    losses, seen = [], []
    for _ in range(2):
        for batch in batches:
            losses.append(float(train_step(batch)))
            seen.append(batch[0].sharding)
    return {"losses": losses, "up": up, "down": down, "optimizer": optimizer, "inputs": seen[1:3]}


@functools.cache
def expected() -> Any:
    return train(px.OneDeviceStrategy("CPU:0"))


def check(found: Any) -> None:
    np.testing.assert_allclose(found["losses"], expected()["losses"], rtol=1e-5)
    for name in ("up", "down"):
        check_close(found[name].numpy(), expected()[name].numpy())


LAYOUT = Layout((2, 3), ("data", "model"))


@pytest.mark.parametrize(
    ("options", "part", "last"),
    [
        ({"parameter_plan": {"up": (1, 8), "down": (8, 1)}}, (1, 6), (5, 6)),
        ({"devices": 6, "parameter_plan": {"up": LAYOUT("None", "model")}}, (4, 6), (5, 6)),
        ({"dataset_strategy": "full_batch"}, (8, 6), (5, 6)),
        ({"dataset_strategy": ((4, 2), (4, 1))}, (2, 3), (5, 3)),
        ({"devices": 6, "dataset_strategy": (LAYOUT("data", "model"),) * 2}, (4, 2), (5, 2)),
    ],
    ids=["cuts", "layout", "full batch", "cut batches", "laid out batches"],
)
def test_training_equals_one_device(options: Any, part: Any, last: Any) -> None:
    if "devices" in options:
        options = options | {"devices": jax.devices()[: options["devices"]]}
    strategy = px.AutoParallelStrategy(**options)
    found = train(strategy)
    check(found)
    whole, rest = found["inputs"]
    assert whole.shard_shape((8, 6)) == part
    assert rest.shard_shape((5, 6)) == last


def test_slots_are_laid_out_like_their_variables() -> None:
    strategy = px.AutoParallelStrategy(parameter_plan={"up": (1, 8)}, devices=jax.devices())
    with strategy.scope():
        up = px.Variable(UP, name="up")
        optimizer = px.train.Optimizer(optax.adam(0.1))
        optimizer.build([up])
    parts = {v.name: v._value.sharding.shard_shape(v.shape) for v in optimizer.variables}
    assert parts["up/mu:0"] == parts["up/nu:0"] == (6, 3)
    strategy.run(lambda: optimizer.apply_gradients([(jnp.ones((6, 24)), up)]))
    assert up._value.sharding == up.sharding
    assert {v._value.sharding.shard_shape(v.shape) for v in optimizer.variables} == {(), (6, 3)}


def test_slots_are_never_whole_on_a_device() -> None:
    """Each device makes its own part of a state; one that looks at values is made from whole ones."""
    shardings: list[Any] = []

    def init(params: Any) -> Any:
        jax.debug.inspect_array_sharding(params[0] * 2, callback=shardings.append)
        return {"slots": [p * 2 for p in params], "count": jnp.zeros(())}

    def looks(params: Any) -> Any:
        return [p * float(p[0, 0]) for p in params]

    strategy = px.AutoParallelStrategy(parameter_plan={"up": (1, 8)}, devices=jax.devices())
    with strategy.scope():
        up = px.Variable(UP, name="up")
        made = []
        for each in (init, looks):
            optimizer = px.train.Optimizer(optax.GradientTransformation(each, lambda *xs: xs[:2]))
            optimizer.build([up])
            made += [v for v in optimizer.variables if v.shape]
    assert [found.shard_shape((6, 24)) for found in shardings] == [(6, 3)]
    for variable, factor in zip(made, (2, UP[0, 0]), strict=True):
        assert {s.data.shape for s in variable._value.addressable_shards} == {(6, 3)}
        check_close(variable.numpy(), UP * factor)


def test_a_searched_plan_and_its_file(tmp_path: Any) -> None:
    shapes = {"up": UP, "down": DOWN}, ROWS[:8], LABELS[:8]
    strategy = px.AutoParallelStrategy(devices=jax.devices()[:4], parallel_mode="auto_parallel")
    plan = strategy.search(loss_of, shapes)
    assert strategy.plan is plan
    found = train(strategy, planned=True)
    check(found)
    assert tuple(found["up"].sharding.spec) == tuple(plan.parameters["up"].spec)
    with pytest.raises(ContextError, match="before variables are made"):
        strategy.search(loss_of, shapes)
    plan.save(tmp_path / "plan.json")
    again = px.AutoParallelStrategy(str(tmp_path / "plan.json"))
    assert again.plan == plan
    assert again.mesh.size == 4
    check(train(again))


def test_variables_are_never_whole_on_a_device() -> None:
    """Each device makes its own part, and a function is traced once and not called."""
    calls: list[Any] = []
    shardings: list[Any] = []

    def make() -> Any:
        calls.append(jnp.zeros(()))
        value = jax.random.normal(jax.random.key(1), (512, 64))
        jax.debug.inspect_array_sharding(value, callback=shardings.append)
        return value

    strategy = px.AutoParallelStrategy(parameter_plan={"w": (8, 1), "host": (8, 1)})
    with strategy.scope():
        w = px.Variable(make, name="w")
        host = px.Variable(np.ones((16, 2)), name="host", dtype=jnp.bfloat16)
    assert len(calls) == 1
    assert isinstance(calls[0], jax.core.Tracer)
    assert [found.shard_shape((512, 64)) for found in shardings] == [(64, 64)]
    check_close(w.numpy(), jax.random.normal(jax.random.key(1), (512, 64)))
    assert {s.data.shape for s in w._value.addressable_shards} == {(64, 64)}
    assert host.dtype == jnp.bfloat16
    assert {s.data.shape for s in host._value.addressable_shards} == {(2, 2)}


def test_initial_values_that_look_at_themselves_are_called() -> None:
    strategy = px.AutoParallelStrategy(parameter_plan={"w": (8,)})
    with strategy.scope():
        w = px.Variable(lambda: np.full(8, float(jnp.ones(()))), name="w")
        with pytest.raises(InvalidValueError, match="shape that was asked for"):
            px.Variable(lambda: jnp.ones(3), shape=(4,))
        with pytest.raises(InvalidValueError, match="cannot be divisible by"):
            px.Variable(lambda: jnp.ones(6), name="w")
    assert w.sharding.spec == P(("d0", "d1", "d2"))


def test_parallel_optimizers_keep_variables_in_parts() -> None:
    strategy = px.AutoParallelStrategy(
        devices=jax.devices()[:4],
        enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0},
    )
    found = train(strategy)
    check(found)
    assert found["down"].sharding.shard_shape((24, 4)) == (6, 4)


def test_modes_of_other_strategies_are_refused() -> None:
    with pytest.raises(InvalidOptionsError, match=r"Use px\.MirroredStrategy for data_parallel"):
        px.AutoParallelStrategy(parallel_mode="data_parallel")


# -- options that act in the program of a step ---------------------------------------------------


def compiled_step(step: Any, *args: Any, **options: Any) -> Any:
    """A compiled step on four devices, with a variable that is cut along its columns."""
    options = {"devices": jax.devices()[:4], "parameter_plan": {"w": (1, 4)}} | options
    strategy = px.AutoParallelStrategy(**options)
    with strategy.scope():
        w = px.Variable(lambda: jnp.ones((16, 16), args[0].dtype), name="w")
    program = px.function(lambda *xs: strategy.run(functools.partial(step, w), args=xs))
    return program, program(*args)


def test_variables_elsewhere_are_not_read_for_a_step() -> None:
    job = Job(1)
    elsewhere = job.variable(np.ones(4, np.float32), name="elsewhere")
    job.strategy.close()
    _, found = compiled_step(lambda w, x: jnp.sum(x @ w), jnp.ones((16, 16)))
    assert float(found) == 16**3
    assert not job.servers.pulls
    assert elsewhere.name.startswith("elsewhere")


@pytest.mark.parametrize("enabled", [False, True])
def test_cuts_move_by_all_to_all_if_enabled(enabled: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        w.assign(shard(jnp.tanh, ((4, 1),))(x @ w))
        return w.value()

    x = jnp.arange(256, dtype=jnp.float32).reshape(16, 16) / 256
    program, found = compiled_step(step, x, enable_alltoall=enabled)
    assert ("all-to-all" in sent(program.lower(x).compile(), 4)) == enabled
    check_close(found, jnp.tanh(x @ jnp.ones((16, 16))))


@pytest.mark.parametrize(
    ("options", "wide"),
    [
        ({}, 1),  # the gradient
        ({"gradient_fp32_sync": False}, 0),
        ({"force_fp32_communication": True}, 2),
    ],
)
def test_sums_of_steps_in_32_bits(options: Any, wide: int) -> None:
    def step(w: Any, x: Any) -> Any:
        return px.value_and_grad(lambda: jnp.sum(jnp.tanh(x @ w)), [w])()

    x = jnp.ones((16, 16), jnp.bfloat16)
    program, (_, (gradient,)) = compiled_step(step, x, **options)
    assert gradient.dtype == jnp.bfloat16
    products = [line for line in program.lower(x).as_text().splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert sum("-> tensor<16x16xf32>" in line for line in products) == wide


@pytest.mark.parametrize("is_open", [False, True])
def test_sums_of_steps_are_packed_or_not(is_open: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        return jnp.sum(x @ w.value(), axis=0), jnp.sum(w * w), jnp.sum(jnp.sin(w * 2))

    options = {"parameter_plan": {"w": (4, 1)}, "comm_fusion": {"openstate": is_open}}
    program, _ = compiled_step(step, jnp.ones((16, 16)), **options)
    text = program.lower(jnp.ones((16, 16))).compile().as_text()
    assert (text.count(" all-reduce(") == 1) == is_open


def test_gradients_of_variables_are_those_that_options_ask_for(tmp_path: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        return px.values_and_grads(lambda: (jnp.sum(x @ w), jnp.sum(w * 2)), [[w], [w]])()[1]

    x = jnp.ones((16, 16))
    dumped = {"dump_local_norm": True, "dump_local_norm_path": str(tmp_path)}
    found = compiled_step(step, x, loss_repeated_mean=False, **dumped)[1]
    check_close(jax.block_until_ready(found), ([np.full((16, 16), 64.0)], [np.full((16, 16), 8.0)]))
    jax.effects_barrier()
    lines = (tmp_path / "rank_0_local_norm.txt").read_text().split()
    assert {lines[0], float(lines[1]), float(lines[3])} == {"w", 64.0 * 8, 8.0 * 8}  # of its columns


@pytest.mark.parametrize("of_variables", [False, True])
def test_levels_cut_and_gather_what_a_step_differentiates(of_variables: bool) -> None:
    def step(w: Any, x: Any) -> Any:
        if of_variables:
            value, found = px.value_and_grad(lambda: jnp.sum(jnp.tanh(x @ w) ** 2), {"w": w})()
            return value, found
        return value_and_grad(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"]) ** 2))({"w": w.value()}, x)

    x = jnp.ones((16, 16)) / 16
    gathers = {}
    for level in ("level1", "level2", "level3"):
        program, (_, gradient) = compiled_step(
            step,
            x,
            parallel_mode="semi_auto_parallel",
            parameter_plan={},
            enable_alltoall=True,  # which adds no constraints
            enable_parallel_optimizer=True,
            parallel_optimizer_config={"parallel_optimizer_threshold": 0, "optimizer_level": level},
        )
        assert level == "level1" or gradient["w"].sharding.shard_shape((16, 16)) == (4, 16)
        gathers[level] = program.lower(x).as_text().count("sdy.sharding_constraint")
    assert gathers["level1"] < gathers["level2"] < gathers["level3"]


@pytest.mark.parametrize("compiled", [False, True])
def test_losses_of_level3_write_variables(compiled: bool) -> None:
    """The loss is staged for its gradient, and so cannot write by itself."""
    config = {"parallel_optimizer_threshold": 0, "optimizer_level": "level3"}
    strategy = px.AutoParallelStrategy(
        devices=["CPU:0", "CPU:1"], enable_parallel_optimizer=True, parallel_optimizer_config=config
    )
    with strategy.scope():
        w = px.Variable(lambda: jnp.ones((4, 2)), name="w")
        seen = px.Variable(0.0, trainable=False)

    def loss(x: Any) -> Any:
        y = x @ w
        seen.assign_add(jnp.mean(y))
        return jnp.sum(y) * seen, {"first": y[0, 0], "name": "aux", "of": w}

    def step(x: Any) -> Any:
        one = px.value_and_grad(loss, [w], has_aux=True)(x)
        several = px.values_and_grads(lambda: (loss(x)[0], jnp.sum(w * w)), [[w], [w]])()
        return one, several

    run = px.function(lambda x: strategy.run(step, (x,))) if compiled else strategy.run
    args = jnp.ones((2, 4)) if compiled else (jnp.ones((2, 4)),)
    for count in (0, 2):
        ((value, aux), (gradient,)), ((_, squares), ((first,), (second,))) = (
            run(args) if compiled else run(step, args)
        )
        assert float(value) == 16 * 4 * (count + 1)
        assert (float(aux["first"]), aux["name"], aux["of"]) == (4, "aux", w)
        check_close(
            (gradient[0, 0], first[0, 0], second[0, 0]), (8.0 * (count + 1), 8.0 * (count + 2), 2)
        )
        assert float(squares) == 8
        assert float(seen) == 4 * (count + 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_has_no_gradient_in_a_step(compiled: bool) -> None:
    strategy = px.AutoParallelStrategy(devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        w, n = px.Variable(2.0), px.Variable(2, trainable=False)
    bad: list[tuple[Any, Any, str]] = [
        (lambda: w * n, [w, n], "real- or complex-valued inputs"),
        (lambda: None, w, "Output was None"),
        (lambda: (w.value(), w.value()), w, "scalar"),
        (lambda: jnp.int32(1), w, "real-valued outputs"),
    ]
    for loss, variables, words in bad:
        grad = px.grad(loss, variables)
        run = px.function(lambda grad=grad: strategy.run(grad)) if compiled else strategy.run
        with pytest.raises(TypeError, match=words):
            run() if compiled else run(grad)


@pytest.mark.parametrize("sync", [False, True])
def test_gradients_of_eager_steps_are_summed_in_32_bits(
    sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    def watched(pull: Any) -> Any:
        wide = with_wide_results(pull)
        return lambda *given: texts.append(str(jax.make_jaxpr(wide)(*given))) or wide(*given)

    monkeypatch.setattr(step_options, "with_wide_results", watched)
    strategy = px.AutoParallelStrategy(devices=["CPU:0", "CPU:1"], gradient_fp32_sync=sync)
    with strategy.scope():
        w = px.Variable(lambda: jnp.ones((4, 2), jnp.bfloat16), name="w")

    def step(x: Any) -> Any:
        def loss() -> Any:
            return jnp.sum(x @ w)

        return px.grad(loss, w)(), px.values_and_grads(lambda: (loss(),), [w])()[1][0]

    for gradient in strategy.run(step, (jnp.ones((2, 4), jnp.bfloat16),)):
        assert gradient.dtype == jnp.bfloat16
        assert gradient.tolist() == [[2, 2]] * 4
    assert [text.count("preferred_element_type=float32") for text in texts] == [1, 1] * sync


def test_eager_steps_lay_out_without_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would move from one dim to another is gathered first."""
    layouts = []
    constrain = jax.lax.with_sharding_constraint

    def watched(x: Any, sharding: Any) -> Any:
        layouts.append(sharding.spec)
        return constrain(x, sharding)

    monkeypatch.setattr(jax.lax, "with_sharding_constraint", watched)
    for enabled in (False, True):
        strategy = px.AutoParallelStrategy(
            devices=jax.devices()[:2], parameter_plan={"w": (2, 1)}, enable_alltoall=enabled
        )
        with strategy.scope():
            w = px.Variable(lambda: jnp.ones((4, 4)), name="w")
        layouts.clear()
        sine = shard(jnp.sin, ((1, 2),))
        found = strategy.run(px.grad(lambda w=w, sine=sine: jnp.sum(sine(w.value())), w))
        check_close(found, jnp.cos(jnp.ones((4, 4))))
        assert [any(spec) for spec in layouts] == [False, True][enabled:]


def test_options_that_cannot_act_on_eager_steps_are_refused() -> None:
    strategy = px.AutoParallelStrategy(devices=["CPU:0", "CPU:1"], force_fp32_communication=True)
    with pytest.raises(InvalidOptionsError, match=r"Run the step in px\.function"):
        strategy.run(lambda: 0)


@pytest.mark.parametrize("gradients_of", [px.value_and_grad, value_and_grad])
def test_eager_steps_find_what_was_compiled(gradients_of: Any) -> None:
    traced = []

    @jax.jit
    def loss(w: Any) -> Any:
        traced.append(w)
        return jnp.sum(w**2)

    for _ in range(2):  # strategies may have other options, so each traces for itself
        strategy = px.AutoParallelStrategy(devices=["CPU:0", "CPU:1"], parameter_plan={"w": (2,)})
        with strategy.scope():
            w = px.Variable(np.ones(4, np.float32), name="w")

        def step(w: Any = w) -> None:
            if gradients_of is px.value_and_grad:
                w.assign_sub(px.value_and_grad(lambda: loss(w.value()), [w])()[1][0])
            else:
                w.assign_sub(value_and_grad(loss)(w.value())[1])

        counts = []
        for _ in range(3):
            strategy.run(step)
            counts.append(len(traced))
        assert counts[0] == counts[2]
    assert len(traced) == 2


def test_files_are_written_when_a_step_runs(tmp_path: Any) -> None:
    files = {"strategy_ckpt_save_file": "s.json", "group_ckpt_save_file": "g.json"}
    options: Any = {name: str(tmp_path / file) for name, file in files.items()}
    strategy = px.AutoParallelStrategy(parameter_plan={"w": (4, 1)}, **options)
    with strategy.scope():
        px.Variable(lambda: jnp.ones((16, 16)), name="w")
    assert not list(tmp_path.iterdir())
    strategy.run(lambda: 0)
    assert len(json.loads((tmp_path / "g.json").read_text())["parameter_groups"]["w"]) == 4
    again = px.AutoParallelStrategy(strategy_ckpt_load_file=options["strategy_ckpt_save_file"])
    with again.scope():
        w = px.Variable(lambda: jnp.ones((16, 16)), name="w")
    assert w.sharding.shard_shape(w.shape) == (4, 16)


@pytest.mark.parametrize("in_parts", [False, True])
def test_variables_may_be_made_whole_first(in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = []

    def watched(make: Any, *rest: Any) -> Any:
        programs.append(make)
        return made_in_parts(make, *rest)

    monkeypatch.setattr(laid_out_variable, "made_in_parts", watched)
    strategy = px.AutoParallelStrategy(parameter_plan={"w": (8,)}, init_param_in_compile=in_parts)
    with strategy.scope():
        w = px.Variable(lambda: jnp.ones(16), name="w")
    assert w.sharding.shard_shape(w.shape) == (2,)
    assert len(programs) == in_parts
