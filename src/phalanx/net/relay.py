"""Copies bytes between two sockets, in both directions."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from phalanx.net.connection import flush
from phalanx.net.event_loop import ENDED, READ, WRITE, EventLoop
from phalanx.net.framing import SendQueue

_CHUNK = 64 << 10
_LARGEST_BUFFER = 1 << 20  # bytes that may wait for an end that does not read


@dataclass(eq=False)
class _End:
    """One end of a pair: what waits to be written to it, and the other end."""

    socket: socket.socket
    queue: SendQueue = field(default_factory=SendQueue)
    other: _End | None = None
    is_lasting: bool = False  # stays open, and silent, when the other end is gone
    is_closing: bool = False  # to be closed once everything has been written


class Relay:
    """Copies between pairs of sockets."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._open: set[socket.socket] = set()

    def add(self, first: socket.socket, second: socket.socket, *, lasting: bool = False) -> None:
        """Copy between two sockets until one ends; then close both, but not a lasting `first`.

        Any thread may call this.
        """
        one, two = _End(first, is_lasting=lasting), _End(second)
        one.other, two.other = two, one

        def begin() -> None:
            for end in (one, two):
                end.socket.setblocking(False)
                self._open.add(end.socket)
                self._watch(end)

        self._loop.call_soon(begin)

    def close(self) -> None:
        """Close all sockets. To be called in the loop's thread, or when it has ended."""
        for sock in self._open:
            self._loop.forget(sock)
            sock.close()
        self._open.clear()

    def _on_ready(self, end: _End, mask: int) -> None:
        if mask & WRITE:
            self._write(end)
        if mask & (READ | ENDED) and end.socket.fileno() >= 0:
            self._read(end)

    def _read(self, end: _End) -> None:
        if end.other is None or end.other.queue.size >= _LARGEST_BUFFER:
            self._watch(end)
            return
        try:
            data = end.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._finish(end)
            return
        end.other.queue.append(memoryview(data))
        self._write(end.other)

    def _write(self, end: _End) -> None:
        if end.socket.fileno() < 0:
            return
        try:
            flush(end.socket, end.queue)
        except OSError:
            end.queue.clear()
            self._finish(end)
            return
        if end.is_closing and not end.queue:
            self._close(end)
            return
        self._watch(end)
        if end.other is not None:
            self._watch(end.other)

    def _watch(self, end: _End) -> None:
        """Wait for what is possible: reading only while the other end takes what was read."""
        reads = end.other is not None and end.other.queue.size < _LARGEST_BUFFER
        mask = (READ if reads else 0) | (WRITE if end.queue else 0)
        self._loop.watch(end.socket, mask, lambda ready: self._on_ready(end, ready))

    def _finish(self, end: _End) -> None:
        """An end has ended: let the other one have what is on its way, and then end it too."""
        other, end.other = end.other, None
        self._close(end)
        if other is not None:
            other.other = None
            other.is_closing = True
            self._write(other)

    def _close(self, end: _End) -> None:
        self._loop.forget(end.socket)
        if not (end.is_lasting and end.is_closing):
            self._open.discard(end.socket)
            end.socket.close()
