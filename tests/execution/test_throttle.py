"""The throttle waits for old programs before it starts new ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from phalanx.execution.throttle import MAX_IN_FLIGHT, Throttle
from phalanx.job import shared_programs
from phalanx.job.shared_programs import SharedProgram


class Token:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.ready = False

    def block_until_ready(self) -> None:
        self._log.append(f"wait {self._name}")

    def is_ready(self) -> bool:
        return self.ready


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


@pytest.mark.parametrize(("threads", "limit"), [("16", MAX_IN_FLIGHT), ("15", 1)])
def test_programs_wait_for_each_other_if_the_pool_is_too_small(
    threads: str, limit: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PJRT_NPROC", threads)  # as it was when JAX started, with eight devices
    throttle = Throttle()
    for _ in range(20):
        throttle.dispatch(lambda: (None, Token([], "")))
        assert throttle.in_flight <= limit
    assert throttle.in_flight == limit
    assert ("PJRT_NPROC=16" in caplog.text) == (limit == 1)


def test_programs_that_have_finished_are_forgotten_together() -> None:
    log: list[str] = []
    throttle = Throttle(limit=4)
    tokens = {name: Token(log, name) for name in "abcdef"}

    def program(name: str) -> tuple[str, Any]:
        return name, tokens[name]

    for name in "abcd":
        throttle.dispatch(program, name)
    tokens["b"].ready = tokens["d"].ready = True  # as programs on other devices may
    throttle.dispatch(program, "e")
    assert log == ["wait a"]
    assert throttle.in_flight == 3
    throttle.dispatch(program, "f")
    assert log == ["wait a"]
    throttle.make_room()
    assert log == ["wait a", "wait c"]
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


class Ledger:
    @contextmanager
    def meet(self, shared: SharedProgram) -> Iterator[None]:
        yield

    def begun(self, token: Any, may_return: bool) -> None:
        pass


def test_programs_between_workers_keep_their_order_over_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """JAX runs programs of different threads at the same time, and gloo would mix up their messages."""
    log: list[str] = []
    throttle = Throttle()
    monkeypatch.setattr(shared_programs, "ledger", Ledger)

    def program(name: str) -> tuple[str, Any]:
        log.append(f"start {name}")
        return name, Token(log, name)

    def dispatch(name: str, shared: bool = True) -> None:
        throttle.dispatch(program, name, shared=SharedProgram(name, name, ()) if shared else None)

    dispatch("a")
    dispatch("b")
    for name, meets in (("local", False), ("c", True)):
        thread = threading.Thread(target=dispatch, args=(name, meets))
        thread.start()
        thread.join(10.0)
    dispatch("d")
    assert log == ["start a", "start b", "start local", "wait b", "start c", "wait c", "start d"]
