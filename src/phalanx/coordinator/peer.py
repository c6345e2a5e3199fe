"""One worker as the coordinator's thread sees it: closures and resources go out over its connection."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phalanx.coordinator.actions import RunAttempts
from phalanx.coordinator.functions import Shipped
from phalanx.coordinator.messages import Attempt, MessageKind, run_message, with_inputs
from phalanx.coordinator.remote_value import RemoteValue
from phalanx.net.connection import Connection

__all__ = ["Entry", "Peer", "Resource"]


class Entry(NamedTuple):
    """A closure, as users' threads put it into the queue.

    Args:
        function: what to call.
        arguments: pickled.
        inputs: values of other closures that the arguments refer to.
        resources: what else must last until the closure is settled: resources, and variables.
        value: where the result goes.
    """

    function: Shipped
    arguments: bytes
    inputs: Sequence[RemoteValue]
    resources: Sequence[Any]
    value: RemoteValue


class Resource(NamedTuple):
    """Something that every worker has.

    Args:
        function: what makes it.
        arguments: pickled.
        resources: what the arguments refer to.
        values: one for each worker.
    """

    function: Shipped
    arguments: bytes
    resources: Sequence[Any]
    values: Sequence[RemoteValue]


class Peer:
    """A worker's connection, and what was sent over it.

    Args:
        connection: the worker is ready at its other end.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._functions: set[int] = set()

    def run(self, action: RunAttempts, entries: Mapping[int, Entry]) -> None:
        """Send attempts, and before them the functions that the worker does not have."""
        attempts = []
        for closure, attempt in action.attempts:
            entry = entries[closure]
            function = self._define(entry.function)
            if entry.inputs:
                arguments = with_inputs(entry.arguments, [v.error or v.data() for v in entry.inputs])
                attempts.append(Attempt(closure, attempt, function, 1, arguments))
            else:
                attempts.append(Attempt(closure, attempt, function, 0, entry.arguments))
        self._send(MessageKind.RUN, run_message(action.era, attempts))

    def build(self, number: int, resource: Resource) -> None:
        """Let the worker build a resource."""
        function = self._define(resource.function)
        self._send(MessageKind.BUILD, [b"%d %d" % (number, function), resource.arguments])

    def recall(self, era: int) -> None:
        """Let the worker return what it has not begun."""
        self._send(MessageKind.RECALL, [b"%d" % era])

    def release(self, what: str, number: int) -> None:
        """No closure needs a function, a resource or the value of a variable any more."""
        if what == "function":
            self._functions.discard(number)
        self._send(MessageKind.RELEASE, [pickle.dumps((what, number), protocol=5)])

    def _define(self, function: Shipped) -> int:
        number = function.number
        if number not in self._functions:
            self._functions.add(number)
            self._send(MessageKind.DEFINE, [b"%d" % number, function.blob])
        return number

    def _send(self, kind: MessageKind, buffers: Sequence[Any]) -> None:
        self.connection.send({}, buffers, kind)
