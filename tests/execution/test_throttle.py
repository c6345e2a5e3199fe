"""The throttle waits for old programs before it starts new ones."""

from __future__ import annotations

from typing import Any

from phalanx.execution.throttle import Throttle


class Token:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def block_until_ready(self) -> None:
        self._log.append(f"wait {self._name}")


def test_programs_wait_for_the_one_a_limit_ago() -> None:
    log: list[str] = []
    throttle = Throttle(limit=2)

    def program(name: str) -> tuple[str, Any]:
        log.append(f"start {name}")
        return name, Token(log, name)

    results = [throttle.dispatch(program, name) for name in "abcd"]
    assert results == list("abcd")
    assert log == ["start a", "start b", "wait a", "start c", "wait b", "start d"]
    assert throttle.in_flight == 2


def test_a_program_that_fails_to_start_leaves_no_trace() -> None:
    throttle = Throttle(limit=1)

    def broken() -> tuple[None, Any]:
        raise ValueError("no")

    for _ in range(3):
        try:
            throttle.dispatch(broken)
        except ValueError:
            continue
    assert throttle.in_flight == 0
