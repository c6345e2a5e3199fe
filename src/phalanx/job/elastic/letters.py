"""Messages between two ends that survive the loss of a connection; pure.

Each end numbers what it sends, and keeps it until the other has said that it has it. After a new
connection each end says what it has, and gets the rest again. So every message arrives once, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.job.hub import fields

__all__ = ["Letters"]


class Letters:
    """One end's half.

    Examples:
        >>> here, there = Letters(), Letters()
        >>> lost, later = here.written({"type": "a"}), here.written({"type": "b"})
        >>> there.is_next(later), there.is_next(lost)  # one comes before it
        (False, True)
        >>> [letter["type"] for letter in here.after(there.heard)]
        ['b']
    """

    def __init__(self) -> None:
        self.heard = 0
        """The number of the last message that has come."""
        self._last = 0
        self._kept: list[dict[str, Any]] = []

    def written(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message to send, as it must be sent."""
        self._last += 1
        letter = {**message, "number": self._last, "heard": self.heard}
        self._kept.append(letter)
        return letter

    def is_next(self, letter: Mapping[str, Any]) -> bool:
        """Whether a message that has come is the next one; others have come before, or come again."""
        number, heard = fields.whole(letter, "number"), fields.whole(letter, "heard")
        self._kept = self.after(heard)
        if number != self.heard + 1:
            return False
        self.heard = number
        return True

    def after(self, heard: int) -> list[dict[str, Any]]:
        """What the other end does not have, if this is the last that it has."""
        return [letter for letter in self._kept if letter["number"] > heard]
