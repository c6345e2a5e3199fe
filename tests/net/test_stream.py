"""Messages in the thread of the caller."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx import errors
from phalanx.net import spinning, stream as module
from phalanx.net.framing import Limits, ProtocolError
from phalanx.net.stream import Stream

LIMITS = Limits(fields=1 << 10, buffers=64 << 20, most=8)
SECONDS = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[Stream, Stream]]:
    streams = tuple(Stream(sock, LIMITS) for sock in socket.socketpair())
    yield streams  # type: ignore[misc]
    for stream in streams:
        stream.close()


def test_messages_arrive_in_order(pair: tuple[Stream, Stream]) -> None:
    one, two = pair
    for i in range(20):
        one.send([b"%d" % i, b""], i, SECONDS)
    for i in range(20):
        message = two.receive(SECONDS)
        assert (message.number, [bytes(b) for b in message.buffers]) == (i, [b"%d" % i, b""])
    assert two.poll() is None
    assert one.bytes_out == two.bytes_in > 0


def test_large_messages(pair: tuple[Stream, Stream]) -> None:
    one, two = pair
    data = bytes(range(256)) * (1 << 16)
    thread = threading.Thread(target=one.send, args=([b"a", data], 1, SECONDS), daemon=True)
    thread.start()
    assert two.receive(SECONDS).buffers[1] == data
    thread.join(SECONDS)


def test_waiting_has_a_deadline(pair: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMINDER", 0.0)
    reminded: list[float] = []
    with pytest.raises(errors.DeadlineExceededError, match=r"0\.6 seconds"):
        pair[0].receive(0.6, reminded.append)
    assert reminded
    assert pair[0].socket.fileno() < 0, "closed, because a part of a message may be lost"


def test_a_peer_that_does_not_read(pair: tuple[Stream, Stream]) -> None:
    with pytest.raises(errors.DeadlineExceededError, match="took nothing"):
        pair[0].send([bytes(16 << 20)], 1, 0.3)


def test_a_peer_that_goes(pair: tuple[Stream, Stream]) -> None:
    pair[1].send([b"last"], 1, SECONDS)
    pair[1].close()
    assert pair[0].receive(SECONDS).buffers == [b"last"]
    with pytest.raises(ConnectionResetError):
        pair[0].receive(SECONDS)


def test_garbage(pair: tuple[Stream, Stream]) -> None:
    pair[0].socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError):
        pair[1].receive(SECONDS)
    assert pair[1].socket.fileno() < 0


def test_waiting_can_be_interrupted(pair: tuple[Stream, Stream]) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pair[0].receive(SECONDS)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_answer_that_comes_soon_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Stream(sock, LIMITS, spins=True) for sock in socket.socketpair())
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks % 3 == 0:
            one.send([b"soon"], looks, SECONDS)

    monkeypatch.setattr(spinning, "_yield_processor", look)
    monkeypatch.setattr(spinning, "_MOMENT", SECONDS)
    with two.socket, one.socket:
        one.send([b""], 1, SECONDS)
        assert two.receive(SECONDS).number == 1
        assert looks == 0, "nothing is known of this peer"
        assert [two.receive(SECONDS).number for _ in range(2)] == [3, 6]
        monkeypatch.setattr(spinning, "_MOMENT", 0.0)
        one.send([b""], 7, SECONDS)
        assert two.receive(SECONDS).number == 7
        with pytest.raises(errors.DeadlineExceededError):
            two.receive(0.3)
        assert looks == 6, "nobody looks for what does not come soon"


def test_an_answer_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Stream(sock, LIMITS, spins=True) for sock in socket.socketpair())
    is_asleep = threading.Event()
    fill = Stream._fill

    def filled(stream: Stream, flags: int) -> int:
        if not flags:
            is_asleep.set()
        return fill(stream, flags)

    monkeypatch.setattr(Stream, "_fill", filled)
    with two.socket, one.socket:
        one.send([b""], 1, SECONDS)
        two.receive(SECONDS)
        is_asleep.clear()
        answer = threading.Thread(
            target=lambda: is_asleep.wait(SECONDS) and one.send([b"late"], 2, SECONDS)
        )
        answer.start()
        assert two.receive(SECONDS).number == 2
        answer.join(SECONDS)
