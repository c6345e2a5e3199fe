"""Futures that are set by hand."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from phalanx.runtime.futures import settle


def test_a_future_has_what_the_work_returns_or_raises() -> None:
    done: Future[int] = Future()
    settle(done, lambda: 3)
    assert done.result(0) == 3

    def interrupted() -> int:
        raise KeyboardInterrupt

    failed: Future[int] = Future()
    settle(failed, interrupted)
    with pytest.raises(KeyboardInterrupt):
        failed.result(0)
