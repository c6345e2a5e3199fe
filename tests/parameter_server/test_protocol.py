"""The commit protocol, in all states that one closure can get into."""

from __future__ import annotations

import pytest

from tests.parameter_server.protocol_model import (
    PROGRAMS,
    ByAttempt,
    Forgetful,
    Unfenced,
    UnfencedByAttempt,
    violations,
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_closure_counts_once_on_all_servers(program: str) -> None:
    count, wrong = violations(program)
    assert wrong[:1] == []
    assert count > 500


def test_two_attempts_at_the_same_time_count_once() -> None:
    count, wrong = violations("arbiter", together=2, cuts=1)
    assert wrong[:1] == []
    assert count > 1000


@pytest.mark.soak
def test_three_attempts_two_at_the_same_time_count_once() -> None:
    count, wrong = violations("arbiter", attempts=3, together=2, cuts=0)
    assert wrong[:1] == []
    assert count > 100_000


def test_without_the_fence_a_closure_counts_twice() -> None:
    """The fence alone is enough, and nothing else would do."""
    assert violations("one server", ByAttempt)[1] == []
    _, wrong = violations("one server", UnfencedByAttempt)
    assert any("applied twice" in text for text in wrong)
    _, wrong = violations("several servers", UnfencedByAttempt, cuts=0)
    assert any("applied twice" in text for text in wrong)


@pytest.mark.parametrize("program", ["one server", "arbiter"])
def test_without_the_fence_a_closure_may_stay_half_done(program: str) -> None:
    _, wrong = violations(program, Unfenced)
    assert any("never done" in text for text in wrong)


def test_the_check_finds_a_server_that_forgets() -> None:
    _, wrong = violations("one server", Forgetful)
    assert any("applied twice" in text for text in wrong)
