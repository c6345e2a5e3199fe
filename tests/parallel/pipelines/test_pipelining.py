"""Models in stages compute what they compute whole."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from tests.parallel.pipelines import models
from tests.parallel.pipelines.models import Model

from phalanx.parallel.pipelines.pipelining import Pipelined, pipeline

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


def assert_like_whole(model: Model, pipe: Pipelined, rows: int, tolerance: float = 1e-5) -> None:
    batch = model.batch(rows)
    value, gradients = pipe.value_and_grad(pipe.place(model.params), *batch)
    wanted, expected = jax.value_and_grad(model.whole)(model.params, *batch)
    np.testing.assert_allclose(value, wanted, rtol=tolerance)
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


CROSS = [
    ("gpipe", 2, 2, 1),
    ("1f1b", 2, 3, 1),
    ("1f1b", 4, 8, 1),
    ("interleaved", 2, 4, 2),
    ("zero_bubble_v", 2, 4, 2),
    ("seqpipe", 2, 4, 2),
]


@pytest.mark.parametrize(("schedule", "stages", "micro_batches", "chunks"), CROSS)
def test_gradients_are_those_of_the_whole_model(
    schedule: str, stages: int, micro_batches: int, chunks: int
) -> None:
    model = models.language(stages * chunks)
    pipe = piped(model, stages, schedule, micro_batches, chunks=chunks)
    assert_like_whole(model, pipe, 8)
    assert pipe.peak_live == pipe.schedule.peak_live
