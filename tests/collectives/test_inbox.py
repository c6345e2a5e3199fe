"""Messages and those who ask for them, in any order of coming and asking."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from phalanx.collectives.inbox import Inbox


class Message(NamedTuple):
    source: int
    text: str


@pytest.mark.parametrize("asks_first", [True, False])
def test_each_gets_the_first_that_fits(asks_first: bool) -> None:
    inbox: Inbox[Message] = Inbox()
    messages = [Message(0, "a"), Message(1, "b"), Message(0, "c")]
    futures = []
    steps = [
        lambda: futures.extend(inbox.take("key", source) for source in (1, None, 0)),
        lambda: [inbox.put("key", message) for message in messages],
    ]
    for step in steps if asks_first else steps[::-1]:
        step()
    assert [future.result(0).text for future in futures] == ["b", "a", "c"]
    assert not inbox.take("key").done(), "none is left"


def test_keys_are_apart() -> None:
    inbox: Inbox[Message] = Inbox()
    inbox.put(("key", 1), Message(0, "a"))
    assert not inbox.take(("key", 2)).done()
    assert inbox.take(("key", 1)).result(0).text == "a"
