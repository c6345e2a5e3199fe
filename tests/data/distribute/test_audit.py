"""The audit tells the truth: it finds what is lost, repeated or new."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.contract.conftest import READING, STRATEGIES
from tests.data.distribute.test_distributed_dataset import mirrored, with_policy
from tests.data.workers import Worker

import phalanx as px

Dataset = px.data.Dataset


@pytest.mark.parametrize("name", READING)
def test_every_strategy_passes(name: str) -> None:
    strategy = STRATEGIES[name]()
    features = np.random.default_rng(0).normal(size=(23, 4))
    dataset = Dataset.from_tensor_slices((features, [b"%d" % i for i in range(23)]))
    dist = strategy.experimental_distribute_dataset(dataset.shuffle(23).batch(8))
    report = px.data.audit(dist)
    assert report
    assert report.ok
    assert (report.examples, report.seen, report.steps) == (23, 23, [3])
    assert sum(report.shares[0]) == 23
    assert "exactly once" in str(report)
    assert len(list(dist)) == 3  # counting takes nothing away


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 30),
    size=st.integers(1, 7),
    workers=st.integers(1, 3),
    replicas=st.integers(1, 3),
    policy=st.sampled_from(["AUTO", "DATA", "OFF"]),
)
def test_all_workers_are_counted(
    rows: int, size: int, workers: int, replicas: int, policy: str
) -> None:
    dataset = with_policy(Dataset.range(rows).shuffle(10).batch(size), policy)
    report = px.data.audit(Worker(workers, 0, replicas).experimental_distribute_dataset(dataset))
    times = workers if policy == "OFF" else 1
    assert report.seen == rows * times
    assert report.ok == (times == 1 or rows == 0)
    assert sum(n for _, n in report.duplicates) == rows * (times - 1)
    assert report.losses == report.strangers == []
    assert len(report.shares) == workers


def test_examples_that_are_equal_count_as_often_as_they_are_there() -> None:
    dist = mirrored(2).experimental_distribute_dataset(Dataset.from_tensor_slices([7, 7, 8]).batch(2))
    assert px.data.audit(dist).ok


def test_a_forgotten_shard_is_found() -> None:
    """Every worker reads everything: each example is seen twice."""
    dist = Worker(2, 0, 2).distribute_datasets_from_function(lambda c: Dataset.range(6).batch(2))
    report = px.data.audit(dist, reference=Dataset.range(6).batch(2))
    assert not report
    assert sorted(report.duplicates) == [(str(i), 1) for i in range(6)]
    assert "seen too often: 6" in str(report)
    assert "1 x 0" in str(report)
    alone = px.data.audit(dist)
    assert alone.examples is None
    assert len(alone.duplicates) == 6


def test_losses_and_strangers_are_found() -> None:
    def dataset_fn(context: px.InputContext) -> Any:
        half = Dataset.range(20).shard(context.num_input_pipelines, context.input_pipeline_id)
        return half.take(8).map(lambda x: x * 10 if x == 4 else x).batch(2)

    dist = Worker(2, 1, 1).distribute_datasets_from_function(dataset_fn)
    report = px.data.audit(dist, reference=Dataset.range(20).batch(5))
    assert sorted(int(x) for x, _ in report.losses) == [4, 16, 17, 18, 19]
    assert report.strangers == [("40", 1)]
    assert report.duplicates == []
    text = str(report)
    assert "NOT every one of 20" in text
    assert "lost: 5" in text
    assert "not in the dataset: 1" in text


def test_different_seeds_lose_and_repeat() -> None:
    def dataset_fn(context: px.InputContext) -> Any:
        dataset = Dataset.range(16).shuffle(16, seed=context.input_pipeline_id).batch(2)
        return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)

    dist = Worker(2, 0, 2).distribute_datasets_from_function(dataset_fn)
    report = px.data.audit(dist, reference=Dataset.range(16).batch(2))
    assert report.seen == 16
    assert report.losses
    assert sum(n for _, n in report.losses) == sum(n for _, n in report.duplicates)


def test_any_iterable_can_be_counted() -> None:
    assert px.data.audit(mirrored(3).experimental_distribute_dataset([np.arange(4), np.arange(3)]))


def test_leaves_of_different_lengths_and_ragged_rows() -> None:
    uneven = Dataset.zip((Dataset.range(8).batch(4), Dataset.range(4).batch(2)))
    with pytest.raises(px.errors.InvalidArgumentError, match="same number of rows"):
        px.data.audit(mirrored(2).experimental_distribute_dataset(uneven))
    one = px.OneDeviceStrategy("CPU:0")  # which divides nothing
    assert px.data.audit(one.experimental_distribute_dataset(uneven))
    ragged = Dataset.from_tensor_slices([[1], [2, 2], [3]]).ragged_batch(2)
    assert px.data.audit(mirrored(2).experimental_distribute_dataset(ragged))
    scalars = px.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(Dataset.range(3))
    assert px.data.audit(scalars).seen == 3


def test_large_examples_are_shown_by_their_shape() -> None:
    dist = Worker(2, 0, 1).experimental_distribute_dataset(
        with_policy(Dataset.from_tensor_slices((np.zeros((7, 50)), np.arange(7))).batch(7), "OFF")
    )
    report = px.data.audit(dist)
    assert report.duplicates[0] == ("(float64(50,), 0)", 1)
    assert "…" in str(report)


def test_what_cannot_be_counted() -> None:
    s = mirrored(2)
    with pytest.raises(px.errors.InvalidValueError, match="repeat"):
        px.data.audit(s.experimental_distribute_dataset(Dataset.range(4).batch(2).repeat()))
    with pytest.raises(px.errors.InvalidValueError, match="once"):
        px.data.audit(s.experimental_distribute_dataset(np.arange(2) for _ in range(2)))
    with pytest.raises(px.errors.InvalidTypeError, match="distribute"):
        px.data.audit(Dataset.range(4))  # type: ignore[arg-type]


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    dist = mirrored(2).experimental_distribute_dataset(Dataset.range(40).batch(4))
    assert px.data.audit(dist)
    assert "worker 0" in terminal.getvalue()
