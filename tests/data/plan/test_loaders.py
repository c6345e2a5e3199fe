"""Batches from elsewhere: lists, generators, Grain, and what looks like torch or TensorFlow."""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.data.distribute.test_distributed_dataset import flat, mirrored, parts, vals
from tests.data.workers import separately

import phalanx as px


def distributed(source: Any, replicas: int = 2) -> Any:
    return mirrored(replicas).experimental_distribute_dataset(source)


# -- other libraries -----------------------------------------------------------------------------------


class Tensor:
    """What a torch tensor shows: it must be detached and brought to the host first."""

    def __init__(self, array: Any, tracked: bool = True, remote: bool = True) -> None:
        self._array, self._tracked, self._remote = np.asarray(array), tracked, remote

    def detach(self) -> Tensor:
        return Tensor(self._array, False, self._remote)

    def cpu(self) -> Tensor:
        return Tensor(self._array, self._tracked, False)

    def numpy(self) -> Any:
        if self._tracked or self._remote:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad or is on a device.")
        if self._array.dtype == ml_dtypes.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return jnp.asarray(self._array).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return jnp.asarray(self._array).__dlpack_device__()


class EagerTensor:
    """What a TensorFlow tensor shows."""

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)

    def cpu(self) -> Any:
        raise AssertionError("deprecated")

    def numpy(self) -> Any:
        return self._array


class TorchLoader:
    """Gives lists of tensors, as a torch DataLoader collates pairs, and has a sampler with epochs."""

    class Sampler:
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    def __init__(self) -> None:
        self.sampler = self.Sampler()

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        order = np.arange(6) + 10 * self.sampler.epoch
        for i in (0, 4):
            yield [Tensor(order[i : i + 4]), Tensor(np.ones((len(order[i : i + 4]), 2)))]


def test_torch_loaders() -> None:
    dist = distributed(TorchLoader())
    assert dist.cardinality == 2
    epochs = [[parts(x[0]) for x in dist] for _ in range(2)]
    assert epochs == [[[[0, 1], [2, 3]], [[4], [5]]], [[[10, 11], [12, 13]], [[14], [15]]]]
    element = next(iter(dist))
    assert type(element) is list
    assert [v.dtype for v in element[1].values] == [jnp.float32] * 2


def test_a_dtype_that_numpy_does_not_know() -> None:
    (x,) = distributed([Tensor(np.arange(4).astype(ml_dtypes.bfloat16))])
    assert [v.dtype for v in x.values] == [jnp.bfloat16] * 2
    assert flat(parts(x)) == [0, 1, 2, 3]


def test_tensorflow_datasets() -> None:
    batches = [{"x": EagerTensor([[1.0], [2.0]]), "s": EagerTensor(np.array([b"a", b"b"], object))}]
    (element,) = distributed(batches)
    assert parts(element["x"]) == [[[1.0]], [[2.0]]]
    assert [v.tolist() for v in element["s"].values] == [[b"a"], [b"b"]]


def test_hugging_face_batches_are_dictionaries_of_lists() -> None:
    class Batch(collections.UserDict[str, Any]):
        """A mapping that is no dict."""

    rows = Batch(label=[0, 1, 2], text=["a", "b", "c"], grid=[[1, 2], [3, 4], [5, 6]])
    (element,) = distributed([rows])
    assert type(element) is dict
    assert parts(element["label"]) == [[0, 1], [2]]
    assert [v.tolist() for v in element["text"].values] == [["a", "b"], ["c"]]
    assert parts(element["grid"]) == [[[1, 2], [3, 4]], [[5, 6]]]


def grain_dataset() -> Any:
    return grain.MapDataset.range(10).map(lambda x: {"x": np.float32(x)}).batch(4)


@pytest.mark.parametrize("make", [grain_dataset, lambda: grain_dataset().to_iter_dataset()])
def test_grain(make: Any) -> None:
    dist = distributed(make())
    for _ in range(2):
        assert [parts(x["x"]) for x in dist] == [
            [[0.0, 1.0], [2.0, 3.0]],
            [[4.0, 5.0], [6.0, 7.0]],
            [[8.0], [9.0]],
        ]


def test_grain_data_loaders() -> None:
    sampler = grain.samplers.IndexSampler(
        6, shard_options=grain.sharding.NoSharding(), num_epochs=1, shuffle=True, seed=3
    )
    loader = grain.DataLoader(
        data_source=np.arange(6),
        sampler=sampler,
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )
    it = iter(distributed(loader, 3))
    first = parts(next(it))
    state = it.state()
    rest = vals(it)
    assert sorted(flat([first, rest])) == list(range(6))
    assert vals(distributed(loader, 2).iterator(state)) == [[[y] for y in flat(rest)]]


# -- kinds of iterables --------------------------------------------------------------------------------


def test_lists_and_structures() -> None:
    class Pair(NamedTuple):
        a: Any
        b: Any

    batch = Pair(np.arange(4), {"c": [np.arange(4) * 2, (jnp.ones((4, 1)),)]})
    (x,) = distributed([batch])
    assert type(x) is Pair
    assert parts(x.b["c"][0]) == [[0, 2], [4, 6]]
    assert parts(x.b["c"][1][0]) == [[[1.0], [1.0]]] * 2


def test_a_generator_can_be_read_once() -> None:
    dist = distributed(np.arange(i) for i in (2, 4))
    assert dist.element_spec.value_specs[0].shape == (None,)  # which looks at the first batch
    assert vals(dist) == [[[0], [1]], [[0, 1], [2, 3]]]
    with pytest.raises(px.errors.InvalidValueError, match="read once"):
        list(dist)
    with pytest.raises(px.errors.InvalidValueError, match="has been read"):
        dist.element_spec  # noqa: B018


def test_a_generator_that_reuses_its_buffer() -> None:
    def batches() -> Iterator[Any]:
        buffer = np.empty(64, np.float32)
        for i in range(5):
            buffer[:] = i
            yield buffer

    options = px.InputOptions(experimental_per_replica_buffer_size=4)
    elements = list(mirrored(2).experimental_distribute_dataset(batches(), options))
    assert [set(flat(parts(x))) for x in elements] == [{float(i)} for i in range(5)]


def test_generators_are_closed() -> None:
    closed = []

    def batches() -> Iterator[Any]:
        try:
            while True:
                yield np.arange(2)
        finally:
            closed.append(True)

    it = iter(distributed(batches()))
    next(it)
    it.close()
    assert closed == [True]


def test_objects_with_items_are_iterable() -> None:
    class Items:
        def __getitem__(self, i: int) -> Any:
            if i >= 2:
                raise IndexError
            return np.arange(2) + i

    assert vals(distributed(Items())) == [[[0], [1]], [[1], [2]]]


def test_one_device_gets_elements_as_they_are() -> None:
    one = px.OneDeviceStrategy("CPU:3")
    elements = list(one.experimental_distribute_dataset([{"x": 1, "y": "a"}, {"x": 2, "y": "b"}]))
    assert [e["y"] for e in elements] == ["a", "b"]
    assert [int(e["x"]) for e in elements] == [1, 2]
    assert elements[0]["x"].devices() == {jax.devices()[3]}


def test_every_worker_reads_all_and_keeps_its_own() -> None:
    source = [np.arange(5), np.arange(5, 8)]
    found = separately(2, 1, lambda s: vals(s.experimental_distribute_dataset(source)))
    assert found == [[[[0, 1, 2]], [[5, 6]]], [[[3, 4]], [[7]]]]


# -- refusals ------------------------------------------------------------------------------------------


def test_scalars_cannot_be_divided() -> None:
    for source in ([1, 2], ["a", "b"], [(np.ones(2), 3)]):
        with pytest.raises(px.errors.UnbatchedDatasetError, match="batch"):
            list(distributed(source))


def test_elements_must_have_one_structure() -> None:
    with pytest.raises(px.errors.StructureMismatchError, match="one structure"):
        list(distributed([{"x": np.arange(2)}, {"y": np.arange(2)}]))


def test_elements_must_be_arrays() -> None:
    with pytest.raises(px.errors.InvalidTypeError):
        list(distributed([object()]))


def test_an_empty_iterable_has_no_spec() -> None:
    assert list(distributed([])) == []
    with pytest.raises(px.errors.InvalidValueError, match="no element"):
        distributed([]).element_spec  # noqa: B018


def test_a_mapping_is_no_iterable_of_batches() -> None:
    class Lazy(Mapping[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return np.arange(2)

        def __iter__(self) -> Iterator[str]:
            return iter("x")

        def __len__(self) -> int:
            return 1

    with pytest.raises(px.errors.InvalidOperandError):
        distributed(Lazy())
    (element,) = distributed([Lazy()])
    assert parts(element["x"]) == [[0], [1]]


def test_rows_instead_of_batches_are_refused_by_name() -> None:
    """As a Hugging Face dataset yields them if nobody batches it."""
    rows = [{"x": 1, "text": "a"}, {"x": 2, "text": "b"}]
    dist = px.MirroredStrategy(["CPU:0", "CPU:1"]).experimental_distribute_dataset(rows)
    with pytest.raises(px.errors.UnbatchedDatasetError, match="Call dataset"):
        _ = dist.element_spec
    with pytest.raises(px.errors.UnbatchedDatasetError, match="Call dataset"):
        next(iter(dist))


class EndlessTf:
    """An endless dataset as tf.data has it: no length, but a cardinality."""

    def __len__(self) -> int:
        raise TypeError("The dataset is infinite.")

    def cardinality(self) -> np.int64:
        return np.int64(-1)

    def __iter__(self) -> Any:
        while True:
            yield np.arange(4)


class EndlessGrain(EndlessTf):
    """An endless dataset as Grain has it: of the largest length there is."""

    def __len__(self) -> int:
        return sys.maxsize


@pytest.mark.parametrize("source", [EndlessTf(), EndlessGrain()])
def test_endless_loaders_are_known_to_be_endless(source: Any) -> None:
    dist = px.MirroredStrategy(["CPU:0", "CPU:1"]).experimental_distribute_dataset(source)
    assert dist.cardinality == px.data.INFINITE_CARDINALITY
    assert "endlessly many global batches" in dist.describe()
    with pytest.raises(px.errors.InvalidValueError, match="endless dataset has no epoch"):
        px.data.audit(dist)
