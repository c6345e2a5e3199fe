"""One place to listen for all purposes."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx import errors
from phalanx.net import endpoint as module
from phalanx.net.endpoint import Endpoint, dial
from phalanx.net.framing import ProtocolError

KEY = b"secret"
SECONDS = 20.0


class Service:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.taken: list[tuple[socket.socket, dict[str, Any]]] = []

    def admit(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        self.taken.append((sock, purpose))
        self.arrived.release()

    def close(self) -> None:
        for sock, _ in self.taken:
            sock.close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.fixture
def endpoint(service: Service) -> Iterator[Endpoint]:
    endpoint = Endpoint("127.0.0.1:0", KEY, {"tests": service.admit}).start()
    yield endpoint
    endpoint.close()


def test_purposes_find_their_services(endpoint: Endpoint, service: Service) -> None:
    other = Service()
    endpoint.serve("others", other.admit)
    for name, found in (("tests", service), ("others", other)):
        with dial(endpoint.address, KEY, {"for": name, "n": 1}, SECONDS):
            assert found.arrived.acquire(timeout=SECONDS)
            assert found.taken[0][1] == {"for": name, "n": 1}
    other.close()
    with pytest.raises(errors.InvalidValueError, match="'tests'"):
        endpoint.serve("tests", other.admit)


@pytest.mark.skipif(sys.platform != "linux", reason="sockets without files are Linux's")
def test_processes_of_one_machine_meet_at_a_unix_socket(endpoint: Endpoint, service: Service) -> None:
    with dial(endpoint.address, KEY, {"for": "tests"}, SECONDS) as sock:
        assert sock.family == socket.AF_UNIX
    other = endpoint.address.replace("127.0.0.1", "localhost")  # which is no name of the endpoint
    with dial(other, KEY, {"for": "tests"}, SECONDS) as sock:
        assert sock.family == socket.AF_INET
    names = {module._nearby_name(a, k) for a in ("a:1", "a:2", "b:1") for k in (b"1", b"2")}
    assert len(names) == 6


@pytest.mark.parametrize("purpose", [{}, {"for": "nothing"}, {"for": 3}, {"for": ["tests"]}])
def test_other_purposes_are_refused(endpoint: Endpoint, purpose: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="does not serve"):
        dial(endpoint.address, KEY, purpose, SECONDS)


def test_strangers_are_refused(endpoint: Endpoint, service: Service) -> None:
    other = endpoint.address.replace("127.0.0.1", "localhost")
    for address in (endpoint.address, other):
        with pytest.raises(errors.UnauthenticatedError):
            dial(address, b"guess", {"for": "tests"}, SECONDS)
    assert not service.taken


def test_an_endpoint_that_is_missing_is_named() -> None:
    with pytest.raises(errors.DeadlineExceededError, match=r"lost ship at 127\.0\.0\.1:1 .* Ahoy"):
        dial("127.0.0.1:1", KEY, {"for": "tests"}, 0.2, peer="lost ship", hint="Ahoy. ")


def test_an_address_that_is_in_use(endpoint: Endpoint) -> None:
    with pytest.raises(errors.ClusterEnvironmentError, match="in use"):
        Endpoint(endpoint.address, KEY)
