"""How long Phalanx waits, in one place.

Nothing waits for ever. A wait first warns, naming who is late and where they are, and then raises.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.core.errors import InvalidValueError


@dataclass(frozen=True)
class Patience:
    """After how many seconds a wait warns, and after how many it gives up."""

    warn_after: float
    give_up_after: float


def replica_patience() -> Patience:
    """How long replicas of one process wait for each other at a merge point.

    The default gives a slow replica (compiling, reading data) half an hour, with a warning each
    minute. The environment variable PHALANX_REPLICA_DEADLINE sets another number of seconds.
    """
    text = os.environ.get("PHALANX_REPLICA_DEADLINE", "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise InvalidValueError(
            "The environment variable PHALANX_REPLICA_DEADLINE must be a positive number of "
            f"seconds. Received: {text!r}"
        )
    return Patience(warn_after=min(60.0, seconds / 2), give_up_after=seconds)
