"""What this process is doing, for those that watch it: in a job, the other workers.

The training thread writes plain attributes of the watcher, so that telling costs almost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from phalanx.runtime import laboratory


class Watcher(Protocol):
    """Where the phase and the number of steps are written."""

    phase: str
    step: int | None
    thread: int


_watchers: list[Watcher] = []
_checks: list[Callable[[], None]] = []


def watched_by(watcher: Watcher, check: Callable[[], None] | None = None) -> None:
    """Tell this watcher from now on, and no other.

    Args:
        watcher: who is told.
        check: raises if what the process does is in vain; see `check`.
    """
    watcher.step = 0
    _watchers[:] = [watcher]
    _checks[:] = [] if check is None else [check]


def watched_by_none() -> None:
    """Tell no watcher any more."""
    _watchers.clear()
    _checks.clear()


def check() -> None:
    """Raise if what this process does is in vain, because its job has failed.

    Code that waits for something of its own process calls this from time to time.
    """
    for each in _checks:
        each()


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
    watcher.thread = threading.get_ident()
    try:
        yield
    finally:
        watcher.phase = before


def count_steps(count: int = 1) -> None:
    """Some steps of all replicas have begun."""
    for watcher in _watchers:
        watcher.step = (watcher.step or 0) + count
    laboratory.reach("step")
