"""Waiting without sleeping, on a clock of the test's own."""

from __future__ import annotations

import pytest

from phalanx.net import spinning
from phalanx.net.spinning import Spinner


class Clock:
    """A clock that goes on when the spinner looks, or as told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def __call__(self) -> float:
        return self.now

    def look(self, seconds: float, found: bool = False) -> bool:
        self.looks += 1
        self.now += seconds
        return found

    def sleep(self, seconds: float) -> str:
        self.now += seconds
        return "slept"


SOON, LATE = 0.9 * spinning._MOMENT, 1.1 * spinning._MOMENT


@pytest.mark.parametrize(("first", "looks"), [(SOON, 1), (LATE, 0)])
def test_one_looks_only_if_the_last_wait_was_short(first: float, looks: int) -> None:
    clock = Clock()
    spinner = Spinner(clock)
    spinner.wait(lambda: clock.look(0.0), lambda: clock.sleep(first))
    assert clock.looks == 0, "nothing is known at first"
    spinner.wait(lambda: clock.look(0.0, found=True), lambda: clock.sleep(0.0))
    assert clock.looks == looks


def test_one_looks_for_a_moment_and_then_sleeps() -> None:
    clock = Clock()
    spinner = Spinner(clock)
    spinner.wait(lambda: False, lambda: clock.sleep(SOON))
    assert spinner.wait(lambda: clock.look(0.4 * spinning._MOMENT), lambda: clock.sleep(0.0)) == "slept"
    assert clock.looks == 3, "the third look ends behind the moment"
    assert spinner.wait(lambda: clock.look(0.0, found=True), lambda: clock.sleep(SOON)) == "slept"
    assert clock.looks == 3, "it came late, so nobody looks the next time"
    assert spinner.wait(lambda: clock.look(0.0, found=True), lambda: clock.sleep(0.0)) is True


def test_others_run_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(spinning, "_yield_processor", lambda: order.append("others"))
    spinner = Spinner(lambda: 0.0)
    spinner.wait(lambda: False, lambda: True)
    spinner.wait(lambda: (order.append("look"), len(order) > 4)[1], lambda: False)
    assert order == ["look", "others", "look", "others", "look"]
