"""Addresses, and the sockets at them."""

from __future__ import annotations

import socket
import sys

from phalanx.errors import ClusterEnvironmentError, InvalidValueError
from phalanx.runtime.formatting import shown

_BACKLOG = 1024
_BUFFER = 4 << 20  # bytes that the system may hold of a connection, in each direction
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


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; what is in the way is said in words."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port that an ended process used may be taken again at once.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ClusterEnvironmentError(
            f"Nothing can listen at {host}:{port}: {error.strerror or error}. The port may be in use, "
            f"or the address may belong to another machine. Received: {host}:{port}"
        ) from error
    return listener


def tune(sock: socket.socket) -> None:
    """Send at once, and let the kernel notice in half a minute that the other machine is gone."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -- Unix sockets, which move more than twice as much as TCP does, between processes of one machine.
# Linux has them without files, in a name space that ends with the process.


def listen_nearby(name: str) -> socket.socket | None:
    """A socket that listens for processes of this machine; None if there can be none."""
    if sys.platform != "linux":
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_unnamed(name))
        listener.listen(_BACKLOG)
    except OSError:  # another process has the name; the network still works
        listener.close()
        return None
    return listener


def reach(host: str, port: int, name: str, seconds: float) -> socket.socket:
    """Connect to what listens at a name on this machine; if nothing does, over the network."""
    if name and sys.platform == "linux":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(seconds)
        try:
            sock.connect(_unnamed(name))
        except OSError:  # another machine, or another container of this one
            sock.close()
        else:
            return sock
    return socket.create_connection((host, port), seconds)


def _unnamed(name: str) -> bytes:
    """The address of a Unix socket that has no file."""
    return b"\0" + name.encode()


def enlarge(sock: socket.socket) -> None:
    """Let the system hold more of a connection."""
    if sock.family == socket.AF_UNIX or _largest_buffer() >= _BUFFER:  # else TCP's own choice is better
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)


def _largest_buffer() -> int:
    """How large a buffer of a connection may be; 0 if the system does not tell."""
    sizes = []
    for name in ("rmem_max", "wmem_max"):
        try:
            with open(f"/proc/sys/net/core/{name}") as file:
                sizes.append(int(file.read()))
        except (OSError, ValueError):
            return 0
    return min(sizes)
