"""Where checkpoints lie: directories that get their names when they are complete."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from phalanx.errors import AlreadyExistsError
from phalanx.runtime import laboratory
from phalanx.runtime.file_names import exchange_names
from phalanx.runtime.formatting import shown
from phalanx.runtime.processes import is_alive

__all__ = [
    "INDEX",
    "begin",
    "discard",
    "flush_folder",
    "is_checkpoint",
    "is_orbax",
    "machine",
    "partial_of",
    "put_in_place",
    "remove",
    "remove_leftovers",
]

INDEX = "index.json"
_PARTIAL = ".partial"
_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
_OURS = re.compile(r"arrays-\d+|part-\d+\.json(\.new)?|index\.json(\.new)?")
_LONGEST_SAVE = 86400.0  # seconds; what another machine has not written to for longer is left over

_begun: set[str] = set()  # names of what this process writes, or has written


def begin(path: Path) -> Path:
    """Make the directory in which a checkpoint is written before it gets its name."""
    check_target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    partial.mkdir()
    return partial


def check_target(path: Path) -> None:
    """Refuse to write over what is no checkpoint."""
    if os.path.lexists(path) and not _is_replaceable(path):
        raise AlreadyExistsError(
            "A checkpoint is a directory of its own, and takes the place of an earlier one only. There "
            f"is something else. Choose another path, or remove it. Received: {shown(str(path))}"
        )


def _is_replaceable(path: Path) -> bool:
    """Whether there is a checkpoint, perhaps a damaged one, or an empty directory."""
    if path.is_symlink() or not path.is_dir():
        return False
    return is_orbax(path) or all(_OURS.fullmatch(name) for name in os.listdir(path))


def partial_of(path: Path) -> Path:
    """What a file or a directory is called before it is complete; tells which process writes it."""
    mark = f"{machine()}@{os.getpid()}@{secrets.token_hex(4)}"
    partial = path.with_name(f".{path.name}@{mark}{_PARTIAL}")
    _begun.add(partial.name)
    return partial


def machine() -> str:
    """The name of this machine, and which numbers of processes count in it.

    Containers may share a name and a directory, and do not see the processes of each other.
    """
    namespace = ""
    with contextlib.suppress(OSError):  # a system without such namespaces
        namespace = f"-{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{socket.gethostname()}{namespace}"


def flush_folder(folder: Path) -> None:
    """Make sure that the names in a directory are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(partial: Path, path: Path) -> None:
    """Give a directory its name; one that has it already goes, in the same moment if possible."""
    check_target(path)  # it may have come meanwhile
    laboratory.reach("commit", path=str(path.absolute()))
    if path.exists() and exchange_names(partial, path):
        flush_folder(path.parent)
        shutil.rmtree(partial, ignore_errors=True)
        return
    try:
        os.rename(partial, path)
    except OSError:
        if not path.exists():
            raise
        remove(path)
        os.rename(partial, path)
    flush_folder(path.parent)


def is_checkpoint(path: Path) -> bool:
    """Whether there is a complete checkpoint."""
    return os.path.isfile(path / INDEX) or is_orbax(path)


def is_orbax(path: Path) -> bool:
    """Whether there is a checkpoint in the format of Orbax."""
    return any(os.path.exists(path / name) for name in _ORBAX)  # False for names that cannot be


def remove(path: Path) -> None:
    """Remove a checkpoint; those who read it at this moment still can."""
    aside = path.parent / f".{path.name}.{secrets.token_hex(4)}.removed"
    with contextlib.suppress(FileNotFoundError):  # another process was quicker
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)


def discard(partial: Path) -> None:
    """Remove what was begun. Other processes may still write there, and find it gone."""
    with contextlib.suppress(OSError):
        remove(partial)


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what processes began to write, under a name, and died over.

    Of another machine or container, or one that had another name then, it is what was not written to
    for a day.
    """
    own = machine()
    for path in folder.glob(f".{name}@*{_PARTIAL}"):
        *_, host, pid, _ = ("", "", *path.name.split("@"))
        if not pid.isdigit() or path.name in _begun:
            continue
        # A number that is that of this process was that of another one, which has ended.
        is_over = int(pid) == os.getpid() or not is_alive(int(pid))
        if is_over if host == own else time.time() - _written_at(path) > _LONGEST_SAVE:
            _remove_at_once(path)
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 8}.removed"):
        shutil.rmtree(path, ignore_errors=True)


def _written_at(path: Path) -> float:
    """When something was last written to a file, or to the files of a directory."""
    times = [time.time()]  # if it is gone
    with contextlib.suppress(OSError):
        times = [each.stat().st_mtime for each in (path, *(path.iterdir() if path.is_dir() else ()))]
    return max(times)


def _remove_at_once(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
