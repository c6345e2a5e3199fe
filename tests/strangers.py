"""Peers that do not belong to a job, for tests of everything that listens."""

from __future__ import annotations

import socket
from typing import Any

from phalanx.net.addresses import reach, split_address
from phalanx.net.endpoint import _nearby_name

SECONDS = 10.0

HOSTILE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x80\x04\x95" + b"pickle" * 100,
    bytes(100_000),
    b"\x00" * 64 + b"\xff" * 34,
]


def knock(address: str, key: bytes | None = None) -> socket.socket:
    """A connection to what listens at an address; with the key, at its socket for this machine."""
    name = "" if key is None else _nearby_name(address, key)
    sock = reach(*split_address(address), name, SECONDS)
    sock.settimeout(SECONDS)
    return sock


def is_closed_after(sock: socket.socket, data: bytes) -> bool:
    """Whether the other end closes a connection over which nonsense comes."""
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it was closed already
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


class Tapped:
    """A socket whose bytes are noted."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.sent = sock, b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self._sock.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
