"""Shows who has joined while a job starts."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from phalanx.job.hub.descriptions import Task

_log = logging.getLogger("phalanx")


class Arrivals:
    """A context manager that shows arrivals: live on a terminal, as lines of the log elsewhere.

    `tasks` are all that are expected.
    """

    _patience = 5.0  # seconds after which the missing ones are named

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._addresses = {str(task): task.address for task in tasks}
        self._joined: dict[str, str] = {}
        self._missing = list(self._addresses)
        self._live: Live | None = None
        self._done = threading.Event()
        self._reminder = threading.Thread(target=self._remind, name="phalanx-arrivals", daemon=True)

    def __enter__(self) -> Arrivals:
        if sys.stderr.isatty():
            self._live = Live(Text(), console=Console(stderr=True), transient=True)
            self._live.start()
        else:
            self._reminder.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        if self._live is not None:
            self._live.stop()

    def note(self, message: dict[str, Any]) -> None:
        """A worker has joined."""
        self._joined[message["worker"]] = f"{message.get('host')}"
        self._missing = list(message["missing"])
        if self._live is not None:
            self._live.update(self._text(), refresh=True)
        else:
            _log.info(
                "%s joined from %s; missing: %s",
                message["worker"],
                message.get("host"),
                ", ".join(self._missing) or "no task",
            )

    def _text(self) -> Text:
        lines = [f"{len(self._joined)} of {len(self._addresses)} workers have joined"]
        for name, address in self._addresses.items():
            here = name in self._joined
            lines.append(f"  {name}  {address}  " + (self._joined[name] if here else "not there yet"))
        return Text("\n".join(lines))

    def _remind(self) -> None:
        if not self._done.wait(self._patience):
            where = ", ".join(f"{name} ({self._addresses.get(name, '?')})" for name in self._missing)
            _log.warning("Waiting for %s to join.", where)
