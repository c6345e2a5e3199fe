"""Sockets that listen, and connections that notice when the other machine is gone."""

from __future__ import annotations

import socket

from phalanx.core.errors import ClusterEnvironmentError

__all__ = ["join_address", "keep_alive", "listen"]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; what is in the way is said in words."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port that an ended process used may be taken again at once.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ClusterEnvironmentError(
            f"Nothing can listen at {host}:{port}: {error.strerror or error}. The port may be in use, "
            f"or the address may belong to another machine. Received: {host}:{port}"
        ) from error
    return listener


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel notice within about half a minute that the machine at the other end is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets where the host is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
