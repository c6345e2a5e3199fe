"""`CheckpointManager`: the checkpoints of one directory, the newest of which stay."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from phalanx.core.variables import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell
from phalanx.train.checkpoint import Checkpoint, latest_checkpoint, read_state, update_state
from phalanx.train.checkpoint_files import is_checkpoint, remove, remove_leftovers

__all__ = ["CheckpointManager", "checkpoints_iterator", "wait_for_new_checkpoint"]

_log = logging.getLogger("phalanx")

_POLL = 1.0  # seconds between looks into a directory
_WARN_EVERY = 60.0


class CheckpointManager:
    """Saves checkpoints into a directory and removes old ones.

    What is in the directory when the manager is made counts too, so training that goes on after a
    restart keeps the right ones.

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
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidTypeError(
                f"`checkpoint` must be a px.train.Checkpoint. Received: {shown(checkpoint)}"
            )
        if max_to_keep is not None and not max_to_keep > 0:
            raise InvalidValueError(
                f"`max_to_keep` must be a positive number or None. Received: {shown(max_to_keep)}"
            )
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidValueError(
                "`checkpoint_interval` counts steps, so it needs a `step_counter`. "
                f"Received: checkpoint_interval={shown(checkpoint_interval)}"
            )
        self._checkpoint, self._folder = checkpoint, Path(directory)
        self._most, self._hours = max_to_keep, keep_checkpoint_every_n_hours
        self._name, self._init_fn = checkpoint_name, init_fn
        self._counter, self._interval = step_counter, checkpoint_interval
        self._last_step: int | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._folder)
        names = dict.fromkeys(read_state(self._folder))
        self._names = [name for name in names if is_checkpoint(self._folder / name)]
        self._kept_until = time.time()
        self._preserved: set[str] = set()

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
        return [str(self._folder / name) for name in self._names if name not in self._preserved]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, None if there is none."""
        return str(self._folder / self._names[-1]) if self._names else None

    def save(
        self, checkpoint_number: int | None = None, check_interval: bool = True, options: Any = None
    ) -> str | None:
        """Save a checkpoint, and remove those that are too many; returns its path.

        Args:
            checkpoint_number: the number in its name; the default counts.
            check_interval: whether nothing happens, and None is returned, before
                `checkpoint_interval` steps have been made since the last one.
            options: not used.
        """
        step = None if self._counter is None else int(self._counter)
        if check_interval and not self._is_due(step):
            return None
        counter = self._checkpoint.save_counter
        counter.assign_add(1)
        number = int(counter) if checkpoint_number is None else int(checkpoint_number)
        name = f"{self._name}-{number}"
        path = self._checkpoint.write(str(self._folder / name))
        self._last_step = step
        self._names = [*(n for n in self._names if n != name), name]
        removed = self._swept()
        update_state(self._folder, name, self._names)
        for old in removed:
            remove(self._folder / old)
        return path

    def restore_or_initialize(self) -> str | None:
        """Restore the newest checkpoint, or call `init_fn` if there is none; returns its path."""
        path = self.latest_checkpoint
        if path is not None:
            self._checkpoint.restore(path)
            self._last_step = None if self._counter is None else int(self._counter)
        elif self._init_fn is not None:
            self._init_fn()
        return path

    def _is_due(self, step: int | None) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return True
        return step - self._last_step >= self._interval

    def _swept(self) -> list[str]:
        """Take the names off the list that are too many."""
        removed = []
        usual = [name for name in self._names if name not in self._preserved]
        while self._most is not None and len(usual) > self._most:
            name = usual.pop(0)
            if self._is_to_be_preserved(name):
                self._preserved.add(name)
            else:
                removed.append(name)
        self._names = [name for name in self._names if name not in removed]
        return removed

    def _is_to_be_preserved(self, name: str) -> bool:
        if self._hours is None:
            return False
        written = (self._folder / name).stat().st_mtime
        if written - self._kept_until < self._hours * 3600:
            return False
        self._kept_until = written
        return True


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
