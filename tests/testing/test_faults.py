"""Schedules of faults, the proxies that make some of them, and the checks of histories."""

from __future__ import annotations

import gc
import socket
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from phalanx.net.addresses import split_address
from phalanx.testing.faults.checkers import closure_violations
from phalanx.testing.faults.history import (
    ClosureEnded,
    ClosureRaised,
    ClosureSubmitted,
    CoordinatorRestarted,
    Event,
    Happened,
    History,
    Named,
    ServersAtEnd,
    ServersRead,
)
from phalanx.testing.faults.proxies import Proxies
from phalanx.testing.faults.schedules import random_schedule

SECONDS = 20.0
TASKS = {"worker 0": ["kill", "cut"], "ps 0": ["freeze"]}


def test_schedules_follow_from_their_seeds() -> None:
    schedules = [random_schedule(seed, TASKS, 3) for seed in range(50)]
    assert schedules == [random_schedule(seed, TASKS, 3) for seed in range(50)]
    assert len({s.faults for s in schedules}) == 50
    faults = [fault for s in schedules for fault in s.faults]
    assert {(f.task, f.kind) for f in faults} == {(t, k) for t, kinds in TASKS.items() for k in kinds}
    assert {f.wave for f in faults} == {0, 1, 2}
    assert schedules[7].of(1) == [f for f in schedules[7].faults if f.wave == 1]
    assert "seed 7" in str(schedules[7])


# -- histories --------------------------------------------------------------------------------------


def view(order: int, begun: float, *seen: set[int], reader: str = "a", run: int = 0) -> ServersRead:
    return ServersRead(run, reader, order, begun, tuple(map(frozenset, seen)))


GOOD: tuple[Event, ...] = (
    ClosureSubmitted(0, 0, (0, 1)),
    ClosureSubmitted(0, 1, (0,), needs=(0,)),
    ClosureSubmitted(0, 2, (1,)),
    ClosureSubmitted(0, 3, (0, 1)),
    ClosureEnded(0, 0, 2.0, "done", view(1, 1.0, set(), set())),
    ClosureEnded(0, 1, 4.0, "done", view(2, 3.0, {0}, {0})),
    ClosureEnded(0, 2, 4.5, "failed"),
    ClosureRaised(0, 2),
    ClosureEnded(0, 3, 5.0, "cancelled"),
    view(1, 6.0, {0, 1}, {0}, reader="the coordinator"),
    Happened("freeze", "worker 0", 1.0, 9.0),
    Named(3.0, "worker 0 at localhost has not answered"),
    ServersAtEnd(10.0, ((1, 1, 0, 0), (1, 0, 0, 0)), ((1, 0, 0, 0), (0, 0, 0, 0))),
)


def changed(index: int, **fields: Any) -> History:
    events = list(GOOD)
    events[index] = replace(events[index], **fields)
    return History(events)


WRONG = {
    "closure 0 counts 2 times on server 1, not 1": changed(-1, effects=((1, 1, 0, 0), (2, 0, 0, 0))),
    "closure 1 counts 0 times on server 0, not 1": changed(-1, effects=((1, 0, 0, 0), (1, 0, 0, 0))),
    "closure 3 counts 1 times on server 0, not 0": changed(-1, effects=((1, 1, 0, 1), (1, 0, 0, 0))),
    "did not come to its end": History(list(GOOD[:-1])),
    "closures [1] were done, but read 1 of the coordinator": changed(9, seen=(frozenset({0}),) * 2),
    "closure 1 does not see 0, which it needs": changed(
        5, view=view(2, 3.0, {0}, set(), reader="another")
    ),
    "read 2 of a lacks [1] on 0, seen before by itself": changed(4, view=view(1, 1.0, {1}, set())),
    "lacks [2] on 1, seen before by others": changed(4, view=view(9, 1.0, set(), {2}, reader="b")),
    "the error of closure 2 was raised 2 times": History([*GOOD, ClosureRaised(0, 2)]),
    "the error of closure 1 was raised, which has not failed": changed(7, closure=1),
    "failed, and no error was raised": History([e for e in GOOD if not isinstance(e, ClosureRaised)]),
    "worker 0 was missing for 8.0 s and was not named": changed(11, at=7.5),
}


def test_a_good_history() -> None:
    assert closure_violations(History(list(GOOD)), max_staleness=0) == []


@pytest.mark.parametrize("text", list(WRONG))
def test_a_wrong_history(text: str) -> None:
    assert any(text in found for found in closure_violations(WRONG[text])), closure_violations(
        WRONG[text]
    )


def test_a_stale_read() -> None:
    stale = changed(5, view=view(2, 1.5, set(), set()))
    text = "closure 1 missed 1 others on server 0, not 0"
    assert text in closure_violations(stale, max_staleness=0)
    assert not any("missed" in found for found in closure_violations(stale, max_staleness=1))
    assert not any("missed" in found for found in closure_violations(stale))


def test_a_restart_forgets_what_came_after_the_checkpoint() -> None:
    events: list[Event] = [
        ClosureSubmitted(0, 0, (0,)),
        ClosureEnded(0, 0, 1.0, "done", view(1, 0.5, set())),
        ClosureSubmitted(0, 1, (0,)),
        ClosureEnded(0, 1, 2.0, "done", view(2, 1.5, {0})),
        CoordinatorRestarted(1, since=1),
        view(1, 3.0, {0}, run=1),
    ]
    assert closure_violations(History([*events, ServersAtEnd(9.0, ((1, 0),), ((0, 0),))])) == []
    wrong = closure_violations(History([*events, ServersAtEnd(9.0, ((1, 1),), ((1, 0),))]))
    assert wrong == ["closure 1 counts 1 times on server 0, not 0"]
    events.append(ClosureSubmitted(1, 1, (0,)))
    assert closure_violations(History([*events, ServersAtEnd(9.0, ((1, 1),), ((1, 0),))])) == []


# -- proxies ----------------------------------------------------------------------------------------


class Echo:
    """Sends back what it gets, and notes it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard: list[bytes] = []
        self.changed = threading.Condition()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            if not sock.recv(1, socket.MSG_PEEK):
                sock.close()
                return
            self._threads.append(threading.Thread(target=self._echo, args=(sock,), daemon=True))
            self._threads[-1].start()

    def _echo(self, sock: socket.socket) -> None:
        with sock:
            while data := _received(sock):
                with self.changed:
                    self.heard.append(data)
                    self.changed.notify_all()
                try:
                    sock.sendall(data)
                except OSError:
                    return

    def wait_for(self, *texts: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: b"".join(self.heard) == b"".join(texts), SECONDS)

    def close(self) -> None:
        with socket.create_connection(split_address(self.address)):
            pass
        for thread in self._threads:
            thread.join(SECONDS)
        self._listener.close()


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(100)
    except OSError:
        return b""


@pytest.fixture
def echo() -> Iterator[Echo]:
    found = Echo()
    yield found
    found.close()


@pytest.fixture
def proxies(echo: Echo) -> Iterator[Proxies]:
    with Proxies({"echo": echo.address}) as found:
        yield found


@pytest.fixture
def client(proxies: Proxies) -> Iterator[socket.socket]:
    with socket.create_connection(split_address(proxies.addresses["echo"]), SECONDS) as sock:
        sock.sendall(b"hello")
        assert sock.recv(100) == b"hello"
        yield sock


def test_a_proxy_delays(proxies: Proxies, client: socket.socket, echo: Echo) -> None:
    assert proxies.delay("echo", 0.3) == 1
    client.sendall(b"later")
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.recv(100)
    assert echo.heard == [b"hello"]
    client.settimeout(SECONDS)
    assert client.recv(100) == b"later"


def test_a_proxy_cuts(proxies: Proxies, client: socket.socket) -> None:
    assert proxies.cut("echo") == 1
    assert _received(client) == b""


def test_a_proxy_loses_answers(proxies: Proxies, client: socket.socket, echo: Echo) -> None:
    assert proxies.lose_answers("echo", 0.1) == 1
    client.sendall(b"done")
    assert _received(client) == b"", "the connection ends without an answer"
    echo.wait_for(b"hello", b"done")


def test_a_proxy_delivers_late(proxies: Proxies, client: socket.socket, echo: Echo) -> None:
    assert proxies.deliver_late("echo", 0.1) == 1
    client.sendall(b"old")
    assert _received(client) == b""
    assert echo.heard == [b"hello"]
    echo.wait_for(b"hello", b"old")


def test_a_proxy_of_nobody_ends_connections(echo: Echo) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        Proxies({"nobody": f"127.0.0.1:{port}"}) as proxies,
        socket.create_connection(split_address(proxies.addresses["nobody"]), SECONDS) as sock,
    ):
        assert _received(sock) == b""


def test_proxies_close_what_they_accept_as_they_end(echo: Echo) -> None:
    """Tasks dial until they are ended, which may be after their proxies were."""
    sockets: list[socket.socket] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(10):
            with Proxies({"echo": echo.address}) as proxies:
                where, begun = split_address(proxies.addresses["echo"]), threading.Event()

                def dial(where: tuple[str, int] = where, begun: threading.Event = begun) -> None:
                    for _ in range(20):
                        sockets.append(socket.create_connection(where))
                        begun.set()

                proxies._loop.call_soon_threadsafe(dial)  # it takes none before all have dialled
                assert begun.wait(SECONDS)
            while sockets:
                with sockets.pop() as sock:
                    assert _received(sock) == b""
        del proxies
        gc.collect()
    assert not [str(warning.message) for warning in found]
