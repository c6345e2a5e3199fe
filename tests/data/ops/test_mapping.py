"""Functions over elements: how they are called, what they may return, how they fail."""

from __future__ import annotations

import threading
from collections import namedtuple
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.data import Ragged

D = px.data.Dataset
DEADLINE = 30.0


def ints(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


Pair = namedtuple("Pair", "a b")


# -- calling --------------------------------------------------------------------------------------


def test_tuples_are_unpacked_and_other_nests_are_not() -> None:
    pairs = D.zip((D.range(3), D.range(10, 13)))
    assert ints(pairs.map(lambda a, b: a + b)) == [10, 12, 14]
    assert ints(pairs.map(lambda *parts: len(parts))) == [2, 2, 2]
    assert ints(pairs.map(lambda pair: pair[1])) == [10, 11, 12]
    assert ints(pairs.map(lambda a, b=7: b)) == [10, 11, 12]
    assert ints(pairs.filter(lambda a, b: a > 0).map(max)) == [11, 12]
    assert ints(pairs.map(lambda a, b: {"a": a}).map(lambda e: e["a"])) == [0, 1, 2]
    assert ints(pairs.map(Pair).map(lambda p: p.b)) == [10, 11, 12]
    assert ints(pairs.map(lambda a, b: ((a, b), b)).map(lambda ab, b: ab[1] - b)) == [0, 0, 0]
    assert ints(pairs.map(lambda a, b: (a,)).map(lambda a: a)) == [0, 1, 2]


def test_results_may_be_anything_that_elements_are_made_of() -> None:
    made = D.range(2).map(lambda x: {"j": jnp.ones(2) * x, "l": [1, 2], "s": f"n{x}", "f": 1.5})
    first, second = list(made)
    assert isinstance(first["j"], np.ndarray)
    assert second["j"].tolist() == [1.0, 1.0]
    assert (first["l"].dtype, first["s"], type(first["f"])) == (np.int32, "n0", np.float32)
    ragged = list(D.range(2).map(lambda x: [[1], [2, 3]]))
    assert ragged[0] == Ragged([[1], [2, 3]])
    datasets = D.range(3).map(D.range).flat_map(lambda d: d)
    assert ints(datasets) == [0, 0, 1]


def test_functions_are_called_once_per_element_in_order_and_only_when_asked() -> None:
    calls: list[int] = []

    def note(x: Any) -> Any:
        calls.append(int(x))
        return x

    dataset = D.range(10).map(note).batch(2)
    assert calls == []
    iterator = iter(dataset)
    assert calls == []
    next(iterator)
    assert calls == [0, 1]
    next(iterator)
    assert calls == [0, 1, 2, 3]
    iterator.close()


def test_the_form_of_results_is_found_out_with_the_first_element_only_when_needed() -> None:
    calls: list[int] = []

    def note(x: Any) -> Any:
        calls.append(int(x))
        return x * 1.5, [x]

    dataset = D.range(10).map(note).shuffle(5).prefetch(1).batch(4, drop_remainder=True)
    assert calls == []
    shapes = [spec.shape for spec in dataset.element_spec]
    assert shapes == [(4,), (4, 1)]
    assert calls == [0]
    list(dataset)
    assert len(calls) == 11
    fresh = D.range(2).map(note)
    calls.clear()
    list(fresh)
    assert calls == [0, 1]
    _ = fresh.element_spec
    assert calls == [0, 1]


def test_a_signature_is_known_without_calling() -> None:
    signature = {"x": px.TensorSpec((None,), np.float32)}
    dataset = D.range(3).map(lambda n: {"x": np.arange(n)}, output_signature=signature)
    assert dataset.batch(2).element_spec["x"].shape == (None, None)
    assert [e["x"].dtype for e in dataset] == [np.float32] * 3
    with pytest.raises(px.errors.InvalidTypeError, match="concatenate"):
        dataset.concatenate(D.range(3))
    with pytest.raises(px.errors.InvalidTypeError, match=r"output_signature.*for element 0"):
        list(D.range(3).map(lambda n: n, output_signature=px.TensorSpec((1,), np.int64)))


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (lambda x: None, "at least one array"),
        (lambda x: object(), "arrays, numbers and strings"),
        (lambda x: x if x < 2 else (x, x), "one structure.*element 2"),
        (lambda x: x if x < 2 else float(x), "one dtype: int64. Received: float32 for element 2"),
        (lambda x: "a" if x < 2 else x, "one dtype: object"),
    ],
)
@pytest.mark.parametrize("parallel", [None, 2])
def test_results_must_have_one_form(fn: Any, match: str, parallel: int | None) -> None:
    with pytest.raises((px.errors.InvalidTypeError, px.errors.InvalidValueError), match=match):
        list(D.range(5).map(fn, num_parallel_calls=parallel))


def test_functions_may_use_their_arrays_again() -> None:
    array = np.zeros(2, int)

    def fill(x: Any) -> Any:
        array[:] = x
        return array

    assert [x.tolist() for x in D.range(3).map(fill)] == [[0, 0], [1, 1], [2, 2]]
    kept = list(D.range(3).map(fill).batch(2))
    assert [x.tolist() for x in kept] == [[[0, 0], [1, 1]], [[2, 2]]]
    assert len(list(D.range(100).map(lambda x: np.zeros(2**18, np.uint8)).batch(100))) == 1


def test_shapes_may_differ() -> None:
    dataset = D.range(3).map(np.arange)
    assert [x.tolist() for x in dataset] == [[], [0], [0, 1]]
    assert [x.tolist() for x in dataset.take(2).concatenate(dataset)][-1] == [0, 1]


# -- many elements at once ------------------------------------------------------------------------


def test_vectorized_functions_get_columns() -> None:
    sizes: list[int] = []

    def double(x: Any, names: Any) -> Any:
        sizes.append(len(x))
        return {"x": x * 2, "n": names}

    source = D.from_tensor_slices((np.ones((7, 2)), list("abcdefg")))
    batches = list(source.map(double, vectorized=True).batch(3))
    assert sizes == [3, 3, 1]
    assert batches[0]["x"].tolist() == [[2.0, 2.0]] * 3
    assert batches[2]["n"].tolist() == ["g"]
    spec = source.map(double, vectorized=True).element_spec
    assert (spec["x"].shape, spec["n"].shape) == ((2,), ())
    assert len(list(source.map(double, vectorized=True))) == 7


def test_vectorized_functions_and_ragged_elements() -> None:
    source = D.from_tensor_slices([[1], [2, 3], [4, 5]])
    lengths = source.map(lambda rows: np.array([len(r) for r in rows]), vectorized=True)
    assert [x.tolist() for x in lengths.batch(3)] == [[1, 2, 2]]
    doubled = source.map(lambda r: Ragged([2 * x for x in r]), vectorized=True)
    assert [x.tolist() for x in doubled.take(2)] == [[2], [4, 6]]


def test_vectorized_functions_return_a_row_per_element() -> None:
    for fn in (lambda x: x[:1], lambda x: x.sum()):
        with pytest.raises(px.errors.InvalidValueError, match=r"one row per element.*elements 0 to 3"):
            list(D.range(4).map(fn, vectorized=True).batch(4))
    signature = px.TensorSpec((), np.float32)
    good = D.range(4).map(lambda x: x, vectorized=True, output_signature=signature)
    assert next(iter(good.batch(4))).dtype == np.float32


# -- failing --------------------------------------------------------------------------------------


def fail_at(n: int) -> Any:
    def fn(x: Any) -> Any:
        if x == n:
            raise ZeroDivisionError("never divide")
        return x

    return fn


@pytest.mark.parametrize("parallel", [None, 1, 3, px.data.AUTOTUNE])
@pytest.mark.parametrize("prefetch", [False, True])
def test_errors_name_the_element_and_come_after_those_before(parallel: Any, prefetch: bool) -> None:
    dataset = D.range(20).map(fail_at(7), num_parallel_calls=parallel)
    dataset = dataset.prefetch(4) if prefetch else dataset
    iterator = iter(dataset)
    assert [int(next(iterator)) for _ in range(7)] == list(range(7))
    with pytest.raises(
        px.errors.DatasetFunctionError, match=r"map failed for element 7.*never"
    ) as info:
        next(iterator)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(px.errors.DatasetFunctionError):
        next(iterator)
    iterator.close()


def test_errors_of_other_operations() -> None:
    with pytest.raises(px.errors.DatasetFunctionError, match="filter failed for element 7"):
        ints(D.range(20).filter(lambda x: fail_at(7)(x) is not None))
    with pytest.raises(px.errors.DatasetFunctionError, match=r"filter.*element 1.*must return a bool"):
        ints(D.range(20).filter(lambda x: True if x == 0 else np.ones(2, bool)))
    with pytest.raises(px.errors.DatasetFunctionError, match="bool"):
        ints(D.range(20).filter(lambda x: x))
    with pytest.raises(px.errors.DatasetFunctionError, match="flat_map failed for element 1"):
        ints(D.range(20).flat_map(lambda x: D.range(fail_at(1)(x))))
    with pytest.raises(px.errors.InvalidTypeError, match="interleave must return a dataset"):
        ints(D.range(20).interleave(lambda x: x))
    with pytest.raises(px.errors.DatasetFunctionError, match="reduce failed for element 7"):
        D.range(20).reduce(0, lambda s, x: fail_at(7)(x))
    with pytest.raises(px.errors.DatasetFunctionError, match="elements 4 to 7"):
        list(D.range(20).map(lambda x: fail_at(7)(x.max()) + x, vectorized=True).batch(4))


def test_arguments_that_do_not_fit_are_errors_of_the_function() -> None:
    with pytest.raises(px.errors.DatasetFunctionError, match="TypeError") as info:
        ints(D.range(2).map(lambda a, b: a))
    assert isinstance(info.value.__cause__, TypeError)


# -- in parallel ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_parallel_calls_keep_the_order(batch: int) -> None:
    dataset = D.range(300).map(lambda x: x * 2, num_parallel_calls=3)
    assert [int(x) for b in dataset.batch(batch) for x in b] == [2 * x for x in range(300)]
    whole = D.range(300).map(lambda x: x * 2, num_parallel_calls=3, vectorized=True)
    assert [int(x) for b in whole.batch(batch) for x in b] == [2 * x for x in range(300)]


def test_parallel_calls_are_parallel_and_end_with_the_iterator() -> None:
    barrier = threading.Barrier(3, timeout=DEADLINE)
    threads: set[threading.Thread] = set()

    def meet(x: Any) -> Any:
        threads.add(threading.current_thread())
        barrier.wait()
        return x

    with iter(D.range(9).map(meet, num_parallel_calls=3)) as iterator:
        assert ints(iterator) == list(range(9))
    assert len(threads) == 3
    assert not any(thread.is_alive() for thread in threads)


def not_kept() -> Any:
    options = px.data.Options()
    options.deterministic = False
    return options


@pytest.mark.parametrize(
    "parallel",
    [
        lambda d, fn: d.map(fn, num_parallel_calls=2, deterministic=False),
        lambda d, fn: d.map(fn, num_parallel_calls=2).with_options(not_kept()),
    ],
)
def test_the_order_need_not_be_kept(parallel: Any) -> None:
    one_has_come = threading.Event()

    def hold_back(x: Any) -> Any:
        assert x != 0 or one_has_come.wait(DEADLINE)
        return x

    with iter(parallel(D.range(4), hold_back)) as iterator:
        first = int(next(iterator))
        one_has_come.set()
        assert first != 0
        assert sorted([first, *ints(iterator)]) == [0, 1, 2, 3]


def test_what_a_map_is_told_counts_more_than_options() -> None:
    others = threading.Semaphore(0)

    def hold_back(x: Any) -> Any:
        if x > 0:
            others.release()
        else:
            assert all(others.acquire(timeout=DEADLINE) for _ in range(3))
        return x

    told = D.range(4).map(hold_back, num_parallel_calls=2, deterministic=True)
    assert ints(told.with_options(not_kept())) == [0, 1, 2, 3]


def test_parallel_calls_read_only_so_far_ahead() -> None:
    read: list[int] = []

    def numbers() -> Any:
        for i in range(100):
            read.append(i)
            yield i

    with iter(D.from_generator(numbers).map(lambda x: x, num_parallel_calls=2)) as iterator:
        next(iterator)
        assert len(read) <= 5


def test_errors_of_the_input_come_through_parallel_calls() -> None:
    source = D.range(10).map(fail_at(5)).map(lambda x: x, num_parallel_calls=2)
    with iter(source) as iterator:
        assert [int(next(iterator)) for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(px.errors.DatasetFunctionError, match="element 5"):
            next(iterator)


# -- others ---------------------------------------------------------------------------------------


def test_numbering() -> None:
    pairs = D.range(5, 8).enumerate(start=2)
    assert [(int(i), int(x)) for i, x in pairs] == [(2, 5), (3, 6), (4, 7)]
    assert pairs.element_spec[0] == px.TensorSpec((), np.dtype(np.int64))
    nested = D.from_tensor_slices((np.arange(3), np.arange(3))).enumerate().shuffle(3, seed=1)
    assert all(int(i) == int(a) == int(b) for i, (a, b) in nested)


def test_reducing() -> None:
    assert D.range(5).reduce(0, lambda s, x: s + int(x)) == 10
    assert D.range(0).reduce("start", lambda s, x: None) == "start"
    pairs = D.range(3).enumerate()
    assert pairs.reduce((0, 0), lambda s, e: (s[0] + int(e[0]), s[1] + int(e[1]))) == (3, 3)


def test_applying() -> None:
    assert ints(D.range(3).apply(lambda d: d.repeat(2))) == [0, 1, 2] * 2


def test_batches_of_any_size_are_expected_after_the_first() -> None:
    batches = px.data.Dataset.range(10).batch(4)
    assert batches.map(lambda x: x * 2).element_spec.shape == (None,)
    assert batches.map(lambda x: x.sum()).element_spec.shape == ()
    full = px.data.Dataset.range(8).batch(4, drop_remainder=True)
    assert full.map(lambda x: x * 2).element_spec.shape == (4,)


def test_vectorized_functions_get_arrays_wherever_shapes_agree() -> None:
    """A shuffle that holds batches of different sizes hands them on one by one."""
    batches = D.range(3).batch(2).shuffle(1).map(lambda x: x * 2, vectorized=True)
    assert [x.tolist() for x in batches] == [[0, 2], [4]]
