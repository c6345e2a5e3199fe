"""What became of an attempt whose worker is lost: decided from what the servers know of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from phalanx.parameter_server.requests import Settled
from phalanx.parameter_server.store import Trace

__all__ = ["say_settled", "verdict"]

_log = logging.getLogger("phalanx")


def verdict(found: Sequence[tuple[Trace, bytes]], home: int | None) -> Settled:
    """Whether an attempt counts.

    All servers have fenced it off, so that nothing changes while this is decided. If any of them has
    applied it, all had staged it, and the others can follow. If none has, none ever will.

    Args:
        found: what each server knows, and what the closure returned.
        home: the server that decides alone, if several attempts of a closure may run.

    >>> verdict([(Trace.STAGED, b""), (Trace.APPLIED, b"42")], None)
    Settled(committed=True, value=b'42')
    >>> verdict([(Trace.STAGED, b""), (Trace.STAGED, b"")], None)
    Settled(committed=False, value=b'')
    """
    witnesses = found if home is None else [found[home]]
    values = [value for trace, value in witnesses if trace is Trace.APPLIED]
    return Settled(bool(values), next((value for value in values if value), b""))


def say_settled(committed: bool) -> None:
    """Say what became of a commit of no closure that another task has settled."""
    _log.warning(
        "A worker was lost, or was slow, in the middle of a commit to several parameter servers. "
        "All of them have now %s its updates.",
        "made" if committed else "dropped",
    )
