"""Stages in different processes: the same results, and faults that name the stage."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.parallel.pipelines import models

import phalanx as px
from phalanx.parallel.pipelines.named_schedules import SCHEDULES

WORKERS = {"preload": ["phalanx", "jax"], "devices": 2}


@pytest.fixture(scope="module")
def pair() -> Iterator[px.testing.MultiProcess]:
    with px.testing.MultiProcess(workers=2, **WORKERS) as cluster:  # type: ignore[arg-type]
        yield cluster


def trained(
    schedule: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    steps: int,
    rows: int,
    partly: bool = False,
) -> Any:
    """Losses and parameters after some steps, and what this worker held."""
    from phalanx.parallel.pipelines.pipelining import pipeline

    px.comm.init()
    parts = stages * chunks
    model = models.language(parts) if parts > 2 else models.equal(parts)
    devices = ["CPU:0", "CPU:1"]
    pipe = pipeline(
        model.parts,
        schedule,
        micro_batches,
        loss=model.loss,
        shared=model.shared,
        chunks=chunks,
        devices=devices,
        workers=True,
    )
    made = []

    def maker(i: int) -> Any:
        def make() -> Any:
            made.append(i)
            return model.params[i]

        return make

    params = pipe.create([maker(i) for i in range(parts)])
    transform = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
    optimizer = pipe.optimizer(transform)
    state = optimizer.init(params)
    losses = []
    own = pipe.takes(2)

    def batch(step: int) -> Any:  # what this worker's stages take, and nothing else
        whole = model.batch(rows - step % 2)
        return [x if i in own else None for i, x in enumerate(whole)] if partly else whole

    for step in range(steps):
        value, gradients = pipe.value_and_grad(params, *batch(step))
        losses.append(float(value))
        params, state = optimizer.update(gradients, state, params)
    held = [
        None
        if isinstance(jax.tree.leaves(nest)[0], jax.ShapeDtypeStruct)
        else jax.tree.map(np.asarray, nest)
        for nest in params
    ]
    moments = sum(not isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state))
    last = float(pipe(params, *batch(0)))
    return losses, held, pipe.peak_live, pipe.stages, moments, last


def expected(parts: int, steps: int, rows: int) -> Any:
    model = models.language(parts) if parts > 2 else models.equal(parts)
    transform = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))
    losses, params = model.trained(transform, rows, steps)
    return losses, params, float(model.whole(params, *model.batch(rows)))


def check(
    cluster: px.testing.MultiProcess,
    workers: int,
    name: str,
    stages: int,
    micro: int,
    chunks: int,
    steps: int = 3,
    rows: int = 7,
    partly: bool = True,
) -> None:
    results = cluster.run(trained, name, stages, micro, chunks, steps, rows, partly, timeout=240)
    losses, params, last = expected(stages * chunks, steps, rows)
    schedule = px.parallel.schedule(name, stages, micro, chunks)
    each = stages // workers
    merged: list[Any] = [None] * len(params)
    for rank, (found, held, live, mine, moments, final) in enumerate(results):
        np.testing.assert_allclose(found, losses, rtol=1e-4)
        assert final == pytest.approx(last, rel=1e-4)
        assert mine == tuple(range(rank * each, (rank + 1) * each))
        assert live == tuple(schedule.peak_live[stage] for stage in mine)
        assert moments < len(jax.tree.leaves(optax.adam(1.0).init(params)))
        for i, nest in enumerate(held):
            assert (nest is not None) == (schedule.placement[i] in mine)
            merged[i] = nest or merged[i]
    for one, other in zip(jax.tree.leaves(merged), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "chunks", "partly"),
    [("1f1b", 4, 4, 1, True), ("zero_bubble_v", 2, 3, 2, False)],
)
def test_workers_with_stages_of_their_own_train_the_same_model(
    pair: px.testing.MultiProcess,
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    partly: bool,
) -> None:
    check(pair, 2, name, stages, micro_batches, chunks, partly=partly)


@pytest.mark.soak
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_twenty_steps_of_every_schedule_on_workers(workers: int) -> None:
    with px.testing.MultiProcess(workers=workers, **WORKERS) as cluster:  # type: ignore[arg-type]
        for name in SCHEDULES:
            chunks = 1 if name in ("gpipe", "1f1b", "seqpipe") else 2
            stages = 6 if workers == 3 else 4
            check(cluster, workers, name, stages, 6, chunks, 20, rows=12)  # none is empty


def overlapping() -> Any:
    """Whether micro batch 0 left while this worker computed 1, and 1 was begun without waiting for 0.

    The result of micro batch 0 is there after 1 was begun, and that of 1 after 0 was sent.
    """
    from phalanx.collectives import groups
    from phalanx.parallel.pipelines.hosts import WorkerHosts
    from phalanx.parallel.pipelines.pipelining import pipeline

    px.comm.init()
    begun, sent = threading.Event(), threading.Event()
    came: dict[str, bool] = {}
    calls: list[int] = []

    class Late:
        """An array that is there when micro batch 1 was begun."""

        def __init__(self, x: Any) -> None:
            self.x, self.shape, self.dtype = x, x.shape, x.dtype

        def copy_to_host_async(self) -> None:
            pass

        def __array__(self, *_: Any, **__: Any) -> Any:
            came["1 was begun"] = begun.wait(60)
            return np.asarray(self.x)

    def wait(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            begun.set()
            came["0 was sent"] = sent.wait(60)
        return x

    @jax.custom_jvp
    def through(x: Any) -> Any:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    through.defjvp(lambda xs, dots: (through(*xs), *dots))
    mailbox, hand_over = groups.world().mailbox, WorkerHosts.hand_over
    assert mailbox is not None
    post = mailbox.post

    def handed_over(hosts: Any, nest: Any, *where: Any) -> None:
        hand_over(hosts, nest if calls[1:] else jax.tree.map(Late, nest), *where)

    def posted(*args: Any) -> None:
        post(*args)
        if begun.is_set():
            sent.set()

    first = px.comm.get_rank() == 0
    model = models.equal(2)
    pipe = pipeline(
        [lambda p, x: models.layer(p, through(x) if first else x), models.layer],
        "gpipe",
        2,
        loss=model.loss,
        devices=["CPU:0"],
        workers=True,
    )
    if first:
        WorkerHosts.hand_over = handed_over  # type: ignore[method-assign]
        mailbox.post = posted  # type: ignore[method-assign]
    try:
        value, _ = pipe.value_and_grad(pipe.place(model.params), *model.batch(4))
    finally:
        WorkerHosts.hand_over = hand_over  # type: ignore[method-assign]
        mailbox.post = post  # type: ignore[method-assign]
    return float(value), came


def test_activations_are_sent_while_the_next_ones_are_computed(pair: px.testing.MultiProcess) -> None:
    model = models.equal(2)
    wanted = float(model.whole(model.params, *model.batch(4)))
    (first, came), (last, _) = pair.run(overlapping, timeout=120)
    assert came == {"1 was begun": True, "0 was sent": True}
    assert first == last == pytest.approx(wanted, rel=1e-5)


def failing(what: str, count: int = 2) -> tuple[str, str]:
    from phalanx.parallel.pipelines.pipelining import pipeline

    px.comm.init()
    rank = px.comm.get_rank()
    model = models.equal(count)

    def raises(x: Any) -> Any:
        raise ZeroDivisionError("while it is computed")

    def bad(p: Any, x: Any) -> Any:
        if what == "computes":
            x = jax.pure_callback(raises, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        if what == "raises":
            raise ZeroDivisionError("in my stage")
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "never ends":
            endless = jax.lax.fori_loop(0, 10**8, lambda _, y: y @ y / 256, jnp.ones((256, 256)))
            x = x + 0 * jax.lax.stop_gradient(endless[0, 0])
        return models.layer(p, x)

    where = {"raises": 1, "dies": 1, "computes": 0, "never ends": 0}
    micro_batches = 4 if what == "schedule" and rank else 2
    rows = 6 if what == "shapes" and rank else 4
    try:
        pipe = pipeline(
            [bad if i == where.get(what) else models.layer for i in range(count)],
            "1f1b",
            micro_batches,
            loss=model.loss,
            devices=["CPU:0"],
            workers=True,
        )
        pipe.value_and_grad(pipe.place(model.params), *model.batch(rows))
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("raises", "WorkerFailedError", "Stage 1 of a pipeline failed on rank 1: ZeroDivisionError"),
        ("schedule", "CollectiveMismatchError", "disagree about its schedule"),
        ("shapes", "CollectiveMismatchError", "disagree about its batch"),
    ],
)
def test_a_stage_that_fails_or_disagrees_is_named_on_the_others(
    pair: px.testing.MultiProcess, what: str, kind: str, text: str
) -> None:
    results = pair.run(failing, what)
    assert results[0][0] == kind
    assert text in results[0][1]
    if what == "raises":
        assert results[1] == ("ZeroDivisionError", "in my stage")
    else:
        assert results[1] == results[0]


def test_a_computation_that_fails_is_named_on_the_others(pair: px.testing.MultiProcess) -> None:
    """Its result is waited for by the thread that sends it."""
    first, last = pair.run(failing, "computes")
    assert first[0] == "JaxRuntimeError"
    assert "while it is computed" in first[1]
    assert last[0] == "WorkerFailedError"
    assert "Stage 0 of a pipeline failed on rank 0: JaxRuntimeError" in last[1]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("raises", "Stage 1 of a pipeline failed on rank 1: ZeroDivisionError"),
        ("schedule", "disagree about its schedule"),
        ("dies", "worker 1"),
    ],
)
def test_all_others_name_the_stage(what: str, text: str) -> None:
    with px.testing.MultiProcess(workers=4, **WORKERS) as cluster:  # type: ignore[arg-type]
        outcomes = cluster.start(failing, what, 4).results(timeout=120)
        for rank in (0, 2, 3):
            assert text in outcomes[rank].value[1]


def test_a_stage_that_dies_is_named_on_the_others(pair: px.testing.MultiProcess) -> None:
    outcomes = pair.start(failing, "dies").results(timeout=60)
    kind, text = outcomes[0].value
    assert kind == "WorkerLostError"
    assert "worker 1" in text


@pytest.mark.soak
def test_a_stage_that_never_ends_is_late_and_those_that_wait_for_it_are_not() -> None:
    env = {"PHALANX_DEADLINE": "4"}
    with px.testing.MultiProcess(workers=2, env=env, **WORKERS) as cluster:  # type: ignore[arg-type]
        for kind, text in cluster.run(failing, "never ends"):
            assert kind == "DeadlineExceededError"
            assert "Late: worker 0 (" in text
            assert "worker 1 waits for worker 0 in recv" in text
            assert "worker 0 waits" not in text
