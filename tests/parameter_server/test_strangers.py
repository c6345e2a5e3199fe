"""What comes over the ports of a parameter server and does not belong there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from phalanx import errors
from phalanx.net.endpoint import dial
from phalanx.net.framing import Message, encode
from phalanx.net.stream import Stream
from phalanx.parameter_server import wire
from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.requests import Commit, Token
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
from tests.strangers import HOSTILE, Tapped, is_closed_after, knock

V = variable(0)


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running(1) as servers:
        yield servers[0]


@pytest.fixture
def job(server: RunningServer) -> Iterator[ServerConnections]:
    with connections([server]) as servers:
        servers.create(V, np.zeros((), np.float32))
        yield servers


def unharmed(job: ServerConnections, closure: int = 99) -> None:
    before = value_of(job, V)
    assert job.push(Token(closure), [add(V)]) == Commit(True)
    assert value_of(job, V) == before + 1.0


@pytest.mark.parametrize("nearby", [False, True])
def test_garbage_before_the_proof(server: RunningServer, job: Any, nearby: bool) -> None:
    for data in HOSTILE:
        with knock(server.address, KEY if nearby else None) as sock:
            assert is_closed_after(sock, data)
    unharmed(job)


def test_a_wrong_token(server: RunningServer, job: Any) -> None:
    for address in (server.address, server.address.replace("127.0.0.1", "localhost")):
        with pytest.raises(errors.UnauthenticatedError, match="PHALANX_TOKEN"):
            dial(address, b"guess", {"for": PURPOSE}, SECONDS)
    unharmed(job)


def test_a_replay(server: RunningServer, job: Any) -> None:
    from phalanx.net.client import authenticate

    tapped = Tapped(knock(server.address))
    authenticate(tapped, KEY, {"for": PURPOSE}, SECONDS).close()  # type: ignore[arg-type]
    with knock(server.address) as sock:
        sock.sendall(tapped.sent)
        assert b"this token is not right" in sock.recv(1 << 16) + sock.recv(1 << 16)
    unharmed(job)


def test_those_who_say_nothing_do_not_keep_others_out(server: RunningServer, job: Any) -> None:
    slow = [knock(server.address) for _ in range(100)]
    for sock in slow:
        sock.sendall(b"\0")
    with connections([server], job.run) as other:
        assert value_of(other, V) == 0.0
    assert server.endpoint.strangers <= 64
    unharmed(job)
    for sock in slow:
        sock.close()


BAD_REQUESTS: dict[str, Callable[[], list[Any]]] = {
    "nothing": list,
    "an unknown kind": lambda: [b"\xee"],
    "no kind": lambda: [b""],
    "a hello that is no JSON": lambda: [b"\x01nonsense"],
    "a hello without a run": lambda: wire.with_fields(Kind.HELLO, {}),
    "a hello with a path": lambda: wire.with_fields(Kind.HELLO, {"run": "../../etc", "index": 0}),
    "a push before the hello": lambda: wire.push(Kind.PUSH, Token(1), []),
    "a folder before the hello": lambda: wire.with_fields(Kind.SAVE, {"folder": "/tmp/x"}),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_nonsense_after_the_proof_ends_its_connection(
    server: RunningServer, job: Any, name: str
) -> None:
    stream = Stream(dial(server.address, KEY, {"for": PURPOSE}, SECONDS), LIMITS)
    stream.send(BAD_REQUESTS[name](), 1, SECONDS)
    with pytest.raises(ConnectionError):
        stream.receive(SECONDS)
    unharmed(job)


@pytest.mark.parametrize("kind", [Kind.CREATE, Kind.OPTIMIZER, Kind.PULL, Kind.PUSH, Kind.DECIDE])
def test_nonsense_of_a_member_ends_its_connection(server: RunningServer, job: Any, kind: Kind) -> None:
    stream = Stream(dial(server.address, KEY, {"for": PURPOSE}, SECONDS), LIMITS)
    stream.send(wire.with_fields(Kind.HELLO, {"run": job.run, "index": 0}), 1, SECONDS)
    assert wire.fields_in(stream.receive(SECONDS).buffers)["variables"] == 1
    stream.send([bytes([kind]) + b"{}abc"], 2, SECONDS)
    with pytest.raises(ConnectionError):
        stream.receive(SECONDS)
    unharmed(job)


def test_a_message_that_is_too_long_is_not_waited_for(server: RunningServer, job: Any) -> None:
    stream = Stream(dial(server.address, KEY, {"for": PURPOSE}, SECONDS), LIMITS)
    head = bytes(encode(Message({}, [b"x"], 1), LIMITS)[0])[:16] + (1 << 60).to_bytes(8, "big")
    stream.socket.sendall(head)
    with pytest.raises(ConnectionError):
        stream.receive(SECONDS)
    unharmed(job)
