"""`Progress`: a bar in the terminal of the first worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bar,
    TextColumn,
    TimeRemainingColumn,
)

from phalanx.collectives import groups
from phalanx.comm import functional
from phalanx.execution.throttle import THROTTLE
from phalanx.runtime.numbers import check_integer

__all__ = ["Progress", "slow_worker"]

_SHORT = 0.005  # seconds; a busy machine makes any worker this late
_SHARE = 0.1  # of a step


class Progress:
    """Shows how far training is: a bar with the step, the loss, examples per second and the time left.

    Of the workers of a job only the first one shows it. Reading a loss waits for its step, so only one
    update in `every` reads it. From time to time the workers meet, and the bar tells which of them came
    last and how long the others had waited for it: its input or its Python code is slow. So all workers
    must update their bars equally often.

    Args:
        total: how many steps there will be; None if that is not known.
        batch_size: examples of a step, of all replicas together.
        description: what stands in front of the bar.
        every: how many updates come between two looks at the numbers.
        compare: how many updates come between two meetings of the workers; 0 for none.
        console: where to write; rich's console on the standard error by default.
        clock: what tells the time in seconds.

    Examples:
        >>> import phalanx as px
        >>> with px.train.Progress(total=3, batch_size=8) as progress:
        ...     for step in range(3):
        ...         progress.update(loss=1.0 / (step + 1))
        >>> progress.step
        3
    """

    def __init__(
        self,
        total: int | None = None,
        batch_size: int | None = None,
        description: str = "training",
        every: int = 1,
        compare: int = 20,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = None if total is None else check_integer(total, "total", 0)
        self._batch = None if batch_size is None else check_integer(batch_size, "batch_size", 1)
        self._every = check_integer(every, "every", 1)
        self._compare = check_integer(compare, "compare", 0)
        self._waited = 0.0  # of this worker, at the last meeting
        self._inside = 0.0  # seconds that this worker was in programs of all, until the last meeting
        self._met = (0, 0.0)  # the step and the time of the last meeting
        self._description, self._clock = description, clock
        self._console = console or Console(stderr=True)
        self._bar: Bar | None = None
        self._began = 0.0
        self.step = 0
        self.text = ""
        self.slow = ""
        """Which worker the others wait for, and how long; empty if there is none."""

    def __enter__(self) -> Self:
        self._began = self._clock()
        self._met = (self.step, self._began)
        self._inside = THROTTLE.seconds_between_workers
        if not groups.is_initialized() or groups.world().rank == 0:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=self._console,
            )
            self._task = self._bar.add_task(self._description, total=self._total, text="")
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, steps: int = 1, **numbers: Any) -> None:
        """Count steps, and show numbers such as ``loss=loss``; metrics are read."""
        before, self.step = self.step, self.step + check_integer(steps, "steps", 0)
        if self._compare and before // self._compare != self.step // self._compare:
            self._meet()
        if self._bar is None:
            return
        if before // self._every != self.step // self._every:
            self.text = self._line(numbers)
        self._bar.update(self._task, completed=self.step, text=self.text)

    def _line(self, numbers: dict[str, Any]) -> str:
        parts = []
        for name, value in numbers.items():
            read = getattr(value, "result", None)
            number = float(np.asarray(read() if callable(read) else value))
            parts.append(f"{name} {number:.4g}")
        taken = self._clock() - self._began
        if taken > 0 and self._batch is not None:
            parts.append(f"{self.step * self._batch / taken:.4g} examples/s")
        elif taken > 0:
            parts.append(f"{self.step / taken:.4g} steps/s")
        return ", ".join([*parts, *([self.slow] if self.slow else [])])

    def _meet(self) -> None:
        """Wait for the other workers, and learn how long each of them has waited.

        The answer is that of the meeting before: only after a meeting is it known who came last.
        """
        if not groups.is_initialized() or groups.world().size == 1:
            return
        began = self._clock()
        steps = self.step - self._met[0]
        inside, self._inside = self._inside, THROTTLE.seconds_between_workers
        # Steps in which workers exchange something make them wait there, and not for the meeting.
        waited = self._waited + (self._inside - inside) / max(steps, 1)
        mine = np.array([waited, began - self._met[1], steps])
        parts, _ = functional.all_gather(mine)
        self._waited = self._clock() - began
        self._met = (self.step, self._clock())
        waits = np.stack([np.asarray(part) for part in parts or [mine]])
        self.slow = slow_worker(waits[:, 0].tolist(), float(waits[:, 1].mean() / max(waits[0, 2], 1)))


def slow_worker(waits: Sequence[float], seconds_per_step: float) -> str:
    """Which worker came last to a meeting, in words; empty if all came at about the same time.

    Args:
        waits: how many seconds each has waited for the others.
        seconds_per_step: how long a step takes.

    >>> slow_worker([0.2, 0.0, 0.19], 0.5)
    'worker 1 is late by 0.2 s'
    >>> slow_worker([0.001, 0.0], 0.5)
    ''
    """
    late = max(waits) - min(waits)
    if late < max(_SHORT, _SHARE * seconds_per_step):
        return ""
    return f"worker {int(np.argmin(waits))} is late by {late:.2g} s"
