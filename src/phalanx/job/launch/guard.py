"""Ends the processes of a job when the process that started them is gone.

The launcher starts this file as a process of its own (it imports nothing but the standard library, so
that it starts in milliseconds) and writes to its standard input: ``mark M`` for the mark that the job's
processes carry, ``+P`` for the process group P that began, ``-P`` for one that ended, and ``bye``. If
the input ends without a ``bye``, the launcher has died, and all that is left of the job is ended.

A *mark* is a random text in the environment of a process. Children inherit it, so that they are found
even if they have left the process group. A program may start others with an environment of its own; so
on Linux the mark is also a number that stands in a limit which means nothing to ordinary processes: the
time that one may compute with real-time priority, as a bound of thousands of years. Children inherit
it in any case, and everybody may read it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import zlib
from collections.abc import Iterable

try:
    import resource
except ImportError:  # no Unix
    resource = None  # type: ignore[assignment]

MARK = "PHALANX_PROCESS_MARK"
"""The environment variable that holds the mark."""

_LIMIT = "Max realtime timeout"
_NAME_BITS = 24

TERM_SECONDS = 2.0
"""How long processes may take to end by themselves after a SIGTERM."""


def mark_process(pid: int, mark: str) -> None:
    """Give a process a mark that its children inherit whatever environment they get; Linux only."""
    _set_limit(pid, numbers(mark).start)


def unmark_this_process() -> None:
    """Take the mark off this process."""
    _set_limit(os.getpid(), None)


def _set_limit(pid: int, soft: int | None) -> None:
    if hasattr(resource, "prlimit"):
        with contextlib.suppress(OSError, ValueError):  # it is gone, or may have no such limit
            _, hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)
            resource.prlimit(pid, resource.RLIMIT_RTTIME, (hard if soft is None else soft, hard))


def numbers(mark: str) -> range:
    """The numbers that stand for a mark, and for those that begin with it: ``job`` or ``job/name/``.

    >>> job, process = numbers("00ff00ff00ff00ff"), numbers("00ff00ff00ff00ff/worker 0/")
    >>> len(job), len(process), process.start in job
    (16777216, 1, True)
    """
    job, _, name = mark.partition("/")
    first = (1 << 61) + (zlib.crc32(job.encode()) << _NAME_BITS)
    if not name:
        return range(first, first + (1 << _NAME_BITS))
    number = first + 1 + zlib.crc32(name.encode()) % ((1 << _NAME_BITS) - 1)
    return range(number, number + 1)


def marked(mark: str) -> list[int]:
    """The processes that have this mark, or one that begins with it; Linux only."""
    text, limits = f"{MARK}={mark}".encode(), numbers(mark)
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    if _limit_of(name) in limits or _has_text(name, text):
                        found.append(int(name))
    return found


def _has_text(pid: str, text: bytes) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return any(entry.startswith(text) for entry in file.read().split(b"\0"))


def _limit_of(pid: str) -> int:
    with open(f"/proc/{pid}/limits") as file:
        for line in file:
            if line.startswith(_LIMIT):
                soft = line[len(_LIMIT) :].split()[0]
                return int(soft) if soft.isdigit() else 0
    return 0


def send_to_group(group: int, signum: int) -> bool:
    """Send a signal to a process group; whether there was one."""
    try:
        for number in _heard(signum):
            os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: not permitted if all are zombies
        return False
    return True


def send_to_marked(mark: str, signum: int) -> bool:
    """Send a signal to every process with a mark; whether there was any."""
    pids = marked(mark) if mark else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            for number in _heard(signum):
                os.kill(pid, number)
    return bool(pids)


def _heard(signum: int) -> tuple[int, ...]:
    """What to send so that a stopped process, too, hears a signal that asks it to end."""
    asks = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return (signum, signal.SIGCONT) if signum in asks else (signum,)


def end_all(mark: str, groups: Iterable[int]) -> None:
    """End process groups and marked processes: SIGTERM, and SIGKILL to what is left."""
    groups = list(groups)

    def send(signum: int) -> bool:
        return any([*(send_to_group(g, signum) for g in groups), send_to_marked(mark, signum)])

    deadline = time.monotonic() + TERM_SECONDS
    alive = send(signal.SIGTERM)
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = send(0)
    deadline = time.monotonic() + TERM_SECONDS
    while send(signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)  # what is being forked while it is killed is found in the next round


def main() -> None:
    """Follow the launcher's messages until it says goodbye or dies."""
    unmark_this_process()  # where a job runs inside a job, the outer one must not end this process
    mark = ""
    groups: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "bye":
            return
        if word.startswith("mark "):
            mark = word[5:]
        elif word.startswith("+"):
            groups.add(int(word[1:]))
        elif word.startswith("-"):
            groups.discard(int(word[1:]))
    end_all(mark, groups)


if __name__ == "__main__":
    main()
