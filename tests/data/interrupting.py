"""Interrupts at random moments, and at every moment."""

from __future__ import annotations

import dis
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from phalanx.runtime.interrupts import _Delayed


class Interrupt(BaseException):
    """What the signal handler raises."""


class SoftInterrupt(Exception):
    """What a handler raises that uses exceptions of its own."""


def _raise(kind: type[BaseException]) -> Callable[[int, FrameType | None], None]:
    def handler(number: int, frame: FrameType | None) -> None:
        raise kind

    return handler


@contextmanager
def alarms(kind: type[BaseException] = Interrupt) -> Iterator[None]:
    """Let alarms raise an exception."""
    before = signal.signal(signal.SIGALRM, _raise(kind))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted_loop(
    iterator: Any, rng: random.Random, most: float, interrupts: tuple[type[BaseException], ...]
) -> tuple[list[Any], int]:
    """All elements of an iterator, and how many interrupts came, one each `most` seconds or earlier."""
    found: list[Any] = []
    count, end = 0, time.monotonic() + 60
    while time.monotonic() < end:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, most))
            for element in iterator:
                found.append(element)
            signal.setitimer(signal.ITIMER_REAL, 0)
            return found, count
        except interrupts:
            count += 1
    raise AssertionError(f"no end in sight after {len(found)} elements and {count} interrupts")


_HANDLERS_RUN_AFTER = ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")


def interrupt_at(number: int, call: Callable[[], Any], within: tuple[str, ...] = ("",)) -> bool:
    """Call something, and interrupt it at the given moment; whether it ended before.

    Moments are those at which Python runs handlers: after calls of C functions, at the beginning of
    functions and at the end of rounds of loops, but not in uninterrupted sections. Only those in files
    count whose names have one of the words of `within`.
    """
    moments = 0
    last: dict[FrameType, str] = {}  # the last step of each function that runs

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal moments
        frame.f_trace_opcodes = True  # without lines, Python 3.13 tells no steps either
        if event == "call" and frame.f_back is not None and last.get(frame.f_back) == "CALL":
            last[frame.f_back] = ""  # what was called is no C function, so that nothing runs behind it
        if not any(word in frame.f_code.co_filename for word in within):
            return None
        if event == "opcode":
            before, last[frame] = last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
            held = isinstance(signal.getsignal(signal.SIGALRM), _Delayed)
            if before.startswith(_HANDLERS_RUN_AFTER) and not held:
                moments += 1
                if moments == number:
                    sys.settrace(None)
                    raise Interrupt
        return trace

    before = sys.gettrace()
    with alarms():
        # Since Python 3.12, steps are only told if some frame wanted them when the tracing began.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    return moments < number
