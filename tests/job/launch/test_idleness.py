"""Whether a process has computed between two looks."""

from __future__ import annotations

import pytest

from phalanx.job.launch.idleness import Idleness


@pytest.mark.parametrize(
    ("used", "seconds"),
    [(702.0, 10_000.0), (1.0, 2.0)],
    ids=["the last look was long ago", "the number belongs to another process now"],
)
def test_only_two_looks_in_a_row_at_one_process_count(used: float, seconds: float) -> None:
    """It was silent hours ago, say, and has computed since then, but not all the time."""
    computed = [2.0, used, used, used + 1.0]
    times = [0.0, seconds, seconds + 2.0, seconds + 4.0]
    processes = Idleness(lambda pid: computed.pop(0), lambda: times.pop(0))
    assert [processes.computes(7) for _ in range(4)] == [None, None, False, True]
