"""Messages between workers: who may send them, and which receive gets which."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from phalanx.comm.mailbox import Mailbox

DEADLINE = 10.0


@pytest.fixture
def boxes() -> Iterator[list[Mailbox]]:
    made: list[Mailbox] = []

    def find(rank: int) -> tuple[str, int]:
        return "127.0.0.1", made[rank].port

    made += [Mailbox(rank, "127.0.0.1", b"secret", find) for rank in range(3)]
    yield made
    for box in made:
        box.close()


def test_messages_are_told_apart_by_topic_and_sender(boxes: list[Mailbox]) -> None:
    early = boxes[0].expect("a", 2)
    anyone = boxes[0].expect("b", None)
    boxes[1].post(0, "a", {"n": 1}, b"one")
    boxes[2].post(0, "a", {"n": 2}, b"two")
    boxes[2].post(0, "a", {"n": 3})
    boxes[1].post(0, "b", {})
    assert early.result(DEADLINE) == (2, {"n": 2}, b"two")
    assert boxes[0].expect("a", 1).result(DEADLINE) == (1, {"n": 1}, b"one")
    assert boxes[0].expect("a", 2).result(DEADLINE) == (2, {"n": 3}, b"")
    assert anyone.result(DEADLINE).source == 1
    boxes[0].post(0, "self", {}, b"x")
    assert boxes[0].expect("self", 0).result(DEADLINE).data == b"x"


def test_messages_of_one_sender_keep_their_order(boxes: list[Mailbox]) -> None:
    for i in range(100):
        boxes[1].post(0, "a", {"n": i}, bytes(i * 1000))
    came = [boxes[0].expect("a", None).result(DEADLINE) for _ in range(100)]
    assert [(m.about["n"], len(m.data)) for m in came] == [(i, i * 1000) for i in range(100)]


def test_strangers_are_not_heard(boxes: list[Mailbox]) -> None:
    with pytest.raises(AuthenticationError):
        Client(("127.0.0.1", boxes[0].port), authkey=b"guess")
    silent = Client(("127.0.0.1", boxes[0].port))  # proves nothing, and does not get in the way
    silent.send_bytes(b'{"topic": "a", "about": {}, "size": 0}')
    waiting = boxes[0].expect("a", None)
    boxes[1].post(0, "a", {"n": 7})
    assert waiting.result(DEADLINE) == (1, {"n": 7}, b"")
    silent.close()
