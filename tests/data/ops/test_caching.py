"""Caches: filled once, used whole, never half."""

from __future__ import annotations

import gc
import json
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx.data import Ragged
from phalanx.data.ops.cache_files import decode, encode

D = px.data.Dataset
DEADLINE = 30.0


def ints(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


class Counted:
    """A dataset of numbers that counts how often elements are made."""

    def __init__(self, size: int = 10) -> None:
        self.calls = 0
        self.dataset = D.range(size).map(self._note)

    def _note(self, x: Any) -> Any:
        self.calls += 1
        return x * 2


@pytest.fixture(params=["memory", "file"])
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "" if request.param == "memory" else str(tmp_path / "elements")


def test_elements_are_made_once(name: str) -> None:
    source = Counted()
    cached = source.dataset.cache(name)
    for _ in range(3):
        assert ints(cached) == [2 * i for i in range(10)]
    assert source.calls == 10
    assert ints(cached.skip(3).take(2)) == [6, 8]
    assert sorted(ints(cached.shuffle(4).repeat(2))) == sorted([2 * i for i in range(10)] * 2)
    assert source.calls == 10
    assert len(cached) == 10


def test_nothing_is_kept_of_a_pass_that_was_not_finished(name: str) -> None:
    source = Counted()
    cached = source.dataset.cache(name)
    assert ints(cached.take(4)) == [0, 2, 4, 6]
    assert source.calls == 4
    assert ints(cached) == [2 * i for i in range(10)]
    assert source.calls == 14
    assert ints(cached) == [2 * i for i in range(10)]
    assert source.calls == 14


def test_nothing_is_kept_of_a_pass_that_failed(name: str) -> None:
    broken = [True]

    def fn(x: Any) -> Any:
        if x == 5 and broken[0]:
            raise OSError("disk on fire")
        return x

    cached = D.range(8).map(fn).cache(name)
    with pytest.raises(px.errors.DatasetFunctionError, match="disk on fire"):
        ints(cached)
    broken[0] = False
    assert ints(cached) == list(range(8))
    broken[0] = True
    assert ints(cached) == list(range(8))


def test_empty_datasets_are_cached_too(name: str) -> None:
    cached = Counted(0).dataset.cache(name)
    assert ints(cached) == ints(cached) == []


def test_a_cache_below_a_repetition_is_used_from_the_second_pass_on(name: str) -> None:
    source = Counted(5)
    assert len(ints(source.dataset.cache(name).shuffle(5).repeat(4))) == 20
    assert source.calls == 5


def test_what_is_kept_does_not_depend_on_when_it_was_read(name: str) -> None:
    def make() -> Any:
        return D.range(12).shuffle(12, seed=1).map(lambda x: x).cache(name).shuffle(3, seed=2)

    first = make()
    orders = [ints(first) for _ in range(3)]
    again = make()
    assert ints(again.iterator({"epoch": 2, "index": 0, "seed": 0})) == orders[2]
    assert ints(again.iterator({"epoch": 1, "index": 5, "seed": 0})) == orders[1][5:]


def test_kept_elements_cannot_be_changed(name: str) -> None:
    cached = D.range(3).map(lambda x: np.full(2, x)).cache(name)
    for _ in range(2):
        for element in cached:
            with pytest.raises(ValueError, match="read-only"):
                element[0] = 9
    assert [x.tolist() for x in cached] == [[0, 0], [1, 1], [2, 2]]


def test_arrays_in_memory_are_not_kept_again() -> None:
    x = np.arange(10)
    assert np.shares_memory(next(iter(D.from_tensor_slices(x).cache().batch(4))), x)


def test_many_iterators_may_fill_one_cache(name: str) -> None:
    source = Counted(200)
    cached = source.dataset.cache(name)
    start = threading.Barrier(4, timeout=DEADLINE)
    found: list[list[int]] = []

    def read() -> None:
        start.wait()
        for _ in range(3):
            found.append(ints(cached))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert found == [[2 * i for i in range(200)]] * 12
    assert source.calls <= 800


def test_rewritten_plans_do_not_share_what_is_kept() -> None:
    cached = D.range(4).map(lambda x: x).cache()
    ints(cached)
    other = D(cached._node.with_inputs((D.range(2).map(lambda x: x)._node,)))
    assert ints(other) == [0, 1]


# -- files ----------------------------------------------------------------------------------------


def test_files_are_found_by_later_programs(tmp_path: Path) -> None:
    source = Counted()
    ints(source.dataset.cache(tmp_path / "elements"))
    later = Counted()
    assert ints(later.dataset.cache(str(tmp_path / "elements"))) == [2 * i for i in range(10)]
    assert later.calls == 1  # to find out the structure


def test_files_keep_all_kinds_of_elements(tmp_path: Path) -> None:
    def make(x: Any) -> Any:
        return {
            "n": jnp.full((2,), x, jnp.bfloat16),
            "v": np.arange(x),
            "s": f"ä{x}",
            "b": b"\x00" * int(x),
            "r": Ragged([np.arange(x), np.arange(1)]),
            "t": np.array([["p", "q"]], object),
            "z": np.zeros((0, 3)),
        }

    cached = D.range(5).map(make).cache(tmp_path / "c")
    first, second = list(cached), list(cached)
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        assert a["n"].dtype == b["n"].dtype == jnp.bfloat16
        assert (a["s"], a["b"], a["r"]) == (b["s"], b["b"], b["r"])
        assert all(np.array_equal(a[k], b[k]) and a[k].shape == b[k].shape for k in "nvtz")
    assert [e["s"] for e in cached.skip(2)] == ["ä2", "ä3", "ä4"]
    vectors = cached.shuffle(3, seed=0).map(lambda e: e["v"]).ragged_batch(5)
    assert sorted(row.tolist() for row in next(iter(vectors))) == [list(range(n)) for n in range(5)]


def test_a_column_may_turn_out_to_be_ragged_late(tmp_path: Path) -> None:
    cached = D.range(6).map(lambda x: np.full(2 if x < 4 else 3, x)).cache(tmp_path / "c")
    for _ in range(2):
        assert [x.tolist() for x in cached] == [[x] * (2 if x < 4 else 3) for x in range(6)]


def test_half_written_files_are_never_used(tmp_path: Path) -> None:
    cached = Counted().dataset.cache(tmp_path / "c")
    iterator = iter(cached)
    for _ in range(5):
        next(iterator)
    (partial,) = tmp_path.iterdir()
    assert "partial" in partial.name
    assert ints(Counted().dataset.cache(tmp_path / "c").take(1)) == [0]
    iterator.close()
    assert list(tmp_path.iterdir()) == []
    iterator = iter(cached)
    next(iterator)
    del iterator
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    ints(cached)
    assert [path.name for path in tmp_path.iterdir()] == ["c.cache"]


def test_a_process_that_was_killed_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    left = tmp_path / "c.cache.partial-1-abc"
    left.mkdir()
    (left / "0.column").write_bytes(b"123")
    assert ints(Counted().dataset.cache(tmp_path / "c")) == [2 * i for i in range(10)]


def test_damaged_files_are_noticed(tmp_path: Path) -> None:
    cached = Counted().dataset.cache(tmp_path / "c")
    ints(cached)
    column = tmp_path / "c.cache" / "0.column"
    column.write_bytes(column.read_bytes()[:-1])
    with pytest.raises(px.errors.DataLossError, match="damaged"):
        ints(cached)
    words = D.range(3).map(lambda x: f"w{x}").cache(tmp_path / "w")
    list(words)
    column = tmp_path / "w.cache" / "0.column"
    for cut in (1, 5):
        column.write_bytes(column.read_bytes()[:-cut])
        with pytest.raises(px.errors.DataLossError, match="too early"):
            list(words)
    manifest = tmp_path / "w.cache" / "manifest.json"
    manifest.write_text(json.dumps({"version": 99}))
    with pytest.raises(px.errors.DataLossError, match="another format"):
        list(words)


def test_files_of_other_datasets_are_refused(tmp_path: Path) -> None:
    ints(Counted().dataset.cache(tmp_path / "c"))
    with pytest.raises(px.errors.InvalidValueError, match="another dataset"):
        list(D.from_tensor_slices(np.zeros(3, np.float32)).cache(tmp_path / "c"))
    with pytest.raises(px.errors.InvalidTypeError, match="cache file"):
        list(D.range(4).window(2).cache(tmp_path / "d"))


leaves = st.one_of(
    st.text(),
    st.binary(),
    st.integers(-(2**31), 2**31 - 1).map(np.int32),
    st.lists(st.floats(width=32, allow_nan=False), max_size=3).map(lambda v: np.array(v, np.float32)),
    st.lists(st.text(), max_size=3).map(lambda v: np.array(v, object)),
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(
        lambda v: Ragged([np.arange(n) for n in v])
    ),
)


@given(leaves)
@settings(deadline=None)
def test_leaves_survive_a_file(leaf: Any) -> None:
    again = decode(encode(leaf))
    assert type(again) is type(leaf)
    if isinstance(leaf, np.ndarray | np.generic):
        assert (again.dtype, again.shape) == (leaf.dtype, leaf.shape)
        assert np.array_equal(again, leaf)
    else:
        assert again == leaf
