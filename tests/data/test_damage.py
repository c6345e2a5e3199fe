"""Damaged files under every kind of plan: what comes before is given, and the damage is always said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tests.data.workers import Worker, together

import phalanx as px

D = px.data.Dataset
GOOD = 25  # records before the damaged one


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damage") / "records"
    with px.data.TFRecordWriter(str(path)) as writer:
        for i in range(40):
            writer.write(b"%04d" % i)
    data = bytearray(path.read_bytes())
    data[20 * GOOD + 13] ^= 1
    path.write_bytes(data)
    return path


def drain(iterator: Any) -> list[Any]:
    """What comes before the damage, which is then said again and again."""
    found: list[Any] = []
    with pytest.raises(px.errors.DataLossError, match=f"record {GOOD}, which starts at byte 500"):
        found.extend(iterator)
    with pytest.raises(px.errors.DataLossError):
        next(iterator)
    return found


def records(elements: list[Any]) -> list[bytes]:
    found: list[bytes] = []
    for element in elements:
        leaf = jax.tree_util.tree_leaves(element)[-1]
        leaves = list(leaf) if isinstance(leaf, D) else np.ravel(np.asarray(leaf, object))
        found.extend(leaves)
    return found


PLANS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda d: d,
    "batch": lambda d: d.batch(7),
    "shuffle in a small buffer": lambda d: d.shuffle(10).batch(4),
    "shuffle in a large buffer": lambda d: d.shuffle(100),
    "second of a zip": lambda d: D.zip(D.range(100), d).batch(4),
    "window": lambda d: d.window(6),
    "rebatch": lambda d: d.batch(4).rebatch([3, 5]),
    "sample": lambda d: D.sample_from_datasets(
        [d, D.from_tensor_slices([b"x"]).repeat()], [1, 0]
    ).batch(8),
    "choose": lambda d: D.choose_from_datasets([d], D.range(1).repeat()).batch(8),
    "interleave": lambda d: D.range(1).interleave(lambda _: d, 4).batch(8),
    "interleave in threads": lambda d: D.range(1).interleave(lambda _: d, 4, 1, 2).batch(8),
    "prefetch": lambda d: d.batch(4).prefetch(2),
    "map in threads": lambda d: d.map(lambda x: x, num_parallel_calls=2).batch(4),
}


@pytest.mark.parametrize("plan", PLANS)
def test_what_comes_before_is_not_lost(plan: str, damaged: Path) -> None:
    dataset = PLANS[plan](px.data.TFRecordDataset(str(damaged)))
    with iter(dataset) as iterator:
        found = records(drain(iterator))
    assert sorted(found) == [b"%04d" % i for i in range(GOOD)]


@pytest.mark.parametrize(
    "plan",
    [
        lambda d: d.window(6, drop_remainder=True),
        lambda d: d.batch(4).rebatch([3, 5], drop_remainder=True),
        lambda d: d.batch(7, drop_remainder=True),
    ],
)
def test_dropping_a_remainder_does_not_drop_the_damage(plan: Any, damaged: Path) -> None:
    with iter(plan(px.data.TFRecordDataset(str(damaged)))) as iterator:
        assert len(records(drain(iterator))) < GOOD


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_replicas_get_what_comes_before(policy: str, ahead: int, damaged: Path) -> None:
    options = px.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    dist = strategy.experimental_distribute_dataset(
        px.data.TFRecordDataset(str(damaged)).batch(8).with_options(options),
        px.InputOptions(experimental_per_replica_buffer_size=ahead),
    )
    with iter(dist) as iterator:
        steps = [strategy.experimental_local_results(x) for x in drain(iterator)]
    assert [r for parts in steps for part in parts for r in part] == [b"%04d" % i for i in range(GOOD)]


def test_other_workers_hear_of_damage(damaged: Path, tmp_path: Path) -> None:
    """They wait for each other in every step, so that a worker that fails must not fail silently."""
    fine = tmp_path / "fine"
    with px.data.TFRecordWriter(str(fine)) as writer:
        for i in range(40):
            writer.write(b"%04d" % i)

    def read(worker: Worker) -> tuple[int, str]:
        files = px.data.TFRecordDataset([str(fine), str(damaged)]).batch(8)
        steps = 0
        with iter(worker.experimental_distribute_dataset(files)) as iterator:
            try:
                while next(iterator, None) is not None:
                    steps += 1
            except px.PhalanxError as error:
                return steps, f"{type(error).__name__}: {error}"
        return steps, "no error"

    (steps0, error0), (steps1, error1) = together(2, 1, read)
    assert steps0 == steps1 == 7
    assert error0.startswith("AbortedError: The input of worker 1 failed: DataLossError: records is")
    assert error1.startswith("DataLossError: records is damaged at record 25")
