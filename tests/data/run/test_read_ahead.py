"""Work ahead: in order, not too far, and ended when nobody needs it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from phalanx.data.run.element_queue import ElementQueue
from phalanx.data.run.read_ahead import ReadAhead

DEADLINE = 30.0


class Producer:
    """Counts up, and remembers what happened to it."""

    def __init__(self, count: int = 10, make: Callable[[int], Any] = lambda i: i) -> None:
        self.count, self.make = count, make
        self.made: list[Any] = []
        self.closed = threading.Event()
        self.reached = threading.Condition()
        self.cancelled = False
        self.thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        self.thread = threading.current_thread()
        try:
            for i in range(self.count):
                item = self.make(i)
                with self.reached:
                    self.made.append(item)
                    self.reached.notify_all()
                yield item, i + 1
        finally:
            self.closed.set()

    def cancel(self) -> None:
        self.cancelled = True

    def wait_until_made(self, count: int) -> None:
        with self.reached:
            assert self.reached.wait_for(lambda: len(self.made) >= count, DEADLINE)


def drain(items: Any) -> list[Any]:
    found = []
    while (item := items.get()) is not None:
        found.append(item)
    return found


@pytest.mark.parametrize("depth", [1, 2, 7, 100])
def test_items_come_in_order(depth: int) -> None:
    assert drain(ReadAhead(Producer(), depth, ElementQueue(0))) == list(range(10))


def test_the_end_stays_the_end() -> None:
    ahead = ReadAhead(Producer(1), 1, ElementQueue(0))
    assert [ahead.get(), ahead.get(), ahead.get()] == [0, None, None]


def test_no_more_is_made_than_was_asked_for() -> None:
    work = Producer(100)
    ahead = ReadAhead(work, 3, ElementQueue(0))
    assert ahead.get() == 0
    work.wait_until_made(5)  # three wait, and one more is in the hand of the thread
    assert ahead.get() == 1
    work.wait_until_made(6)
    assert len(work.made) == 6
    ahead.stop()


def test_stopping_closes_the_work_in_its_thread() -> None:
    work = Producer(100)
    ahead = ReadAhead(work, 1, ElementQueue(0))
    ahead.get()
    ahead.stop()
    assert work.closed.is_set()
    assert work.cancelled
    assert work.thread is not None
    assert not work.thread.is_alive()
    assert ahead.get() is None
    ahead.stop()


def test_an_error_comes_after_the_items_before_it_and_again() -> None:
    def make(i: int) -> int:
        return 1 // (2 - i) + i

    ahead = ReadAhead(Producer(5, make), 1, ElementQueue(0))
    assert [ahead.get(), ahead.get()] == [0, 2]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            ahead.get()


def test_settings_of_the_caller_hold_in_the_thread() -> None:
    with jax.enable_x64(True):
        ahead = ReadAhead(Producer(2, lambda i: jnp.asarray(2**40 + i)), 1, ElementQueue(0))
        assert [int(x) for x in drain(ahead)] == [2**40, 2**40 + 1]


def test_nothing_keeps_an_owner_alive() -> None:
    """The thread knows its work only; whoever owns it can be collected."""

    class Owner:
        def __init__(self) -> None:
            self.ahead = ReadAhead(Producer(100), 1, ElementQueue(0))

    import weakref

    owner = Owner()
    ahead = owner.ahead
    reference = weakref.ref(owner)
    del owner
    gc.collect()
    assert reference() is None
    ahead.stop()


def test_without_depth_items_are_made_when_they_are_asked_for() -> None:
    work = Producer()
    ahead = ReadAhead(work, 0, ElementQueue(0))
    for i in range(3):
        assert ahead.get() == i
        assert work.made == list(range(i + 1))
    assert ahead.queue.position == 3
    ahead.stop()
    assert work.closed.is_set()
    assert ahead.get() is None
