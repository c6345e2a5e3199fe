"""Collectives inside of `Strategy.run`: on both executors, in staged code, and differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px

c = px.comm


def runs(
    executor: str, count: int, fn: Callable[[jax.Array], Any], shape: tuple[int, ...] = (6,)
) -> list[Any]:
    """What each replica gets for its own rows of a table."""
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    rows = given(count, shape)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(rows[context.replica_id_in_sync_group])
    )
    step = lambda v: strategy.run(fn, args=(v,))  # noqa: E731
    result = (px.function(step) if executor == "compiled" else step)(values)
    local = [jax.tree.map(lambda x, i=i: x.values[i], result, is_leaf=is_value) for i in range(count)]
    return [jax.tree.map(np.asarray, x) for x in local]


def is_value(x: Any) -> bool:
    return isinstance(x, px.DistributedValues)


def given(count: int, shape: tuple[int, ...] = (6,)) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape))
    return (np.arange(count * size, dtype=np.float32).reshape(count, *shape) % 7) + 1


@pytest.fixture(params=["eager", "compiled"])
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(("executor", "count"), [("eager", 2), ("compiled", 2), ("compiled", 3)])
def test_every_operation(executor: str, count: int) -> None:
    x = given(count)
    parts = x.reshape(count, count, -1)

    def everything(mine: jax.Array) -> dict[str, Any]:
        blocks = list(jnp.reshape(mine, (count, -1)))
        return {
            "rank": c.get_rank() + c.get_world_size() * 10,
            "sum": c.all_reduce(mine)[0],
            "avg": c.all_reduce(mine, px.ReduceOp.MEAN)[0],
            "max": c.all_reduce(mine, "max")[0],
            "prod": c.all_reduce(mine, "prod")[0],
            "bxor": c.all_reduce(mine.astype(jnp.int32), "bxor")[0],
            "premul": c.all_reduce(mine, c.premul_sum(0.5))[0],
            "reduce": c.reduce(mine, 1)[0],
            "broadcast": c.broadcast(mine, 1)[0],
            "all_gather": c.all_gather_into_tensor(mine)[0],
            "list": c.all_gather(mine)[0],
            "gather": c.gather_into_tensor(mine, 1)[0],
            "scatter": c.scatter_tensor(mine, 1)[0],
            "scatter list": c.scatter(blocks, 1)[0],
            "reduce_scatter": c.reduce_scatter_tensor(mine, "min")[0],
            "reduce_scatter list": c.reduce_scatter(blocks)[0],
            "all_to_all": c.all_to_all_single(mine)[0],
            "all_to_all list": c.all_to_all(blocks)[0],
            "coalesced": c.all_reduce_coalesced([mine, mine + 1])[0],
        }

    for i, found in enumerate(runs(executor, count, everything)):
        assert found["rank"] == i + 10 * count
        wanted: dict[str, Any] = {
            "sum": x.sum(0),
            "avg": x.mean(0),
            "max": x.max(0),
            "prod": x.prod(0),
            "bxor": np.bitwise_xor.reduce(x.astype(np.int32)),
            "premul": x.sum(0) / 2,
            "reduce": x.sum(0) if i == 1 else x[i],
            "broadcast": x[1],
            "all_gather": x.reshape(-1),
            "list": list(x),
            "gather": x.reshape(-1) * (i == 1),
            "scatter": parts[1, i],
            "scatter list": parts[1, i],
            "reduce_scatter": parts.min(0)[i],
            "reduce_scatter list": parts.sum(0)[i],
            "all_to_all": parts[:, i].reshape(-1),
            "all_to_all list": list(parts[:, i]),
            "coalesced": [x.sum(0), x.sum(0) + count],
        }
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_groups_of_replicas(executor: str) -> None:
    x = given(3)

    def some(mine: jax.Array) -> dict[str, Any]:
        group = c.Group("ends", (2, 0))
        out, handle = c.all_reduce(mine, "sum", group, async_op=True)
        if handle is None:  # as in torch; compiled code has one shape for all
            assert c.all_gather(mine, group) == (None, None)
            return dict.fromkeys(["sum", "all", "from", "part"], mine) | {"rank": c.get_rank(group)}
        assert handle.wait()
        return {
            "rank": jnp.asarray(c.get_rank(group)),
            "sum": out.value,
            "all": c.all_gather_into_tensor(mine, group)[0],
            "from": c.broadcast(mine, 2, group)[0],
            "part": c.all_to_all_single(mine, None, None, group)[0],
        }

    found = runs(executor, 3, some)
    assert [int(f["rank"]) for f in found] == [1, -1, 0]
    for f, wanted in zip(found, [x[0] + x[2], x[1], x[0] + x[2]], strict=True):
        np.testing.assert_array_equal(f["sum"], wanted)
    for i, place in ((0, 1), (2, 0)):
        np.testing.assert_array_equal(found[i]["all"], np.concatenate([x[2], x[0]]))
        np.testing.assert_array_equal(found[i]["from"], x[2])
        halves = x[[2, 0]].reshape(2, 2, 3)
        np.testing.assert_array_equal(found[i]["part"], halves[:, place].reshape(-1))
    np.testing.assert_array_equal(found[1]["from"], x[1])


def test_gradients_are_those_of_the_sum_of_all_losses(executor: str) -> None:
    def loss_of(name: str) -> Callable[[jax.Array], jax.Array]:
        def loss(x: jax.Array) -> jax.Array:
            weight = jnp.asarray(c.get_rank(), jnp.float32) + 1
            if name == "sum":
                return weight * jnp.sum(c.all_reduce(x)[0] ** 2)
            if name == "gather":
                return weight * jnp.sum(c.all_gather_into_tensor(x)[0] ** 2)
            if name == "reduce_scatter":
                return weight * jnp.sum(c.reduce_scatter_tensor(x)[0] ** 2)
            if name == "broadcast":
                return weight * jnp.sum(c.broadcast(x, 1)[0] ** 2)
            return weight * jnp.sum(c.all_to_all_single(x)[0] ** 2)

        return loss

    rows = given(2)
    total = 3.0
    weights = np.repeat([1.0, 2.0], 3)
    wanted = {
        "sum": np.stack([2 * total * rows.sum(0)] * 2),
        "gather": 2 * total * rows,
        "broadcast": np.stack([0 * rows[0], 2 * total * rows[1]]),
        "all_to_all": 2 * weights * rows,
        "reduce_scatter": np.stack([2 * weights * rows.sum(0)] * 2),
    }
    for name, gradients in wanted.items():
        found = runs(executor, 2, lambda x, n=name: jax.grad(loss_of(n))(x))
        np.testing.assert_allclose(np.stack(found), gradients, err_msg=name)


def test_inside_of_scan_and_jit() -> None:
    def steps(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = c.all_reduce(carry, "max")[0] + k * c.get_rank()
            return new, new

        return jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(3.0))[0])(x)

    top = given(2).max(0)
    found = runs("compiled", 2, steps)
    np.testing.assert_array_equal(found[0], top + 1)
    np.testing.assert_array_equal(found[1], top + 3)


def test_alone_collectives_are_the_identity_in_traced_code_too() -> None:
    @jax.jit
    def program(x: jax.Array) -> Any:
        return c.all_reduce(x, "avg")[0], c.all_gather_into_tensor(x)[0], c.all_to_all_single(x)[0]

    for out in program(jnp.arange(3.0)):
        np.testing.assert_array_equal(out, np.arange(3.0))
    assert jax.grad(lambda x: c.all_reduce(x**2)[0])(3.0) == 6.0


def test_variables_are_written_by_replicas(executor: str) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = px.Variable(
            jnp.zeros(2),
            synchronization=px.VariableSynchronization.ON_READ,
            aggregation=px.VariableAggregation.SUM,
        )

    def step() -> None:
        v.assign(jnp.ones(2) * (c.get_rank() + 1))
        c.all_reduce_(v, "max")

    run = lambda: strategy.run(step)  # noqa: E731
    (px.function(run) if executor == "compiled" else run)()
    np.testing.assert_array_equal(np.asarray(v.read_value()), [4.0, 4.0])


def test_what_exchanges_give_differs_between_replicas() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    ends = c.Group("ends", (0, 2))
    rows = jnp.arange(3.0)
    for call in (
        lambda: c.all_to_all_single(rows)[0],
        lambda: c.reduce_scatter_tensor(rows)[0] + jnp.zeros(3),
        lambda: c.all_reduce(rows, "sum", ends)[0],
        lambda: (c.isend(rows, [1, None, None]), c.recv(rows * 2, [None, 0, None]))[1],
    ):
        with strategy.scope():
            mirrored = px.Variable(jnp.zeros(3))

        def step(call: Any = call, variable: Any = mirrored) -> None:
            out = call()
            variable.assign(rows if out is None else out)

        with pytest.raises(px.errors.DivergenceError):
            px.function(lambda step=step: strategy.run(step))()


def test_groups_do_not_communicate_in_branches_that_not_all_take() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    ends = c.Group("ends", (0, 2))

    def step() -> jax.Array:
        x = jnp.ones(2)
        return jax.lax.cond(c.get_rank() != 1, lambda: c.all_reduce(x, "sum", ends)[0], lambda: x)

    with pytest.raises(ValueError, match="communicates inside lax"):
        px.function(lambda: strategy.run(step))()
