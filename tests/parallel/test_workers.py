"""Plans over the devices of several processes: the same plan everywhere, parts, and equal numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.parallel.models import after, batch, check_close, mlp, mlp_parameters, state_of, step

import phalanx as px
from phalanx.parallel import Hardware, Layout, all_devices, parallelize, profile

PARAMS = mlp_parameters(8, 16, 4)
BATCHES = [batch(16, 8, seed=1), batch(16, 8, seed=2), batch(6, 8, seed=3)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[px.testing.MultiProcess]:
    """Two workers with two devices each."""
    env = {"PHALANX_DEADLINE": "30"}
    with px.testing.MultiProcess(2, 2, env=env, preload=("phalanx", "tests.parallel.models")) as opened:
        yield opened


def slow_network() -> Hardware:
    """Hosts that are far from each other."""
    return profile("A100").replace(outer=px.parallel.Link(1.0, 1e-3), reduce_scatter=False)


def trained(mode: str, count: int, **options: Any) -> dict[str, Any]:
    """Some steps; what this worker has of the state after them."""
    all_devices()
    program = parallelize(
        step, (state_of(PARAMS), *BATCHES[0]), parallel_mode=mode, gradients_mean=True, **options
    )
    state, losses = after(program, state_of(PARAMS), BATCHES[:count])
    parts = {s.data.shape for s in state[0]["down"].addressable_shards}
    return {
        "losses": losses,
        "devices": program.mesh.size,
        "down": parts,
        "plan": None if program.plan is None else program.plan.digest(),
        "local": len(state[0]["down"].addressable_shards),
    }


@pytest.mark.parametrize(
    ("mode", "options", "part"),
    [
        ("data_parallel", {}, (16, 4)),
        (
            "data_parallel",
            {
                "enable_parallel_optimizer": True,
                "parallel_optimizer_config": {
                    "parallel_optimizer_threshold": 0,
                    "optimizer_level": "level2",
                },
            },
            (4, 4),
        ),
        ("semi_auto_parallel", {"parameter_plan": {"down": (4, 1)}}, (4, 4)),
        ("auto_parallel", {"search_mode": "dynamic_programming"}, None),
    ],
    ids=["data", "sharded", "semi", "auto"],
)
def test_modes_over_workers_equal_one_device(
    cluster: px.testing.MultiProcess, mode: str, options: dict[str, Any], part: Any
) -> None:
    _, losses = after(jax.jit(step), state_of(PARAMS), BATCHES)
    found = cluster.run(lambda: trained(mode, 3, **options))
    for each in found:
        check_close(each["losses"], losses)
        assert (each["devices"], each["local"]) == (4, 2)
        assert each["down"] == {part} or part is None
    assert found[0]["plan"] == found[1]["plan"]
    assert (found[0]["plan"] is not None) == (mode == "auto_parallel")


def averaged(rows: int) -> float:
    """A number that the function itself averages over the devices."""
    all_devices()
    program = parallelize(
        lambda w, x: jax.lax.pmean(jnp.mean(x * w), "replica"),
        (np.float32(2), np.ones(8, np.float32)),
        parallel_mode="hybrid_parallel",
        gradients_mean=True,
    )
    return float(program(np.float32(2), np.arange(rows, dtype=np.float32)))


def test_parts_that_two_devices_compute(cluster: px.testing.MultiProcess) -> None:
    """Ten rows on four devices of two workers are two parts of five; three rows are one."""
    assert cluster.run(lambda: [averaged(10), averaged(3)]) == [[9.0, 2.0]] * 2


def planned(far: bool) -> Any:
    args = (PARAMS, *batch(64, 8))
    hardware = slow_network() if far else profile("A100")
    plan = parallelize(mlp, args, parallel_mode="auto_parallel", hardware=hardware).plan
    assert plan is not None
    return plan.digest(), {
        n: link.beta for n, link in zip(plan.mesh.names, plan.mesh.links, strict=True)
    }


def test_hosts_and_devices_are_a_topology_and_plans_are_compared(
    cluster: px.testing.MultiProcess,
) -> None:
    (one, links), (other, _) = cluster.run(lambda: planned(True))
    assert one == other
    assert set(links.values()) <= {1e-3, profile("A100").inner.beta}
    assert 1e-3 in links.values()  # an axis goes over workers, and costs what that costs

    def differs() -> str:
        try:
            planned(bool(all_devices()) and jax.process_index() == 0)
        except px.errors.DivergenceError as error:
            return str(error)
        return "no error"

    texts = cluster.run(differs)
    assert all("The workers do not have the same plan: worker 1 differs" in text for text in texts)


def broadcast(wanted: bool) -> Any:
    rank = jax.process_index() if all_devices() else 0
    params = {"w": np.full(2, 1.0 + rank, np.float32)}
    x = np.ones((4, 2), np.float32)
    program = parallelize(
        lambda p, x: jnp.sum(x * p["w"]),
        (params, x),
        parallel_mode="data_parallel",
        parameter_broadcast=wanted,
    )
    try:
        return float(program(params, x))
    except px.errors.DivergenceError as error:
        return str(error)


def test_parameters_of_the_first_worker(cluster: px.testing.MultiProcess) -> None:
    assert cluster.run(lambda: broadcast(True)) == [8.0, 8.0]
    texts = cluster.run(lambda: broadcast(False))
    assert all("do not have the same state" in text for text in texts)


def with_variables() -> Any:
    """Training with variables in parts, on batches in parts."""
    layout = Layout((2, 2), ("data", "model"))
    strategy = px.AutoParallelStrategy(
        parameter_plan={"w": layout("None", "model")},
        dataset_strategy=(layout("data", "None"), layout("data", "None")),
    )
    x, y = batch(22, 8, seed=5)
    with strategy.scope():
        w = px.Variable(lambda: jax.random.normal(jax.random.key(0), (8, 4)), name="w")
        optimizer = px.train.Optimizer(optax.adam(0.1))
    dataset = px.data.Dataset.from_tensor_slices((x, y)).batch(8)

    def train(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            return jnp.mean((x @ w.value() - y) ** 2)

        value, gradients = px.value_and_grad(loss, [w])()
        optimizer.apply_gradients(zip(gradients, [w], strict=True))
        return value

    run = px.function(lambda x, y: strategy.run(train, args=(x, y)))
    losses, rows = [], []
    for x_part, y_part in strategy.experimental_distribute_dataset(dataset):
        rows.append({s.data.shape for s in x_part.addressable_shards})
        losses.append(float(run(x_part, y_part)))
    parts = {s.data.shape for s in w.value().addressable_shards}
    return losses, w.numpy(), parts, rows


def alone() -> Any:
    x, y = batch(22, 8, seed=5)
    w = jax.random.normal(jax.random.key(0), (8, 4))
    optimizer = optax.adam(0.1)
    slots, losses = optimizer.init(w), []
    for i in range(0, 22, 8):
        value, gradient = jax.value_and_grad(
            lambda w, i=i: jnp.mean((x[i : i + 8] @ w - y[i : i + 8]) ** 2)
        )(w)
        updates, slots = optimizer.update(gradient, slots, w)
        w = optax.apply_updates(w, updates)
        losses.append(float(value))
    return losses, np.asarray(w)


def test_a_strategy_over_workers(cluster: px.testing.MultiProcess) -> None:
    losses, w = alone()
    for found_losses, found, parts, rows in cluster.run(with_variables):
        check_close((found_losses, found), (losses, w))
        assert parts == {(8, 2)}  # of each variable, as its layout says
        assert rows == [{(4, 8)}, {(4, 8)}, {(3, 8)}]
