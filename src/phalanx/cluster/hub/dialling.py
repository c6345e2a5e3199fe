"""Getting through to a hub, and telling broken connections from other errors."""

from __future__ import annotations

import socket
import time

from phalanx.cluster.hub.frames import ProtocolError, Stream
from phalanx.cluster.hub.sockets import keep_alive
from phalanx.core.errors import DeadlineExceededError, InvalidValueError, UnauthenticatedError
from phalanx.core.showing import shown

__all__ = ["dial", "is_broken_connection", "split_address"]

_ATTEMPT = 5.0  # seconds for one try
_PAUSE = 0.1  # seconds between tries
_LONGEST_PORT = 10  # digits, zeros in front among them


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of an address.

    >>> split_address("host0:2222"), split_address("[::1]:80")
    (('host0', 2222), ('::1', 80))
    """
    host, colon, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= _LONGEST_PORT
    if not colon or not host or not is_number or int(port) > 65535:
        raise InvalidValueError(
            "An address must be a host and a port up to 65535, for example 'host0:2222'. "
            f"Received: {shown(address)}"
        )
    return host.strip("[]"), int(port)


def dial(address: str, token: str, timeout: float) -> tuple[socket.socket, Stream]:
    """Connect to a hub, trying again until `timeout` has passed; returns a proven connection."""
    host, port = split_address(address)
    end = time.monotonic() + timeout
    while True:
        left = max(0.05, min(_ATTEMPT, end - time.monotonic()))
        try:
            return _dial_once(host, port, token, left)
        except ProtocolError as error:
            raise ProtocolError(f"{error} Address: {address}") from None
        except UnauthenticatedError as error:
            raise UnauthenticatedError(f"{error} Address: {address}") from None
        except OSError as error:
            reason = _reason(error, host)
        if time.monotonic() + _PAUSE >= end:
            raise DeadlineExceededError(
                f"The hub at {address} could not be reached within {timeout:g} seconds: {reason}. It "
                "runs in the launcher, or next to the first worker: check that this has started, and "
                f"that the address is right. Received: {shown(address)}"
            )
        time.sleep(_PAUSE)


def _dial_once(host: str, port: int, token: str, timeout: float) -> tuple[socket.socket, Stream]:
    end = time.monotonic() + timeout
    sock = socket.create_connection((host, port), timeout)
    try:
        keep_alive(sock)
        stream = Stream(token, server=False)
        while not stream.proven:
            sock.settimeout(max(0.01, end - time.monotonic()))
            data = sock.recv(4096)
            if not data:
                raise ConnectionResetError("it closes the connection")
            stream.receive(data)
            sock.sendall(stream.take())
    except BaseException:
        sock.close()
        raise
    return sock, stream


def _reason(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} is not known ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "what is there does not answer"
    return str(error.strerror or error)


_MARKS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out waiting",
    "unavailable:",
    "deadline_exceeded",
    "coordination service",
)


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error reads as if another process had gone away.

    >>> is_broken_connection(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    True
    >>> is_broken_connection(ValueError("a and b differ"))
    False
    """
    text = str(error).lower()
    return isinstance(error, ValueError | RuntimeError | OSError) and any(m in text for m in _MARKS)
