"""What outlives a server: the folder of a run, with its log and its snapshots.

Log number n has the requests since snapshot number n was taken (number 0 has all of them). When a
snapshot is written, the logs and the snapshots before it go.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import InvalidValueError, PhalanxError
from phalanx.job.registry import runtime_folder
from phalanx.net.addresses import split_address
from phalanx.parameter_server.commands import perform
from phalanx.parameter_server.journal import Journal, read_journal
from phalanx.parameter_server.snapshots import load_snapshot, records_of, sync_folder, write_snapshot
from phalanx.parameter_server.store import Store
from phalanx.runtime.formatting import shown

__all__ = ["Durability", "Keeper", "default_folder", "fresh_store"]

_log = logging.getLogger(__name__)

_MODES = ("none", "snapshot", "log")
_DESCRIPTION = "run.json"
_SPARE = "spare"  # a log that is not needed any more
_NEW_FOLDERS = 3  # around the folder of a run: of the server, of all servers, and one more


@dataclass(frozen=True)
class Durability:
    """What of a server outlives its process.

    Args:
        mode: "none": nothing. "snapshot": what it held at the last snapshot. "log": all that it has
            acknowledged.
        sync: whether the log also survives the death of the machine. Each acknowledgement then waits
            for the disk.
        interval: seconds between snapshots, for "snapshot"; there is another one as soon as there are
            new variables or optimizers.
        limit: bytes of a log after which there is a snapshot, for "log".
    """

    mode: str = "none"
    sync: bool = False
    interval: float = 30.0
    limit: int = 1 << 30

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise InvalidValueError(
                f"durability must be one of {', '.join(map(repr, _MODES))}. "
                f"Received: {shown(self.mode)}"
            )


def default_folder(address: str) -> Path:
    """Where the server at an address keeps its runs.

    In PHALANX_SERVER_FOLDER, or where running jobs have their files.
    """
    base = os.environ.get("PHALANX_SERVER_FOLDER", "")
    name = f"ps-{split_address(address)[1]}"
    return (Path(base) if base else runtime_folder() / "servers") / name


def fresh_store() -> Store:
    """An empty store, whose versions no task has seen before."""
    return Store(version=secrets.randbits(62) + 1)


class Keeper:
    """Keeps what a store holds in a folder. For one thread, except `busy`'s.

    Args:
        folder: of the run.
        durability: what to keep.
        later: runs something in the thread that uses the keeper.
    """

    def __init__(
        self, folder: Path, durability: Durability, later: Callable[[Callable[[], None]], None]
    ) -> None:
        self._folder, self.durability, self._later = folder, durability, later
        self._journal: Journal | None = None
        self._number = 0
        self._written = time.monotonic()
        self._has_changed = False
        self._saved: set[tuple[str, int]] = set()  # what the latest snapshot has
        self._writer: threading.Thread | None = None

    @classmethod
    def begin(
        cls, folder: Path, durability: Durability, later: Callable[[Callable[[], None]], None]
    ) -> Keeper:
        """Begin a run in a new folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        with open(folder / _DESCRIPTION, "w") as file:
            json.dump(vars(durability), file)
            file.flush()
            if durability.sync:
                os.fsync(file.fileno())
        keeper = cls(folder, durability, later)
        keeper._journal = keeper._opened(0)
        if durability.sync:  # a file is there after a crash if its folder is, and so on
            for parent in list(folder.parents)[:_NEW_FOLDERS]:
                sync_folder(parent)
        return keeper

    @classmethod
    def resume(
        cls, folder: Path, later: Callable[[Callable[[], None]], None]
    ) -> tuple[Keeper, Store] | None:
        """Go on with a run as its folder has it; None if nothing was kept."""
        try:
            described = json.loads((folder / _DESCRIPTION).read_text())
        except (OSError, ValueError):
            return None
        keeper = cls(folder, Durability(**described), later)
        store = fresh_store()
        if not keeper._load(store):
            return None
        keeper._saved = _made(store)
        keeper._journal = keeper._opened(keeper._number)
        return keeper, store

    @property
    def log_size(self) -> int:
        """Bytes of the log since the last snapshot."""
        return 0 if self._journal is None else self._journal.size

    def note(self, buffers: Any) -> None:
        """A request has changed the store."""
        self._has_changed = True
        if self._journal is not None:
            self._journal.append(buffers)

    def sync(self) -> None:
        """Let the disk have what was noted."""
        if self._journal is not None:
            self._journal.sync()

    def take_care(self, store: Store) -> None:
        """Take a snapshot if it is time for one; call this now and then."""
        durability = self.durability
        if self._writer is not None or not self._has_changed:
            return
        if durability.mode == "log":
            # Replaying costs about as much as reading a snapshot of the same size.
            held = sum(h.value.nbytes for h in store.variables.values())
            is_time = self.log_size > max(durability.limit, 2 * held)
        else:  # without a variable, or an optimizer, tasks could not go on
            is_time = time.monotonic() - self._written >= durability.interval
            is_time |= not _made(store) <= self._saved
        if is_time:
            self.snapshot(store)

    def snapshot(self, store: Store) -> threading.Thread:
        """Begin to write a snapshot of what the store holds now; returns who writes it."""
        number, before = self._number + 1, self._journal
        if before is not None:
            before.trim()  # only the last log may have an end that does not count
        self._journal = self._opened(number)
        self._number = number
        self._has_changed = False
        self._written = time.monotonic()
        if before is not None:
            before.close()
        records = records_of(store)
        self._saved = _made(store)
        must_sync = self.durability.sync or self.durability.mode != "log"  # as the log itself

        def write() -> None:
            try:
                write_snapshot(self._path("snapshot", number), records, sync=must_sync)
            except (OSError, PhalanxError):
                _log.exception("A parameter server could not write a snapshot")
                self._later(self._failed)
            else:
                self._later(lambda: self._clean(number))
            records.clear()

        writer = threading.Thread(target=write, name="phalanx-snapshot", daemon=True)
        self._writer = writer
        writer.start()  # which may be done, and forgotten, at once
        return writer

    def close(self, *, forget: bool = False) -> None:
        """Stop; what is in the folder stays there, or goes."""
        if self._writer is not None:
            self._writer.join(60.0)
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if forget:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- inside ----------------------------------------------------------------------------------

    def _path(self, kind: str, number: int) -> Path:
        return self._folder / f"{kind}-{number:08d}"

    def _numbers(self, kind: str) -> list[int]:
        found = [p.name.removeprefix(f"{kind}-") for p in self._folder.glob(f"{kind}-*")]
        return sorted(int(text) for text in found if text.isdigit())

    def _opened(self, number: int) -> Journal | None:
        """The log of this number, if there are logs."""
        if self.durability.mode != "log":
            return None
        path, spare = self._path("log", number), self._folder / _SPARE
        is_new = not path.exists()
        try:
            journal = Journal(path, spare, sync=self.durability.sync)
            if self.durability.sync:
                sync_folder(self._folder)
        except OSError:
            if is_new:  # the log before goes on, and must stay the last one
                path.unlink(missing_ok=True)
            raise
        return journal

    def _load(self, store: Store) -> bool:
        snapshots, logs = self._numbers("snapshot"), self._numbers("log")
        if snapshots:
            self._number = snapshots[-1]
            load_snapshot(self._path("snapshot", self._number), store)
        for number in [n for n in logs if n >= self._number]:
            for record in read_journal(self._path("log", number), may_be_torn=number == logs[-1]):
                perform(store, record)
            self._number = number
        return bool(snapshots or logs)

    def _clean(self, number: int) -> None:
        """A snapshot is written: what was before it is not needed any more."""
        self._writer = None
        for kind in ("log", "snapshot"):
            for old in [self._path(kind, n) for n in self._numbers(kind) if n < number]:
                if kind == "log" and old.stat().st_size <= 2 * self.durability.limit:
                    old.replace(self._folder / _SPARE)  # the next log is written over it
                else:
                    old.unlink(missing_ok=True)

    def _failed(self) -> None:
        self._writer = None
        self._has_changed = True


def _made(store: Store) -> set[tuple[str, int]]:
    """The variables and optimizers of a store."""
    return {("variable", v) for v in store.variables} | {("optimizer", o) for o in store.optimizers}
