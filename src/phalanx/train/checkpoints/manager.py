"""`CheckpointManager`: the checkpoints of one directory, the newest of which stay."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from phalanx.core.variables.variable import Variable
from phalanx.errors import DataLossError, InvalidTypeError, InvalidValueError, NotFoundError
from phalanx.runtime import laboratory
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell
from phalanx.runtime.numbers import check_integer
from phalanx.train.checkpoints.calling import require_between_steps
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.checkpoints.directories import is_checkpoint, remove, remove_leftovers
from phalanx.train.checkpoints.retention import Kept, Retention
from phalanx.train.checkpoints.state import (
    DirectoryState,
    change_state,
    latest_checkpoint,
    path_of,
    read_state,
    time_of,
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
        self._checkpoint, self._given = checkpoint, path_of(directory)
        self._folder = self._given.absolute()  # the program may go to another directory
        self._retention = Retention(max_to_keep, keep_checkpoint_every_n_hours)
        self._name, self._init_fn = checkpoint_name, init_fn
        self._counter, self._interval = step_counter, checkpoint_interval
        self._last_step: int | None = None  # of the last checkpoint that is complete
        self._step_of_save: int | None = None  # of the last one that was begun
        self._clock = clock
        self._save_seconds: float | None = None
        self._lock = threading.Lock()  # a checkpoint may be completed by another thread
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        self._kept = self._found()

    def _found(self) -> Kept:
        """What is in the directory, also a checkpoint that was completed but not written down."""
        state = read_state(self._folder)
        times = self._times(state)
        pairs = {name: times[name] for name in self._numbers(times)}
        last = max(self._numbers(times).values(), default=-1)
        there = self._numbers(path.name for path in self._folder.iterdir())
        newer = sorted((number, name) for name, number in there.items() if number > last)
        pairs |= {name: time_of(self._folder / name) for _, name in newer}
        whole = [pair for pair in pairs.items() if is_checkpoint(self._folder / pair[0])]
        self._without_index = [name for name in pairs if self._has_no_index(name)]
        return Kept(
            tuple(pair for pair in whole if pair[0] not in state.preserved),
            tuple(pair for pair in whole if pair[0] in state.preserved),
            self._clock() if state.preserved_until is None else state.preserved_until,
        )

    def _times(self, state: DirectoryState) -> dict[str, float]:
        """The checkpoints that a directory's file names, in order, each with its time."""
        times = state.times or [time_of(self._folder / name) for name in state.names]
        return dict(zip(state.names, times, strict=True))

    def _has_no_index(self, name: str) -> bool:
        """Whether there is something under a name that is no checkpoint; no save leaves such behind."""
        path = self._folder / name
        return path.is_dir() and not is_checkpoint(path)

    def _numbers(self, names: Iterable[str]) -> dict[str, int]:
        """The names of this manager's checkpoints, and their numbers; others may be there, too."""
        matches = (re.fullmatch(rf"{re.escape(self._name)}-(\d+)", name) for name in names)
        return {match[0]: int(match[1]) for match in matches if match is not None}

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._given)

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
        """The paths of the checkpoints that stay for now, the newest last.

        One that is being saved in the background comes in when it is complete; see `sync`.
        """
        return [str(self._given / name) for name, _ in self._kept.current]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint that is complete, None if there is none."""
        found = self._kept.current or self._kept.preserved
        return str(self._given / found[-1][0]) if found else None

    @property
    def save_seconds(self) -> float | None:
        """How long the last save has taken until it was complete; None if there was none."""
        return self._save_seconds

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
        require_between_steps("CheckpointManager.save")
        step = None if self._counter is None else int(self._counter)
        if check_interval and not self._is_due(step):
            self._checkpoint.raise_failure()
            return None
        # If the checkpoint before has failed, that is raised later, where the other workers are told,
        # and after this one is counted: perhaps it has failed on this worker only.
        self._checkpoint.settle()
        counter = self._checkpoint.save_counter
        counter.assign_add(1)
        number = int(counter) if checkpoint_number is None else int(checkpoint_number)
        name = f"{self._name}-{number}"
        self._step_of_save = step
        begun = time.monotonic()

        def written() -> None:
            self._written(name, step)
            self._save_seconds = time.monotonic() - begun

        def followed() -> None:
            self._refresh(step)
            self._save_seconds = time.monotonic() - begun

        self._checkpoint.write_then(self._folder / name, options, written, followed, positions)
        return str(self._given / name)

    def sync(self) -> None:
        """Wait for a checkpoint that is being written, and raise what went wrong with it."""
        self._checkpoint.sync()

    def _written(self, name: str, step: int | None) -> None:
        """A checkpoint is complete: write it down, and remove what is too much."""
        with self._lock:
            kept, removed = self._retention.after(self._kept, name, self._clock())
            change_state(self._folder, lambda state: self._noted(state, kept))
            self._kept, self._last_step = kept, step
        for old in removed:
            laboratory.note("removed", path=str((self._folder / old).absolute()))
            remove(self._folder / old)

    def _noted(self, state: DirectoryState, kept: Kept) -> DirectoryState:
        """What the directory's file says of it; checkpoints with other names stay as they are."""
        times = self._times(state)
        others = {name: times[name] for name in times if name not in self._numbers(times)}
        pairs = {**others, **dict(kept.preserved), **dict(kept.current)}
        preserved = (state.preserved & others.keys()) | dict(kept.preserved).keys()
        until = kept.preserved_until if self._retention.hours is not None else state.preserved_until
        return DirectoryState(tuple(pairs), tuple(pairs.values()), preserved, until)

    def _refresh(self, step: int | None) -> None:
        """Another worker has completed a checkpoint."""
        with self._lock:
            self._kept, self._last_step = self._found(), step

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint, or call `init_fn` if there is none; returns its path.

        If the newest one is damaged, the one before it is restored, with a warning, and so on. If none
        is whole, that is an error: a training does not begin from nothing unnoticed.
        """
        self.sync()  # what is being saved counts
        present = [*self._kept.preserved, *self._kept.current]
        damaged = [str(self._given / name) for name in self._without_index if self._has_no_index(name)]
        for path in damaged:
            _log.warning("%s is damaged and is not restored: it has no index.", path)
        if damaged and not present:
            raise DataLossError(
                "There is no whole checkpoint to restore. To begin anew, remove what is left. "
                f"Received: {shown(damaged[-1])}, which has no index"
            )
        while present:
            newest = present.pop()
            path = str(self._given / newest[0])
            try:
                status = self._checkpoint.restore(path)
            except (DataLossError, NotFoundError) as error:
                if not present:
                    raise
                self._kept = self._kept.with_damaged(newest)
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
        last = self._step_of_save if self._checkpoint.is_saving else self._last_step
        if self._interval is None or step is None or last is None:
            return True
        return step - last >= self._interval


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
