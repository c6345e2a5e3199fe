"""The file ``checkpoint`` of a directory: which checkpoints count, and which is the latest.

It is TensorFlow's, in the text format of protocol buffers, with a checksum in a comment. If it is
damaged, the complete checkpoints in the directory count.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell
from phalanx.train.checkpoints.directories import is_checkpoint, partial_of

__all__ = [
    "DirectoryState",
    "add_to_state",
    "change_state",
    "latest_checkpoint",
    "numbered",
    "path_of",
    "read_state",
]

_log = logging.getLogger("phalanx")

_STATE = "checkpoint"
_CHECKSUM = re.compile(r"# crc32: (\d+)\n")
_LINE = re.compile(r'^(\w+|# preserved): (?:"((?:[^"\\]|\\.)*)"|([-+.\deE]+))$', re.MULTILINE)
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
_LOCKED = 60.0  # seconds for which another process may hold the lock of a directory


@dataclass(frozen=True)
class DirectoryState:
    """The checkpoints of a directory.

    Args:
        names: of those that count, the latest last.
        times: when each of them was written, in seconds since 1970; empty if it is not known.
        preserved: those of them that are kept for good.
        preserved_until: the time of the last one that is kept for good, if there is one.
    """

    names: tuple[str, ...] = ()
    times: tuple[float, ...] = ()
    preserved: frozenset[str] = frozenset()
    preserved_until: float | None = None


def read_state(folder: Path, name: str = _STATE) -> DirectoryState:
    """What the file of a directory says; nothing if there is none."""
    try:
        data = (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return DirectoryState()
    try:
        return _parsed(data.decode())
    except ValueError as error:
        _log.warning(
            "The file %s is damaged: %s. The checkpoints that are in its directory count.",
            folder / name,
            error,
        )
        return _listed(folder)


def _parsed(text: str) -> DirectoryState:
    checksum = _CHECKSUM.match(text)
    if checksum and int(checksum[1]) != zlib.crc32(text[checksum.end() :].encode()):
        raise ValueError("its checksum does not fit")
    found: dict[str, list[str]] = {}
    for key, path, number in _LINE.findall(text):
        found.setdefault(key, []).append(_unescaped(path) or number)
    latest = found.get("model_checkpoint_path", [])[:1]
    if not latest:
        raise ValueError("it does not say which checkpoint is the latest")
    others = [path for path in found.get("all_model_checkpoint_paths", []) if path not in latest]
    times = tuple(map(float, found.get("all_model_checkpoint_timestamps", [])))
    names = (*others, *latest)
    until = found.get("last_preserved_timestamp")
    return DirectoryState(
        names,
        times if len(times) == len(names) else (),
        frozenset(found.get("# preserved", [])),
        float(until[0]) if until else None,
    )


def _escaped(name: str) -> str:
    return re.sub(r'[\\"\n\r]', lambda x: _ESCAPES[x[0]], name)


def _unescaped(text: str) -> str:
    plain = {escaped: name for name, escaped in _ESCAPES.items()}
    return re.sub(r"\\.", lambda x: plain.get(x[0], x[0]), text)


def _listed(folder: Path) -> DirectoryState:
    """The complete checkpoints of a directory, the newest last."""
    found = []
    for path in folder.iterdir():
        if not path.name.startswith(".") and is_checkpoint(path):
            found.append((path.stat().st_mtime, path.name))
    found.sort()
    # None is known to stay for good, so those that do are chosen again, from the oldest.
    names, times = tuple(name for _, name in found), tuple(time for time, _ in found)
    return DirectoryState(names, times, preserved_until=0.0)


def change_state(folder: Path, change: Callable[[DirectoryState], DirectoryState]) -> None:
    """Change what the file of a directory says, which others may do at the same time."""
    with _lock_of(folder):
        _write_state(folder, change(read_state(folder)))


def add_to_state(folder: Path, name: str) -> None:
    """Make a checkpoint the latest of its directory."""

    def change(state: DirectoryState) -> DirectoryState:
        times = state.times or [time_of(folder / each) for each in state.names]
        pairs = dict(zip(state.names, times, strict=True))
        there = [x for x in pairs if x != name and is_checkpoint(folder / x)]
        return replace(
            state,
            names=(*there, name),
            times=(*(pairs[each] for each in there), time.time()),
            preserved=state.preserved & set(there),
        )

    change_state(folder, change)


def time_of(path: Path) -> float:
    """When a checkpoint was written."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


@contextlib.contextmanager
def _lock_of(folder: Path) -> Iterator[None]:
    """Only one process changes the file of a directory, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end, pause = time.monotonic() + _LOCKED, Bell()
        while not _take_lock(descriptor):
            if time.monotonic() >= end:  # a process that is frozen must not keep others from saving
                _log.warning(
                    "Another process has held the lock of %s for %g seconds. The file %r there is "
                    "changed without it, so what that process changes may be lost.",
                    folder,
                    _LOCKED,
                    _STATE,
                )
                break
            pause.wait(0.01)
        yield
    finally:
        with contextlib.suppress(OSError):  # a process that was forked meanwhile keeps it open
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _take_lock(descriptor: int) -> bool:
    """Whether the lock is taken, or cannot be."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _write_state(folder: Path, state: DirectoryState) -> None:
    lines = [f'model_checkpoint_path: "{_escaped(state.names[-1])}"'] if state.names else []
    lines += [f'all_model_checkpoint_paths: "{_escaped(name)}"' for name in state.names]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in state.times]
    lines += [f'# preserved: "{_escaped(name)}"' for name in state.names if name in state.preserved]
    if state.preserved_until is not None:
        lines.append(f"last_preserved_timestamp: {state.preserved_until!r}")
    text = "\n".join([*lines, ""])
    fresh = partial_of(folder / _STATE)
    try:
        with open(fresh, "w") as file:
            file.write(f"# crc32: {zlib.crc32(text.encode())}\n{text}")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(folder / _STATE)
    finally:
        fresh.unlink(missing_ok=True)


def latest_checkpoint(checkpoint_dir: str, latest_filename: str | None = None) -> str | None:
    """The path of the newest checkpoint in a directory, None if there is none.

    Args:
        checkpoint_dir: the directory.
        latest_filename: the file that says which it is, by default ``checkpoint``.

    Examples:
        >>> import phalanx as px
        >>> px.train.latest_checkpoint("/no/such/directory") is None
        True
    """
    folder = path_of(checkpoint_dir)
    return newest(folder, read_state(folder, latest_filename or _STATE).names)


def newest(folder: Path, names: Sequence[str]) -> str | None:
    """The path of the last of some checkpoints that is there."""
    for name in reversed(names):
        if is_checkpoint(folder / name):
            return str(folder / name)
    return None


def path_of(given: Any) -> Path:
    """A path that the user gave."""
    if not isinstance(given, str | os.PathLike):
        raise InvalidTypeError(f"A checkpoint needs a path. Received: {shown(given)}")
    return Path(given)


def numbered(prefix: Any, number: int) -> Path:
    """The path of a checkpoint with a number: beside others, or in a directory that ends with a slash.

    >>> str(numbered("runs/ckpt", 3)), str(numbered("runs/", 3))
    ('runs/ckpt-3', 'runs/-3')
    """
    path = path_of(prefix)
    is_folder = os.fspath(prefix).endswith("/")
    return path / f"-{number}" if is_folder else path.with_name(f"{path.name}-{number}")
