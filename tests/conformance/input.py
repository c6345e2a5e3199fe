"""Translations of the recorded cases about input: batches, policies, iterators, workers."""

from __future__ import annotations

import re
import tempfile
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.data.distribute.splitting import batch_sizes_for_worker
from tests.conformance.harness import case, cases, differs, mirrored, records
from tests.data.workers import Worker, separately

Dataset = px.data.Dataset


def R(*args: int) -> Any:
    return Dataset.range(*args)


def central() -> px.Strategy:
    return px.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


def dd(replicas: int, dataset: Any) -> Any:
    return mirrored(replicas).experimental_distribute_dataset(dataset)


def opt(dataset: Any, policy: str) -> Any:
    options = px.data.Options()
    options.experimental_distribute.auto_shard_policy = px.data.experimental.AutoShardPolicy[policy]
    return dataset.with_options(options)


def parts(x: Any) -> list[Any]:
    """What each replica has, as lists."""
    values = x.values if isinstance(x, px.PerReplica) else [x]
    return [np.asarray(v).tolist() for v in values]


def vals(elements: Any) -> list[Any]:
    """Per step, per replica."""
    return [parts(x) for x in elements]


# -- one worker: 14 datasets by policy ---------------------------------------------------------------

_REBATCH = re.compile(r"in_rebatch_range(\d+)_batch(\d+)(_drop)?_r(\d+)_(AUTO|DATA|FILE|OFF)")


def rebatched(name: str) -> Any:
    rows, size, drop, replicas, policy = _REBATCH.fullmatch(name).groups()  # type: ignore[union-attr]
    dataset = R(int(rows)).batch(int(size), drop_remainder=drop is not None)
    return vals(dd(int(replicas), opt(dataset, policy)))


for _name in [r["case"] for r in records("input") if _REBATCH.fullmatch(r["case"])]:
    case(_name)(lambda name=_name: rebatched(name))


@differs()
def in_rebatch_mismatched_batch_dims() -> None:
    with pytest.raises(px.errors.InvalidArgumentError, match="same number of rows"):
        list(dd(2, Dataset.zip((R(8).batch(4), R(4).batch(2)))))


@case()
def in_rebatch_ragged() -> Any:
    dataset = Dataset.from_tensor_slices([[1], [2, 2], [3]]).ragged_batch(2)
    return list(dd(2, dataset))


# -- what may be distributed -------------------------------------------------------------------------


@differs()
def in_not_a_dataset_list() -> None:
    batches = [np.arange(3), np.arange(4)]
    assert vals(dd(2, batches)) == [[[0, 1], [2]], [[0, 1], [2, 3]]]
    with pytest.raises(px.errors.UnbatchedDatasetError):
        list(dd(2, [1, 2, 3]))


@differs()
def in_not_a_dataset_generator() -> None:
    assert vals(dd(2, (np.arange(i) for i in (2, 3)))) == [[[0], [1]], [[0, 1], [2]]]


@case()
def in_values_from_function_one_device() -> Any:
    one = px.OneDeviceStrategy("CPU:0")
    return [
        one.experimental_distribute_values_from_function(lambda c: c.num_replicas_in_sync),
        px.get_strategy().experimental_distribute_values_from_function(
            lambda c: c.replica_id_in_sync_group
        ),
    ]


# -- datasets from functions --------------------------------------------------------------------------


def dff(replicas: int, fn: Any, options: Any = None) -> Any:
    return mirrored(replicas).distribute_datasets_from_function(fn, options)


@differs()
def in_dff_static_shape_drops_last_step() -> None:
    found = vals(dff(2, lambda c: R(6).batch(2, drop_remainder=True)))
    assert found == [[[0, 1], [2, 3]], [[4, 5], []]]


@differs()
def in_dff_unbatched_scalars() -> None:
    assert vals(dff(2, lambda c: R(5))) == [[0, 1], [2, 3], [4, []]]


@case()
def in_dff_per_replica_mode() -> Any:
    seen = []

    def f(c: px.InputContext) -> Any:
        seen.append([c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync])
        return R(4).batch(2)

    mode = px.InputReplicationMode.PER_REPLICA
    options = px.InputOptions(experimental_replication_mode=mode, experimental_fetch_to_device=False)
    data = vals(dff(2, f, options))
    return {"contexts": seen, "data": data}


@case()
def in_dff_place_on_device_needs_per_replica() -> Any:
    options = px.InputOptions(experimental_place_dataset_on_device=True)
    return dff(2, lambda c: R(4).batch(2), options)


@case()
def in_one_device_dff_per_replica_mode() -> Any:
    options = px.InputOptions(experimental_replication_mode=px.InputReplicationMode.PER_REPLICA)
    strategy = px.OneDeviceStrategy("CPU:0")
    return strategy.distribute_datasets_from_function(lambda c: R(4), options)


@differs()
def in_dff_returns_non_dataset() -> None:
    assert vals(dff(2, lambda c: [1, 2])) == [[1, 2]]
    with pytest.raises(AttributeError):
        dff(2, lambda c: 3)


# -- iterators ----------------------------------------------------------------------------------------


@case()
def in_iter_get_next_out_of_range() -> Any:
    it = iter(dd(2, R(2).batch(2)))
    it.get_next()
    return it.get_next()


@case()
def in_iter_after_end_again() -> Any:
    it = iter(dd(2, R(2).batch(2)))
    r = []
    for _ in range(3):
        try:
            next(it)
            r.append("ok")
        except StopIteration:
            r.append("stop")
    return r


@case()
def in_iter_independent() -> Any:
    d = dd(2, R(4).batch(2))
    a = iter(d)
    next(a)
    b = iter(d)
    return {"b_first": vals([next(b)]), "again": vals(d)}


def optionals(it: Any) -> tuple[list[Any], Any]:
    out = []
    for _ in range(3):
        o = it.get_next_as_optional()
        out.append([o.has_value(), vals([o.get_value()]) if o.has_value() else None])
    return out, o


@case()
def in_iter_optional() -> Any:
    steps, last = optionals(iter(dd(2, R(3).batch(2))))
    with pytest.raises(px.errors.InvalidArgumentError) as error:
        last.get_value()
    return {"steps": steps, "empty_get_value": error.type.__name__}


@case()
def in_iter_next_in_replica_fn() -> Any:
    s = mirrored(2)
    it = iter(s.experimental_distribute_dataset(R(4).batch(2)))
    return s.run(lambda: next(it))


@case()
def in_iter_next_in_other_strategy_scope() -> Any:
    a, b = mirrored(2), mirrored(2)
    it = iter(a.experimental_distribute_dataset(R(4).batch(2)))
    with b.scope():
        return next(it)


@case()
def in_iter_inside_compiled_function() -> Any:
    s = mirrored(2)
    it = iter(s.experimental_distribute_dataset(R(4).batch(2)))

    @px.function
    def step(it: Any) -> Any:
        return s.reduce("SUM", s.run(jnp.sum, args=(next(it),)), axis=None)

    return [step(it), step(it)]


@case()
def in_isinstance() -> Any:
    s = mirrored(2)
    d = s.experimental_distribute_dataset(R(4).batch(2))
    it = iter(d)
    x = next(it)
    with s.scope():
        v = px.Variable(1.0)
    from_function = s.distribute_datasets_from_function(lambda c: R(2))
    return [
        isinstance(d, px.DistributedDataset),
        isinstance(it, px.DistributedIterator),
        isinstance(x, px.DistributedValues),
        isinstance(v, px.DistributedValues),
        isinstance(v, px.Variable),
        isinstance(from_function, px.DistributedDataset),
    ]


@case()
def in_element_spec() -> Any:
    one = px.OneDeviceStrategy("CPU:0")
    nested = Dataset.from_tensors((np.float32([1.0]), np.int32([2]))).repeat(4).batch(2)
    return {
        "dynamic": dd(2, R(4).batch(2)).element_spec,
        "static": dd(2, R(4).batch(4, drop_remainder=True)).element_spec,
        "static_indivisible": dd(2, R(6).batch(3, drop_remainder=True)).element_spec,
        "nested": dd(2, nested).element_spec,
        "iterator": iter(dd(2, R(4).batch(2))).element_spec,
        "one_device": one.experimental_distribute_dataset(R(4).batch(2)).element_spec,
    }


@case()
def in_partial_loss_mean_trap() -> Any:
    s = mirrored(2)
    dataset = Dataset.from_tensor_slices([1.0, 2.0, 3.0]).batch(2)
    x = list(s.experimental_distribute_dataset(dataset))[-1]
    return {
        "batch": x,
        "per_replica_mean": s.run(jnp.mean, args=(x,)),
        "reduce_mean_axis0": s.reduce("MEAN", x, axis=0),
        "sum_axis0": s.reduce("SUM", x, axis=0),
    }


@case()
def in_shuffle_once_for_all_replicas() -> Any:
    x = vals(dd(2, R(10).shuffle(10, seed=1).batch(4)))
    f = [e for st in x for r in st for e in r]
    return [sorted(f), len(f)]


@case()
def in_prefetch_reads_ahead() -> Any:
    seen, enough = [], threading.Event()

    def count(x: Any) -> Any:
        seen.append(1)
        if len(seen) > 2:
            enough.set()
        return x

    with iter(dd(2, R(100).map(count).batch(2))) as it:
        next(it)
        return enough.wait(60)


@differs()
def in_sparse_partial() -> None:
    """There are no sparse tensors; rows of a dense matrix may be missing like all others."""
    dense = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], np.float32)
    last = list(dd(2, Dataset.from_tensor_slices(dense).batch(2)))[-1]
    assert [x.shape for x in last.values] == [(1, 2), (0, 2)]


@differs()
def in_partial_disable_off_policy() -> None:
    s = mirrored(2)
    s.extended.experimental_enable_get_next_as_optional = False
    found = vals(s.experimental_distribute_dataset(opt(R(5).batch(4), "OFF")))
    assert found == [[[0, 1], [2, 3]], [[4], []]]


@differs()
def in_central_storage_off_policy_partial() -> None:
    found = vals(central().experimental_distribute_dataset(opt(R(5).batch(4), "OFF")))
    assert found == [[[0, 1], [2, 3]], [[4], []]]


# -- several workers ----------------------------------------------------------------------------------

_SHARD = re.compile(
    r"in_shard_(range(\d+)|files(\d+)x(\d+))_batch(\d+)_w(\d+)r(\d+)_(AUTO|DATA|FILE|OFF)"
)


def sharded(dataset: Any, workers: int, replicas: int) -> list[Any]:
    """Per worker, per step, per local replica; a single replica's list stands for itself."""

    def read(strategy: px.Strategy) -> list[Any]:
        steps = vals(strategy.experimental_distribute_dataset(dataset))
        return steps if replicas > 1 else [step[0] for step in steps]

    return separately(workers, replicas, read)


def files(count: int, rows: int) -> Any:
    folder = Path(tempfile.mkdtemp())
    names = []
    for i in range(count):
        path = folder / f"{i}.txt"
        path.write_text("".join(f"{i * rows + j}\n" for j in range(rows)))
        names.append(str(path))
    return px.data.TextLineDataset(names).map(lambda line: np.int64(int(line)))


def shard_case(name: str) -> list[Any]:
    match = _SHARD.fullmatch(name)
    assert match is not None
    _, rows, count, each, size, workers, replicas, policy = match.groups()
    dataset = R(int(rows)) if rows else files(int(count), int(each))
    return sharded(opt(dataset.batch(int(size)), policy), int(workers), int(replicas))


FEWER_FILES = "in_shard_files1x8_batch4_w2r1_FILE"

for _name in [r["case"] for r in records("input") if _SHARD.fullmatch(r["case"])]:
    if _name != FEWER_FILES:
        case(_name)(lambda name=_name: shard_case(name))


@differs(FEWER_FILES)
def in_shard_fewer_files_than_workers() -> None:
    dataset = opt(files(1, 8).batch(4), "FILE")

    def distribute(strategy: px.Strategy) -> None:
        with pytest.raises(px.errors.InvalidArgumentError, match=r"0\.txt"):
            strategy.experimental_distribute_dataset(dataset)

    separately(2, 1, distribute)
    assert shard_case("in_shard_files1x8_batch4_w2r1_AUTO") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@case()
def in_shard_hint() -> Any:
    h = px.data.experimental.SHARD_HINT
    return sharded(opt(R(8).shard(h, h).batch(4), "HINT"), 2, 1)


@case()
def in_shard_shuffle_unsynchronised_trap() -> Any:
    """Different seeds are a mistake; workers agree on the seed of a shuffle that has none."""

    def read(strategy: Worker) -> list[Any]:
        worker = strategy.extended._input_worker[1]
        dataset = opt(R(8).shuffle(8, seed=worker + 1).batch(4), "DATA")
        return vals(strategy.experimental_distribute_dataset(dataset))

    found = separately(2, 1, read)
    return sorted(x for worker in found for step in worker for x in step[0]) == list(range(8))


# -- one expression each ---------------------------------------------------------------------------

cases(
    {
        "in_rebatch_batch_then_prefetch_repeat": lambda: vals(
            dd(2, R(4).batch(2).repeat(2).prefetch(1))
        ),
        "in_rebatch_two_level_batch": lambda: vals(dd(2, R(8).batch(2).batch(2))),
        "in_rebatch_batch_then_filter": lambda: vals(dd(2, R(8).batch(4).filter(lambda x: x[0] < 4))),
        "in_rebatch_from_tensors_no_batch_op": lambda: vals(
            dd(2, Dataset.from_tensors(np.arange(4)).repeat(2))
        ),
        "in_rebatch_unbatched_scalars": lambda: vals(dd(2, R(4))),
        "in_one_device_no_split": lambda: list(
            px.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(R(5).batch(2))
        ),
        "in_one_device_unbatched": lambda: list(
            px.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(R(3))
        ),
        "in_central_storage_even": lambda: vals(
            central().experimental_distribute_dataset(R(8).batch(4))
        ),
        "in_dff_not_rebatched": lambda: vals(dff(2, lambda c: R(6).batch(2))),
        "in_dff_odd_number_of_batches": lambda: list(dff(2, lambda c: R(5).batch(2))),
        "in_iter_optional_static_shape": lambda: optionals(
            iter(dff(2, lambda c: R(6).batch(2, drop_remainder=True)))
        )[0],
        "in_dataset_cardinality": lambda: [
            dd(2, R(5).batch(2)).cardinality,
            dd(2, R(5).batch(2).repeat()).cardinality,
            dd(2, R(8).filter(lambda x: x > 2).batch(2)).cardinality,
        ],
        "in_batch_sizes_for_worker": lambda: {
            f"{g}_{w}_{r}": [list(batch_sizes_for_worker(g, w, r, i)) for i in range(w)]
            for g, w, r in ((7, 2, 2), (4, 1, 3), (10, 2, 3))
        },
    }
)
