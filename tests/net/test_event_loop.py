"""The thread that waits for sockets, timers and calls of other threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.net.event_loop import READ, WRITE, EventLoop, Poller

SECONDS = 20.0


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop("test").start()
    yield loop
    loop.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_calls_of_other_threads_run_in_the_thread_and_in_order(loop: EventLoop) -> None:
    seen: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(loop.call, lambda: loop.is_current) for _ in range(50)]:
            assert future.result(SECONDS)
    for i in range(100):
        loop.call_soon(lambda i=i: seen.append(i))  # type: ignore[misc]
    assert loop.call(lambda: list(seen)) == list(range(100))


def test_what_a_call_raises_is_raised_where_it_was_made(loop: EventLoop) -> None:
    with pytest.raises(KeyError):
        loop.call(lambda: {}[1])
    assert loop.call(lambda: loop.call(lambda: 3)) == 3


def test_sockets_and_timers(loop: EventLoop, pair: tuple[socket.socket, socket.socket]) -> None:
    got: list[bytes] = []
    heard, timed = threading.Event(), threading.Event()

    def read(mask: int) -> None:
        assert mask & READ
        got.append(pair[0].recv(100))
        heard.set()

    loop.call(lambda: loop.watch(pair[0], READ, read))
    begin = time.monotonic()
    loop.call(lambda: loop.call_later(0.05, timed.set))
    assert timed.wait(SECONDS)
    assert time.monotonic() - begin >= 0.05
    assert not heard.is_set()
    pair[1].sendall(b"hello")
    assert heard.wait(SECONDS)
    loop.call(lambda: loop.forget(pair[0]))
    heard.clear()
    pair[1].sendall(b"again")
    assert not heard.wait(0.1)
    assert got == [b"hello"]


def test_timers_come_in_their_order_and_again(loop: EventLoop) -> None:
    seen: list[str] = []
    done = threading.Event()

    def tick() -> None:
        seen.append("tick")
        if seen.count("tick") == 3:
            done.set()

    def begin() -> None:
        loop.call_later(0.03, lambda: seen.append("second"))
        loop.call_later(0.01, lambda: seen.append("first"))
        loop.repeat(0.05, tick)

    loop.call(begin)
    assert done.wait(SECONDS)
    assert seen[:3] == ["first", "second", "tick"]


def test_a_handler_that_fails_harms_no_other(
    loop: EventLoop, pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: int) -> None:
        raise KeyError("boom")

    loop.call(lambda: loop.watch(pair[0], WRITE, fail))
    loop.call_soon(lambda: fail(0))
    assert loop.call(lambda: 1) == 1
    assert "boom" in caplog.text
    assert loop.call(lambda: loop._poller.mask(pair[0].fileno())) == 0


def test_there_is_a_round_although_nothing_happens() -> None:
    rounds = threading.Semaphore(0)
    loop = EventLoop("test", rounds.release, tick=0.01).start()
    assert all(rounds.acquire(timeout=SECONDS) for _ in range(5))
    loop.close()


def test_after_the_end_calls_run_where_they_are_made_or_not_at_all() -> None:
    loop = EventLoop("test")
    loop.call_soon(lambda: None)
    assert loop.call(threading.current_thread) is threading.current_thread()
    loop.start()
    loop.close()
    assert not loop.is_alive
    loop.call_soon(lambda: pytest.fail("it is over"))
    assert loop.call(threading.current_thread) is threading.current_thread()
    loop.close()
    EventLoop("test").close()


def test_what_another_thread_has_closed_is_no_obstacle() -> None:
    poller = Poller()
    first, other = socket.socketpair()
    number = first.fileno()
    poller.watch(number, READ)
    first.close()
    other.close()
    again, other = socket.socketpair()
    assert again.fileno() == number
    poller.watch(number, READ | WRITE)
    assert poller.wait(SECONDS) == [(number, WRITE)]
    poller.watch(number, 0)
    assert poller.wait(0.0) == []
    again.close()
    other.close()
    poller.close()


def test_a_loop_that_spins_does_all_that_others_do() -> None:
    loop = EventLoop("spinning").start()
    loop.spin()
    ours, theirs = socket.socketpair()
    got, later = threading.Semaphore(0), threading.Event()
    loop.call(lambda: loop.watch(ours, READ, lambda _: (ours.recv(1), got.release())[1]))
    for _ in range(200):
        theirs.send(b"x")
        assert got.acquire(timeout=20)
    assert [loop.call(lambda i=i: i) for i in range(200)] == list(range(200))  # type: ignore[misc]
    loop.call(lambda: loop.call_later(0.01, later.set))
    assert later.wait(20)
    loop.close()
    assert not loop.is_alive
    for sock in (ours, theirs):
        sock.close()
