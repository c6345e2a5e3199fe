"""Optimizers on parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.train.server_updates import couples_rows, couples_variables
from tests.parameter_server.jobs import Job

FIXED = px.partitioners.FixedShardsPartitioner
SEPARATE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "schedule": optax.adam(optax.exponential_decay(0.1, 3, 0.5)),
    "clip": optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
}
BY_VARIABLE = {"lamb": optax.lamb(0.1), "adafactor": optax.adafactor(0.1)}
TOGETHER = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
}


@pytest.mark.parametrize("name", SEPARATE | BY_VARIABLE | TOGETHER)
def test_what_a_transformation_looks_at(name: str) -> None:
    transform = (SEPARATE | BY_VARIABLE | TOGETHER)[name]
    assert couples_variables(transform) == (name in TOGETHER)
    assert couples_rows(transform) == (name not in SEPARATE)


def test_a_norm_that_is_kept_for_later_is_found() -> None:
    """A transformation that divides by the norm of the gradients of the step before."""

    def init(params: Any) -> Any:
        del params
        return jnp.float32(1.0)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda g: g / state, updates), optax.tree.norm(updates)

    assert couples_variables(optax.GradientTransformation(init, update))


def train(job: Any, strategy: px.Strategy, transform: Any, run: Callable[..., Any]) -> Any:
    rng = np.random.default_rng(0)
    with strategy.scope():
        w = px.Variable(rng.normal(size=(6, 3)).astype("f"))
        b = px.Variable(np.zeros(3, "f"))
        optimizer = px.train.Optimizer(transform)
    x, y = rng.normal(size=(8, 6)).astype("f"), rng.normal(size=(8, 3)).astype("f")

    def step(x: Any, y: Any) -> Any:
        return optimizer.minimize(lambda: jnp.mean((jnp.tanh(x @ w) + b - y) ** 2), [w, b])

    compiled = px.function(lambda x, y: strategy.run(step, args=(x, y)))
    losses = [float(run(compiled, x, y)) for _ in range(3)]
    losses += [float(run(lambda: strategy.run(step, args=(x, y))))]
    return losses, w.numpy(), b.numpy(), int(optimizer.iterations)


@pytest.mark.parametrize("name", ["adam", "momentum", "schedule", "lamb"])
@pytest.mark.parametrize("shards", [1, 2])
def test_one_worker_trains_as_central_storage_does(name: str, shards: int) -> None:
    transform = (SEPARATE | BY_VARIABLE)[name]
    if shards > 1 and name == "lamb":
        return
    central = px.CentralStorageStrategy(["CPU:0"])
    expected = train(None, central, transform, lambda fn, *args: fn(*args))
    job = Job(2, FIXED(shards))
    found = train(job, job.strategy, transform, job.run)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    assert found[3] == 4
    assert all(len(push) <= 2 * shards + 1 for push in job.servers.pushes)


@pytest.mark.parametrize("name", TOGETHER)
def test_transformations_of_all_variables_are_refused(name: str) -> None:
    job = Job()
    with job.strategy.scope(), pytest.raises(ValueError, match="one variable at a time"):
        px.train.Optimizer(TOGETHER[name])


def test_the_remedy_works() -> None:
    job = Job()
    v, w = job.variable([3.0, 4.0]), job.variable(0.0)
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(1.0))
    clip = optax.clip_by_global_norm(1.0)

    @px.function
    def step() -> None:
        gradients = [jnp.array([6.0, 8.0]), jnp.array(0.0)]
        gradients, _ = clip.update(gradients, clip.init(gradients))
        optimizer.apply_gradients(zip(gradients, [v, w], strict=True))

    job.run(step)
    np.testing.assert_allclose(v.numpy(), [2.4, 3.2], rtol=1e-6)


def test_what_looks_at_whole_variables_needs_whole_variables() -> None:
    job = Job(2, FIXED(2))
    table = job.variable(np.ones((4, 2), "f"))
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.lamb(0.1))
        whole = px.Variable(1.0)
    with pytest.raises(ValueError, match="sees a variable as a whole"):
        job.run(lambda: optimizer.apply_gradients([(jnp.ones((4, 2)), table)]))
    job.run(lambda: optimizer.apply_gradients([(jnp.ones(()), whole)]))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_sparse_gradients_change_their_rows_only(shards: int, compiled: bool) -> None:
    job = Job(2, FIXED(shards))
    start = np.arange(16, dtype=np.float32).reshape(8, 2)
    table = job.variable(start)
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.adam(0.1))

    def step(ids: Any) -> Any:
        return optimizer.minimize(lambda: px.nn.embedding_lookup(table, ids).sum(), [table])

    run = px.function(step) if compiled else step
    for _ in range(2):
        job.run(run, np.array([7, 1, 7]))
    sent = [u for push in job.servers.pushes for u in push if u.method == "apply"]
    assert sum(len(u.indices) for u in sent) == 6
    expected = start.copy()
    for row in (7, 1):
        params = jnp.asarray(start[row])
        state = optax.adam(0.1).init(params)
        for _ in range(2):
            gradient = jnp.full(2, 2.0 if row == 7 else 1.0)
            updates, state = optax.adam(0.1).update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        expected[row] = params
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-5)


def test_no_gradient_is_lost_between_workers() -> None:
    """Two workers that read the same value: both gradients count, one after the other."""
    from phalanx.parameter_server.closure import closure
    from phalanx.parameter_server.requests import Token

    job = Job()
    v = job.variable(10.0)
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(0.1, momentum=0.5))
    step = px.function(lambda: optimizer.minimize(lambda: v * v, [v]))
    attempts = []
    for i in range(2):
        with closure(Token(i), job.servers) as attempt:
            step()
        attempts.append(attempt)
    for attempt in attempts:
        job.servers.push(attempt.token, attempt.updates)
    assert int(optimizer.iterations) == 2
    np.testing.assert_allclose(float(v), 10.0 - 2.0 - (2.0 + 1.0), rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_step_sees_what_the_server_will_make_of_it(compiled: bool, shards: int) -> None:
    job = Job(2, FIXED(shards))
    v, table = job.variable(1.0), job.variable(np.ones((4, 2), "f"))
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.adam(0.1))

    def step(ids: Any) -> Any:
        before = v + 0.0
        v.assign_add(1.0)
        sparse = px.IndexedSlices(jnp.ones((2, 2)), ids)
        optimizer.apply_gradients([(jnp.float32(1.0), v), (sparse, table)])
        middle = v + 0.0
        v.assign_add(10.0)
        table.scatter_add(px.IndexedSlices(jnp.ones((1, 2)), jnp.array([0])))
        found = table.sparse_read(ids), table + 0.0
        return before, middle, v + 0.0, found, optimizer.iterations + 0

    run = px.function(step) if compiled else step
    for i in range(2):
        pushes = len(job.servers.pushes)
        before, middle, after, (rows, whole), count = job.run(run, np.array([3, 0]))
        assert len(job.servers.pushes) == pushes + 1
        assert int(count) == int(optimizer.iterations) == i + 1
        np.testing.assert_allclose(float(v), float(after), rtol=1e-6)
        np.testing.assert_allclose(float(middle), float(before) + 1.0 - 0.1, rtol=1e-4)
        np.testing.assert_allclose(table.numpy(), whole, rtol=1e-6)
        np.testing.assert_allclose(table.numpy()[[3, 0]], rows, rtol=1e-6)


def test_an_average_of_weights_is_that_of_central_storage() -> None:
    """A program that reads variables before and after apply_gradients, and differentiates twice."""

    def train(strategy: px.Strategy, run: Callable[..., Any]) -> Any:
        with strategy.scope():
            w, average = px.Variable([1.0, 2.0]), px.Variable([0.0, 0.0])
            optimizer = px.train.Optimizer(optax.sgd(0.1, momentum=0.9))

        def step() -> Any:
            loss = optimizer.minimize(lambda: jnp.sum(w * w), [w])
            average.assign(0.9 * average + 0.1 * w)
            later = px.grad(lambda: jnp.sum(w * w * w), w)()
            w.assign_sub(0.01 * later)
            return loss, later

        compiled = px.function(lambda: strategy.run(step))
        results = [run(compiled) for _ in range(3)] + [run(lambda: strategy.run(step))]
        return [[np.asarray(x) for x in r] for r in results], w.numpy(), average.numpy()

    central = train(px.CentralStorageStrategy(["CPU:0"]), lambda fn: fn())
    job = Job()
    found = train(job.strategy, job.run)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, central)


def test_an_assignment_after_the_update_is_known() -> None:
    job = Job()
    v = job.variable(1.0)
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(0.1))

    def step() -> Any:
        optimizer.apply_gradients([(jnp.float32(1.0), v)])
        v.assign(7.0)
        return v + 0.0

    assert float(job.run(step)) == 7.0
    assert float(job.run(px.function(step))) == 7.0
    assert float(v) == 7.0


def test_an_assignment_does_not_stop_momentum() -> None:
    job = Job()
    v = job.variable(1.0)
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(1.0, momentum=0.5))

    def step() -> None:
        optimizer.apply_gradients([(jnp.float32(1.0), v)])
        v.assign(0.0)

    job.run(step)
    job.run(lambda: optimizer.apply_gradients([(jnp.float32(0.0), v)]))
    assert float(v) == -0.5


def test_an_optimizer_travels_with_a_function() -> None:
    job = Job()
    v = job.variable(1.0)
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(0.5))
    step = px.function(lambda: optimizer.apply_gradients([(jnp.float32(1.0), v)]))
    again = cloudpickle.loads(cloudpickle.dumps(optimizer))
    job.run(lambda: again.apply_gradients([(jnp.float32(1.0), v)]))
    job.run(step)
    assert float(v) == 0.0
    assert int(again.iterations) == 2
    assert again.iterations is optimizer.iterations


def test_iterations_are_where_the_first_variable_is() -> None:
    job = Job(3)
    variables = [job.variable(1.0) for _ in range(2)]
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(0.5))
    assert optimizer.iterations.definition.server == variables[0].definition.server
    assert job.variable(1.0).definition.server == 2  # as if there were no optimizer
    assert optimizer.variables == [optimizer.iterations]
    assert "on parameter servers" in repr(optimizer)


def test_an_optimizer_made_outside_of_the_scope_is_built_by_the_coordinator() -> None:
    job = Job()
    v = job.variable(1.0)
    optimizer = px.train.Optimizer(optax.sgd(0.5))
    step = px.function(lambda: optimizer.apply_gradients([(jnp.float32(1.0), v)]))
    with pytest.raises(RuntimeError, match="in the coordinator's program"):
        job.run(step)
    optimizer.build([v])
    job.run(step)
    assert float(v) == 0.5


def test_what_optimizers_there_cannot_do() -> None:
    job, other = Job(), Job()
    v = other.variable(1.0)
    with other.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(0.5))
        with pytest.raises(NotImplementedError, match="bfloat16"):
            px.train.Optimizer(optax.sgd(0.5), loss_scale=px.train.LossScale())
        with pytest.raises(ValueError, match="needs something else"):
            px.train.Optimizer(optax.masked(optax.sgd(0.1), [True]))
    w = job.variable(1.0)
    with pytest.raises(ValueError, match="another strategy"):
        optimizer.apply_gradients([(jnp.float32(1.0), w)])
    with pytest.raises(px.PhalanxError):
        optimizer.apply_gradients([(jnp.float32(1.0), v), (jnp.float32(1.0), w)])
    with pytest.raises(ValueError, match="shape"):
        optimizer.apply_gradients([(jnp.ones(3), v)])


def test_replicas_of_a_worker_push_one_gradient() -> None:
    job = Job(compute_devices=["CPU:0", "CPU:1"])
    v = job.variable(10.0)
    with job.strategy.scope():
        optimizer = px.train.Optimizer(optax.sgd(1.0))

    def step() -> None:
        gradient = px.get_replica_context().replica_id_in_sync_group + 1.0
        optimizer.apply_gradients([(gradient, v)])

    job.run(lambda: job.strategy.run(step))
    assert float(v) == 7.0
    job.run(px.function(lambda: job.strategy.run(step)))
    assert float(v) == 4.0
    assert [len(push) for push in job.servers.pushes] == [2, 2]
    assert int(optimizer.iterations) == 2
