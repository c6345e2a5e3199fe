"""Connects, sends messages, and waits for the answers to requests."""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from phalanx.errors import DeadlineExceededError, UnauthenticatedError, UnavailableError
from phalanx.net.addresses import reach, split_address, tune
from phalanx.net.connection import Connection
from phalanx.net.event_loop import EventLoop
from phalanx.net.framing import Decoder, Limits, Message, ProtocolError, encode
from phalanx.net.handshake import ClientHandshake
from phalanx.runtime.formatting import shown

_ATTEMPT = 5.0  # seconds for one try
_PAUSE = 0.1  # seconds between tries


def connect(
    address: str,
    key: bytes,
    purpose: Mapping[str, Any],
    timeout: float,
    *,
    peer: str = "server",
    hint: str = "",
    name: str = "",
    refusals: float = math.inf,
) -> socket.socket:
    """Connect, trying again until `timeout` has passed; both ends have then proved themselves.

    `hint` is what an error says of the reasons that a peer may not be there, and `name` where it
    listens for processes of its own machine. Where a peer was before, nothing listens any more if it
    has ended: after `refusals` seconds of that, it is given up.
    """
    host, port = split_address(address)
    end = time.monotonic() + timeout
    answered = time.monotonic()
    while True:
        left = max(0.05, min(_ATTEMPT, end - time.monotonic()))
        try:
            sock = reach(host, port, name, left)
            return authenticate(sock, key, purpose, left, peer)
        except (ProtocolError, UnauthenticatedError) as error:
            raise type(error)(f"{error} Address: {address}") from None
        except OSError as error:
            reason = _reason(error, host)
            if not isinstance(error, ConnectionRefusedError):
                answered = time.monotonic()
        now = time.monotonic()
        if now + _PAUSE >= end or now - answered >= refusals:
            seconds = min(timeout, refusals)
            raise DeadlineExceededError(
                f"The {peer} at {address} could not be reached within {seconds:g} seconds: {reason}. "
                f"{hint}Received: {shown(address)}"
            )
        time.sleep(_PAUSE)


def authenticate(
    sock: socket.socket, key: bytes, purpose: Mapping[str, Any], timeout: float, peer: str = "server"
) -> socket.socket:
    """Prove to each other, over a new connection, that both ends know the key; returns it.

    What follows the handshake is not read. The connection is closed if anything is wrong.
    """
    end = time.monotonic() + timeout
    try:
        tune(sock)
        handshake = ClientHandshake(key, purpose, peer)
        while not handshake.is_done:
            sock.settimeout(max(0.01, end - time.monotonic()))
            data = sock.recv(handshake.needs)
            if not data:
                raise ConnectionResetError("it closes the connection")
            handshake.receive(data)
            if answer := handshake.take():
                sock.sendall(answer)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _reason(error: OSError, host: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name {host!r} is not known ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "what is there does not answer"
    return str(error.strerror or error)


class RequestClient:
    """A connection with a thread of its own, which ends with it; all threads may use it.

    A request has a number, and so has its answer. The end that connects uses odd numbers, so that the
    other may use even ones for requests of its own.

    Args:
        sock: both ends of it have proved themselves; belongs to the client from now on.
        name: of the thread.
        on_message: called in the thread with each message that answers no request; if it raises, the
            connection is closed.
        on_close: called in the thread when the connection has closed, unless by `close`.
        after_round: called in the thread after whatever it does, and at least each `tick` seconds.
        tick: see `after_round`.
        limits: how large messages may be.
        decoder: if memory for buffers shall come from elsewhere.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_message: Callable[[Message], None] = lambda _: None,
        on_close: Callable[[], None] = lambda: None,
        *,
        after_round: Callable[[], None] | None = None,
        tick: float = 1.0,
        limits: Limits = Limits(),  # noqa: B008 - cannot be changed
        decoder: Decoder | None = None,
    ) -> None:
        self.socket, self._limits = sock, limits
        self._on_message, self._on_close = on_message, on_close
        self._numbers = itertools.count(1, 2)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Message]] = {}
        self.is_closed = False
        self.loop = EventLoop(name, after_round, tick)
        self._connection = Connection(
            self.loop, sock, self._receive, self._closed, limits=limits, decoder=decoder
        )

    def start(self) -> RequestClient:
        """Begin to receive."""
        self.loop.start()
        return self

    def send(self, fields: Mapping[str, Any], buffers: Sequence[Any] = (), number: int = 0) -> None:
        """Send a message; buffers must stay as they are until they are sent.

        A message that cannot be encoded is an error at once; after the end nothing happens.
        """
        pieces = encode(Message(fields, buffers, number), self._limits)
        self.loop.call_soon(partial(self._connection.push, pieces))

    def request(
        self, fields: Mapping[str, Any], buffers: Sequence[Any] = (), *, timeout: float
    ) -> Message:
        """Send a message and wait for its answer.

        `DeadlineExceededError` if there is none in time, `UnavailableError` if the connection closes.
        """
        future: Future[Message] = Future()
        with self._lock:
            if self.is_closed:
                raise _lost()
            number = next(self._numbers)
            self._pending[number] = future
        try:
            self.send(fields, buffers, number)
            return future.result(timeout)
        except TimeoutError:
            raise DeadlineExceededError(f"There was no answer within {timeout:g} seconds.") from None
        finally:
            with self._lock:
                self._pending.pop(number, None)

    def close(self, timeout: float = 5.0) -> None:
        """Close the connection and end the thread; requests that wait fail."""
        self._on_close = lambda: None
        if self.loop.is_alive:
            self.loop.call_soon(self._connection.close)
        else:
            self._connection.close()
        self.loop.close(timeout)

    def _receive(self, message: Message) -> None:
        with self._lock:
            future = self._pending.pop(message.number, None)
        if future is None:
            self._on_message(message)
        else:
            future.set_result(message)

    def _closed(self, error: Exception | None) -> None:
        with self._lock:
            self.is_closed = True
            pending = list(self._pending.values())
            self._pending.clear()
        self._on_close()
        for future in pending:
            future.set_exception(_lost(error))
        self.loop.close()


def _lost(error: Exception | None = None) -> UnavailableError:
    return UnavailableError(f"The connection has closed{f': {error}' if error is not None else ''}.")
