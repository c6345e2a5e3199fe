"""What the coordinator and a worker tell each other, as bytes.

Messages have no fields, only buffers; their number says what they are. Everything that happens once per
closure is packed by `struct`, many closures in one message. The rest is pickled: both ends have proved
that they belong to the job.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from phalanx.net.framing import Limits

__all__ = [
    "LIMITS",
    "PURPOSE",
    "Attempt",
    "MessageKind",
    "Report",
    "Status",
    "attempts_in",
    "report_message",
    "reports_in",
    "run_message",
    "with_inputs",
]

PURPOSE = "closures"
"""What connections to a worker are for."""

LIMITS = Limits(fields=0, buffers=1 << 36, most=4)

_ERA = struct.Struct("<Q")
_ATTEMPT = struct.Struct("<QIIBQ")  # closure, attempt, function, whether it has inputs, size
_BUSY = struct.Struct("<d")
_REPORT = struct.Struct("<QIBQ")  # closure, attempt, status, size


class MessageKind(IntEnum):
    """The numbers of messages."""

    # from the coordinator
    HELLO = 1
    DEFINE = 2
    RUN = 3
    BUILD = 4
    RELEASE = 5
    RECALL = 6
    PING = 7
    # from the worker
    READY = 11
    REPORT = 12
    PONG = 13
    REFUSED = 14


class Status(IntEnum):
    """What a worker says of an attempt, or of a resource."""

    DONE = 0
    FAILED = 1
    RETURNED = 2
    REFUSED = 3
    BUILT = 4
    NOT_BUILT = 5


class Attempt(NamedTuple):
    """An attempt that a worker shall make.

    Args:
        closure: its number.
        attempt: the number of the attempt.
        function: the number of the function.
        has_inputs: whether the arguments come with the values of other closures.
        arguments: pickled; empty if there are none.
        era: see `phalanx.coordinator.state.ReturnAttempts`.
    """

    closure: int
    attempt: int
    function: int
    has_inputs: int
    arguments: bytes
    era: int = 0


class Report(NamedTuple):
    """What has become of an attempt, or of a resource.

    Args:
        closure: its number, or that of the resource.
        attempt: the number of the attempt.
        status: what has become of it.
        value: what it returned, or what it raised; see `phalanx.coordinator.values`.
    """

    closure: int
    attempt: int
    status: int
    value: bytes


def run_message(era: int, attempts: Iterable[Attempt]) -> list[bytes]:
    """Attempts as buffers.

    >>> attempts = [Attempt(7, 0, 1, 0, b"x"), Attempt(8, 1, 1, 0, b"")]
    >>> list(attempts_in(run_message(3, attempts))) == [a._replace(era=3) for a in attempts]
    True
    """
    pack = _ATTEMPT.pack
    heads, bodies = [_ERA.pack(era)], []
    for closure, attempt, function, has_inputs, arguments, _ in attempts:
        heads.append(pack(closure, attempt, function, has_inputs, len(arguments)))
        if arguments:
            bodies.append(arguments)
    return [b"".join(heads), b"".join(bodies)]


def attempts_in(buffers: Sequence[Any]) -> Iterator[Attempt]:
    """The attempts of a message."""
    head, bodies = buffers
    (era,) = _ERA.unpack_from(head)
    at = 0
    for closure, attempt, function, has_inputs, size in _ATTEMPT.iter_unpack(head[_ERA.size :]):
        arguments = bytes(bodies[at : at + size]) if size else b""
        at += size
        yield Attempt(closure, attempt, function, has_inputs, arguments, era)


def report_message(busy: float, reports: Iterable[Report]) -> list[bytes]:
    """Reports as buffers, and how many seconds each attempt took on average.

    >>> reports = [Report(7, 0, Status.DONE, b"value")]
    >>> busy, found = reports_in(report_message(0.5, reports))
    >>> busy, list(found) == reports
    (0.5, True)
    """
    pack = _REPORT.pack
    heads, bodies = [_BUSY.pack(busy)], []
    for closure, attempt, status, value in reports:
        heads.append(pack(closure, attempt, status, len(value)))
        if value:
            bodies.append(value)
    return [b"".join(heads), b"".join(bodies)]


def reports_in(buffers: Sequence[Any]) -> tuple[float, Iterator[tuple[int, int, int, bytes]]]:
    """The reports of a message, as plain tuples, and how long an attempt took."""
    head, bodies = buffers
    return _BUSY.unpack_from(head)[0], _reports(head, bodies)


def _reports(head: Any, bodies: Any) -> Iterator[tuple[int, int, int, bytes]]:
    at = 0
    for closure, attempt, status, size in _REPORT.iter_unpack(head[_BUSY.size :]):
        value = bytes(bodies[at : at + size]) if size else b""
        at += size
        yield closure, attempt, status, value


def with_inputs(arguments: bytes, inputs: Sequence[bytes | BaseException]) -> bytes:
    """Arguments together with the values of closures that they refer to, or why they have none."""
    return pickle.dumps((arguments, list(inputs)), protocol=5)
