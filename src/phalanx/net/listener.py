"""Accepts connections, and admits those that prove themselves."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.net.addresses import tune
from phalanx.net.event_loop import READ, EventLoop
from phalanx.net.handshake import ServerHandshake

_HANDSHAKE = 10.0  # seconds that a peer may take to prove itself
_MOST_STRANGERS = 64  # connections that have not proved themselves yet
_PAUSE = 0.1  # seconds after a connection that could not be accepted


class Acceptor:
    """Accepts connections in an event loop.

    `failed` is called when this process has no descriptor left for the next connection.
    """

    def __init__(
        self,
        loop: EventLoop,
        sock: socket.socket,
        accepted: Callable[[socket.socket], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        sock.setblocking(False)
        self._loop, self._socket, self._accepted, self._failed = loop, sock, accepted, failed
        self._is_closed = False
        self._listen()

    def close(self) -> None:
        """Stop listening."""
        self._is_closed = True
        self._loop.forget(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        if not self._is_closed:
            self._loop.watch(self._socket, READ, self._accept)

    def _accept(self, _: int) -> None:
        try:
            sock, _ = self._socket.accept()
        except (ConnectionError, BlockingIOError):  # the peer is gone already
            return
        except OSError:  # this process has no descriptor left: wait for a while
            self._loop.forget(self._socket)
            self._loop.call_later(_PAUSE, self._listen)
            self._failed()
            return
        self._accepted(sock)


class Listener:
    """Listens in an event loop, and gives away the connections of those who know the key.

    Strangers have little time to prove themselves. There may be a few of them; the oldest goes if
    there are more, so that they keep out none of those who belong to the job.

    Args:
        loop: waits for the sockets; it must not run yet, or this must be its thread.
        sockets: listen, and belong to the listener from now on.
        key: the secret.
        admitted: called with each connection that has proved itself, and what it is for.
        accepts: whether connections for a purpose are served here; the default is all.
    """

    def __init__(
        self,
        loop: EventLoop,
        sockets: Sequence[socket.socket],
        key: bytes,
        admitted: Callable[[socket.socket, dict[str, Any]], None],
        accepts: Callable[[dict[str, Any]], bool] | None = None,
    ) -> None:
        self._loop, self._key, self._admitted, self._accepts = loop, key, admitted, accepts
        self._strangers: dict[socket.socket, float] = {}  # since when; the oldest first
        self._acceptors = [Acceptor(loop, s, self._welcome, self._make_room) for s in sockets]

    @property
    def strangers(self) -> int:
        """How many connections have not proved themselves yet."""
        return len(self._strangers)

    def close(self) -> None:
        """Stop listening, and drop those who have not proved themselves."""
        for acceptor in self._acceptors:
            acceptor.close()
        self._make_room()

    def _make_room(self, most: int = 0) -> None:
        """Drop the oldest of too many strangers, and those that take too long."""
        crowd = len(self._strangers) - most
        patience = time.monotonic() - _HANDSHAKE
        for i, (sock, since) in enumerate(list(self._strangers.items())):
            if i < crowd or since <= patience:
                self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        del self._strangers[sock]
        self._loop.forget(sock)
        sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._strangers[sock] = time.monotonic()
        handshake = ServerHandshake(self._key, self._accepts)
        self._loop.watch(sock, READ, partial(self._go_on, sock, handshake))
        self._loop.call_later(_HANDSHAKE, partial(self._make_room, _MOST_STRANGERS))
        self._go_on(sock, handshake, 0)
        self._make_room(_MOST_STRANGERS)

    def _go_on(self, sock: socket.socket, handshake: ServerHandshake, mask: int) -> None:
        try:
            if mask:
                data = sock.recv(handshake.needs)
                if not data:
                    self._drop(sock)
                    return
                handshake.receive(data)
            self._answer(sock, handshake)
        except BlockingIOError:
            return
        except PhalanxError:
            with contextlib.suppress(OSError):
                self._answer(sock, handshake)
            self._drop(sock)
        except OSError:
            self._drop(sock)
        else:
            if handshake.is_done:
                del self._strangers[sock]
                self._loop.forget(sock)
                tune(sock)
                self._admitted(sock, handshake.purpose)

    def _answer(self, sock: socket.socket, handshake: ServerHandshake) -> None:
        """Send a few bytes; a new connection takes them at once."""
        data = handshake.take()
        if data and sock.send(data) < len(data):
            raise ConnectionAbortedError("A peer does not take what it is sent.")
