"""Messages between workers: who may send them, and which receive gets which."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator

import pytest

import phalanx as px
from phalanx.collectives.links import Links
from phalanx.collectives.mailbox import Mailbox

DEADLINE = 10.0


@pytest.fixture
def boxes() -> Iterator[list[Mailbox]]:
    links = [Links(rank, "127.0.0.1", b"secret") for rank in range(3)]

    def box(rank: int) -> Mailbox:
        dial = lambda to, channel: links[rank].dial(links[to].address, channel, DEADLINE)  # noqa: E731
        return Mailbox(rank, links[rank], dial)

    yield [box(rank) for rank in range(3)]
    for link in links:
        link.close()


def test_messages_are_told_apart_by_topic_and_sender(boxes: list[Mailbox]) -> None:
    early = boxes[0].expect("a", 2)
    anyone = boxes[0].expect("b", None)
    boxes[1].post(0, "a", {"n": 1}, b"one")
    boxes[2].post(0, "a", {"n": 2}, b"two")
    boxes[2].post(0, "a", {"n": 3})
    boxes[1].post(0, "b", {})

    def heard(source: int) -> tuple[int, object, bytes]:
        message = boxes[0].expect("a", source).result(DEADLINE)
        return message.source, message.about, bytes(message.data)

    first = early.result(DEADLINE)
    assert (first.source, first.about, bytes(first.data)) == (2, {"n": 2}, b"two")
    assert heard(1) == (1, {"n": 1}, b"one")
    assert heard(2) == (2, {"n": 3}, b"")
    assert anyone.result(DEADLINE).source == 1
    boxes[0].post(0, "self", {}, b"x")
    assert boxes[0].expect("self", 0).result(DEADLINE).data == b"x"


def test_messages_of_one_sender_keep_their_order(boxes: list[Mailbox]) -> None:
    for i in range(100):
        boxes[1].post(0, "a", {"n": i}, bytes(i * 1000))
    came = [boxes[0].expect("a", None).result(DEADLINE) for _ in range(100)]
    assert [(m.about["n"], len(m.data)) for m in came] == [(i, i * 1000) for i in range(100)]


# -- strangers ---------------------------------------------------------------------------------------


@pytest.fixture
def door() -> Iterator[Links]:
    links = Links(0, "127.0.0.1", b"secret")
    yield links
    links.close()


@pytest.mark.parametrize("local", [True, False])
def test_workers_prove_themselves_to_each_other(door: Links, local: bool) -> None:
    own = Links(1, "127.0.0.1", b"secret")
    address = door.address if local else door.address._replace(local="")
    dialled = own.dial(address, "0,1", DEADLINE)
    assert (dialled.family == socket.AF_UNIX) == (local and sys.platform == "linux")
    found = door.wait("0,1", 1, DEADLINE)
    assert found is not None
    dialled.sendall(b"hello")
    assert found.recv(5) == b"hello"
    assert door.wait("0,1", 1, 0.0) is None
    door.cut()
    assert dialled.recv(1) == b""
    own.close()


def test_another_secret_is_refused_by_both_ends(door: Links) -> None:
    stranger = Links(1, "127.0.0.1", b"guess")
    with pytest.raises(px.errors.UnauthenticatedError):
        stranger.dial(door.address, "0,1", DEADLINE)
    with pytest.raises(px.errors.UnauthenticatedError):
        door.dial(stranger.address, "0,1", DEADLINE)
    assert door.wait("0,1", 1, 0.0) is None
    stranger.close()


def test_a_machine_of_its_own_is_reached_over_the_network(door: Links) -> None:
    own = Links(1, "127.0.0.1", b"secret")
    dialled = own.dial(door.address._replace(local="nobody"), "0,1", DEADLINE)
    assert dialled.family == socket.AF_INET
    own.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0\r\n\r\n" * 10, b"\xff" * 5000])
def test_strangers_are_not_heard_and_are_not_in_the_way(door: Links, said: bytes) -> None:
    with socket.create_connection(door.address[:2], DEADLINE) as stranger:
        stranger.sendall(said)
        own = Links(1, "127.0.0.1", b"secret")
        own.dial(door.address, "0,1", DEADLINE)
        assert door.wait("0,1", 1, DEADLINE) is not None
        own.close()


def test_a_proof_cannot_be_given_back(door: Links) -> None:
    """Who is in between cannot let a worker prove itself to its own listener."""
    with socket.create_connection(door.address[:2], DEADLINE) as one:
        greeting = one.recv(46, socket.MSG_WAITALL)
        purpose = b'{"rank": 0, "channel": "0"}'
        one.sendall(greeting[-32:] + bytes(32) + len(purpose).to_bytes(2, "big") + purpose)
        assert one.recv(33, socket.MSG_WAITALL) == b"phalanx: this token is not right"


def test_many_silent_strangers_keep_nobody_out() -> None:
    links, own = (Links(rank, "127.0.0.1", b"secret") for rank in range(2))
    crowd = [socket.create_connection(links.address[:2], DEADLINE) for _ in range(200)]
    sock = own.dial(links.address._replace(local=""), "a", DEADLINE)
    assert links.wait("a", 1, DEADLINE) is not None
    sock.close()
    end = time.monotonic() + DEADLINE / 2  # less than a silent one has
    while links._listener.strangers > 64:
        assert time.monotonic() < end
    for stranger in crowd:
        stranger.close()
    for link in (links, own):
        link.close()
