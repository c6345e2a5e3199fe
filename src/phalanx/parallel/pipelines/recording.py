"""Timelines: when each stage did what, in a step in which each stage has a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx.errors import DeadlineExceededError
from phalanx.parallel.pipelines.hosts import HostExchange
from phalanx.parallel.pipelines.schedule import PipelineSchedule, TimedAction
from phalanx.parallel.pipelines.stage_steps import StageStep
from phalanx.runtime.deadlines import worker_deadline

__all__ = ["Timeline", "recorded"]


@dataclass(frozen=True)
class Timeline:
    """What really happened in a step.

    Args:
        actions: with their times in seconds since the first one began.
        stages: how many there are.
    """

    actions: tuple[TimedAction, ...]
    stages: int

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return max((t.end for t in self.actions), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the time of all stages in which they waited."""
        busy = sum(t.end - t.start for t in self.actions)
        whole = self.seconds * self.stages
        return 1 - busy / whole if whole else 0.0


class _WaitingExchange:
    """Values of other stages, which are waited for; an error of one stage ends the others."""

    def __init__(self, inner: HostExchange, inside: threading.Condition, failures: list[Any]) -> None:
        self._inner, self._inside, self._failures = inner, inside, failures

    def give(self, kind: str, micro: int, position: int, part: int, value: Any) -> None:
        """See `StageExchange`."""
        with self._inside:
            self._inner.give(kind, micro, position, part, jax.block_until_ready(value))
            self._inside.notify_all()

    def take(self, kind: str, micro: int, position: int, part: int) -> Any:
        """See `StageExchange`."""
        if not self._inner.is_from_here(kind, position):
            return jax.block_until_ready(self._inner.take(kind, micro, position, part))
        key = kind, micro, position, part
        end = time.monotonic() + worker_deadline()
        with self._inside:
            while key not in self._inner.box:
                if self._failures:
                    raise _OtherStageError
                if not self._inside.wait(max(0.0, end - time.monotonic())) and time.monotonic() > end:
                    raise DeadlineExceededError(
                        f"Position {position} waited in vain for {kind}{micro}. Received: nothing"
                    )
            return jax.block_until_ready(self._inner.take(kind, micro, position, part))


class _OtherStageError(Exception):
    """Another stage has failed, and says why."""


class _Watch:
    """Runs programs to their end, and keeps when they began and ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[float, float]] = []

    def run(self, program: Callable[..., Any], *args: Any) -> Any:
        jax.block_until_ready(args)
        start = time.perf_counter()
        result, _ = jax.block_until_ready(program(*args))
        self.spans.append((start, time.perf_counter()))
        return result


def recorded(
    schedule: PipelineSchedule,
    stages: Sequence[int],
    step: Callable[..., StageStep],
    exchange: HostExchange,
) -> tuple[dict[int, StageStep], Timeline]:
    """Let every stage do its actions in a thread; returns the stages, and when they did what."""
    inside = threading.Condition()
    failures: list[BaseException] = []
    waiting = _WaitingExchange(exchange, inside, failures)
    watches = {i: _Watch() for i in stages}
    steps = {i: step(i, exchange=waiting, start=watch.run) for i, watch in watches.items()}
    found: list[TimedAction] = []

    def run(stage: int) -> None:
        watch = watches[stage]
        try:
            for action in schedule.orders[stage]:
                watch.spans.clear()
                steps[stage].perform(action)
                if watch.spans:  # a micro batch without rows takes no time
                    found.append(TimedAction(stage, action, watch.spans[0][0], watch.spans[-1][1]))
        except _OtherStageError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            with inside:
                failures.append(error)
                inside.notify_all()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    first = min((t.start for t in found), default=0.0)
    shifted = [TimedAction(t.stage, t.action, t.start - first, t.end - first) for t in found]
    ordered = sorted(shifted, key=lambda t: (t.start, t.stage))
    return steps, Timeline(tuple(ordered), len(stages))
