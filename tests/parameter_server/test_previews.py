"""What a task reads of its own updates before they count is what they will make of a variable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from phalanx.errors import InvalidArgumentError
from phalanx.parameter_server.requests import Token, Update
from phalanx.parameter_server.store import Outcome, Store
from phalanx.parameter_server.updates import METHODS
from tests.parameter_server.running import add, variable

TABLE = variable(0, (6, 2))
SPARSE = [method for method in METHODS if method.startswith("scatter")]
numbers = st.integers(1, 9)


@st.composite
def updates(draw: st.DrawFn) -> Update:
    if draw(st.booleans()):
        rows = draw(st.lists(st.integers(-8, 8), max_size=5))
        values = np.array([[draw(numbers)] * 2 for _ in rows], np.float32).reshape(-1, 2)
        return Update(TABLE, draw(st.sampled_from(SPARSE)), values, np.array(rows, np.int64))
    method = draw(st.sampled_from(["assign", "assign_add", "assign_sub"]))
    return Update(TABLE, method, np.full((6, 2), draw(numbers), np.float32))


def new_store() -> Store:
    store = Store()
    store.create(TABLE, np.arange(12, dtype=np.float32).reshape(6, 2))
    return store


def read_after(store: Store, tokens: list[Token], rows: Any) -> Any:
    changes = store.staged_by(tokens)
    if 0 not in changes:
        value = store.held(0).value
        return value.copy() if rows is None else value[rows]
    found = np.frombuffer(store.after(changes[0], 0, rows), np.float32)
    return found.reshape(6 if rows is None else len(rows), 2).copy()


@given(st.lists(st.lists(updates(), max_size=3), min_size=1, max_size=3), st.data())
def test_what_is_read_is_what_will_count(closures: list[list[Update]], data: st.DataObject) -> None:
    """Also if another task commits between the read and the commits."""
    store, tokens = new_store(), [Token(i) for i in range(len(closures))]
    for token, changes in zip(tokens, closures, strict=True):
        own = [u._replace(values=u.values.copy()) for u in changes]  # a store may keep them
        assert store.stage(token, own) is Outcome.DONE
    rows = data.draw(st.none() | st.lists(st.integers(0, 5), max_size=5))
    shown = read_after(store, tokens, None if rows is None else np.array(rows, np.int64))
    others = [] if data.draw(st.booleans()) else [Update(TABLE, "assign_add", np.ones((6, 2)))]
    expected = new_store()
    for store_ in (store, expected):
        store_.push(Token(99), others)
    for token, changes in zip(tokens, closures, strict=True):
        assert store.commit(token) is Outcome.DONE
        expected.push(token, changes)
    value = store.held(0).value
    np.testing.assert_array_equal(value, expected.held(0).value)
    assert store.counts["updates"] == expected.counts["updates"]
    if not others:
        np.testing.assert_array_equal(shown, value if rows is None else value[rows])


@pytest.mark.parametrize("rows", [[4, 1], [-1, 2], [5, 9], [-9, 1], [3, 3], []])
@pytest.mark.parametrize("read", [[1, 4], [5, 2, 3], [5, 5]])
def test_one_sparse_update(rows: list[int], read: list[int]) -> None:
    """Of rows that exist, counted from the end, that do not exist, or that stand there twice."""
    store = new_store()
    values = np.arange(1, 2 * len(rows) + 1, dtype=np.float32).reshape(-1, 2)
    store.stage(Token(0), [Update(TABLE, "scatter_add", values, np.array(rows, np.int64))])
    shown = read_after(store, [Token(0)], np.array(read, np.int64))
    store.commit(Token(0))
    np.testing.assert_array_equal(shown, store.held(0).value[read])
    expected = np.arange(12, dtype=np.float32).reshape(6, 2)
    for row, more in zip(rows, values, strict=True):
        if -6 <= row < 6:
            expected[row] += more
    np.testing.assert_array_equal(store.held(0).value, expected)


@pytest.mark.parametrize("read", [[1, 6], [-1]])
def test_rows_to_read_must_exist(read: list[int]) -> None:
    store = new_store()
    store.stage(Token(0), [Update(TABLE, "scatter_add", np.ones((1, 2)), np.array([1]))])
    with pytest.raises(InvalidArgumentError, match="rows from 0 to 5"):
        read_after(store, [Token(0)], np.array(read, np.int64))


def test_what_is_being_sent_stays_as_it_is() -> None:
    store = new_store()
    store.stage(Token(0), [add(TABLE)])
    shown = store.after(store.staged_by([Token(0)])[0], 0, None)
    before = bytes(shown)
    store.commit(Token(0))
    store.push(Token(1), [add(TABLE)])
    assert bytes(shown) == before
    assert (store.held(0).value == np.arange(12).reshape(6, 2) + 2).all()


def test_what_counts_already_is_not_added() -> None:
    """A read that is sent again may come after the commit."""
    store = new_store()
    store.stage(Token(0), [add(TABLE)])
    store.commit(Token(0))
    assert store.staged_by([Token(0), Token(1)]) == {}


@pytest.mark.parametrize("end", ["drop", "forget"])
def test_nothing_stays_of_what_is_dropped(end: str) -> None:
    store = new_store()
    store.stage(Token(0), [add(TABLE)])
    store.after(store.staged_by([Token(0)])[0], 0, None)
    store.drop(Token(0)) if end == "drop" else store.forget(5)
    assert not store.staged
    assert not store._ready
