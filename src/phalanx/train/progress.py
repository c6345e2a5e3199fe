"""`Progress`: a bar in the terminal of the first worker."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from phalanx.runtime.numbers import check_integer

__all__ = ["Progress"]


class Progress:
    """Shows how far training is: a bar with the step, the loss, examples per second and the time left.

    Of the workers of a job only the first one shows it. Reading a loss waits for its step, so only one
    update in `every` reads it.

    Args:
        total: how many steps there will be; None if that is not known.
        batch_size: examples of a step, of all replicas together.
        description: what stands in front of the bar.
        every: how many updates come between two looks at the numbers.
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
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = None if total is None else check_integer(total, "total", 0)
        self._batch = None if batch_size is None else check_integer(batch_size, "batch_size", 1)
        self._every = check_integer(every, "every", 1)
        self._description, self._clock = description, clock
        self._console = console or Console(stderr=True)
        self._bar: Bar | None = None
        self._began = 0.0
        self.step = 0
        self.text = ""

    def __enter__(self) -> Self:
        self._began = self._clock()
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
        return ", ".join(parts)
