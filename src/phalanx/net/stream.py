"""Sends and receives messages in the thread of the caller, without a loop.

For one thread that asks and waits: handing a message over to another thread costs more than a small
message itself. Waiting has a deadline and can be interrupted.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.errors import DeadlineExceededError
from phalanx.net.framing import Decoder, Limits, Message, SendQueue, encode
from phalanx.net.spinning import Spinner

_TICK = 0.25  # seconds after which a wait looks at its deadline
_REMINDER = 4.5  # seconds
_MOST = 4 << 20  # bytes of one call of the system
_TIMEVAL = struct.Struct("@ll")


class Stream:
    """A connection for one thread. After any error it is closed, also after an interrupt.

    Args:
        sock: belongs to the stream from now on.
        limits: how large messages may be.
        decoder: if memory for buffers shall come from elsewhere.
        spins: whether to look for answers that come soon instead of sleeping.
    """

    def __init__(
        self,
        sock: socket.socket,
        limits: Limits,
        decoder: Decoder | None = None,
        *,
        spins: bool = False,
    ) -> None:
        # The system's own timeouts: Python's would cost another call of the system for each wait.
        sock.settimeout(None)
        tick = _TIMEVAL.pack(0, int(_TICK * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        self.socket = sock
        self._limits = limits
        self._decoder = decoder or Decoder(limits)
        self._spinner = Spinner() if spins else None
        self.bytes_in = self.bytes_out = 0

    def send(self, buffers: Sequence[Any], number: int, timeout: float) -> None:
        """Send a message of buffers; `DeadlineExceededError` if the peer does not take it in time.

        Args:
            buffers: raw bytes.
            number: of the message.
            timeout: seconds within which the peer must take something.
        """
        pieces = encode(Message({}, buffers, number), self._limits)
        try:
            if len(pieces) == 1:
                try:
                    sent = self.socket.send(pieces[0])
                except BlockingIOError:
                    sent = 0
                self.bytes_out += sent
                if sent == len(pieces[0]):
                    return
                pieces = [pieces[0][sent:]]
            self._send_all(pieces, timeout)
        except BaseException:
            self.close()
            raise

    def _send_all(self, pieces: Sequence[memoryview], timeout: float) -> None:
        queue = SendQueue()
        queue.extend(pieces)
        end = time.monotonic() + timeout
        while queue:
            try:
                sent = self.socket.sendmsg(queue.views(_MOST))
            except BlockingIOError:
                sent = 0
            queue.sent(sent)
            self.bytes_out += sent
            if sent:
                end = time.monotonic() + timeout
            elif time.monotonic() > end:
                raise DeadlineExceededError(f"The peer took nothing for {timeout:g} seconds.")

    def receive(self, timeout: float, remind: Callable[[float], None] | None = None) -> Message:
        """The next message; `DeadlineExceededError` if nothing comes for so many seconds.

        `remind` is called again and again while nothing comes, with the seconds so far.
        """
        message = self._decoder.next()
        try:
            while message is None:
                if self._spinner is None:
                    self._sleep(timeout, remind)
                else:
                    self._spinner.wait(self._look, lambda: self._sleep(timeout, remind))
                message = self._decoder.next()
        except BaseException:
            self.close()
            raise
        return message

    def _look(self) -> int:
        """Take what has come; how many bytes."""
        return self._fill(socket.MSG_DONTWAIT)

    def _sleep(self, timeout: float, remind: Callable[[float], None] | None) -> int:
        """Wait until something has come."""
        count = self._fill(0)
        if not count:
            self._wait(timeout, remind)
        return count

    def _wait(self, timeout: float, remind: Callable[[float], None] | None) -> None:
        """Wait until something has come; one tick has passed already."""
        start = time.monotonic() - _TICK
        reminded = start
        while not self._fill(0):
            now = time.monotonic()
            if now - start >= timeout:
                raise DeadlineExceededError(f"The peer sent nothing for {timeout:g} seconds.")
            if remind is not None and now - reminded >= _REMINDER:
                reminded = now
                remind(now - start)

    def poll(self) -> Message | None:
        """The next message if all of it is there."""
        message = self._decoder.next()
        try:
            while message is None and self._look():
                message = self._decoder.next()
        except BaseException:
            self.close()
            raise
        return message

    def _fill(self, flags: int) -> int:
        try:
            count = self.socket.recv_into(self._decoder.buffer(), 0, flags)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        self._decoder.received(count)
        self.bytes_in += count
        return count

    def close(self) -> None:
        """End the connection."""
        self.socket.close()
