"""What this process is doing, told to whoever watches it: in a job, the other workers.

The training thread writes plain attributes of the watcher, so that telling costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Where the phase and the number of steps are written."""

    phase: str
    step: int | None


_watchers: list[Watcher] = []


def watched_by(watcher: Watcher) -> None:
    """Tell this watcher from now on, and no other."""
    watcher.step = 0
    _watchers[:] = [watcher]


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Be in a phase, and then in the one before again.

    Examples:
        >>> import types
        >>> watcher = types.SimpleNamespace(phase="step", step=None)
        >>> watched_by(watcher)
        >>> with phase("input"):
        ...     watcher.phase
        'input'
        >>> watcher.phase
        'step'
        >>> _watchers.clear()
    """
    if not _watchers:
        yield
        return
    watcher = _watchers[0]
    before, watcher.phase = watcher.phase, name
    try:
        yield
    finally:
        watcher.phase = before


def count_steps(count: int = 1) -> None:
    """Some steps of all replicas have begun."""
    for watcher in _watchers:
        watcher.step = (watcher.step or 0) + count
