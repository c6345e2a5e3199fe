"""What people see of a checkpoint that is written or read: its size, and how long it takes."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import TextIO

from phalanx.runtime.formatting import bytes_text

__all__ = ["ProgressLine"]

_log = logging.getLogger("phalanx")

_QUIET = 1.0  # seconds after which a line is shown
_EVERY = 0.2  # seconds between changes of it


class ProgressLine:
    """A line in the terminal that says how far a checkpoint is, and a line in the log at the end.

    Nothing is shown where the standard error is no terminal, nor of what takes less than a second.

    Args:
        what: what is done to which checkpoint.
        total: how many bytes there are.
        stream: where to write, by default the standard error.
        clock: gives seconds.

    Examples:
        >>> line = ProgressLine("Saving ckpt-1", 2_000_000, clock=iter([0.0, 0.5, 2.0]).__next__)
        >>> line.add(1_000_000)
        >>> line.done()
        'Saving ckpt-1: 2 MB in 2.0 s (1 MB/s)'
    """

    def __init__(
        self,
        what: str,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self.total, self._clock = what, total, clock
        self._stream = sys.stderr if stream is None else stream
        self._begun = clock()
        self._shown_at = self._begun + _QUIET - _EVERY
        self._done = 0
        self._is_shown = False

    def add(self, size: int) -> None:
        """So many more bytes are done."""
        self._done += size
        now = self._clock()
        if now - self._shown_at >= _EVERY and self._stream.isatty():
            self._shown_at, self._is_shown = now, True
            share = self._done / max(1, self.total)
            rate = bytes_text(self._done / max(1e-9, now - self._begun))
            of = f"{bytes_text(self._done)} of {bytes_text(self.total)}"
            self._stream.write(f"\r{self._what}: {share:.0%}, {of} ({rate}/s) ")
            self._stream.flush()

    def add_of(self, size: int, total: int) -> None:
        """So many more bytes are done, of so many."""
        self.total = total
        self.add(size)

    def done(self) -> str:
        """All is done; returns the line for the log."""
        seconds = self._clock() - self._begun
        rate = bytes_text(self.total / max(1e-9, seconds))
        text = f"{self._what}: {bytes_text(self.total)} in {seconds:.1f} s ({rate}/s)"
        if self._is_shown:
            self._stream.write(f"\r{text}\x1b[K\n")
            self._stream.flush()
        _log.info("%s", text)
        return text
