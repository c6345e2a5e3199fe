"""Where in the user's program a call was made."""

from __future__ import annotations

from phalanx.core.callsite import CallSite


def program(x: float) -> tuple[int, int]:
    return int(x), int(x)


def places() -> list[tuple[CallSite, tuple[int | None, ...]]]:
    """Every instruction of a function, with its position in the source."""
    code = program.__code__
    return [(CallSite(((code, 2 * i),), ""), p) for i, p in enumerate(code.co_positions())]


def test_copies_of_one_call_are_one_place() -> None:
    found = places()
    alike = [(a, b) for a, p in found for b, q in found if p == q and a is not b and None not in p]
    assert alike
    assert all(a == b for a, b in alike)


def test_two_calls_on_one_line_are_two_places() -> None:
    calls = {p: site for site, p in places() if p[0] == p[1] and None not in p and p[3] - p[2] == 6}  # type: ignore[operator]
    first, second = calls.values()
    assert first != second


def test_instructions_without_a_position_are_told_apart_by_their_offset() -> None:
    code = program.__code__.replace(co_linetable=b"")
    assert CallSite(((code, 2),), "") != CallSite(((code, 4),), "")
