"""Bytes between two sockets, in both directions."""

from __future__ import annotations

import contextlib
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.net.event_loop import EventLoop
from phalanx.net.relay import Relay

SECONDS = 20.0


@pytest.fixture
def relay():
    loop = EventLoop("test").start()
    relay = Relay(loop)
    yield relay
    loop.call(relay.close)
    loop.close()


@contextlib.contextmanager
def pairs(count):
    """Connected sockets, with deadlines: the outer ones of each two pairs are the test's."""
    made = [socket.socketpair() for _ in range(count)]
    for s in (s for pair in made for s in pair):
        s.settimeout(SECONDS)
    yield made
    for s in (*(first for first, _ in made[::2]), *(second for _, second in made[1::2])):
        s.close()


def read_all(s, size):
    data = bytearray()
    while len(data) < size:
        piece = s.recv(65536)
        assert piece, f"the end after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


def test_bytes_arrive_in_both_directions_at_the_same_time(relay):
    chance = random.Random(1)
    with pairs(8) as made:
        data = {}
        for (a, inner), (other_inner, b) in zip(made[::2], made[1::2], strict=True):
            relay.add(inner, other_inner)
            data[a, b] = chance.randbytes(300_000)
            data[b, a] = chance.randbytes(200_000)
        with ThreadPoolExecutor(16) as pool:
            sent = [pool.submit(source.sendall, piece) for (source, _), piece in data.items()]
            got = [pool.submit(read_all, to, len(piece)) for (_, to), piece in data.items()]
            assert [future.result(SECONDS) for future in sent] == [None] * 8
            assert [future.result(SECONDS) for future in got] == list(data.values())


def test_a_reader_that_sleeps_does_not_fill_the_memory(relay):
    with pairs(4) as made:
        (a, inner), (other_inner, _), (c, third), (fourth, d) = made
        relay.add(inner, other_inner)
        a.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 50_000_000:
                sent += a.send(bytes(100_000))
        assert sent < 10_000_000
        relay.add(third, fourth)
        c.sendall(b"hello")
        assert read_all(d, 5) == b"hello", "others go on"


def test_the_last_bytes_arrive_before_the_end(relay):
    with pairs(2) as made:
        (a, inner), (other_inner, b) = made
        relay.add(inner, other_inner)
        a.sendall(b"goodbye")
        a.close()
        assert read_all(b, 7) == b"goodbye"
        assert b.recv(1) == b""


def test_a_lasting_end_falls_silent_instead(relay):
    with pairs(2) as made:
        (a, inner), (other_inner, b) = made
        relay.add(inner, other_inner, lasting=True)
        b.sendall(b"last words")
        b.close()
        assert read_all(a, 10) == b"last words"
        a.settimeout(0.3)
        with pytest.raises(TimeoutError):
            a.recv(1)
        a.sendall(b"to no end")
