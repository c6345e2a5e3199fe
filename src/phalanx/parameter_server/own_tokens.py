"""Tokens of updates that belong to no closure: each task numbers its own.

A task makes one such update after another, so a server needs to remember only the last ones of each
task: what has a smaller number than those is over, and a late copy of it is refused. Updates of other
tasks, however many, do not push the last one of a dead task out.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator

from phalanx.parameter_server.requests import Token

__all__ = ["OwnTokens", "TokenLine", "line_of"]

_NUMBERS = 32  # bits of the number of an update; those before it name the task
_MOST_TASKS = 4096
_MOST_NUMBERS = 64  # of each task


class TokenLine:
    """Tokens for updates that belong to no closure; servers know them by their negative numbers.

    Each task of a run has a line of its own, and makes one update after the other.

    >>> line = TokenLine()
    >>> first, second = line.take(), line.take()
    >>> first.closure < 0, first != second
    (True, True)
    """

    def __init__(self) -> None:
        self._name, self._numbers = secrets.randbits(63 - _NUMBERS), itertools.count()

    def take(self) -> Token:
        """The next token."""
        return Token(-1 - (self._name << _NUMBERS | next(self._numbers)))


class OwnTokens:
    """Which of these updates a server has made, and by which attempt.

    >>> made, line = OwnTokens(), TokenLine()
    >>> tokens = [line.take() for _ in range(70)]
    >>> for token in tokens:
    ...     made.note(token)
    >>> made.attempt(tokens[-1].closure), made.is_over(tokens[-1].closure)
    (0, False)
    >>> made.attempt(tokens[0].closure), made.is_over(tokens[0].closure)
    (None, True)
    """

    def __init__(self) -> None:
        self._lines: dict[int, dict[int, int]] = {}  # task -> number -> attempt, in order

    def note(self, token: Token) -> None:
        """An update was made."""
        name, number = _split(token.closure)
        line = self._lines.pop(name, None)
        if line is None:
            line = {}
            if len(self._lines) >= _MOST_TASKS:
                del self._lines[next(iter(self._lines))]
        self._lines[name] = line  # the last one that was used
        line[number] = token.attempt
        if len(line) > _MOST_NUMBERS:
            del line[next(iter(line))]

    def attempt(self, closure: int) -> int | None:
        """By which attempt an update was made."""
        name, number = _split(closure)
        line = self._lines.get(name)
        return None if line is None else line.get(number)

    def is_over(self, closure: int) -> bool:
        """Whether an update is older than all that are remembered of its task."""
        name, number = _split(closure)
        line = self._lines.get(name)
        return line is not None and len(line) >= _MOST_NUMBERS and number < next(iter(line))

    def items(self) -> Iterator[tuple[int, int]]:
        """All that are remembered, each with its attempt."""
        for name, line in self._lines.items():
            for number, attempt in line.items():
                yield -1 - (name << _NUMBERS | number), attempt

    def update(self, items: Iterable[tuple[int, int]]) -> None:
        """Remember what `items` returned."""
        for closure, attempt in items:
            self.note(Token(closure, attempt))


def line_of(token: Token) -> int:
    """What names the task that has taken a token."""
    return _split(token.closure)[0]


def _split(closure: int) -> tuple[int, int]:
    name, number = divmod(-1 - closure, 1 << _NUMBERS)
    return name, number
