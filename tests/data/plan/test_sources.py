"""Where elements come from."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px

D = px.data.Dataset
spec = px.TensorSpec


def ints(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


# -- arrays ---------------------------------------------------------------------------------------


def test_slices_of_nests_keep_structure_and_dtype() -> None:
    dataset = D.from_tensor_slices({"x": np.ones((3, 2), np.float16), "y": ([1, 2, 3], jnp.zeros(3))})
    assert dataset.element_spec == {
        "x": spec((2,), np.dtype(np.float16)),
        "y": (spec((), np.dtype(np.int32)), spec((), np.dtype(np.float32))),
    }
    element = next(iter(dataset))
    assert element["x"].shape == (2,)
    assert type(element["y"][0]) is np.int32
    assert len(dataset) == 3


def test_slices_of_strings_and_ragged_lists() -> None:
    dataset = D.from_tensor_slices((["a", "b"], [[1], [2, 3]], np.array([b"x", b"yz"])))
    assert [(a, b.tolist(), c) for a, b, c in dataset] == [("a", [1], b"x"), ("b", [2, 3], b"yz")]
    assert dataset.element_spec[1].shape == (None,)
    assert next(iter(dataset.map(lambda a, b, c: a + "!"))) == "a!"


def test_one_element() -> None:
    dataset = D.from_tensors(([1, 2], [[1], [2, 3]], "s", {"k": 1.0}))
    ((a, b, c, d),) = list(dataset)
    assert (a.tolist(), b.to_list(), c, d["k"]) == ([1, 2], [[1], [2, 3]], "s", 1.0)
    assert len(dataset) == 1
    assert dataset.element_spec[1] == px.data.RaggedSpec((2, None), np.dtype(np.int32))


def test_sources_do_not_copy_and_cannot_be_written_through() -> None:
    x = np.arange(4)
    element = next(iter(D.from_tensor_slices(x.reshape(2, 2))))
    assert np.shares_memory(element, x)
    assert not element.flags.writeable
    whole = next(iter(D.from_tensors(x)))
    assert not whole.flags.writeable


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (3, "first dimension"),
        ((), "at least one array"),
        (None, "at least one array"),
        (([1, 2], [1, 2, 3]), r"first dimensions \[2, 3\]"),
        ({"a": [1], "b": 2}, "first dimension"),
    ],
)
def test_slices_that_cannot_be_made(bad: Any, match: str) -> None:
    with pytest.raises(px.errors.InvalidValueError, match=match):
        D.from_tensor_slices(bad)


def test_no_element_at_all_cannot_be_made() -> None:
    with pytest.raises(px.errors.InvalidValueError, match="at least one array"):
        D.from_tensors(())
    with pytest.raises(px.errors.InvalidTypeError, match="arrays, numbers and strings"):
        D.from_tensors(object())
    with pytest.raises(px.errors.InvalidTypeError, match=r"from_tensor_slices, Dataset.range"):
        D([1, 2, 3])  # type: ignore[arg-type]


# -- ranges ---------------------------------------------------------------------------------------


def test_ranges() -> None:
    assert ints(D.range(3)) == [0, 1, 2]
    assert ints(D.range(5, 1, -2)) == [5, 3]
    assert type(next(iter(D.range(1)))) is np.int64
    assert type(next(iter(D.range(1, output_type=np.float32)))) is np.float32
    assert ints(D.range(10**15, 10**15 + 2)) == [10**15, 10**15 + 1]
    assert ints(D.range(10**18).skip(10**17).take(1)) == [10**17]


@pytest.mark.parametrize("args", [(), (1, 2, 3, 4), (1, 2, 0)])
def test_ranges_that_cannot_be_made(args: tuple[int, ...]) -> None:
    with pytest.raises(px.errors.InvalidValueError, match="range needs"):
        D.range(*args)


def test_ranges_of_other_things() -> None:
    with pytest.raises(px.errors.InvalidTypeError, match=r"integer\. Received: 1.5"):
        D.range(1.5)  # type: ignore[arg-type]
    with pytest.raises(px.errors.InvalidTypeError, match="output_type"):
        D.range(3, output_type=str)


# -- generators -----------------------------------------------------------------------------------


def test_generators_run_anew_for_each_iteration() -> None:
    dataset = D.from_generator(lambda: iter([(1, "a"), (2, "b")]))
    assert dataset.cardinality() == px.data.UNKNOWN_CARDINALITY
    for _ in range(2):
        assert [(int(n), s) for n, s in dataset] == [(1, "a"), (2, "b")]
    assert dataset.element_spec == (spec((), np.dtype(np.int32)), spec((), np.dtype(object)))


def test_generators_are_lazy_and_are_closed() -> None:
    log: list[Any] = []

    def numbers() -> Iterator[int]:
        log.append("begin")
        try:
            for i in range(10):
                log.append(i)
                yield i
        finally:
            log.append("end")

    dataset = D.from_generator(numbers)
    iterator = iter(dataset)
    assert log == []
    next(iterator)
    assert log == ["begin", 0]
    iterator.close()
    assert log == ["begin", 0, "end"]
    assert list(iterator) == []
    assert len(ints(dataset.take(2))) == 2
    assert log.count("end") == 2


def test_generators_may_use_their_arrays_again() -> None:
    def numbers() -> Iterator[Any]:
        array, rows = np.zeros(2, int), np.zeros(3, int)
        for i in range(5):
            array[:] = i
            rows[:] = i
            yield array, rows[: 1 + i % 3]

    dataset = D.from_generator(numbers)
    assert [(a.tolist(), b.tolist()) for a, b in dataset] == [
        ([i] * 2, [i] * (1 + i % 3)) for i in range(5)
    ]
    batches = list(dataset.map(lambda a, b: a).batch(2))
    assert [b.tolist() for b in batches] == [[[0, 0], [1, 1]], [[2, 2], [3, 3]], [[4, 4]]]
    (words,) = dataset.map(lambda a, b: b).ragged_batch(5)
    assert words.to_list() == [[i] * (1 + i % 3) for i in range(5)]
    (words,) = D.zip(dataset, D.range(5)).map(lambda e, i: e[1]).ragged_batch(5)
    assert words.to_list() == [[i] * (1 + i % 3) for i in range(5)]


def test_large_elements_are_not_allocated_before_they_come() -> None:
    def images() -> Iterator[Any]:
        yield from (np.full(2**20, i, np.uint8) for i in range(3))

    shuffled = D.from_generator(images).shuffle(10**9, seed=0)
    assert sorted(int(x[-1]) for x in shuffled) == [0, 1, 2]
    assert len(list(D.from_generator(lambda: iter(np.zeros((100, 2**18), np.uint8))).batch(100))) == 1


def test_generators_take_arguments_and_signatures() -> None:
    def count(n: Any, text: Any) -> Iterator[Any]:
        for i in range(n):
            yield {"n": i, "s": text}

    signature = {"n": spec((), np.int64), "s": spec((), np.object_)}
    dataset = D.from_generator(count, args=(2, "x"), output_signature=signature)
    assert dataset.element_spec["n"].dtype == np.int64
    assert [(type(e["n"]), e["s"]) for e in dataset] == [(np.int64, "x")] * 2
    typed = D.from_generator(lambda: iter([1, 2]), output_types=np.float32, output_shapes=())
    assert type(next(iter(typed))) is np.float32
    pairs = D.from_generator(lambda: iter([([1, 2], 3)]), (np.int8, np.float64))
    assert [x.dtype for x in next(iter(pairs))] == [np.int8, np.float64]


@pytest.mark.parametrize(
    ("yields", "signature", "match"),
    [
        ([1, 2.5], None, "one dtype: int32. Received: float32 for element 1"),
        ([1, (1, 2)], None, "one structure.* for element 1"),
        ([()], None, "at least one array"),
        ([[1, 2], [3]], spec((2,), np.int32), r"shape=\(1,\).* for element 1"),
        ([1.5], spec((), np.int32), "float32.* for element 0"),
        (["a"], spec((), np.float32), "fit its output_signature"),
        ([[[1], [2, 3]]], spec((2, None), np.int32), "RaggedSpec"),
        ([1], px.data.RaggedSpec((None, None), np.int32), "output_signature"),
    ],
)
def test_elements_must_have_one_form(yields: list[Any], signature: Any, match: str) -> None:
    dataset = D.from_generator(lambda: iter(yields), output_signature=signature)
    with pytest.raises((px.errors.InvalidTypeError, px.errors.InvalidValueError), match=match):
        list(dataset)


def test_signatures_are_checked_when_given() -> None:
    for bad in (3, [spec((), np.int32)], {"a": "int"}):
        with pytest.raises(px.errors.InvalidTypeError, match=r"must be a px\.TensorSpec"):
            D.from_generator(lambda: iter([1]), output_signature=bad)
    with pytest.raises(px.errors.InvalidValueError, match="at least one spec"):
        D.from_generator(lambda: iter([1]), output_signature=())
    with pytest.raises(px.errors.InvalidValueError, match="either"):
        D.from_generator(lambda: iter([1]), np.int32, output_signature=spec((), np.int32))
    with pytest.raises(px.errors.InvalidTypeError, match="needs a function"):
        D.from_generator([1, 2])  # type: ignore[arg-type]


def test_errors_of_generators_come_after_the_elements_before_them() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("lost")

    iterator = iter(D.from_generator(numbers))
    assert [int(next(iterator)), int(next(iterator))] == [1, 2]
    with pytest.raises(
        px.errors.DatasetFunctionError, match=r"from_generator failed for element 2"
    ) as info:
        next(iterator)
    assert isinstance(info.value.__cause__, KeyError)
    with pytest.raises(px.errors.DatasetFunctionError, match="element 0: TypeError"):
        list(D.from_generator(lambda: 3))  # type: ignore[arg-type,return-value]


def test_the_form_of_nothing_is_not_known() -> None:
    empty = D.from_generator(lambda: iter([]))
    assert list(empty) == []
    with pytest.raises(px.errors.InvalidValueError, match="output_signature"):
        _ = empty.element_spec


# -- files ----------------------------------------------------------------------------------------


def test_files_are_listed_by_pattern(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.bin"):
        (tmp_path / name).touch()
    (tmp_path / "d.txt").mkdir()
    dataset = D.list_files(str(tmp_path / "*.txt"), shuffle=False)
    assert list(dataset) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    assert dataset._node.is_file_source
    assert dataset._node.files == tuple(dataset)
    assert list(D(dataset._node.with_files(["x"]))) == ["x"]
    several = D.list_files([tmp_path / "*.bin", tmp_path / "a*", tmp_path / "*.t*"], seed=1)
    assert sorted(several) == [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.bin")]
    assert len({tuple(several) for _ in range(20)}) > 1
    again = D.list_files([tmp_path / "*.bin", tmp_path / "a*", tmp_path / "*.t*"], seed=1)
    assert list(again) == list(D.list_files(str(tmp_path / "*[tn]"), shuffle=True, seed=1))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(px.errors.InvalidArgumentError, match="found no files"):
        D.list_files(str(tmp_path / "*"))
    with pytest.raises(px.errors.InvalidTypeError, match="patterns"):
        D.list_files(3)  # type: ignore[arg-type]


# -- the plan -------------------------------------------------------------------------------------


def test_a_dataset_tells_what_it_is() -> None:
    dataset = D.range(3)
    assert bool(D.range(0))
    assert "int64" in repr(dataset)
    assert "unknown" in repr(dataset.map(lambda x: x))
    for endless in (dataset.repeat(), dataset.filter(lambda x: True)):
        with pytest.raises(TypeError, match=r"infinite|unknown"):
            len(endless)
    assert ints(dataset.as_numpy_iterator()) == [0, 1, 2]


def test_plans_can_be_pickled() -> None:
    dataset = D.range(5).map(abs).shuffle(3, seed=1).cache().batch(2).with_options(px.data.Options())
    list(dataset)
    again = pickle.loads(pickle.dumps(dataset))
    assert [x.tolist() for x in again] == [x.tolist() for x in dataset]
