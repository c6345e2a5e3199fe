"""Timelines: when stages did what, and how much they waited."""

from __future__ import annotations

import itertools
import statistics
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.parallel.pipelines import models
from tests.parallel.pipelines.test_pipelining import DEVICES

from phalanx.parallel.pipelines.pipelining import pipeline


def waiting_pipe(name: str, stages: int, chunks: int, micro_batches: int, seconds: float) -> Any:
    """Stages that wait stand for stages that compute, because the machine may have few cores."""
    clock = threading.Event()

    def slow(x: Any) -> Any:
        def wait(y: Any) -> Any:
            clock.wait(seconds)
            return y

        return jax.pure_callback(
            wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
        )

    @jax.custom_vjp
    def stage(w: Any, x: Any) -> Any:
        return slow(x) * w

    def forward(w: Any, x: Any) -> Any:
        return stage(w, x), (w, x)

    def backward(kept: Any, g: Any) -> Any:
        w, x = kept
        g = slow(slow(g))
        return jnp.sum(g * x), g * w

    stage.defvjp(forward, backward)
    return pipeline(
        [stage] * (stages * chunks),
        name,
        micro_batches,
        loss=jnp.mean,
        chunks=chunks,
        devices=DEVICES[:stages],
    )


WAITING = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]


@pytest.mark.parametrize(("name", "chunks"), WAITING)
def test_a_timeline_has_the_order_of_the_schedule(name: str, chunks: int) -> None:
    stages, micro_batches = 2, 4
    pipe = waiting_pipe(name, stages, chunks, micro_batches, seconds=0.001)
    params = pipe.place([jnp.float32(1)] * (stages * chunks))
    (value, _), timeline = pipe.recorded(params, np.ones((8, 2), "float32"))
    assert float(value) == pytest.approx(1.0)
    order = [[t.action for t in timeline.actions if t.stage == i] for i in range(stages)]
    assert order == [list(row) for row in pipe.schedule.orders]
    for i in range(stages):  # one after the other
        spans = [(t.start, t.end) for t in timeline.actions if t.stage == i]
        assert all(a[0] <= a[1] <= b[0] for a, b in itertools.pairwise(spans))
    formula = (stages - 1) / (chunks * micro_batches + stages - 1)
    assert pipe.schedule.bubble() == pytest.approx(formula)
    busy = sum(t.end - t.start for t in timeline.actions)
    assert timeline.bubble == pytest.approx(1 - busy / (stages * timeline.seconds))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "chunks"), WAITING)
def test_the_bubble_of_a_timeline_is_that_of_the_schedule(name: str, chunks: int) -> None:
    """The median of what was measured: on a busy machine threads wake late now and then."""
    stages, micro_batches = 2, 4
    pipe = waiting_pipe(name, stages, chunks, micro_batches, seconds=0.02)
    params = pipe.place([jnp.float32(1)] * (stages * chunks))
    batch = np.ones((8, 2), "float32")
    pipe.recorded(params, batch)  # compiles
    bubbles = [pipe.recorded(params, batch)[1].bubble for _ in range(9)]
    assert statistics.median(bubbles) == pytest.approx(pipe.schedule.bubble(), abs=0.04)


def test_a_stage_that_fails_ends_a_recorded_step() -> None:
    def fails(w: Any, x: Any) -> Any:
        raise ZeroDivisionError("in stage 1")

    pipe = pipeline([models.layer, fails], "1f1b", 2, loss=jnp.mean, devices=DEVICES[:2])
    params = pipe.place([models.equal(1).params[0], jnp.ones(())])
    with pytest.raises(ZeroDivisionError, match="in stage 1"):
        pipe.recorded(params, np.ones((4, models.WIDTH), "float32"))
