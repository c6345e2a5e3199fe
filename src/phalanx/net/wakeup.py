"""A way to wake up a thread that waits for several files at once."""

from __future__ import annotations

import contextlib
import socket

_CHUNK = 1 << 12


class Wakeup:
    """Readable after `ring`, until `clear`; give it to a selector. `ring` may be called anywhere.

    >>> wakeup = Wakeup()
    >>> wakeup.ring(), wakeup.ring(), wakeup.clear()
    (None, None, None)
    >>> wakeup.close()
    """

    def __init__(self) -> None:
        self._out, self._in = socket.socketpair()
        for end in (self._out, self._in):
            end.setblocking(False)

    def fileno(self) -> int:
        """The file to wait for."""
        return self._out.fileno()

    def ring(self) -> None:
        """Wake up the thread; from any thread, or a signal handler."""
        with contextlib.suppress(OSError):  # full, so it wakes up anyway; or it is closed
            self._in.send(b"!")

    def clear(self) -> None:
        """The thread is awake."""
        with contextlib.suppress(BlockingIOError):
            self._out.recv(_CHUNK)

    def close(self) -> None:
        """Close the files."""
        self._out.close()
        self._in.close()
