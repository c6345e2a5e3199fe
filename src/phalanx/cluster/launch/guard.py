"""Ends the processes of a job when the process that started them is gone.

The launcher starts this file as a process of its own (it imports nothing but the standard library, so
that it starts in milliseconds) and writes to its standard input: ``mark M`` for the mark that the job's
processes carry, ``+P`` for the process group P that began, ``-P`` for one that ended, and ``bye``. If
the input ends without a ``bye``, the launcher has died, and all that is left of the job is ended.

A *mark* is a random text in the environment of a process. Children inherit it, so that they are found
even if they have left the process group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable

MARK = "PHALANX_PROCESS_MARK"
"""The environment variable that holds the mark."""

TERM_SECONDS = 2.0
"""How long processes may take to end by themselves after a SIGTERM."""


def marked(mark: str) -> list[int]:
    """The processes whose environment has this mark, or one that begins with it; Linux only."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                    if any(entry.startswith(wanted) for entry in file.read().split(b"\0")):
                        found.append(int(name))
    return found


def send_to_group(group: int, signum: int) -> bool:
    """Send a signal to a process group; whether there was one."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):  # macOS: not permitted if all are zombies
        return False
    return True


def send_to_marked(mark: str, signum: int) -> bool:
    """Send a signal to every process with a mark; whether there was any."""
    pids = marked(mark) if mark else []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
    return bool(pids)


def end_all(mark: str, groups: Iterable[int], patience: float = TERM_SECONDS) -> None:
    """End process groups and marked processes: SIGTERM, and SIGKILL to what is left."""
    groups = list(groups)

    def send(signum: int) -> bool:
        return any([*(send_to_group(g, signum) for g in groups), send_to_marked(mark, signum)])

    deadline = time.monotonic() + patience
    alive = send(signal.SIGTERM)
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = send(0)
    deadline = time.monotonic() + patience
    while send(signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)  # what is being forked while it is killed is found in the next round


def main() -> None:
    """Follow the launcher's messages until it says goodbye or dies."""
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
