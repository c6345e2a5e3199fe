"""Shared memory beside a connection."""

from __future__ import annotations

import os
import random
import sys
from collections import deque
from typing import Any

import numpy as np
import pytest

from phalanx import errors
from phalanx.net.framing import ProtocolError
from phalanx.parameter_server import lane as module
from phalanx.parameter_server.lane import Lane, restored
from phalanx.parameter_server.requests import Commit, Read, Token, Update
from phalanx.parameter_server.shared_memory import open_shared
from tests.parameter_server.running import RunningServer, connections, running, variable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such memory")

SIZE = 1 << 20
BIG = variable(0, (256, 256))
OTHER = variable(1, (256, 256), server=1)


def buffer(random: random.Random, number: int) -> Any:
    return np.full(random.choice([3, 70_000, 100_001, 200_000]), number % 251, np.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_read_is_what_was_written(seed: int) -> None:
    """As long as it has not been given back."""
    rng = random.Random(seed)
    lane = Lane(SIZE)
    memory = open_shared(lane.description)
    lane.close_descriptor()
    unanswered: deque[tuple[list[bytes], list[Any], list[Any], Any]] = deque()
    placed_in_all = 0
    for number in range(400):
        buffers = [b"request", *(buffer(rng, number) for _ in range(rng.randrange(3)))]
        given = [bytes(memoryview(b)) for b in buffers]
        placed = lane.place(buffers) if lane.fits(buffers) else (None, None)
        while placed is None:
            assert unanswered, "there is room when all have been answered"
            _check_and_release(lane, memory, *unanswered.popleft())
            placed = lane.place(buffers)
        request, mark = placed
        if request is not None:
            placed_in_all += 1
            assert sum(map(len, request)) < 65_536 * 2
            unanswered.append((given, buffers, request, mark))
        while unanswered and rng.random() < 0.4:
            _check_and_release(lane, memory, *unanswered.popleft())
    assert placed_in_all > 100
    assert len(unanswered) < 20


def _check_and_release(
    lane: Lane,
    memory: memoryview,
    given: list[bytes],
    buffers: list[Any],
    request: list[Any],
    mark: Any,
) -> None:
    found = restored(request, memory)
    assert [bytes(b) for b in found] == given
    assert [bytes(memoryview(b)) for b in buffers] == given  # to be sent again, if need be
    for b in (b for b in buffers if len(b) >= 65_536):
        assert np.shares_memory(np.frombuffer(b, np.uint8), lane.bytes), "the array can be freed"
    assert all(np.frombuffer(b, np.uint8).ctypes.data % 64 == 0 for b in found if len(b) > 65_536)
    lane.release(mark)


def test_memory_of_others_is_refused() -> None:
    lane = Lane(SIZE)
    good = lane.description
    other = os.memfd_create("test")
    os.ftruncate(other, 2 * SIZE)
    for wrong in (
        {"nonce": "00" * 32},
        {"nonce": ""},
        {"descriptor": other},
        {"descriptor": 0},
        {"descriptor": 9999},
        {"process": 1 << 40},
        {"size": 1 << 60},
        {"size": -1 << 70},
    ):
        with pytest.raises(errors.UnavailableError, match="memory of the peer"):
            open_shared({**good, **wrong})
    for wrong in ({"process": "self/../1"}, {"nonce": "xyz"}, {"size": None}):
        with pytest.raises(ProtocolError):
            open_shared({**good, **wrong})
    os.close(other)
    lane.close_descriptor()


def test_places_that_do_not_exist() -> None:
    memory = memoryview(bytes(1000))
    entry = module._ENTRY.pack
    for packed in (entry(0, 990, 11), entry(5, 0, 10), entry(1, 0, 10), b"abc"):
        with pytest.raises(ProtocolError):
            restored([b"\x64" + packed, b"", b"full"], memory)
    with pytest.raises(ProtocolError):
        restored([b"\x64" + entry(0, 0, 10), b""], None)


def push_all(pair: list[RunningServer]) -> tuple[Any, Any]:
    """Push far more than a lane holds, one after another, to one server and to both."""
    with connections(pair) as servers:
        for v in (BIG, OTHER):
            servers.create(v, np.zeros(v.shape, np.float32))
        done: list[Commit] = []
        for closure in range(120):
            operand = np.full(BIG.shape, closure, np.float32)
            updates = [Update(BIG, "assign_add", operand)]
            if closure % 3 == 0:
                updates.append(Update(OTHER, "assign", operand))
            servers.push_later(Token(closure), updates, b"", done.append)
        servers.collect(wait=True)
        assert done == [Commit(True)] * 120
        big, other = servers.pull([Read(BIG), Read(OTHER)])
        assert (big == sum(range(120))).all()
        assert (other == 117).all()
        return [link._lane for link in servers._links], servers.status()


def test_large_updates_take_the_lane() -> None:
    with running(2) as pair:
        lanes, _ = push_all(pair)
        assert None not in lanes


def test_without_a_lane_they_take_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "description", {"process": 0, "descriptor": 0, "size": 1, "nonce": "00"})
    with running(2) as pair:
        lanes, _ = push_all(pair)
        assert lanes == [None, None]


def test_the_place_of_a_request_is_used_again_once_it_is_answered() -> None:
    with running(1) as single, connections(single) as servers:
        servers.create(BIG, np.zeros(BIG.shape, np.float32))
        for closure in range(5):
            servers.push(Token(closure), [Update(BIG, "assign_add", np.ones(BIG.shape, np.float32))])
        lane = servers._links[0]._lane
        assert (lane._given, lane._used) == (BIG.nbytes, 0)


def test_an_answer_after_a_loss_gives_back_nothing_of_the_next_lane() -> None:
    with running(1) as single, connections(single) as servers:
        servers.create(BIG, np.zeros(BIG.shape, np.float32))
        ones = Update(BIG, "assign_add", np.ones(BIG.shape, np.float32))
        done: list[Commit] = []
        link = servers._links[0]
        servers.push_later(Token(1), [ones], b"", done.append)
        first = link._lane
        link._lose()
        servers.collect(wait=True)
        servers.push_later(Token(2), [ones], b"", done.append)
        second = link._lane
        assert second is not first
        assert second._used == 1
        servers.collect(wait=True)
        assert second._used == 0
        assert done == [Commit(True)] * 2
        assert (servers.pull([Read(BIG)])[0] == 2).all()
