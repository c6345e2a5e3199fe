"""Distributed datasets: every row reaches one replica, on its device, under every strategy."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.contract.conftest import READING, STRATEGIES
from tests.data.naive import nominal_steps
from tests.data.workers import Worker, separately, together

import phalanx as px
from phalanx.data.distribute.splitting import cut_for_worker, sizes_per_step

Dataset = px.data.Dataset
Policy = px.data.experimental.AutoShardPolicy
DEADLINE = 60.0


def mirrored(n: int) -> px.MirroredStrategy:
    return px.MirroredStrategy([f"CPU:{i}" for i in range(n)])


def with_policy(dataset: Any, policy: str) -> Any:
    options = px.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy[policy]
    return dataset.with_options(options)


def parts(x: Any) -> list[Any]:
    """What each replica has, as lists."""
    values = x.values if isinstance(x, px.PerReplica) else [x]
    return [np.asarray(v).tolist() for v in values]


def vals(elements: Any) -> list[Any]:
    return [parts(x) for x in elements]


def flat(nested: Any) -> list[Any]:
    return [y for x in nested for y in flat(x)] if isinstance(nested, list) else [nested]


@pytest.fixture(params=READING)
def strategy(request: pytest.FixtureRequest) -> px.Strategy:
    return STRATEGIES[request.param]()


def input_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "phalanx-input"]


# -- every strategy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["AUTO", "DATA", "FILE", "OFF", "HINT"])
@pytest.mark.parametrize("rows", [0, 1, 7, 12])
def test_every_row_comes_once_and_in_order(strategy: px.Strategy, policy: str, rows: int) -> None:
    dataset = with_policy(Dataset.range(rows).batch(4), policy)
    steps = vals(strategy.experimental_distribute_dataset(dataset))
    assert len(steps) == -(-rows // 4)
    assert all(len(step) == strategy.num_replicas_in_sync for step in steps)
    assert flat(steps) == list(range(rows))


def test_elements_are_on_the_replicas_devices(strategy: px.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    dataset = Dataset.from_tensor_slices(np.arange(24.0).reshape(12, 2)).batch(12)
    (x,) = strategy.experimental_distribute_dataset(dataset)
    assert isinstance(x, px.PerReplica) == (n > 1)
    for component, device in zip(
        strategy.experimental_local_results(x), strategy.extended._replica_devices, strict=True
    ):
        assert isinstance(component, jax.Array)
        assert component.shape == (12 // n, 2)
        spread = isinstance(strategy, px.AutoParallelStrategy)
        expected = set(strategy.mesh.devices.flat) if spread else {device}
        assert device is None or component.devices() == expected
    if n > 1:
        assert x.array.shape == (12, 2)


def test_the_last_batch_may_be_uneven_or_leave_replicas_empty(strategy: px.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    dataset = Dataset.from_tensor_slices(np.ones((4 * n + 1, 3), np.float32)).batch(4 * n)
    last = list(strategy.experimental_distribute_dataset(dataset))[-1]
    shapes = [x.shape for x in strategy.experimental_local_results(last)]
    assert shapes == [(1, 3)] + [(0, 3)] * (n - 1)
    assert float(strategy.reduce("sum", last, axis=(0, 1))) == 3.0
    doubled = strategy.run(lambda x: x * 2, args=(last,))
    assert float(strategy.reduce("mean", doubled, axis=(0, 1))) == 2.0


def test_static_shapes_lose_nothing_either(strategy: px.Strategy) -> None:
    n = strategy.num_replicas_in_sync

    def dataset_fn(context: px.InputContext) -> Any:
        return Dataset.range(2 * (n + 1)).batch(2, drop_remainder=True)

    steps = vals(strategy.distribute_datasets_from_function(dataset_fn))
    assert flat(steps) == list(range(2 * (n + 1)))
    assert all(len(step) == n for step in steps)


def test_input_functions_learn_where_they_are(strategy: px.Strategy) -> None:
    seen = []

    def dataset_fn(context: px.InputContext) -> Any:
        seen.append((context.num_input_pipelines, context.input_pipeline_id))
        assert px.get_strategy() is strategy
        return Dataset.range(8).batch(context.get_per_replica_batch_size(2 * n))

    n = strategy.num_replicas_in_sync
    dist = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    assert seen == [(1, 0)]
    assert sorted(flat(vals(dist))) == list(range(8))


def test_old_spellings(strategy: px.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    dataset = strategy.experimental_make_numpy_dataset(np.arange(2.0 * n)).batch(2 * n)
    iterator = strategy.make_dataset_iterator(dataset)
    sums = strategy.experimental_run(jnp.sum, iterator)
    assert float(strategy.reduce("sum", sums, axis=None)) == sum(range(2 * n))
    with pytest.raises(px.errors.OutOfRangeError):
        iterator.get_next()
    made = strategy.make_input_fn_iterator(lambda c: Dataset.range(n).batch(1))
    assert flat(parts(made.get_next())) == list(range(n))


def test_structures_stay(strategy: px.Strategy) -> None:
    class Pair(NamedTuple):
        a: Any
        b: Any

    nest = {"x": np.arange(4), "y": (np.ones((4, 2), np.float32), Pair(np.arange(4), np.arange(4) * 2))}
    (x,) = strategy.experimental_distribute_dataset(Dataset.from_tensor_slices(nest).batch(4))
    assert set(x) == {"x", "y"}
    assert type(x["y"][1]) is Pair
    assert flat(parts(x["y"][1].b)) == [0, 2, 4, 6]


def test_strings_stay_on_the_host(strategy: px.Strategy) -> None:
    words = [b"a", b"b", b"c", b"d", b"e"]
    dataset = Dataset.from_tensor_slices((words, np.arange(5))).batch(4)
    elements = list(strategy.experimental_distribute_dataset(dataset))
    found = [strategy.experimental_local_results(x[0]) for x in elements]
    assert all(isinstance(w, np.ndarray) and w.dtype == object for step in found for w in step)
    assert [w for step in found for part in step for w in part.tolist()] == words
    assert all(isinstance(v, jax.Array) for v in strategy.experimental_local_results(elements[0][1]))


def test_elements_that_nobody_batched_are_cut_along_their_first_dimension() -> None:
    """Rows of the source are the elements here, so they cannot be moved by their numbers."""
    dataset = Dataset.from_tensor_slices(np.arange(12).reshape(3, 4)).shuffle(3, seed=1)
    steps = vals(mirrored(2).experimental_distribute_dataset(dataset))
    assert sorted(flat(steps)) == list(range(12))
    assert [[len(part) for part in step] for step in steps] == [[2, 2]] * 3


# -- many random inputs --------------------------------------------------------------------------------

SIZES = {
    "rows": st.integers(0, 40),
    "size": st.integers(1, 12),
    "workers": st.integers(1, 3),
    "replicas": st.integers(1, 4),
}


def expected_steps(rows: int, size: int, policy: str, worker: tuple[int, int, int]) -> list[Any]:
    workers, index, replicas = worker
    everything = list(range(rows))
    if policy == "DATA":
        batches = [everything[i : i + size] for i in range(0, rows, size)]
        return [[b[s] for s in cut_for_worker(len(b), workers, replicas, index)] for b in batches]
    table = sizes_per_step(size, workers, replicas, index)
    return [[everything[s] for s in step] for step in nominal_steps(rows, table)]


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(["DATA", "OFF"]), kind=st.sampled_from(["rows", "map", "range"]), **SIZES)
def test_workers_get_what_the_rules_say(
    policy: str, kind: str, rows: int, size: int, workers: int, replicas: int
) -> None:
    """Whether rows are only moved, or made by a function, or counted, makes no difference."""
    array = np.arange(rows, dtype=np.int32)
    dataset = {
        "rows": lambda: Dataset.from_tensor_slices(array),
        "map": lambda: Dataset.from_tensor_slices(array).map(lambda x: x + 0),
        "range": lambda: Dataset.range(rows),
    }[kind]()
    dataset = with_policy(dataset.batch(size), policy)
    options = px.InputOptions(experimental_per_replica_buffer_size=0)

    def read(strategy: Worker) -> list[Any]:
        return vals(strategy.experimental_distribute_dataset(dataset, options))

    found = separately(workers, replicas, read)
    expected = [expected_steps(rows, size, policy, (workers, i, replicas)) for i in range(workers)]
    assert found == expected
    times = 1 if policy == "DATA" else workers
    assert Counter(flat(found)) == Counter(dict.fromkeys(range(rows), times))


@settings(max_examples=25, deadline=None)
@given(
    fn_rows=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    size=st.integers(1, 3),
    replicas=st.integers(1, 4),
)
def test_workers_of_a_function_go_on_until_all_have_ended(
    fn_rows: list[int], size: int, replicas: int
) -> None:
    def read(strategy: Worker) -> list[Any]:
        rows = fn_rows[strategy.extended._input_worker[1]]
        return vals(
            strategy.distribute_datasets_from_function(lambda c: Dataset.range(rows).batch(size))
        )

    found = together(len(fn_rows), replicas, read)
    batches = [-(-rows // size) for rows in fn_rows]
    assert [len(steps) for steps in found] == [max(-(-b // replicas) for b in batches)] * len(fn_rows)
    assert [flat(steps) for steps in found] == [list(range(rows)) for rows in fn_rows]


# -- several workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "size", "policy", "expected"),
    [
        (10, 4, "AUTO", [[[[0, 1]], [[4, 5]], [[8]]], [[[2, 3]], [[6, 7]], [[9]]]]),
        (5, 2, "AUTO", [[[[0]], [[2]], [[4]]], [[[1]], [[3]], [[]]]]),
        (9, 3, "DATA", [[[[0, 1]], [[3, 4]], [[6, 7]]], [[[2]], [[5]], [[8]]]]),
    ],
)
def test_two_workers_as_tensorflow(rows: int, size: int, policy: str, expected: Any) -> None:
    dataset = with_policy(Dataset.range(rows).batch(size), policy)
    found = together(2, 1, lambda s: vals(s.experimental_distribute_dataset(dataset)))
    assert found == expected


def test_a_worker_without_data_gets_empty_batches() -> None:
    def read(strategy: Worker) -> list[Any]:
        rows = [3, 1][strategy.extended._input_worker[1]]
        return vals(strategy.distribute_datasets_from_function(lambda c: Dataset.range(rows).batch(1)))

    assert together(2, 1, read) == [[[[0]], [[1]], [[2]]], [[[0]], [[]], [[]]]]


def test_empty_batches_have_the_shape_of_those_before() -> None:
    """Nobody knows what a generator will give; what it gave tells."""

    def read(strategy: Worker) -> list[Any]:
        count = [1, 3][strategy.extended._input_worker[1]]
        dist = strategy.distribute_datasets_from_function(
            lambda c: ({"x": np.ones((2, 5)), "s": ["a", "b"]} for _ in range(count))
        )
        return [[v.shape for v in (*e["x"].values, *e["s"].values)] for e in dist]

    assert together(2, 1, read) == [
        [[(2, 5), (2,)], [(0, 5), (0,)], [(0, 5), (0,)]],
        [[(2, 5), (2,)]] * 3,
    ]


def test_optionals_end_together() -> None:
    dataset = Dataset.range(3).batch(2)

    def read(strategy: Worker) -> list[bool]:
        it = iter(strategy.experimental_distribute_dataset(dataset))
        return [it.get_next_as_optional().has_value() for _ in range(3)]

    assert together(2, 1, read) == [[True, True, False]] * 2


def test_sizes_of_several_workers_are_never_fixed() -> None:
    dataset = Dataset.range(8).batch(4, drop_remainder=True)
    spec = Worker(2, 0, 1).experimental_distribute_dataset(dataset).element_spec
    assert spec.value_specs[0].shape == (None,)
    assert len(spec.value_specs) == 1


def test_workers_know_whether_all_have_the_same_shapes() -> None:
    """Only then their parts make one array, which compiled steps need."""

    def read(strategy: Worker) -> list[bool]:
        dataset = Dataset.range(11).batch(4)
        steps = strategy.experimental_distribute_dataset(dataset)
        return [x.array is not None for x in steps]

    assert together(2, 1, read) == [[True, True, False]] * 2


def test_endless_workers_go_on() -> None:
    def read(strategy: Worker) -> list[Any]:
        dist = strategy.distribute_datasets_from_function(lambda c: Dataset.range(2).batch(1).repeat())
        return vals(itertools.islice(dist, 3))

    assert together(2, 1, read) == [[[[0]], [[1]], [[0]]]] * 2


def test_workers_shuffle_alike_without_a_seed() -> None:
    dataset = Dataset.range(20).shuffle(20).batch(4)

    def read(strategy: Worker) -> list[Any]:
        dist = strategy.experimental_distribute_dataset(dataset)
        return [flat(vals(dist)), flat(vals(dist))]

    first, second = zip(*together(2, 2, read), strict=True)
    assert sorted(flat(list(first))) == list(range(20))
    assert sorted(flat(list(second))) == list(range(20))
    assert list(first) != list(second)


def test_a_worker_fetches_only_its_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.data.distribute import steps

    fetched = []
    copy_to = steps.RowsOf.copy_to

    def spy(self: Any, out: Any) -> None:
        fetched.append(len(out))
        copy_to(self, out)

    monkeypatch.setattr(steps.RowsOf, "copy_to", spy)
    array = np.arange(64.0).reshape(32, 2)
    dataset = Dataset.from_tensor_slices(array).shuffle(32).batch(8).prefetch(2)
    found = vals(Worker(4, 1, 1).experimental_distribute_dataset(dataset))
    assert fetched == [2] * 4
    assert len(flat(found)) == 16


# -- iterators -----------------------------------------------------------------------------------------


def test_each_iteration_is_an_epoch_of_its_own() -> None:
    dist = mirrored(2).experimental_distribute_dataset(Dataset.range(50).shuffle(50).batch(10))
    epochs = [flat(vals(dist)) for _ in range(3)]
    assert [sorted(e) for e in epochs] == [list(range(50))] * 3
    assert len({tuple(e) for e in epochs}) == 3


def test_threads_end_with_the_data() -> None:
    before = input_threads()
    it = iter(mirrored(2).experimental_distribute_dataset(Dataset.range(8).batch(4)))
    assert input_threads() == before  # nothing is read before somebody asks
    list(it)
    assert input_threads() == before


def test_threads_end_with_close() -> None:
    before = input_threads()
    dist = mirrored(2).experimental_distribute_dataset(Dataset.range(8).batch(4).repeat())
    with iter(dist) as it:
        next(it)
        assert len(input_threads()) == len(before) + 1
    assert input_threads() == before
    assert list(it) == []


def test_threads_end_with_the_iterator() -> None:
    it = iter(mirrored(2).experimental_distribute_dataset(Dataset.range(8).batch(4).repeat()))
    before = input_threads()
    next(it)
    (thread,) = set(input_threads()) - set(before)
    del it
    gc.collect()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def test_without_a_buffer_nothing_is_read_ahead() -> None:
    seen: list[int] = []

    def look(x: Any) -> Any:
        seen.append(int(x))
        return x

    options = px.InputOptions(experimental_per_replica_buffer_size=0)
    dataset = Dataset.range(8).map(look).batch(2)
    it = iter(mirrored(2).experimental_distribute_dataset(dataset, options))
    seen.clear()  # the first element may have been looked at to learn its shape
    assert parts(next(it)) == [[0], [1]]
    assert seen == [0, 1]


def test_elements_can_stay_on_the_host() -> None:
    options = px.InputOptions(experimental_fetch_to_device=False)
    x = next(iter(mirrored(2).experimental_distribute_dataset(Dataset.range(4).batch(4), options)))
    assert all(type(v) is np.ndarray for v in x.values)
    assert parts(mirrored(2).run(lambda v: v + 1, args=(x,))) == [[1, 2], [3, 4]]


def test_an_error_of_a_function_is_raised_where_the_element_is_wanted() -> None:
    def fail(x: Any) -> Any:
        if x == 5:
            raise KeyError("five")
        return x

    it = iter(mirrored(2).experimental_distribute_dataset(Dataset.range(8).map(fail).batch(2)))
    assert [parts(next(it)) for _ in range(2)] == [[[0], [1]], [[2], [3]]]
    for _ in range(2):
        with pytest.raises(Exception, match="five"):
            next(it)


def test_several_threads_may_share_an_iterator() -> None:
    it = iter(mirrored(2).experimental_distribute_dataset(Dataset.range(200).batch(2)))
    found: list[Any] = []

    def take() -> None:
        found.extend(parts(x) for x in it)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert sorted(flat(found)) == list(range(200))


def test_elements_belong_to_their_strategy(strategy: px.Strategy) -> None:
    it = iter(strategy.experimental_distribute_dataset(Dataset.range(24).batch(12)))
    with px.OneDeviceStrategy("CPU:5").scope(), pytest.raises(px.errors.StrategyMismatchError):
        next(it)
    if px.get_strategy() is not strategy:
        with strategy.scope():
            next(it)
        with pytest.raises(px.errors.InvalidValueError, match="outside of the"):
            strategy.run(lambda: next(it))


def test_reduce_combines_all_elements() -> None:
    s = mirrored(2)
    dist = s.experimental_distribute_dataset(Dataset.range(7).batch(4))
    total = dist.reduce(0, lambda state, x: state + int(s.reduce("sum", x, axis=0)))
    assert total == sum(range(7))


# -- from functions ------------------------------------------------------------------------------------


def per_replica(**kwargs: Any) -> px.InputOptions:
    mode = px.InputReplicationMode.PER_REPLICA
    return px.InputOptions(experimental_replication_mode=mode, **kwargs)


@pytest.mark.parametrize(
    "options",
    [
        per_replica(),
        per_replica(experimental_fetch_to_device=False),
        per_replica(experimental_fetch_to_device=False, experimental_place_dataset_on_device=True),
    ],
)
def test_one_pipeline_per_replica(options: px.InputOptions) -> None:
    def dataset_fn(context: px.InputContext) -> Any:
        return Dataset.range(context.input_pipeline_id * 10, context.input_pipeline_id * 11 + 2)

    s = mirrored(3)
    dist = s.distribute_datasets_from_function(lambda c: dataset_fn(c).batch(2), options)
    assert vals(dist) == [[[0, 1], [10, 11], [20, 21]], [[], [12], [22, 23]]]
    on_device = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
    x = next(iter(dist))
    assert all(isinstance(v, jax.Array) == on_device for v in x.values)
    if on_device:
        assert [v.devices() for v in x.values] == [{d} for d in jax.devices()[:3]]


def test_pipelines_of_replicas_shuffle_differently() -> None:
    dist = mirrored(2).distribute_datasets_from_function(
        lambda c: Dataset.range(50).shuffle(50).batch(50), per_replica()
    )
    ((a, b),) = vals(dist)
    assert sorted(a) == sorted(b) == list(range(50))
    assert a != b


def test_an_input_function_may_return_any_iterable() -> None:
    dist = mirrored(2).distribute_datasets_from_function(lambda c: [np.arange(i) for i in (1, 2, 3)])
    assert vals(dist) == [[[0], [0, 1]], [[0, 1, 2], []]]


# -- refusals ------------------------------------------------------------------------------------------


def test_wrong_options() -> None:
    s, dataset = mirrored(2), Dataset.range(4).batch(2)
    with pytest.raises(px.errors.UnsupportedError, match="PER_REPLICA"):
        s.experimental_distribute_dataset(dataset, per_replica())
    with pytest.raises(px.errors.InvalidTypeError, match="InputOptions"):
        s.experimental_distribute_dataset(dataset, 3)
    for depth in (-1, 1.5, True):
        wrong = px.InputOptions(experimental_per_replica_buffer_size=depth)  # type: ignore[arg-type]
        with pytest.raises(px.errors.InvalidValueError, match="buffer_size"):
            s.experimental_distribute_dataset(dataset, wrong)
    both = per_replica(experimental_place_dataset_on_device=True)
    with pytest.raises(px.errors.InvalidValueError, match="exclude"):
        s.distribute_datasets_from_function(lambda c: dataset, both)
    with pytest.raises(px.errors.InvalidValueError, match="PER_REPLICA"):
        s.distribute_datasets_from_function(
            lambda c: dataset, px.InputOptions(experimental_place_dataset_on_device=True)
        )
    for other in (px.get_strategy(), px.OneDeviceStrategy("CPU:0"), Worker(2, 0, 2)):
        with pytest.raises(NotImplementedError):
            other.distribute_datasets_from_function(lambda c: dataset, per_replica())


def test_wrong_arguments() -> None:
    s = mirrored(2)
    with pytest.raises(px.errors.InvalidTypeError, match="callable"):
        s.distribute_datasets_from_function(Dataset.range(3))  # type: ignore[arg-type]
    for wrong in (3, None, np.arange(4), {"x": 1}, "batches"):
        with pytest.raises(px.errors.InvalidOperandError, match="iterable of batches"):
            s.experimental_distribute_dataset(wrong)
    dist = s.experimental_distribute_dataset(Dataset.range(4).batch(2))
    for twice in (dist, iter(dist)):
        with pytest.raises(px.errors.InvalidTypeError, match="distributed once"):
            s.experimental_distribute_dataset(twice)
    with pytest.raises(px.errors.InvalidValueError, match="once per worker"):
        s.make_input_fn_iterator(lambda c: [], px.InputReplicationMode.PER_REPLICA)


@pytest.mark.parametrize("mapped", [False, True])
def test_scalars_cannot_be_divided(mapped: bool) -> None:
    dataset = Dataset.from_tensor_slices((np.ones((4, 2)), np.arange(4)))
    dataset = dataset.map(lambda a, b: (a, b)) if mapped else dataset
    with pytest.raises(px.errors.UnbatchedDatasetError, match="batch"):
        list(mirrored(2).experimental_distribute_dataset(dataset))
    assert len(list(mirrored(1).experimental_distribute_dataset(dataset))) == 4


def test_datasets_of_datasets_cannot_be_divided() -> None:
    for s in (mirrored(1), mirrored(2)):
        with pytest.raises(px.errors.UnbatchedDatasetError, match="flat_map"):
            list(s.experimental_distribute_dataset(Dataset.range(4).window(2)))


# -- what is known beforehand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "shape"), [(4, (2,)), (3, (None,)), (None, (2,))], ids=["even", "odd", "endless"]
)
def test_sizes_from_functions_are_fixed_if_no_replica_can_go_empty(
    count: int | None, shape: Any
) -> None:
    def dataset_fn(context: px.InputContext) -> Any:
        dataset = Dataset.range(10).batch(2, drop_remainder=True)
        return dataset.repeat() if count is None else dataset.take(count)

    dist = mirrored(2).distribute_datasets_from_function(dataset_fn)
    assert dist.element_spec.value_specs[1] == px.TensorSpec(shape, np.dtype(np.int32))
    assert dist.cardinality == (-1 if count is None else count)


def test_describing_names_rows() -> None:
    dist = mirrored(3).experimental_distribute_dataset(Dataset.range(8).batch(4))
    assert dist.describe().splitlines() == [
        "1 worker(s) with 3 replica(s) each",
        "2 global batches of 4 rows",
        "policy DATA: one worker reads everything; a batch is cut by its own size",
        "rows of the first batch:",
        "  worker 0, replica 0: 0 to 1",
        "  worker 0, replica 1: 2 to 3",
        "  worker 0, replica 2: none",
    ]
    assert repr(dist) == "<px.DistributedDataset: 1 worker(s) of 3 replica(s), policy DATA>"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("DATA", ["keeps its own rows", "worker 1, replica 0: 1", "worker 0, replica 1: 2"]),
        ("OFF", ["keeps everything", "nominal size of 4", "worker 1, replica 1: 1"]),
        ("HINT", ["marked"]),
    ],
)
def test_describing_workers(policy: str, words: list[str]) -> None:
    dataset = with_policy(Dataset.range(8).batch(4), policy)
    text = Worker(2, 1, 2).experimental_distribute_dataset(dataset).describe()
    assert [w for w in words if w not in text] == []


def test_describing_input_functions() -> None:
    s = mirrored(2)
    text = s.distribute_datasets_from_function(lambda c: Dataset.range(4).batch(2)).describe()
    assert "once per worker" in text
    assert "replica 1 element 1" in text
    text = s.distribute_datasets_from_function(lambda c: Dataset.range(4), per_replica()).describe()
    assert "once per replica" in text
    text = s.experimental_distribute_dataset([np.arange(3)]).describe()
    assert "from a list" in text
    assert "if it has 8" in text
