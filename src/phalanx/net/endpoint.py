"""The one place at which a task listens, whatever for, and how others dial it.

A task is known by one address. Processes of the same machine first try a Unix socket, whose name
follows from that address and the key, so that no process has to be told of it.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.errors import InvalidValueError
from phalanx.net.addresses import enlarge, join_address, listen, listen_nearby, split_address
from phalanx.net.client import connect
from phalanx.net.event_loop import EventLoop
from phalanx.net.listener import Listener
from phalanx.runtime.formatting import shown

Admit = Callable[[socket.socket, dict[str, Any]], None]
"""Takes a connection that has proved itself, and what it is for. Called in the loop's thread."""

_FOR = "for"


class Endpoint:
    """Listens at an address, and gives connections to those who serve their purposes.

    Args:
        address: where others dial, ``host:port``; with port 0 the system chooses one.
        key: the secret.
        services: who takes connections, by what stands in their purpose as "for".
        host: where to listen, if not at the host that others dial.

    >>> import threading
    >>> arrived = threading.Event()
    >>> endpoint = Endpoint("127.0.0.1:0", b"secret")
    >>> endpoint.serve("greetings", lambda sock, purpose: (sock.close(), arrived.set())[0])
    >>> _ = endpoint.start()
    >>> dial(endpoint.address, b"secret", {"for": "greetings"}, 5.0).close()
    >>> arrived.wait(5.0)
    True
    >>> endpoint.close()
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        services: Mapping[str, Admit] | None = None,
        *,
        host: str = "",
    ) -> None:
        self._services = dict(services or {})
        name, port = split_address(address)
        sockets = [listen(host or name, port)]
        self.address = join_address(name, int(sockets[0].getsockname()[1]))
        """Where others dial."""
        nearby = listen_nearby(_nearby_name(self.address, key))
        if nearby is not None:
            sockets.append(nearby)
        self.loop = EventLoop(f"phalanx-endpoint-{self.address}")
        """Waits for all connections; its thread must not wait for anything else."""
        self._listener = Listener(self.loop, sockets, key, self._admit, self._accepts)

    def serve(self, purpose: str, admit: Admit) -> None:
        """Give the connections of a purpose to a service."""
        if purpose in self._services:
            raise InvalidValueError(
                f"A purpose has one service. Received: {shown(purpose)}, which is served already"
            )
        self._services[purpose] = admit

    def start(self) -> Endpoint:
        """Begin to accept connections."""
        self.loop.start()
        return self

    @property
    def strangers(self) -> int:
        """How many connections have not proved themselves yet."""
        return self._listener.strangers

    def stop_listening(self) -> None:
        """Accept no connections any more. Those that were accepted go on."""
        self.loop.call(self._listener.close)

    def close(self) -> None:
        """Stop listening, and end the thread. Services close the connections that they took."""
        self.stop_listening()
        self.loop.close()

    def _accepts(self, purpose: dict[str, Any]) -> bool:
        name = purpose.get(_FOR)
        return isinstance(name, str) and name in self._services

    def _admit(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        enlarge(sock)
        self._services[purpose[_FOR]](sock, purpose)


def dial(
    address: str,
    key: bytes,
    purpose: Mapping[str, Any],
    timeout: float,
    *,
    peer: str = "task",
    hint: str = "",
) -> socket.socket:
    """Connect to an endpoint, trying again until `timeout` has passed.

    See `connect`. The "for" of the purpose names the service.
    """
    name = _nearby_name(address, key)
    sock = connect(address, key, purpose, timeout, peer=peer, hint=hint, name=name)
    enlarge(sock)
    return sock


def _nearby_name(address: str, key: bytes) -> str:
    """The name of an endpoint's Unix socket, which only those can guess who know the key."""
    digest = hmac.new(key, b"endpoint " + address.encode(), hashlib.sha256).hexdigest()
    return f"phalanx-{digest[:32]}"
