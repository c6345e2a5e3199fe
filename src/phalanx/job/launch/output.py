"""What workers print: cut into lines, and searched for the reason why one failed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

LINE_LIMIT = 1 << 20
"""A longer line is cut, so that a stream without line ends does not fill the memory."""

IDLE_SECONDS, AGE_SECONDS = 0.2, 2.0
"""Text without a line end is shown when nothing more comes for a while, or when it is this old."""

_ANY_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")
_NEWLINE = re.compile(rb"\n")


class LineSplitter:
    r"""Cuts a stream of bytes into lines, which end with ``\n``, ``\r\n`` or ``\r``.

    Text that has not ended yet comes out of `flush` after a while; what follows it on the same line
    then becomes a line of its own.

    Args:
        overwrite: whether a lone ``\r`` goes back to the start of the line, as in a terminal, so that
            of a progress bar only what is to be seen comes out.

    Examples:
        >>> lines = LineSplitter()
        >>> lines.feed(b"one\ntwo\r\nth", now=0.0)
        [b'one', b'two']
        >>> lines.feed(b"ree\n", now=0.1)
        [b'three']
        >>> LineSplitter(overwrite=True).feed(b"10%\r20%\r30%\n", now=0.2)
        [b'30%']
    """

    def __init__(self, overwrite: bool = False) -> None:
        self._overwrite = overwrite
        self._end = _NEWLINE if overwrite else _ANY_END
        self._text = bytearray()
        self._begun = 0.0
        self._latest = 0.0
        self._continued = False  # the line has a part that was given out already

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Take more of the stream; returns the lines that are complete now."""
        searched = max(0, len(self._text) - 1)  # a last \r was left open: \n may follow
        self._begun = self._begun if self._text else now
        self._latest = now
        self._text += data
        lines: list[bytes] = []
        begin = 0
        for end in list(self._end.finditer(self._text, searched)):
            line = self._visible(self._text[begin : end.start()])
            if line or not (self._continued or end.group() == b"\r"):
                lines.append(line)
            begin = end.end()
            self._continued = False
            self._begun = now
        del self._text[:begin]
        if len(self._text) >= LINE_LIMIT:
            lines += self.flush(now, force=True)
        return lines

    def flush(self, now: float, force: bool = False) -> list[bytes]:
        """Returns the text that has not ended, if it has waited long enough or `force` is set."""
        deadline = self.deadline
        if deadline is None or not (force or now >= deadline):
            return []
        line = self._visible(self._text)
        self._text.clear()
        self._continued = True
        return [line] if line else []

    @property
    def deadline(self) -> float | None:
        """When `flush` will have something to show."""
        if not self._text:
            return None
        return min(self._latest + IDLE_SECONDS, self._begun + AGE_SECONDS)

    def _visible(self, line: bytearray) -> bytes:
        text = bytes(line).rstrip(b"\r")
        return text.rpartition(b"\r")[2] if self._overwrite else text


_CONTROL = re.compile(r"\x1b(?!\[[0-9;:]*m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


def printable(line: bytes) -> str:
    r"""A line as text for a terminal: colours stay; control characters and broken UTF-8 are spelt out.

    >>> printable(b"\xc3\xa9 \x1b[1mbold\x1b[0m \x1b[2J \xff")
    'é \x1b[1mbold\x1b[0m \\x1b[2J \\xff'
    """
    text = line.decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


class Tail:
    """The last lines of a stream."""

    def __init__(self, lines: int = 1000, width: int = 2000) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._width = width

    def add(self, line: bytes) -> None:
        """Remember a line, without what is beyond the width."""
        self._lines.append(printable(line[: self._width]))

    @property
    def lines(self) -> list[str]:
        """The lines, oldest first."""
        return list(self._lines)


# -- why a worker failed -------------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_GROUP = "  + Exception Group Traceback (most recent call last):"
_FATAL = "Fatal Python error: "
_IGNORED = "Exception ignored "
_LAST_LINES, _MOST_LINES = 20, 200


def failure_report(lines: Sequence[str]) -> list[str]:
    """The part of a process's last lines that says why it failed.

    This is the last traceback with everything after it, from the first exception of its chain; or what
    Python prints when the interpreter itself fails; or else the last lines.

    >>> failure_report(["epoch 1", "Traceback (most recent call last):", "  File a.py", "KeyError: 3"])
    ['Traceback (most recent call last):', '  File a.py', 'KeyError: 3']
    """
    starts = [i for i, line in enumerate(lines) if _begins_report(lines, i)]
    if not starts:
        return list(lines[-_LAST_LINES:])
    report = list(lines[_start_of_chain(lines, starts) :])
    if len(report) > _MOST_LINES:
        half = _MOST_LINES // 2
        left_out = f"… {len(report) - 2 * half} lines left out …"
        report = [*report[:half], left_out, *report[-half:]]
    return report


def _begins_report(lines: Sequence[str], i: int) -> bool:
    if lines[i].startswith(_FATAL):
        return True
    if lines[i] not in (_TRACEBACK, _GROUP):
        return False
    return not (i and lines[i - 1].startswith(_IGNORED))


def _start_of_chain(lines: Sequence[str], starts: list[int]) -> int:
    """The first line of the chain of exceptions that the last of `starts` belongs to.

    Within a chain, and where a message quotes another traceback, a blank line stands before each.
    """
    first = len(starts) - 1
    while first and not lines[starts[first] - 1].strip():
        first -= 1
    start = starts[first]
    return start - 1 if start and lines[start - 1].startswith("Exception in ") else start
