"""Numbers for TensorBoard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from phalanx.integrations.estimator.hooks import SessionRunContext, SessionRunHook, SessionRunValues
from phalanx.train.event_files import EventFile, scalar_value

Write = Callable[[str, float, int], None]
"""Takes a name, a value and a step."""


class SummaryHook(SessionRunHook):
    """Writes the loss for TensorBoard.

    Args:
        every: after how many steps.
        write: as `summaries` gives it.
    """

    def __init__(self, every: int, write: Write) -> None:
        self._every, self._write = every, write

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Write, if it is time."""
        step = run_context.global_step
        if step % self._every == 0:
            self._write("loss", float(run_values.results["loss"]), step)


@contextlib.contextmanager
def summaries(folder: str) -> Iterator[Write]:
    """A function that writes numbers to an event file; the file is made by the first number."""
    with contextlib.closing(EventFile(folder)) as file:
        yield lambda name, value, step: file.add(step, scalar_value(name, value))
