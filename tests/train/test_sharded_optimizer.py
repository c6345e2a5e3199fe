"""Optimizers whose work is divided over replicas: the numbers of plain optax, and less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.core.variables.sliced_variables import SlicedVariable
from phalanx.train import making_states

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 5)).astype(np.float32)
Y = RNG.normal(size=(24, 3)).astype(np.float32)
START: list[np.ndarray[Any, Any]] = [
    RNG.normal(size=(5, 7)).astype(np.float32),
    RNG.normal(size=7).astype(np.float32),
    RNG.normal(size=(7, 3)).astype(np.float32),
    np.float32(0.5).reshape(()),
]
TRANSFORMS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.sgd(0.02, momentum=0.9),
    "adam": lambda: optax.adam(0.05),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05)),
    "schedule": lambda: optax.chain(
        optax.add_decayed_weights(0.01),
        optax.scale_by_rms(),
        optax.scale_by_schedule(optax.cosine_decay_schedule(-0.05, 20)),
    ),
}
LEVELS = ["states", "gradients", "parameters"]
MOSTLY_THE_LAST = [*(pytest.param(x, marks=pytest.mark.soak) for x in LEVELS[:-1]), LEVELS[-1]]


def loss_of(values: Any, x: Any, y: Any) -> jax.Array:
    w, b, v, s = values
    return jnp.sum((jnp.tanh(x @ w + b) @ v * s - y) ** 2) / len(X)


_known: dict[tuple[str, int], Any] = {}


def reference(name: str, steps: int) -> list[np.ndarray[Any, Any]]:
    """The parameters after some steps of plain optax."""
    if (name, steps) not in _known:
        transform = TRANSFORMS[name]()
        params: Any = [jnp.asarray(p) for p in START]
        state = transform.init(params)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            updates, state = transform.update(jax.grad(loss_of)(params, X, Y), state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(steps):
            params, state = step(params, state)
        _known[name, steps] = [np.asarray(p) for p in params]
    return _known[name, steps]


def mirrored(replicas: int) -> px.MirroredStrategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


@dataclass
class Training:
    """A model, its optimizer and a step."""

    strategy: px.Strategy
    variables: list[px.Variable]
    optimizer: px.train.Optimizer
    run: Callable[[Any, Any], Any]

    def batches(self, rows: int = 24) -> Any:
        data = px.data.Dataset.from_tensor_slices((X, Y)).batch(rows).repeat()
        return iter(self.strategy.experimental_distribute_dataset(data))

    def steps(self, count: int, rows: int = 24) -> list[float]:
        batches = self.batches(rows)
        return [float(self.run(*next(batches))) for _ in range(count)]

    def check(self, expected: list[np.ndarray[Any, Any]]) -> None:
        for variable, want in zip(self.variables, expected, strict=True):
            for copied in variable.values:
                np.testing.assert_allclose(copied.numpy(), want, rtol=2e-4, atol=2e-5)


def training(
    strategy: px.Strategy,
    transform: optax.GradientTransformation,
    shard: Any,
    compiled: bool = True,
    **options: Any,
) -> Training:
    with strategy.scope():
        variables = [px.Variable(jnp.asarray(p), name=n) for p, n in zip(START, "wbvs", strict=True)]
        optimizer = px.train.Optimizer(transform, shard=shard, **options)

    def step(x: jax.Array, y: jax.Array) -> Any:
        return optimizer.minimize(lambda: loss_of([v.value() for v in variables], x, y), variables)

    def run(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=(x, y)), axis=None)

    return Training(strategy, variables, optimizer, px.function(run) if compiled else run)


def everything(level: str | int, **options: Any) -> px.train.OptimizerSharding:
    return px.train.OptimizerSharding(level, threshold=0, **options)


# -- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_twenty_steps_equal_optax(name: str, level: str) -> None:
    """On six replicas no array but one divides evenly."""
    made = training(mirrored(6), TRANSFORMS[name](), everything(level))
    losses = made.steps(20)
    made.check(reference(name, 20))
    assert losses[-1] < losses[0]
    assert int(made.optimizer.iterations) == 20
    assert made.optimizer.gathered == []


@pytest.mark.parametrize(
    ("replicas", "level", "size"),
    [
        (2, 1, -1),
        (2, 2, -1),
        (2, 3, -1),
        (4, "level1", 2),
        (4, "level2", 2),
        (4, "level3", 2),
        (8, "states", -1),
        (8, "gradients", 4),
        (8, "parameters", -1),
        (4, "parameters", 1),
    ],
)
def test_any_number_of_replicas_and_shards(replicas: int, level: Any, size: int) -> None:
    shard = everything(level, shard_size=size)
    made = training(mirrored(replicas), TRANSFORMS["clipped adamw"](), shard)
    made.steps(20)
    made.check(reference("clipped adamw", 20))


@pytest.mark.parametrize("level", MOSTLY_THE_LAST)
def test_the_eager_executor_has_the_same_numbers(level: str) -> None:
    shard = everything(level, shard_size=2)
    made = training(mirrored(4), TRANSFORMS["clipped adamw"](), shard, compiled=False)
    made.steps(5)
    made.check(reference("clipped adamw", 5))


def test_means_and_combined_gradients() -> None:
    for aggregate in ("mean", None):
        strategy = mirrored(2)
        with strategy.scope():
            w = px.Variable(jnp.ones(3))
            optimizer = px.train.Optimizer(optax.sgd(1.0), aggregate, shard=everything(2))

        def step() -> None:
            context = px.get_replica_context()
            assert context is not None
            gradient = jnp.arange(3.0) * (context.replica_id_in_sync_group + 1)
            if aggregate is None:
                gradient = context.all_reduce("mean", gradient)
            optimizer.apply_gradients([(gradient, w)])

        px.function(lambda: strategy.run(step))()
        assert w.numpy().tolist() == [1.0, -0.5, -2.0]


@pytest.mark.parametrize("level", MOSTLY_THE_LAST)
def test_uneven_batches_are_exact(level: str) -> None:
    """Batches of 10, 10 and 4 rows on four replicas."""
    made = training(mirrored(4), TRANSFORMS["clipped adamw"](), everything(level))
    plain = training(mirrored(1), TRANSFORMS["clipped adamw"](), None)
    np.testing.assert_allclose(made.steps(6, rows=10), plain.steps(6, rows=10), rtol=1e-4)
    made.check([v.numpy() for v in plain.variables])


def test_many_steps_as_one_program() -> None:
    made = training(mirrored(4), TRANSFORMS["schedule"](), everything("parameters"))
    px.train.loop(made.run, made.batches(), steps=20)
    made.check(reference("schedule", 20))


def test_pieces_of_a_batch() -> None:
    for level, accumulate in (("states", None), ("gradients", None), ("parameters", False)):
        shard = everything(level, accumulate=accumulate)
        made = training(mirrored(2), TRANSFORMS["clipped adamw"](), shard)

        def step(x: jax.Array, y: jax.Array) -> Any:
            def loss(x: jax.Array, y: jax.Array) -> jax.Array:
                return loss_of([v.value() for v in made.variables], x, y)

            return made.optimizer.minimize_in_pieces(loss, made.variables, (x, y), 3)

        def run(x: Any, y: Any) -> Any:
            return made.strategy.reduce("sum", made.strategy.run(step, args=(x, y)), axis=None)

        compiled = px.function(run)
        batches = made.batches()
        losses = [float(compiled(*next(batches))) for _ in range(3)]
        made.check(reference("clipped adamw", 3))
        assert losses[-1] < losses[0]
        traffic = px.testing.communication(compiled, *next(batches))
        # Once in the loop, and once for the first piece.
        assert traffic.reduce_scatter.count == {"states": 0, "gradients": 2, "parameters": 1}[level]
        with made.strategy.scope(), pytest.raises(px.errors.ContextError, match="given to Strategy"):
            made.optimizer.minimize_in_pieces(lambda: 0.0, made.variables, X, 2)


def test_sparse_and_missing_gradients() -> None:
    for level in LEVELS:
        strategy = mirrored(2)
        with strategy.scope():
            table, other = px.Variable(jnp.ones((5, 2))), px.Variable(jnp.ones(3))
            optimizer = px.train.Optimizer(optax.sgd(1.0, momentum=0.5), shard=everything(level))
        optimizer.build([table, other])

        def step() -> None:
            context = px.get_replica_context()
            assert context is not None
            row = context.replica_id_in_sync_group
            rows = px.IndexedSlices(jnp.ones((2, 2)), jnp.stack([row, row + 1]), (5, 2))
            optimizer.apply_gradients([(rows, table)])

        for run in (lambda: strategy.run(step), px.function(lambda: strategy.run(step))):
            run()
        assert table.numpy()[:, 0].tolist() == [-1.5, -4.0, -1.5, 1.0, 1.0]
        assert other.numpy().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_loss_scale_skips_the_step_on_all_replicas(compiled: bool) -> None:
    """One replica has a gradient that is not finite, in a slice that belongs to the other."""
    strategy = mirrored(2)
    with strategy.scope():
        w = px.Variable(jnp.ones(6))
        scale = px.train.LossScale(initial=4.0)
        optimizer = px.train.Optimizer(optax.adam(0.1), loss_scale=scale, shard=everything(3))

    def step(bad: float) -> None:
        context = px.get_replica_context()
        assert context is not None
        where = jnp.arange(6) == 5
        here = where & (context.replica_id_in_sync_group == 0)
        optimizer.apply_gradients([(jnp.where(here, bad, 4.0), w)])

    def run(bad: jax.Array) -> None:
        strategy.run(step, args=(bad,))

    run = px.function(run) if compiled else run
    run(jnp.float32(jnp.inf))
    assert w.numpy().tolist() == [1.0] * 6
    assert float(scale.value) == 2.0
    run(jnp.float32(4.0))
    np.testing.assert_allclose(w.numpy(), 0.9, rtol=1e-5)


# -- what is kept where ---------------------------------------------------------------------------


def bytes_here(variables: list[px.Variable]) -> int:
    """How many bytes the first device holds of variables."""
    return sum(v._value.array.addressable_shards[0].data.nbytes for v in variables)


WIDTH, DEPTH = 160, 3
ONE = WIDTH * WIDTH * 4  # the bytes of a matrix


def deep(level: Any, **options: Any) -> tuple[list[px.Variable], px.train.Optimizer, Any, Any]:
    strategy = mirrored(4)
    with strategy.scope():
        ws = [px.Variable(jnp.eye(WIDTH), name=f"w{i}") for i in range(DEPTH)]
        optimizer = px.train.Optimizer(
            optax.adam(0.1), shard=None if level == 0 else everything(level), **options
        )

    def step(x: jax.Array) -> Any:
        def loss() -> jax.Array:
            h = x
            for w in ws:
                h = jnp.tanh(h @ w.value())
            return jnp.sum(h)

        return optimizer.minimize(loss, ws)

    run = px.function(lambda x: strategy.run(step, args=(x,)))
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones((2, WIDTH)))
    run(x)
    return ws, optimizer, run, x


def test_memory_and_traffic_of_each_level() -> None:
    """Bytes per device with four replicas, and what a step sends."""
    held, temporary, traffic = {}, {}, {}
    for level in range(4):
        ws, optimizer, run, x = deep(level)
        held[level] = bytes_here(ws), bytes_here(optimizer.variables) - 8  # two counters
        memory = run.lower(x).compile().memory_analysis()
        temporary[level] = memory.temp_size_in_bytes
        found = px.testing.communication(run, x)
        traffic[level] = found.all_reduce.bytes, found.reduce_scatter.bytes, found.all_gather.bytes
    whole = DEPTH * ONE
    assert held == {
        0: (whole, 2 * whole),
        1: (whole, 2 * whole // 4),
        2: (whole, 2 * whole // 4),
        3: (whole // 4, 2 * whole // 4),
    }
    assert traffic == {
        0: (whole, 0, 0),
        1: (whole, 0, whole // 4),
        2: (0, whole, whole // 4),
        3: (0, whole, whole // 4),
    }
    # Summed gradients are never whole from level 2 on.
    assert temporary[2] < temporary[1] - whole // 2


def buffers() -> dict[int, int]:
    """Where arrays are, and how many bytes they have; views of the same memory count once."""
    arrays = [x for x in jax.live_arrays() if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    pieces = [p.data for x in arrays for p in x.addressable_shards]
    return {p.unsafe_buffer_pointer(): p.nbytes for p in pieces}


def test_a_state_is_never_whole_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device makes its slices: by what the program needs, and by what is there when it ends."""
    strategy, whole = mirrored(4), 64 * 1024 * 4
    with strategy.scope():
        w = px.Variable(jnp.ones((64, 1024)), name="w")
    programs: list[Any] = []
    make = making_states.slices_program

    def seen(*args: Any) -> Any:
        programs.append(make(*args))
        return programs[-1]

    monkeypatch.setattr(making_states, "slices_program", seen)
    transform = optax.chain(optax.adam(0.1), _keeps_a_copy())
    before = buffers()
    optimizer = px.train.Optimizer(transform, shard=everything(1))
    optimizer.build([w])
    program, given, _ = programs[0]
    used = program.lower(given).compile().memory_analysis()
    assert used.argument_size_in_bytes == whole  # the copy that each device has anyway
    # The slices of mu, nu and the copy; a counter, and where they are.
    assert 3 * whole // 4 + 4 <= used.output_size_in_bytes < 3 * whole // 4 + 100
    assert used.temp_size_in_bytes < whole // 4
    pieces = [size for where, size in buffers().items() if where not in before]
    assert max(pieces) == whole // 4
    copy = next(v for v in optimizer.variables if v.name == "w/kept:0")
    assert isinstance(copy, SlicedVariable)
    np.testing.assert_array_equal(copy.numpy(), np.full((64, 1024), 2.0))


class _Kept(NamedTuple):
    kept: Any


def _keeps_a_copy(look: Callable[[Any], Any] = lambda p: p * 2) -> optax.GradientTransformation:
    """Starts from something that it computes from parameters."""
    return optax.GradientTransformation(
        lambda params: _Kept(jax.tree.map(look, params)), lambda grads, state, _: (grads, state)
    )


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p * 2,
        lambda p: p @ p.T,  # whole arrays
        lambda p: p / jnp.sqrt(jnp.sum(p**2)),
        lambda p: p * float(p[0, 0]),  # which cannot be traced
        lambda p: jnp.zeros_like(p, jnp.bfloat16),
    ],
    ids=["elementwise", "product", "norm", "value", "narrow"],
)
@pytest.mark.parametrize("is_sliced", [False, True])
def test_a_state_made_of_parameters(look: Callable[[Any], Any], is_sliced: bool) -> None:
    strategy, start = mirrored(4), RNG.normal(size=(5, 6)).astype(np.float32)
    with strategy.scope():
        w = px.Variable(start, name="w")
        if is_sliced:
            px.train.Optimizer(optax.sgd(1.0), shard=everything(3)).build([w])
        optimizer = px.train.Optimizer(_keeps_a_copy(look), shard=everything(3))
        optimizer.build([w])
    kept = optimizer.variables[1]
    expected = look(jnp.asarray(start))
    assert isinstance(kept, SlicedVariable)
    assert kept.dtype == expected.dtype
    np.testing.assert_allclose(kept.numpy(), expected, rtol=1e-6)


def test_gradients_may_gather_again() -> None:
    shard = everything("parameters", regather=True)
    made = training(mirrored(4), TRANSFORMS["clipped adamw"](), shard)
    made.steps(3)
    made.check(reference("clipped adamw", 3))
    texts = []
    for again in (False, True):
        made = training(mirrored(4), optax.sgd(0.1), everything("parameters", regather=again))
        made.optimizer.build(made.variables)
        texts.append(made.run.lower(*next(made.batches())).as_text())  # type: ignore[attr-defined]
    # Only the weights of the second layer and the scale are needed for the gradient.
    assert [text.count("stablehlo.all_gather") for text in texts] == [3, 4]
    assert ["optimization_barrier" in text for text in texts] == [False, True]


def test_small_arrays_stay_whole() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        large, small = px.Variable(jnp.zeros(256)), px.Variable(jnp.zeros(255))
        shard = px.train.OptimizerSharding("parameters", threshold=1)
        optimizer = px.train.Optimizer(optax.sgd(0.1, momentum=0.9), shard=shard)
    optimizer.build([large, small])
    sliced = [isinstance(v, SlicedVariable) for v in (large, small, *optimizer.variables)]
    assert sliced == [True, False, False, True, False]
    assert [v.shape for v in optimizer.variables] == [(), (256,), (255,)]


def test_a_transformation_that_needs_whole_arrays_says_so() -> None:
    """The row and column means of adafactor need whole matrices; the numbers are the same."""
    transform = optax.adafactor(0.05, min_dim_size_to_factor=2)
    made = training(mirrored(4), transform, everything("gradients"))
    plain = training(mirrored(1), transform, None)
    made.steps(3)
    plain.steps(3)
    made.check([v.numpy() for v in plain.variables])
    assert set(made.optimizer.gathered) == {"reduce_sum", "broadcast_in_dim"}


# -- variables in slices --------------------------------------------------------------------------


def sliced(replicas: int = 4, compiled: bool = True) -> tuple[px.MirroredStrategy, px.Variable]:
    strategy = mirrored(replicas)
    with strategy.scope():
        w = px.Variable(jnp.arange(6.0), aggregation=px.VariableAggregation.MEAN, name="w")
        optimizer = px.train.Optimizer(optax.sgd(1.0), shard=everything("parameters"))
    optimizer.build([w])
    assert isinstance(w, SlicedVariable)
    return strategy, w


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_sliced_variable_is_a_mirrored_one(compiled: bool) -> None:
    strategy, w = sliced()

    def step() -> Any:
        context = px.get_replica_context()
        assert context is not None
        w.assign_add(jnp.full(6, 1.0) * context.replica_id_in_sync_group)  # 1.5 in the mean
        w.scatter_add(px.IndexedSlices(jnp.ones(1), jnp.array([0]), (6,)))
        return jnp.sum(w)

    def run() -> Any:
        w.assign(w * 2)
        found = strategy.run(step)
        strategy.extended.update(w, lambda copied: copied.assign(copied / jnp.sum(copied.value())))
        return strategy.reduce("mean", found, axis=None), strategy.reduce("mean", w, axis=None)

    total, mean = (px.function(run) if compiled else run)()
    expected = np.arange(6.0) * 2 + 1.5
    expected[0] += 1
    assert float(total) == pytest.approx(expected.sum())
    for got in (w.numpy(), mean, *(v.numpy() for v in w.values), copy.deepcopy(w).numpy()):
        np.testing.assert_allclose(got, expected / expected.sum(), rtol=1e-6)
    assert w.shape == (6,)
    assert w.part_shape == (2,)
    with pytest.raises(px.errors.InvalidValueError, match="shape"):
        w.assign(jnp.zeros(2))


def test_programs_from_before_are_traced_again() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        w = px.Variable(jnp.arange(4.0))
    evaluate = px.function(lambda: strategy.run(lambda: jnp.sum(w)))
    double = px.function(lambda: w.assign(w * 2))
    for _ in range(2):  # the second call takes the short way
        evaluate()
        double()
    px.train.Optimizer(optax.sgd(1.0), shard=everything("parameters")).build([w])
    double()
    assert [float(x) for x in strategy.experimental_local_results(evaluate())] == [48.0, 48.0]
    assert w.numpy().tolist() == [0.0, 8.0, 16.0, 24.0]
    assert (evaluate.trace_count, double.trace_count) == (2, 2)


def test_a_second_optimizer() -> None:
    strategy, w = sliced(2)
    with strategy.scope():
        other = px.train.Optimizer(optax.adam(0.5), shard=everything("parameters"))
    px.function(lambda: strategy.run(lambda: other.apply_gradients([(jnp.ones(6) * w, w)])))()
    np.testing.assert_allclose(w.numpy(), np.arange(6.0) - [0, 0.5, 0.5, 0.5, 0.5, 0.5], rtol=1e-5)

    for shard in (None, everything("parameters", shard_size=1)):
        with strategy.scope():
            another = px.train.Optimizer(optax.adam(0.5), shard=shard)
        with pytest.raises(px.errors.InvalidValueError, match="is kept in 2 slices"):
            another.build([w])


def test_checkpoints_go_between_levels_and_replica_counts(tmp_path: Path) -> None:
    name = "clipped adamw"
    first = training(mirrored(4), TRANSFORMS[name](), everything("parameters"))
    first.steps(3)
    saved = px.train.Checkpoint(variables=first.variables, optimizer=first.optimizer)
    path = saved.save(str(tmp_path / "ckpt"))
    for replicas, shard in ((6, everything("states")), (2, everything("parameters")), (1, None)):
        again = training(mirrored(replicas), TRANSFORMS[name](), shard)
        again.optimizer.build(again.variables)
        checkpoint = px.train.Checkpoint(variables=again.variables, optimizer=again.optimizer)
        checkpoint.restore(path).assert_consumed()
        again.check([v.numpy() for v in first.variables])
        again.steps(2)
        again.check(reference(name, 5))


# -- bad input ------------------------------------------------------------------------------------


def test_errors() -> None:
    adam = optax.adam(0.1)
    for shard in ("weights", 4, 0, True, "level4"):
        with pytest.raises(px.errors.InvalidValueError, match="'states', 'gradients' or 'parameters'"):
            px.train.Optimizer(adam, shard=shard)
    with pytest.raises(px.errors.InvalidTypeError, match="shard must be"):
        px.train.Optimizer(adam, shard=1.5)
    for name, options in (("threshold", {"threshold": -1}), ("shard_size", {"shard_size": 0})):
        with pytest.raises(px.errors.InvalidValueError, match=name):
            px.train.OptimizerSharding("states", **options)
    with pytest.raises(px.errors.InvalidTypeError, match="accumulate"):
        px.train.OptimizerSharding("states", accumulate=1)
    with pytest.raises(px.errors.InvalidTypeError, match="GradientCommunication"):
        px.train.Optimizer(adam, communication={})
    for size in (3, 8):
        with mirrored(4).scope():
            w = px.Variable(jnp.zeros(4))
            optimizer = px.train.Optimizer(adam, shard=everything(1, shard_size=size))
        with pytest.raises(px.errors.InvalidValueError, match=rf"divide.* {size}, and 4 replicas"):
            optimizer.build([w])
    central = px.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with central.scope():
        w = px.Variable(jnp.zeros(4))
        optimizer = px.train.Optimizer(adam, shard="states")
    with pytest.raises(px.errors.UnsupportedError, match="has a copy of"):
        optimizer.build([w])


def test_one_replica_has_nothing_to_divide() -> None:
    made = training(px.OneDeviceStrategy("CPU:0"), TRANSFORMS["adam"](), everything(3))
    made.steps(3)
    made.check(reference("adam", 3))
