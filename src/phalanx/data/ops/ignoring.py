"""Leaving out what fails."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, SameElements
from phalanx.data.plan.opening import first_element, open_plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class IgnoreErrors(SameElements):
    """The elements for which nothing below fails.

    The nodes below leave out what fails themselves, because only they know where to go on. They ask
    `Run.on_failure`, and must then call their functions also for elements that are skipped.
    """

    log_warning: bool = False

    def size(self, *inputs: int) -> int:
        """Unknown, because any of them may fail."""
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN

    @property
    def element_spec(self) -> Any:
        """Found out with the first element that does not fail."""
        if self.known_spec() is None:
            first_element(self)
        return self.input.element_spec

    def open(self, run: Run) -> Cursor:
        """Read what is below, and let it go on after failures."""
        on_failure = _say if self.log_warning else _say_nothing
        return open_plan(self.input, dataclasses.replace(run, on_failure=on_failure))


def _say(error: Exception) -> None:
    _log.warning("An element of a dataset is left out: %s", error)


def _say_nothing(error: Exception) -> None:
    pass
