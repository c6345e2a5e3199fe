"""Messages between the door and a worker, over connections that are lost at any moment."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from phalanx.job.elastic.letters import Letters


@given(st.lists(st.sampled_from(["send", "arrive", "cut"]), max_size=60))
def test_every_message_arrives_once_and_in_order(events: list[str]) -> None:
    here, there = Letters(), Letters()
    under_way: list[dict[str, Any]] = []
    got: list[int] = []
    sent = 0

    def arrive() -> None:
        letter = under_way.pop(0)
        if there.is_next(letter):
            got.append(letter["value"])

    def again() -> None:
        """A new connection: what was under way is lost, and something is sent before the answer."""
        nonlocal sent
        under_way[:] = [here.written({"value": sent})]
        sent += 1
        under_way.extend(here.after(there.heard))

    for event in events:
        if event == "send":
            under_way.append(here.written({"value": sent}))
            sent += 1
        elif event == "cut":
            again()
        elif under_way:
            arrive()
            here.is_next(there.written({}))  # which says what has come
    again()
    while under_way:
        arrive()
    assert got == list(range(sent))
