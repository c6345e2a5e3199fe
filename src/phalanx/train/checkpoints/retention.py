"""Which checkpoints of a directory stay. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = ["Kept", "Retention"]

Times = tuple[tuple[str, float], ...]
"""Names of checkpoints, each with the time at which it was written."""


@dataclass(frozen=True)
class Kept:
    """The checkpoints of a directory, the newest last.

    Args:
        current: those of which the oldest may go.
        preserved: those that stay for good.
        preserved_until: the time of the last one that stays for good.
        damaged: the names of those that cannot be restored.
    """

    current: Times = ()
    preserved: Times = ()
    preserved_until: float = 0.0
    damaged: frozenset[str] = frozenset()

    def with_damaged(self, one: tuple[str, float]) -> Kept:
        """The same when one of the current ones has turned out to be damaged: it goes first."""
        if one not in self.current:
            return self
        current = (one, *(each for each in self.current if each != one))
        return replace(self, current=current, damaged=self.damaged | {one[0]})


@dataclass(frozen=True)
class Retention:
    """How many checkpoints stay.

    Args:
        most: how many of the newest ones; None keeps all.
        hours: besides, one of every so many hours.

    Examples:
        >>> rule = Retention(2)
        >>> kept, removed = rule.after(Kept((("a", 1.0), ("b", 2.0))), "c", 3.0)
        >>> [name for name, _ in kept.current], removed
        (['b', 'c'], ['a'])
    """

    most: int | None
    hours: float | None = None

    def __post_init__(self) -> None:
        if self.hours is not None and not self.hours > 0:
            raise InvalidValueError(
                "`keep_checkpoint_every_n_hours` must be a positive number or None. "
                f"Received: {shown(self.hours)}"
            )

    def after(self, kept: Kept, name: str, now: float) -> tuple[Kept, list[str]]:
        """What stays and what goes when a new checkpoint is complete, which itself always stays."""
        current = [*((n, t) for n, t in kept.current if n != name), (name, now)]
        preserved, until = list(kept.preserved), kept.preserved_until
        damaged = kept.damaged - {name}
        removed = []
        while self.most is not None and len(current) > max(1, self.most):
            old, written = current.pop(0)
            if old in damaged:
                removed.append(old)
                continue
            until = min(until, written)  # the clock was ahead, or there were checkpoints before
            if self.hours is not None and written - until >= self.hours * 3600:
                preserved.append((old, written))
                until = written
            else:
                removed.append(old)
        return Kept(tuple(current), tuple(preserved), until, damaged - set(removed)), removed
