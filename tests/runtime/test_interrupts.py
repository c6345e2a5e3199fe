"""Interrupts: what handlers raise comes before or after a section, never inside."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx.runtime.interrupts import Bell, start, uninterrupted

DEADLINE = 30.0

# What a handler raises in a finalizer, for example in JAX's, is reported and lost.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Alarm(Exception):
    pass


class Second(Exception):
    pass


def sound(number: int, frame: Any) -> None:
    raise Alarm


def second(number: int, frame: Any) -> None:
    raise Second


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {n: signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGUSR1)}
    signal.signal(signal.SIGALRM, sound)
    signal.signal(signal.SIGUSR1, second)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert signal.getsignal(signal.SIGALRM) is sound
    assert signal.getsignal(signal.SIGUSR1) is second
    for number, handler in before.items():
        signal.signal(number, handler)


def run_section(*numbers: int, error: Exception | None = None) -> list[int]:
    """A section in which some signals come, and that may end with an error; what it has done."""
    done: list[int] = []
    try:
        with uninterrupted():
            for number in numbers:
                signal.raise_signal(number)
                done.append(number)
            if error is not None:
                raise error
    finally:
        assert done == list(numbers)
    return done


def test_handlers_wait_for_the_end_of_a_section() -> None:
    with pytest.raises(Alarm):
        run_section(signal.SIGALRM, signal.SIGALRM)


def test_nothing_happens_without_a_signal_or_for_ignored_ones() -> None:
    run_section()
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    run_section(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


def test_an_inner_section_ends_with_the_outer_one() -> None:
    done = []

    def nested() -> None:
        with uninterrupted():
            run_section(signal.SIGALRM)
            done.append("outer")

    with pytest.raises(Alarm):
        nested()
    assert done == ["outer"]


def test_all_handlers_run_even_if_the_first_raises() -> None:
    with pytest.raises(Second) as info:
        run_section(signal.SIGALRM, signal.SIGUSR1)
    assert isinstance(info.value.__context__, Alarm)


def test_an_error_of_the_section_is_not_lost() -> None:
    with pytest.raises(Alarm) as info:
        run_section(signal.SIGALRM, error=ValueError("of the section"))
    assert isinstance(info.value.__context__, ValueError)
    with pytest.raises(ValueError, match="of the section"):
        run_section(error=ValueError("of the section"))


def test_a_handler_that_the_section_sets_is_kept() -> None:
    def other(number: int, frame: Any) -> None:
        raise AssertionError("never called")

    with uninterrupted():
        signal.signal(signal.SIGALRM, other)
    assert signal.getsignal(signal.SIGALRM) is other
    signal.signal(signal.SIGALRM, sound)


def test_a_handler_that_was_set_since_the_last_section_waits_too() -> None:
    run_section()
    signal.signal(signal.SIGALRM, second)
    with pytest.raises(Second):
        run_section(signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is second
    signal.signal(signal.SIGALRM, sound)
    with pytest.raises(Alarm):
        run_section(signal.SIGALRM)


def test_in_other_threads_it_does_nothing() -> None:
    found: list[Any] = []

    go = threading.Event()

    def look() -> None:
        assert go.wait(DEADLINE)
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGALRM))

    thread = threading.Thread(target=look)
    start(thread)
    go.set()
    thread.join(DEADLINE)
    assert found == [sound]


def wait_for_alarm() -> None:
    """Wait for an alarm that is on its way, unless a finalizer got it.

    A function of its own: since Python 3.12 the end of a loop's round is outside of a `try` around it.
    """
    late = time.monotonic() + 0.01
    while time.monotonic() < late:
        pass


def interrupt_often(seconds: float, what: Any) -> int:
    """Call `what` again and again, with an interrupt at some moment of each call; how often it came."""
    count, delay, end = 0, 1e-6, time.monotonic() + seconds
    while time.monotonic() < end:
        delay = 1e-6 if delay > 60e-6 else delay + 0.7e-6
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            what()
            wait_for_alarm()
            signal.setitimer(signal.ITIMER_REAL, 0)  # on a busy machine it may come even later
        except Alarm:
            count += 1
    return count


@pytest.mark.parametrize("seconds", [0.2, pytest.param(20.0, marks=pytest.mark.soak)])
def test_sections_are_done_completely_or_not_at_all(seconds: float) -> None:
    begun, ended = [], []

    def section() -> None:
        with uninterrupted():
            begun.append(0)
            list(map(str, range(5)))
            ended.append(0)

    assert interrupt_often(seconds, section) > 100
    assert len(begun) == len(ended)
    # Handlers that could not be put back work all the same, and are put back by the next section.
    with pytest.raises(Alarm):
        signal.raise_signal(signal.SIGALRM)
    with uninterrupted():
        pass


def test_a_bell_rings_once_for_all_rings_before_a_wait() -> None:
    bell = Bell()
    assert not bell.wait(0)
    bell.ring()
    bell.ring()
    assert bell.wait(0)
    assert not bell.wait(0)
    ringer = threading.Thread(target=bell.ring)
    ringer.start()
    assert bell.wait(DEADLINE)
    ringer.join(DEADLINE)


def test_interrupts_leave_a_bell_as_it_was() -> None:
    bell = Bell()

    def use() -> None:
        bell.ring()
        bell.wait(0.01)

    assert interrupt_often(0.1, use) > 50
    bell.ring()
    assert bell.wait(0)


def test_threads_that_are_started_run_whatever_interrupts() -> None:
    ran: list[int] = []
    threads: list[threading.Thread] = []

    def begin() -> None:
        thread = threading.Thread(target=ran.append, args=(0,))
        with uninterrupted():
            threads.append(thread)
            start(thread)

    interrupt_often(0.2, begin)
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert len(ran) == len(threads)
