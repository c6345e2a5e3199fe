"""Threads look where the main thread is, which calls and returns, while garbage is collected.

The arguments are the way of looking ("phalanx", or "frames" for `sys._current_frames`, which
Python 3.11 does not survive), the seconds, and the number of threads that look.
"""

from __future__ import annotations

import gc
import sys
import threading
import time

from phalanx.runtime.call_site import where_is
from phalanx.runtime.thread_stacks import all_stacks

MAIN = threading.get_ident()
MOST = 30  # pieces of garbage at a time
over = threading.Event()


class Garbage:
    """Is collected as part of a cycle; in another thread its end lets the main thread run."""

    count = 0

    def __init__(self) -> None:
        self.own = self
        Garbage.count += 1

    def __del__(self) -> None:
        Garbage.count -= 1
        if threading.get_ident() != MAIN:
            time.sleep(0.0002)


def calls(depth: int, rounds: int) -> int:
    """Call and return, and now and then look at the frames of this thread, which must be those."""
    if Garbage.count < MOST:
        Garbage()
    if depth:
        return calls(depth - 1, rounds)
    if rounds % 50:  # mostly, only the others ask for frames
        return -1
    count, frame = 0, sys._getframe()  # type: int, FrameType | None
    while frame is not None:
        count += frame.f_code.co_name == "calls"
        frame = frame.f_back
    return count


def by_frames() -> None:
    """As it was: objects for the frames of the other thread."""
    frame = sys._current_frames().get(MAIN)
    while frame is not None:
        assert frame.f_code.co_filename
        frame = frame.f_back


def by_phalanx() -> None:
    """As it is."""
    where_is(MAIN)
    all_stacks()


def look(way: str) -> None:
    """Look until it is over."""
    while not over.is_set():
        by_frames() if way == "frames" else by_phalanx()
        time.sleep(0.0001)


def main(way: str, seconds: float, walkers: int) -> None:
    """Call and return until the time is over."""
    gc.set_threshold(20, 5, 5)
    sys.setswitchinterval(1e-4)
    threads = [threading.Thread(target=look, args=(way,), daemon=True) for _ in range(walkers)]
    for thread in threads:
        thread.start()
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        depth = 5 + rounds % 40
        assert calls(depth, rounds) in (depth + 1, -1)
        rounds += 1
    over.set()
    for thread in threads:
        thread.join(30.0)
    print(f"survived {rounds} rounds", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
