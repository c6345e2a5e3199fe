"""`CheckpointManager`: the checkpoints of one directory, the newest of which stay."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.core.variables.variable import Variable
from phalanx.errors import DataLossError, InvalidTypeError, InvalidValueError, NotFoundError
from phalanx.runtime import laboratory
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell
from phalanx.runtime.numbers import check_integer
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.checkpoints.files import is_checkpoint, remove, remove_leftovers
from phalanx.train.checkpoints.retention import Kept, Retention
from phalanx.train.checkpoints.state import (
    DirectoryState,
    latest_checkpoint,
    path_of,
    read_state,
    update_state,
)

__all__ = ["CheckpointManager", "checkpoints_iterator", "wait_for_new_checkpoint"]

_log = logging.getLogger("phalanx")

_POLL = 1.0  # seconds between looks into a directory
_WARN_EVERY = 60.0


class CheckpointManager:
    """Saves checkpoints into a directory and removes old ones.

    What is in the directory when the manager is made counts too, so training that goes on after a
    restart keeps the right ones. An old checkpoint is removed only when a newer one is complete.

    Args:
        checkpoint: what to save.
        directory: where; made if it is not there.
        max_to_keep: how many of the newest checkpoints stay; None keeps all.
        keep_checkpoint_every_n_hours: besides, one checkpoint of every so many hours stays.
        checkpoint_name: the name of the checkpoints, before the number.
        step_counter: a variable or number that counts steps, for `checkpoint_interval`.
        checkpoint_interval: how many steps there must be between checkpoints; `save` does nothing
            before.
        init_fn: called by `restore_or_initialize` if there is no checkpoint.
        clock: gives the time in seconds since 1970.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> step = px.Variable(0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = px.train.CheckpointManager(
        ...         px.train.Checkpoint(step=step), folder, max_to_keep=2
        ...     )
        ...     for _ in range(3):
        ...         path = manager.save()
        ...     [path.rpartition("/")[2] for path in manager.checkpoints]
        ['ckpt-2', 'ckpt-3']
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str,
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Variable | None = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidTypeError(
                f"`checkpoint` must be a px.train.Checkpoint. Received: {shown(checkpoint)}"
            )
        if max_to_keep is not None:
            check_integer(max_to_keep, "max_to_keep", 1)
        if not checkpoint_name or Path(checkpoint_name).name != checkpoint_name:
            raise InvalidValueError(
                "`checkpoint_name` is the beginning of a name in `directory`, without slashes. "
                f"Received: {shown(checkpoint_name)}"
            )
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidValueError(
                "`checkpoint_interval` counts steps, so it needs a `step_counter`. "
                f"Received: checkpoint_interval={shown(checkpoint_interval)}"
            )
        self._checkpoint, self._folder = checkpoint, path_of(directory)
        self._retention = Retention(max_to_keep, keep_checkpoint_every_n_hours)
        self._name, self._init_fn = checkpoint_name, init_fn
        self._counter, self._interval = step_counter, checkpoint_interval
        self._last_step: int | None = None
        self._clock = clock
        self._lock = threading.Lock()  # a checkpoint may be completed by another thread
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        self._kept = self._found()

    def _found(self) -> Kept:
        """What is in the directory, also a checkpoint that was completed but not written down."""
        state = read_state(self._folder)
        times = state.times or [self._time_of(name) for name in state.names]
        pairs = dict(zip(state.names, times, strict=True))
        last = max((n for name in pairs if (n := self._number_of(name)) is not None), default=-1)
        newer = {
            number: path.name
            for path in self._folder.glob(f"{self._name}-*")
            if (number := self._number_of(path.name)) is not None and number > last
        }
        pairs |= {newer[number]: self._time_of(newer[number]) for number in sorted(newer)}
        there = tuple((name, t) for name, t in pairs.items() if is_checkpoint(self._folder / name))
        self._without_index = [name for name in pairs if self._has_no_index(name)]
        if self._retention.hours is None or state.preserved_until is None:
            return Kept(there, (), self._clock())
        until = state.preserved_until
        preserved = tuple(pair for pair in there if pair[1] <= until)
        return Kept(there[len(preserved) :], preserved, until)

    def _has_no_index(self, name: str) -> bool:
        """Whether there is something under a name that is no checkpoint; no save leaves such behind."""
        path = self._folder / name
        return path.is_dir() and not is_checkpoint(path)

    def _number_of(self, name: str) -> int | None:
        match = re.fullmatch(rf"{re.escape(self._name)}-(\d+)", name)
        return None if match is None else int(match[1])

    def _time_of(self, name: str) -> float:
        try:
            return (self._folder / name).stat().st_mtime
        except OSError:
            return self._clock()

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._folder)

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """How many steps there must be between checkpoints."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that stay for now, the newest last."""
        return [str(self._folder / name) for name, _ in self._kept.current]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint that is complete, None if there is none."""
        current = self._kept.current
        return str(self._folder / current[-1][0]) if current else None

    def save(
        self, checkpoint_number: int | None = None, check_interval: bool = True, options: Any = None
    ) -> str | None:
        """Save a checkpoint, and remove those that are too many; returns its path.

        Args:
            checkpoint_number: the number in its name; the default counts.
            check_interval: whether nothing happens, and None is returned, before
                `checkpoint_interval` steps have been made since the last one.
            options: `px.train.CheckpointOptions`.
        """
        return self.save_at(checkpoint_number, check_interval, options)

    def save_at(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = False,
        options: Any = None,
        positions: Mapping[str, Any] | None = None,
    ) -> str | None:
        """As `save`, with positions of iterators in place of the present ones; see `Checkpoint`."""
        step = None if self._counter is None else int(self._counter)
        if check_interval and not self._is_due(step):
            return None
        self.sync()
        counter = self._checkpoint.save_counter
        counter.assign_add(1)
        number = int(counter) if checkpoint_number is None else int(checkpoint_number)
        name = f"{self._name}-{number}"
        self._checkpoint.write_then(
            self._folder / name, options, lambda: self._written(name), self._refresh, positions
        )
        self._last_step = step
        return str(self._folder / name)

    def sync(self) -> None:
        """Wait for a checkpoint that is being written, and raise what went wrong with it."""
        self._checkpoint.sync()

    def _written(self, name: str) -> None:
        """A checkpoint is complete: write it down, and remove what is too much."""
        with self._lock:
            kept, removed = self._retention.after(self._kept, name, self._clock())
            names, times = zip(*kept.preserved, *kept.current, strict=True)
            until = kept.preserved_until if self._retention.hours is not None else None
            update_state(self._folder, DirectoryState(names, times, until))
            self._kept = kept
        for old in removed:
            laboratory.note("removed", path=str((self._folder / old).absolute()))
            remove(self._folder / old)

    def _refresh(self) -> None:
        """Another worker has completed a checkpoint."""
        with self._lock:
            self._kept = self._found()

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint, or call `init_fn` if there is none; returns its path.

        If the newest one is damaged, the one before it is restored, with a warning, and so on. If none
        is whole, that is an error: a training does not begin from nothing unnoticed.
        """
        present = [*self._kept.preserved, *self._kept.current]
        damaged = [str(self._folder / name) for name in self._without_index if self._has_no_index(name)]
        for path in damaged:
            _log.warning("%s is damaged and is not restored: it has no index.", path)
        if damaged and not present:
            raise DataLossError(
                "There is no whole checkpoint to restore. To begin anew, remove what is left. "
                f"Received: {shown(damaged[-1])}, which has no index"
            )
        while present:
            newest = present.pop()
            path = str(self._folder / newest[0])
            try:
                status = self._checkpoint.restore(path)
            except (DataLossError, NotFoundError) as error:
                if not present:
                    raise
                self._kept = self._kept.with_first(newest)  # it goes before those that are whole
                _log.warning("%s is not restored, but the checkpoint before it: %s", path, error)
                continue
            self._last_step = None if self._counter is None else int(self._counter)
            for what, names in (
                ("no values for", status.missing),
                ("values that no object takes:", status.lost),
            ):
                if names:
                    _log.warning("%s was restored, but it has %s %s.", path, what, ", ".join(names))
            return path
        if self._init_fn is not None:
            self._init_fn()
        return None

    def _is_due(self, step: int | None) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return True
        return step - self._last_step >= self._interval


def wait_for_new_checkpoint(
    checkpoint_dir: str,
    last_checkpoint: str | None = None,
    seconds_to_sleep: float = _POLL,
    timeout: float | None = None,
    *,
    bell: Bell | None = None,
) -> str | None:
    """Wait until a directory has another newest checkpoint; returns its path.

    Args:
        checkpoint_dir: the directory, which may not be there yet.
        last_checkpoint: the newest checkpoint that is known already.
        seconds_to_sleep: how often to look.
        timeout: after how many seconds to give up and return None; None waits as long as it takes,
            and says so each minute.
        bell: ends the wait when it rings.
    """
    bell = bell or Bell()
    begun = told = time.monotonic()
    end = math.inf if timeout is None else begun + timeout
    while True:
        path = latest_checkpoint(checkpoint_dir)
        if path is not None and path != last_checkpoint:
            return path
        now = time.monotonic()
        if now >= end or bell.wait(min(seconds_to_sleep, end - now)):
            return None
        if now - told >= _WARN_EVERY:
            told = now
            _log.warning(
                "There has been no new checkpoint in %s for %.0f seconds.", checkpoint_dir, now - begun
            )


def checkpoints_iterator(
    checkpoint_dir: str,
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields the path of each newest checkpoint of a directory, as they come.

    Checkpoints that are not the newest any more when they are asked for are passed over.

    Args:
        checkpoint_dir: the directory, which may not be there yet.
        min_interval_secs: at least so many seconds lie between two checkpoints.
        timeout: after how many seconds without a new checkpoint to stop.
        timeout_fn: called then; if it returns False, the wait goes on.

    Examples:
        >>> import tempfile
        >>> import phalanx as px
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = px.train.Checkpoint(w=px.Variable(1.0)).save(f"{folder}/ckpt")
        ...     [path.rpartition("/")[2] for path in px.train.checkpoints_iterator(folder, timeout=0)]
        ['ckpt-1']
    """
    last: str | None = None
    pause = Bell()
    while True:
        begun = time.monotonic()
        path = wait_for_new_checkpoint(checkpoint_dir, last, timeout=timeout)
        if path is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        last = path
        yield path
        left = begun + min_interval_secs - time.monotonic()
        if left > 0:
            pause.wait(left)
