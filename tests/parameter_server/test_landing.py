"""Large values that servers write into memory of the task that reads them."""

from __future__ import annotations

import socket
import sys
from typing import Any

import numpy as np
import pytest

from phalanx.net.framing import ProtocolError
from phalanx.parameter_server.landing import Landing, put
from phalanx.parameter_server.requests import Read, Token
from phalanx.parameter_server.shared_memory import open_shared
from tests.parameter_server.running import RunningServer, add, connections, running, variable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such memory")

BIG, OTHER = variable(0, (300, 300)), variable(1, (300, 300), server=1)


def read_all(pair: list[RunningServer], *, cuts: bool = False) -> tuple[list[Any], list[int]]:
    """Read what changes again and again; all that was read stays as it was."""
    with connections(pair) as servers:
        for v in (BIG, OTHER):
            servers.create(v, np.zeros(v.shape, np.float32))
        kept = []
        for closure in range(12):
            kept.append(servers.pull([Read(BIG), Read(OTHER)]))
            if cuts and closure % 3 == 1:
                for link in servers._links:
                    assert link._stream is not None
                    link._stream.socket.shutdown(socket.SHUT_RDWR)
            servers.push(Token(closure), [add(BIG), add(OTHER, 2.0)])
        for i, (big, other) in enumerate(kept):
            assert (big == i).all()
            assert (other == 2 * i).all()
            assert big.ctypes.data % 64 == 0, "JAX takes it without a copy"
        landings = [link._landing for link in servers._links]
        places = [0 if landing is None else landing._given for landing in landings]
        assert servers.status()[0]["bytes_out"] > 11 * 300 * 300 * 4
        return landings, places


def test_values_land_where_they_are_read() -> None:
    with running(2) as pair:
        landings, places = read_all(pair)
        assert None not in landings
        assert min(places) >= 11 * 300 * 300 * 4, "each is kept, so each has memory of its own"


def test_after_a_loss_values_land_elsewhere() -> None:
    with running(2) as pair:
        landings, places = read_all(pair, cuts=True)
        assert None not in landings
        assert max(places) < 4 * 300 * 300 * 5


def test_without_such_memory_they_come_over_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"process": 0, "descriptor": 0, "size": 1, "nonce": "00"}
    monkeypatch.setattr(Landing, "description", nothing)
    with running(2) as pair:
        assert read_all(pair)[0] == [None, None]


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    landing = Landing(1 << 20)
    memory = open_shared(landing.description, writable=True)
    landing.close_descriptor()
    for i in range(20):
        room = landing.room(500_000)
        assert room is not None
        put(np.full(500_000, i, np.uint8), memory, room.place)
        assert (room.memory == i).all()
    assert landing._given < 1 << 20


def test_places_that_do_not_exist() -> None:
    landing = Landing(1 << 20)
    memory = open_shared(landing.description, writable=True)
    landing.close_descriptor()
    with pytest.raises(ProtocolError):
        put(bytes(100), memory, (1 << 20) - 99)
