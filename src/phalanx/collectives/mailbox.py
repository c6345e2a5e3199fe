"""Messages from worker to worker, which wait at their receiver until they are asked for.

A worker connects to another when it first sends something to it. A message has small JSON fields and
plain bytes; nothing is unpickled here.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from phalanx.collectives.channels import LateError
from phalanx.collectives.inbox import Inbox
from phalanx.collectives.links import Links
from phalanx.net import framing
from phalanx.net.connection import Connection
from phalanx.net.framing import Decoder, Limits, SendQueue
from phalanx.runtime.deadlines import worker_deadline

CHANNEL = "messages"
_LIMITS = Limits(fields=1 << 20, buffers=1 << 40, most=1)
_LOOK = 0.1  # seconds between looks at whether the job has failed
_MOST = 1 << 20  # bytes per call of the system


class ReceivedMessage(NamedTuple):
    """What came: from whom, about what, and the bytes."""

    source: int
    about: dict[str, Any]
    data: Any


class Mailbox:
    """Where the messages for one worker arrive.

    `dial` connects to another worker for a channel, and may wait for it; `check` raises if the job has
    failed.

    Attributes:
        sent: how many messages were sent to each rank.
        received: how many messages have come from each rank.
        moved: when a receiver last took something, by rank.
    """

    def __init__(
        self,
        rank: int,
        links: Links,
        dial: Callable[[int, str], socket.socket],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank, self._links, self._dial, self._check = rank, links, dial, check
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.moved: dict[int, float] = {}
        self._lock = threading.Lock()
        self._inbox: Inbox[ReceivedMessage] = Inbox()
        self._out: dict[int, tuple[socket.socket, threading.Lock]] = {}
        links.give(CHANNEL, self._receive)

    # -- sending ---------------------------------------------------------------------------------

    def post(self, rank: int, topic: str, about: dict[str, Any], data: Any = b"") -> None:
        """Send a message; returns when it is on its way.

        A `LateError` if the receiver takes nothing of it until the deadline of workers.
        """
        body = memoryview(data).cast("B")
        if rank == self._rank:
            self._deliver(topic, ReceivedMessage(rank, about, bytes(body)))
            return
        message = framing.Message({"topic": topic, "about": about}, [body])
        queue = SendQueue()
        queue.extend(framing.encode(message, _LIMITS))
        sock, lock = self._connection(rank)
        with lock:
            # Counted before it leaves, so that never more was received than sent.
            self.sent[rank] = self.sent.get(rank, 0) + 1
            self._send(rank, sock, queue)

    def _send(self, rank: int, sock: socket.socket, queue: SendQueue) -> None:
        seconds = worker_deadline()
        end = time.monotonic() + seconds
        while queue:
            try:
                queue.sent(sock.sendmsg(queue.views(_MOST)))
                self.moved[rank] = time.monotonic()
                end = self.moved[rank] + seconds
            except TimeoutError:
                self._check()
                if time.monotonic() > end:
                    raise LateError([rank]) from None

    def _connection(self, rank: int) -> tuple[socket.socket, threading.Lock]:
        with self._lock:
            known = self._out.get(rank)
        if known is not None:
            return known
        sock = self._dial(rank, CHANNEL)
        sock.settimeout(_LOOK)
        with self._lock:
            if rank in self._out:  # another thread was quicker
                sock.close()
            else:
                self._out[rank] = (sock, threading.Lock())
            return self._out[rank]

    # -- receiving -------------------------------------------------------------------------------

    def expect(self, topic: str, source: int | None) -> Future[ReceivedMessage]:
        """The next message on a topic from a rank, or from any; those that ask first get it first."""
        return self._inbox.take(topic, source)

    def _deliver(self, topic: str, message: ReceivedMessage) -> None:
        with self._lock:
            self.received[message.source] = self.received.get(message.source, 0) + 1
        self._inbox.put(topic, message)

    def _receive(self, source: int, sock: socket.socket) -> None:
        """Take the messages of one worker, until its connection ends."""

        def receive(message: framing.Message) -> None:
            (data,) = message.buffers
            fields = message.fields
            self._deliver(
                str(fields["topic"]), ReceivedMessage(source, fields["about"], np.asarray(data))
            )

        decoder = Decoder(_LIMITS, lambda size: np.empty(size, np.uint8).data)
        Connection(self._links.loop, sock, receive, limits=_LIMITS, decoder=decoder)
