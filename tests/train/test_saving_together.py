"""Workers wait for one that writes a checkpoint as long as it writes, and no longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import phalanx as px
from phalanx.train.checkpoints.together import Pulse, hear_from_writers


class Hub:
    """Passes on at once what is told; time passes only in waits, and with it what others do."""

    def __init__(self, script: dict[float, tuple[str, int]]) -> None:
        self.now = 0.0
        self.script = dict(sorted(script.items()))
        self.told: dict[tuple[str, int], Any] = {}
        self.has_failed = False
        self.sent: list[tuple[float, str]] = []

    def clock(self) -> float:
        return self.now

    def tell(self, name: str, value: Any = None) -> None:
        if self.has_failed:
            raise px.errors.WorkerLostError("worker 1 was killed")
        self.sent.append((self.now, name))

    def hear(self, name: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
        end = self.now + timeout
        while True:
            for at in [at for at in self.script if at <= self.now]:
                self.told[self.script.pop(at)] = at
            found = [rank for rank in ranks if (name, rank) in self.told]
            if len(found) == len(ranks) or self.now >= end:
                return {rank: self.told.pop((name, rank)) for rank in found}
            self.now = min([end, *(at for at in self.script if at > self.now)])


def test_one_that_writes_for_long_is_waited_for() -> None:
    hub = Hub({**{float(t): ("writing 1.1", 0) for t in range(2, 60, 3)}, 61.5: ("saved 1.1", 0)})
    assert hear_from_writers(hub, "saved 1.1", [0], "1.1", 5.0, hub.clock) == {0: 61.5}
    assert hub.now == 61.5


@pytest.mark.parametrize("until", [0, 9])
def test_one_that_writes_no_more_is_missing(until: int) -> None:
    beats: dict[float, tuple[str, int]] = {float(t): ("writing 1.1", 2) for t in range(3, until + 1, 3)}
    hub = Hub({**beats, 0.5: ("part 1.1", 1)})
    assert hear_from_writers(hub, "part 1.1", [1, 2], "1.1", 5.0, hub.clock) == {1: 0.5}
    assert until + 5.0 <= hub.now <= until + 7.0


def test_a_worker_that_was_frozen_hears_what_it_was_told_meanwhile() -> None:
    """Its first look may come before the thread of the connection has read anything."""

    class Frozen(Hub):
        def hear(self, name: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
            if self.now == 0.0:
                self.now = 30.0
                return {}
            return super().hear(name, ranks, timeout)

    hub = Frozen({30.1: ("saved 1.1", 0)})
    assert hear_from_writers(hub, "saved 1.1", [0], "1.1", 5.0, hub.clock) == {0: 30.1}


def test_a_pulse_is_told_once_a_second() -> None:
    hub = Hub({})
    pulse = Pulse(hub, "4.2", hub.clock)
    for _ in range(40):
        hub.now += 0.25
        pulse.beat()
    hub.has_failed = True
    hub.now += 5.0
    pulse.beat()  # what is written may still become a checkpoint
    assert hub.sent == [(float(t), "writing 4.2") for t in range(1, 11)]
