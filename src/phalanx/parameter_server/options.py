"""How a job with parameter servers behaves: how updates count, and what happens when tasks fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer, check_number

__all__ = ["ParameterServerOptions"]

DELIVERIES = ("exactly_once", "at_least_once")
DURABILITIES = ("none", "snapshot", "log")

_LONGEST = 7 * 24 * 3600.0
_MOST = 1 << 20


@dataclass(frozen=True)
class ParameterServerOptions:
    """Options of `px.ParameterServerStrategy`.

    Args:
        delivery: "exactly_once": the updates of a scheduled function count once and as a whole,
            whatever fails. "at_least_once": as in TensorFlow, a function that runs again after a
            failure may count twice, or in part; it is faster.
        max_staleness: how many other functions may have changed variables between the reads of a
            function and its updates; None for any number, 0 for one function after the other.
        backup_workers: how many workers may run a function that is late on another one. The first to
            finish counts, so it needs "exactly_once".
        durability: what a parameter server that starts again still has. "none": nothing; "snapshot":
            what it had at its latest snapshot; "log": every update that it has acknowledged.
        sync: with "log", whether each update is on the disk before it is acknowledged. Without it,
            updates survive the death of a server, but not of its machine.
        window: how many functions a worker has waiting at a time.
        worker_timeout: how many seconds to wait for a worker that is missing, at the start and later.
        server_timeout: the same for a parameter server.

    Examples:
        >>> import phalanx as px
        >>> options = px.experimental.ParameterServerOptions(max_staleness=4, durability="log")
        >>> options.delivery, options.window
        ('exactly_once', 32)
    """

    delivery: str = "exactly_once"
    max_staleness: int | None = None
    backup_workers: int = 0
    durability: str = "none"
    sync: bool = False
    window: int = 32
    worker_timeout: float = 600.0
    server_timeout: float = 60.0

    def __post_init__(self) -> None:
        _check_name(self.delivery, "delivery", DELIVERIES)
        _check_name(self.durability, "durability", DURABILITIES)
        if self.max_staleness is not None:
            self._store("max_staleness", check_integer(self.max_staleness, "max_staleness", 0, _MOST))
        self._store("backup_workers", check_integer(self.backup_workers, "backup_workers", 0, _MOST))
        self._store("window", check_integer(self.window, "window", 1, _MOST))
        for name in ("worker_timeout", "server_timeout"):
            self._store(name, check_number(getattr(self, name), name, 0.001, _LONGEST))
        if not isinstance(self.sync, bool):
            raise InvalidTypeError(f"sync must be True or False. Received: {shown(self.sync)}")
        if self.backup_workers and self.delivery != "exactly_once":
            raise InvalidValueError(
                "Backup workers run a function twice, so its updates must count once: use "
                f"delivery='exactly_once'. Received: backup_workers={self.backup_workers} and "
                f"delivery={shown(self.delivery)}"
            )

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for users; this is still the construction


def _check_name(value: Any, name: str, names: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(repr(n) for n in names)
        raise InvalidValueError(f"{name} must be one of {listed}. Received: {shown(value)}")
