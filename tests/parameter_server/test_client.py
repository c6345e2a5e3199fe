"""Tasks and servers over real connections."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from phalanx import errors
from phalanx.net.endpoint import Endpoint, dial
from phalanx.net.stream import Stream
from phalanx.parameter_server import server_link, service, wire
from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.durability import Durability
from phalanx.parameter_server.local import LocalServers
from phalanx.parameter_server.requests import (
    Commit,
    OptimizerDefinition,
    Read,
    Settled,
    Token,
    Update,
)
from phalanx.parameter_server.service import PURPOSE
from phalanx.parameter_server.wire import LIMITS, Kind
from tests.parameter_server.running import (
    KEY,
    SECONDS,
    RunningServer,
    add,
    connections,
    running,
    value_of,
    variable,
)
from tests.processes import signalled_soon

V, W = variable(0), variable(1, server=1)
TABLE = variable(2, (50, 3), "float32", 1)
BIG = variable(3, (512, 512), "bfloat16", 0)
EMPTY = variable(4, (0, 3), "int32", 0)
ALL = (V, W, TABLE, BIG, EMPTY)


def create_all(servers: Any) -> None:
    for v in ALL:
        servers.create(v, np.zeros(v.shape, np.dtype(v.dtype)))


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RunningServer]]:
    with running(2) as servers:
        yield servers


@pytest.fixture
def servers(pair: list[RunningServer]) -> Iterator[ServerConnections]:
    with connections(pair) as found:
        create_all(found)
        yield found


def test_pull_and_push(servers: ServerConnections) -> None:
    assert servers.push(Token(0), [add(V), add(W, 2.0)], b"42") == Commit(True)
    assert servers.push(Token(0), [add(V), add(W, 2.0)]) == Commit(True), "which is a repetition"
    rows = Update(TABLE, "scatter_add", np.ones((2, 3)), np.array([3, 3]))
    assert servers.push(Token(1), [rows]) == Commit(True)
    big = jnp.full(BIG.shape, 3, jnp.bfloat16)
    assert servers.push(Token(2), [Update(BIG, "assign_sub", np.asarray(big))]) == Commit(True)
    read = servers.pull([Read(W), Read(V), Read(TABLE, np.array([4, 3])), Read(BIG), Read(EMPTY)])
    assert [read[0].tolist(), read[1].tolist(), read[2].tolist()] == [2.0, 1.0, [[0] * 3, [2] * 3]]
    assert read[3].dtype == jnp.bfloat16
    assert (read[3] == -3).all()
    assert read[3].ctypes.data % 64 == 0, "JAX takes it without a copy"
    assert read[4].shape == (0, 3)
    assert servers.push(Token(3), []) == Commit(True)


def test_what_has_not_changed_is_not_sent_again(servers: ServerConnections) -> None:
    first = servers.pull([Read(BIG)])[0]
    before = servers.status()[0]["bytes_out"]
    assert servers.pull([Read(BIG)])[0] is first
    assert servers.status()[0]["bytes_out"] - before < 5000
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1
    servers.push(Token(0), [add(BIG)])
    assert (servers.pull([Read(BIG)])[0] == 1).all()
    assert (first == 0).all()


def test_a_preview_changes_nothing(servers: ServerConnections) -> None:
    servers.define_optimizer(OptimizerDefinition(1, cloudpickle.dumps(optax.adam(0.1))))
    rows = np.array([3, 4, 3])
    updates = [
        add(W, 2.0),
        Update(TABLE, "apply", np.ones((3, 3)), rows, 1),
        add(V),
        Update(TABLE, "scatter_add", np.ones((1, 3)), np.array([4])),
        add(V),
    ]
    for closure in range(3):  # slots do not exist at first, then they do
        before = servers.pull([Read(W), Read(TABLE), Read(V)])
        shown = servers.preview(updates)
        again = servers.pull([Read(W), Read(TABLE), Read(V)])
        assert all((a == b).all() for a, b in zip(before, again, strict=True))
        servers.push(Token(closure), updates)
        after = servers.pull([Read(W), Read(TABLE), Read(V)])
        for a, b in zip(shown, after, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_random_history_is_that_of_servers_in_this_process(servers: ServerConnections) -> None:
    local = LocalServers(2)
    optimizer = OptimizerDefinition(1, cloudpickle.dumps(optax.adam(0.1)))
    create_all(local)
    for found in (local, servers):
        found.define_optimizer(optimizer)
    rng = random.Random(0)
    for closure in range(60):
        rows = np.array([rng.randrange(50) for _ in range(4)])
        updates = [
            add(V),
            add(W),
            Update(TABLE, "scatter_max", np.full((4, 3), closure), rows),
            Update(TABLE, "apply", np.full((4, 3), 0.5), rows, 1),
            Update(V, "apply", np.full((), 0.5), None, 1),
        ]
        chosen = rng.sample(updates, rng.randrange(len(updates)))
        token = Token(closure, rng.randrange(2))
        if rng.random() < 0.2:
            assert local.settle([token]) == servers.settle([token])
        assert local.push(token, chosen) == servers.push(token, chosen)
        if rng.random() < 0.2:
            for found in (local, servers):
                found.forget(closure - 3)
    for v in ALL:
        np.testing.assert_array_equal(local.pull([Read(v)])[0], servers.pull([Read(v)])[0])
    counted = ("commits", "updates", "duplicates", "variables", "staged", "remembered")
    for mine, theirs in zip(local.status(), servers.status(), strict=True):
        assert {k: mine[k] for k in counted} == {k: theirs[k] for k in counted}


def test_answers_may_be_awaited_later(servers: ServerConnections) -> None:
    done: list[int] = []
    for closure in range(300):
        updates = [add(V), add(W)] if closure % 3 else [add(V)]
        servers.push_later(Token(closure), updates, b"", lambda commit, c=closure: done.append(c))  # type: ignore[misc]
        if closure % 50 == 7:
            assert value_of(servers, V) == closure + 1, "a task sees its own updates"
            assert value_of(servers, W) == closure - closure // 3
    servers.collect(wait=True)
    assert sorted(done) == list(range(300))
    assert servers.pending == 0
    servers.collect()


@pytest.mark.parametrize("arbiter", [False, True])
def test_lost_attempts_are_settled(pair: list[RunningServer], arbiter: bool) -> None:
    with connections(pair, arbiter=arbiter) as chief:
        create_all(chief)
        run = chief.run  # type: ignore[attr-defined]
        with connections(pair, run, arbiter=arbiter) as worker:
            assert worker.push(Token(0), [add(V), add(W)], b"42") == Commit(True)
            expected = {Token(0): Settled(True, b"42"), Token(1): Settled(False)}
            assert chief.settle([Token(0), Token(1)]) == expected
            assert worker.push(Token(1), [add(V), add(W)]) == Commit(False)
            assert worker.push(Token(1, 1), [add(V), add(W)]) == Commit(True)
            assert worker.push(Token(1, 2), [add(V), add(W)]) == Commit(False)
        assert value_of(chief, V) == value_of(chief, W) == 2.0
        chief.forget(2)
        assert [s["remembered"] for s in chief.status()] == [0, 0]
        assert [s["staged"] for s in chief.status()] == [0, 0]


def test_at_least_once_stages_nothing(pair: list[RunningServer]) -> None:
    with connections(pair, delivery="at_least_once") as servers:
        create_all(servers)
        for _ in range(2):
            assert servers.push(Token(0), [add(V), add(W)]) == Commit(True)
        assert value_of(servers, V) == value_of(servers, W) == 2.0
        assert [s["remembered"] for s in servers.status()] == [0, 0]
    with pytest.raises(errors.InvalidValueError, match="'exactly_once', 'at_least_once'"):
        connections(pair, delivery="never")


def test_errors_of_servers_are_raised(servers: ServerConnections) -> None:
    unknown = variable(77, server=1)
    with pytest.raises(errors.NotFoundError, match="id 77"):
        servers.pull([Read(V), Read(unknown)])
    with pytest.raises(errors.NotFoundError, match="id 77"):
        servers.push(Token(0), [add(V), add(unknown)])
    with pytest.raises(errors.InvalidArgumentError, match="rows from 0 to 49"):
        servers.pull([Read(TABLE, np.array([50]))])
    with pytest.raises(errors.InvalidArgumentError, match="another variable"):
        servers.create(variable(0, (3,)), np.zeros(3))
    commits: list[Commit] = []
    servers.push_later(Token(1), [add(unknown)], b"", commits.append)
    servers.collect(wait=True)
    assert not commits[0].applied
    assert isinstance(commits[0].error, errors.NotFoundError)
    assert servers.push(Token(0), [add(V), add(W)]) == Commit(True), "the closure can be tried again"
    assert value_of(servers, V) == 1.0
    assert [s["staged"] for s in servers.status()] == [0, 0]


def test_tasks_change_variables_at_the_same_time(pair: list[RunningServer]) -> None:
    with connections(pair) as chief:
        create_all(chief)

        def work(worker: int) -> None:
            with connections(pair, chief.run) as servers:  # type: ignore[attr-defined]
                for i in range(50):
                    servers.pull([Read(BIG), Read(V)])
                    updates = [add(V), add(W), add(BIG)]
                    servers.push_later(Token(worker * 1000 + i), updates, b"", lambda _: None)
                servers.collect(wait=True)

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert value_of(chief, V) == value_of(chief, W) == 150.0
        assert (chief.pull([Read(BIG)])[0] == 150).all()


# -- losses ---------------------------------------------------------------------------------------


def cut(servers: ServerConnections) -> None:
    """Break the connections, as the network might."""
    for link in servers._links:
        if link._stream is not None:
            link._stream.socket.shutdown(socket.SHUT_RDWR)


def test_what_has_no_answer_is_sent_again(servers: ServerConnections) -> None:
    rng = random.Random(1)
    done: list[Commit] = []
    for closure in range(100):
        servers.push_later(Token(closure), [add(V), add(W), add(BIG)], b"", done.append)
        if rng.random() < 0.2:
            cut(servers)
        if rng.random() < 0.2:
            servers.pull([Read(V)])
    servers.collect(wait=True)
    assert done == [Commit(True)] * 100
    assert value_of(servers, V) == value_of(servers, W) == 100.0
    assert (servers.pull([Read(BIG)])[0] == 100).all()


@pytest.mark.parametrize("sync", [False, True])
def test_a_server_that_restarts_goes_on_from_its_log(tmp_path: Path, sync: bool) -> None:
    kept = Durability("log", sync=sync)
    with running(2, tmp_path) as pair, connections(pair, durability=kept) as servers:
        create_all(servers)
        servers.define_optimizer(OptimizerDefinition(1, cloudpickle.dumps(optax.sgd(1.0))))
        done: list[Commit] = []
        for closure in range(60):
            updates = [add(V), add(W), Update(BIG, "apply", np.ones(BIG.shape), None, 1)]
            servers.push_later(Token(closure), updates, b"", done.append)
            if closure % 20 == 11:
                pair[closure // 20 % 2].restart()
                assert value_of(servers, V) == closure + 1
        servers.collect(wait=True)
        assert done == [Commit(True)] * 60
        assert value_of(servers, V) == value_of(servers, W) == 60.0
        assert (servers.pull([Read(BIG)])[0] == -60).all()
        assert servers.status()[0]["log_bytes"] > 0
        servers.end()
        assert not list(tmp_path.glob("*/run-*")), "an ended run leaves nothing"


def test_a_server_that_restarts_goes_on_from_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_CARE", 0.01)
    kept = Durability("snapshot", interval=1000.0)
    with running(2, tmp_path) as pair, connections(pair, durability=kept) as servers:
        for v in (V, W):  # one for each server, so that its first snapshot has all of them
            servers.create(v, np.zeros(v.shape, np.dtype(v.dtype)))
        end, moment = time.monotonic() + SECONDS, threading.Event()
        while len(list(tmp_path.glob("*/run-*/snapshot-00000001"))) < 2:
            assert time.monotonic() < end
            moment.wait(0.005)
        for closure in range(3):
            assert servers.push(Token(closure), [add(V), add(W)]) == Commit(True)
        pair[1].restart()
        assert [value_of(servers, x) for x in (V, W)] == [3.0, 0.0], "what came later is lost with it"
        for closure in range(3, 5):  # but it goes on
            assert servers.push(Token(closure), [add(V), add(W)]) == Commit(True)
        assert [value_of(servers, x) for x in (V, W)] == [5.0, 2.0]


def test_a_server_that_restarts_without_its_variables_is_named() -> None:
    with running(2) as pair, connections(pair) as servers:
        create_all(servers)
        pair[1].restart()
        with pytest.raises(errors.UnavailableError, match=r"ps task 1.*kept nothing"):
            servers.pull([Read(V), Read(W)])


def test_a_server_that_ends_each_connection_is_named(
    pair: list[RunningServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with connections(pair, timeout=0.5) as servers:
        create_all(servers)

        def ends(*args: Any) -> Any:
            raise ConnectionResetError("the peer closed the connection")

        monkeypatch.setattr(server_link, "_TRY", 0.1)
        monkeypatch.setattr(server_link, "greeted", ends)
        cut(servers)
        with pytest.raises(errors.UnavailableError, match="ps task 0"):
            servers.pull([Read(V)])
    assert "Waiting for the parameter server, ps task 0" in caplog.text


def test_a_server_that_is_gone_is_named() -> None:
    with running(2) as pair, connections(pair, timeout=0.5) as servers:
        create_all(servers)
        pair[1].stop()
        with pytest.raises(
            errors.UnavailableError, match=rf"ps task 1.*{pair[1].address}.*0\.5 seconds"
        ):
            servers.push(Token(0), [add(W)])
        pair[1].start()


def test_nobody_waits_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_link, "_TRY", 0.2)
    with running(1) as servers, connections(servers, timeout=0.8) as found:
        servers[0].stop()
        with pytest.raises(errors.UnavailableError):
            found.pull([Read(V)])
        servers[0].start()
    assert f"Waiting for the parameter server, ps task 0, at {servers[0].address}" in caplog.text


def test_a_server_that_does_not_answer_is_named() -> None:
    """It accepts connections, so only its silence tells."""
    silent = Endpoint("127.0.0.1:0", KEY)
    taken: list[socket.socket] = []
    silent.serve(PURPOSE, lambda sock, purpose: taken.append(sock))
    silent.start()
    with pytest.raises(errors.UnavailableError, match=r"ps task 0.*0\.5 seconds"):
        ServerConnections([silent.address], KEY, "run", begin=True, timeout=0.5)
    for sock in taken:
        sock.close()
    silent.close()


def test_a_new_run_empties_the_servers(pair: list[RunningServer]) -> None:
    with connections(pair) as old:
        create_all(old)
        with connections(pair) as new:
            with pytest.raises(errors.NotFoundError):
                new.pull([Read(V)])
            with pytest.raises(errors.UnavailableError, match="another run"):
                old.pull([Read(V)])
            with pytest.raises(errors.UnavailableError, match="another run"):
                connections(pair, old.run)  # type: ignore[attr-defined]


def test_a_run_may_be_resumed(tmp_path: Path) -> None:
    with running(2, tmp_path) as pair:
        with connections(pair, durability=Durability("log")) as first:
            create_all(first)
            first.push(Token(0), [add(V)])
        for server in pair:
            server.restart()
        again = {"begin": True, "resume": True, "durability": Durability("log"), "timeout": SECONDS}
        addresses = [server.address for server in pair]
        with ServerConnections(addresses, KEY, first.run, **again) as second:  # type: ignore[arg-type, attr-defined]
            assert value_of(second, V) == 1.0
            assert second.push(Token(0), [add(V)]) == Commit(True)
            assert value_of(second, V) == 1.0


def test_what_servers_hold_can_be_saved_and_loaded(servers: ServerConnections, tmp_path: Path) -> None:
    servers.push(Token(0), [add(V), add(W)])
    servers.save(str(tmp_path / "saved"))
    servers.push(Token(1), [add(V), add(W)])
    assert value_of(servers, V) == 2.0
    servers.load(str(tmp_path / "saved"))
    assert value_of(servers, V) == value_of(servers, W) == 1.0
    assert servers.push(Token(0), [add(V)]) == Commit(True), "it knows what it had applied"
    assert value_of(servers, V) == 1.0
    with pytest.raises(errors.UnavailableError, match=r"ps task 0.*No such file"):
        servers.load(str(tmp_path / "nothing"))


def test_a_late_copy_of_a_request_to_load_changes_nothing(
    servers: ServerConnections, tmp_path: Path
) -> None:
    """A connection may deliver what it held long after the request was answered over another one."""
    asked: list[list[Any]] = []
    link = servers._links[0]
    ask = link.ask

    def note(buffers: list[Any], then: Any, *, hold: bool = False) -> None:
        asked.append(buffers)
        ask(buffers, then, hold=hold)

    servers.save(str(tmp_path / "saved"))
    link.ask = note  # type: ignore[method-assign]
    servers.load(str(tmp_path / "saved"))
    servers.save(str(tmp_path / "later"))
    link.ask = ask  # type: ignore[method-assign]
    servers.push(Token(0), [add(V)])
    shutil.rmtree(tmp_path / "later")
    answers: list[Any] = []
    for late in asked:
        ask(late, answers.append)
    servers.collect(wait=True)
    assert len(answers) == 2
    assert value_of(servers, V) == 1.0
    assert not (tmp_path / "later").exists()


def test_a_late_hello_begins_no_run(pair: list[RunningServer], servers: ServerConnections) -> None:
    """That of a coordinator which has died, over a connection that delivers late."""
    servers.push(Token(0), [add(V)])
    hello = {"run": "late", "index": 0, "begin": True, "durability": vars(Durability())}
    stream = Stream(dial(pair[0].address, KEY, {"for": "ps"}, SECONDS), LIMITS)
    for number in (1, 2):
        stream.send(wire.with_fields(Kind.HELLO, hello), number, SECONDS)
        wire.read_outcome(stream.receive(SECONDS).buffers)
    stream.close()
    assert value_of(servers, V) == 1.0


def test_other_variables_than_those_of_a_checkpoint_are_a_mistake(
    servers: ServerConnections, tmp_path: Path
) -> None:
    servers.save(str(tmp_path / "saved"))
    servers.create(variable(77), np.zeros((), np.float32))
    with pytest.raises(errors.FailedPreconditionError, match=r"other variables.*v77"):
        servers.load(str(tmp_path / "saved"))


def test_durability_needs_a_folder(pair: list[RunningServer]) -> None:
    with pytest.raises(errors.InvalidValueError, match="no folder"):
        connections(pair, durability=Durability("log"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("a file")
    with (
        running(1, tmp_path) as servers,
        pytest.raises(errors.UnavailableError, match=r"ps task 0.*cannot write.*run-"),
    ):
        connections(servers, durability=Durability("log"))


def test_two_tasks_at_one_address_are_a_mistake(pair: list[RunningServer]) -> None:
    with pytest.raises(errors.FailedPreconditionError, match="same address"):
        connections([pair[0], pair[0]])


def test_waiting_for_a_server_can_be_interrupted(
    pair: list[RunningServer], servers: ServerConnections
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    busy = threading.Event()
    pair[0].endpoint.loop.call_soon(lambda: busy.wait(SECONDS))  # type: ignore[arg-type, return-value]
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), signalled_soon(signal.SIGUSR1):
            servers.push(Token(0), [add(V), add(W)])
    finally:
        signal.signal(signal.SIGUSR1, before)
        busy.set()
    assert servers.push(Token(0), [add(V), add(W)]) == Commit(True), "under the same token"
    assert value_of(servers, V) == value_of(servers, W) == 1.0


def test_an_interrupt_leaves_the_connections_usable(servers: ServerConnections) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        servers._links[0].ask([b"\x0d{}"], interrupt)
        servers.pull([Read(V)])
    assert servers.push(Token(0), [add(V), add(W)]) == Commit(True)
    assert value_of(servers, V) == 1.0


def test_nobody_is_told_of_what_the_disk_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([True])

    def fails_once(file: int) -> None:
        if next(failures, False):
            raise OSError(errno.EIO, "Input/output error")

    kept = Durability("log", sync=True)
    with running(1, tmp_path) as servers, connections(servers, durability=kept) as job:
        job.create(V, np.zeros((), np.float32))
        monkeypatch.setattr(os, "fdatasync", fails_once)
        assert job.push(Token(1), [add(V)]) == Commit(True)
        assert value_of(job, V) == 1.0
        servers[0].restart()
        assert value_of(job, V) == 1.0
    assert next(failures, False) is False
