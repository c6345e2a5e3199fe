"""The rules of a store: who may change what, and which values stay as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phalanx import errors
from phalanx.parameter_server.local import LocalServers
from phalanx.parameter_server.own_tokens import TokenLine
from phalanx.parameter_server.requests import (
    Commit,
    Read,
    Settled,
    Token,
    Update,
)
from phalanx.parameter_server.store import Outcome, Store, Trace
from tests.parameter_server.running import add, value_of, variable

V = variable(0)
TABLE = variable(1, (4, 2))


@pytest.fixture
def store() -> Store:
    store = Store()
    store.create(V, np.zeros((), np.float32))
    store.create(TABLE, np.zeros((4, 2), np.float32))
    return store


def value(store: Store, id: int = 0) -> Any:
    return store.held(id).value.tolist()


def test_a_closure_counts_once(store: Store) -> None:
    assert store.push(Token(3), [add(V)], b"42") is Outcome.DONE
    assert store.push(Token(3), [add(V)]) is Outcome.REPEATED
    assert store.push(Token(3, 1), [add(V)]) is Outcome.REFUSED, "another attempt counts"
    assert value(store) == 1.0
    assert store.status()["duplicates"] == store.status()["refused"] == 1


def test_what_is_staged_counts_when_it_is_committed(store: Store) -> None:
    assert store.stage(Token(3), [add(V)], b"42") is Outcome.DONE
    assert store.stage(Token(3), [add(V, 5.0)]) is Outcome.REPEATED
    assert value(store) == 0.0
    assert store.commit(Token(3)) is Outcome.DONE
    assert store.commit(Token(3)) is Outcome.REPEATED
    assert store.commit(Token(4)) is Outcome.REFUSED, "nothing is staged"
    assert value(store) == 1.0


def test_what_is_dropped_does_not_count(store: Store) -> None:
    store.stage(Token(3), [add(V)])
    assert store.drop(Token(3)) is Outcome.DONE
    assert store.drop(Token(3)) is Outcome.REPEATED
    assert store.commit(Token(3)) is Outcome.REFUSED


def test_an_inquiry_fences_an_attempt_off(store: Store) -> None:
    store.push(Token(1), [add(V)], b"42")
    store.stage(Token(2), [add(V)])
    found = [store.inquire(Token(closure)) for closure in (1, 2, 3)]
    assert found == [(Trace.APPLIED, b"42"), (Trace.STAGED, b""), (Trace.NONE, b"")]
    assert store.commit(Token(2)) is Outcome.REFUSED
    assert store.push(Token(3), [add(V)]) is Outcome.REFUSED
    assert store.push(Token(3, 1), [add(V)]) is Outcome.DONE, "the next attempt may"
    assert store.decide(Token(2), True) is Outcome.DONE
    assert store.decide(Token(2), True) is Outcome.REPEATED
    assert value(store) == 3.0


def test_closures_that_are_done_are_forgotten_and_refused(store: Store) -> None:
    store.push(Token(1), [add(V)], b"42")
    store.stage(Token(2), [add(V)])
    store.inquire(Token(3))
    assert store.forget(5) is Outcome.DONE
    assert store.forget(4) is Outcome.REPEATED
    assert not any([store.applied, store.values, store.staged, store.fences])
    assert store.push(Token(1), [add(V)]) is Outcome.REFUSED
    assert store.push(Token(5), [add(V)]) is Outcome.DONE


def test_forgetting_costs_little(store: Store) -> None:
    for closure in range(1000):
        store.push(Token(closure), [add(V)])
        store.forget(closure - 10)
    assert len(store.applied) < 600
    assert store.push(Token(980), [add(V)]) is not Outcome.DONE
    assert value(store) == 1000.0


def test_updates_of_no_closure_count_once_too(store: Store) -> None:
    line = TokenLine()
    tokens = [line.take() for _ in range(5000)]
    for token in tokens:
        assert store.push(token, [add(V)]) is Outcome.DONE
    assert store.push(tokens[-1], [add(V)]) is Outcome.REPEATED
    store.forget(100)
    assert store.push(tokens[-2], [add(V)]) is Outcome.REPEATED
    assert value(store) == 5000.0
    assert len(list(store.own.items())) < 100, "not all of them are remembered"
    assert store.push(tokens[0], [add(V)]) is Outcome.REFUSED, "it may have been made"
    assert value(store) == 5000.0


@pytest.mark.parametrize("method", ["push", "stage", "apply"])
def test_all_updates_are_made_or_none(store: Store, method: str) -> None:
    bad = Update(variable(1, (4, 2)), "scatter_add", np.ones((1, 3)), np.array([0]))
    for wrong in (bad, add(variable(9)), Update(V, "apply", np.ones(()), None, 7)):
        with pytest.raises(errors.PhalanxError, match="Received"):
            getattr(store, method)(*([] if method == "apply" else [Token(1)]), [add(V), wrong])
    assert value(store) == 0.0
    assert store.push(Token(1), [add(V)]) is Outcome.DONE, "the closure may be tried again"


def test_values_that_somebody_reads_stay_as_they_are(store: Store) -> None:
    lent = store.held(1).lend()
    rows = Update(TABLE, "scatter_add", np.ones((1, 2), np.float32), np.array([2]))
    store.apply([rows])
    store.apply([add(TABLE)])
    assert bytes(lent) == bytes(32)
    assert value(store, 1)[2] == [2.0, 2.0]
    before = store.held(1).value
    del lent
    store.apply([rows])
    assert store.held(1).value is before, "changed in place once nobody reads it"


def test_operands_stay_as_they_are_until_they_are_logged(store: Store) -> None:
    operand = np.full((4, 2), 3, np.float32)
    store.push(Token(0), [Update(TABLE, "assign", operand), add(TABLE)])
    assert operand.tolist() == [[3, 3]] * 4
    store.push(Token(1), [add(V), Update(TABLE, "assign", operand)])
    assert store.held(1).value is operand, "a whole value is not copied"


def test_each_value_has_a_version(store: Store) -> None:
    versions = {store.held(0).version, store.held(1).version}
    for update in (add(V), add(TABLE), Update(V, "assign", np.float32(3))):
        store.apply([update])
        versions.add(store.held(update.variable.id).version)
    assert len(versions) == 5


def test_rows_are_copied(store: Store) -> None:
    rows = store.rows(1, np.array([3, 0, 3]))
    store.apply([add(TABLE)])
    assert rows.tolist() == [[0, 0]] * 3
    for wrong in ([4], [-1], [[0]]):
        with pytest.raises(errors.InvalidArgumentError, match="rows from 0 to 3"):
            store.rows(1, np.array(wrong))
    with pytest.raises(errors.InvalidArgumentError):
        store.rows(0, np.array([0]))


def test_a_variable_is_created_once(store: Store) -> None:
    assert not store.create(V, np.ones((), np.float32))
    assert value(store) == 0.0
    with pytest.raises(errors.InvalidArgumentError, match="another variable"):
        store.create(variable(0, (2,)), np.ones(2, np.float32))
    with pytest.raises(errors.InvalidArgumentError, match="does not fit"):
        store.create(variable(5, (2,)), np.ones(3, np.float32))
    with pytest.raises(errors.InvalidArgumentError, match="float12"):
        store.create(variable(5, (), "float12"), np.ones(()))


# -- several servers in one process --------------------------------------------------------------------

W = variable(1, server=1)


def pair(**options: Any) -> LocalServers:
    servers = LocalServers(2, **options)
    for v in (V, W):
        servers.create(v, np.zeros((), np.float32))
    return servers


@pytest.mark.parametrize("arbiter", [False, True])
def test_all_servers_commit_or_none(arbiter: bool) -> None:
    servers = pair(arbiter=arbiter)
    assert servers.push(Token(0), [add(V), add(W)], b"42") == Commit(True)
    assert servers.push(Token(0), [add(V), add(W)]) == Commit(True)
    servers.stores[1].stage(Token(1), [add(W)])
    assert servers.settle([Token(0), Token(1)]) == {
        Token(0): Settled(True, b"42"),
        Token(1): Settled(False),
    }
    assert servers.push(Token(1), [add(V), add(W)]) == Commit(False)
    assert servers.push(Token(1, 1), [add(V), add(W)]) == Commit(True)
    assert value_of(servers, V) == value_of(servers, W) == 2.0
    assert [s["staged"] for s in servers.status()] == [0, 0]


def test_what_one_server_has_committed_the_others_commit() -> None:
    servers = pair()
    for store, v in zip(servers.stores, (V, W), strict=True):
        store.stage(Token(0), [add(v)], b"42")
    servers.stores[0].commit(Token(0))
    assert servers.settle([Token(0)]) == {Token(0): Settled(True, b"42")}
    assert value_of(servers, V) == value_of(servers, W) == 1.0
    assert servers.stores[1].commit(Token(0)) is Outcome.REPEATED


def test_the_arbiter_takes_the_first_attempt() -> None:
    servers = pair(arbiter=True)
    servers.stores[1].stage(Token(0, 0), [add(W)])  # and its home has not been asked yet
    assert servers.push(Token(0, 1), [add(V), add(W)]) == Commit(True)
    assert servers.push(Token(0, 0), [add(V), add(W)]) == Commit(False)
    assert servers.settle([Token(0, 0)]) == {Token(0, 0): Settled(False)}
    assert value_of(servers, V) == value_of(servers, W) == 1.0


def test_at_least_once_remembers_nothing() -> None:
    servers = pair(delivery="at_least_once")
    for _ in range(2):
        servers.push(Token(0), [add(V), add(W)])
    assert value_of(servers, V) == value_of(servers, W) == 2.0


def test_pulled_values_are_not_those_of_the_store() -> None:
    servers = pair()
    before = servers.pull([Read(V)])[0]
    servers.push(Token(0), [add(V)])
    assert before.tolist() == 0.0
