"""What a scheduled function does to variables on parameter servers.

While a closure runs, its reads go to the servers, once for each variable, and its updates are recorded.
It sees its own updates; other tasks do not until they are pushed, all of them as one commit. Outside of
closures, as in the program of the coordinator, each step is a commit of its own.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from phalanx.core.elsewhere import Change, Pending, Rows
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.errors import AbortedError, ContextError
from phalanx.parameter_server.requests import Read, Servers, Token, Update, own_token
from phalanx.parameter_server.updates import existing_rows

__all__ = ["HOME", "Closure", "closure", "current_closure", "current_servers", "use", "use_when_needed"]


class Closure:
    """One attempt to run a scheduled function.

    Attributes:
        token: what its updates are known by.
        servers: where its variables are.
    """

    def __init__(self, token: Token, servers: Servers) -> None:
        self.token = token
        self.servers = servers
        self._states: dict[Any, Pending] = {}

    def pending(self, variable: Any) -> Pending:
        """What the closure has done to a variable so far."""
        found = self._states.get(variable)
        if found is None:
            found = self._states[variable] = Pending(variable)
        return found

    def commit(self, changed: Mapping[Any, Pending]) -> None:
        """Take over what a step of the closure has done."""
        self._states.update(changed)

    @property
    def updates(self) -> list[Update]:
        """What it has done to variables, for `Servers.push`; waits until it has been computed."""
        return updates_of(self._states)


class closure:  # noqa: N801 - reads as a statement
    """Run code as a closure, for the duration of a ``with`` block.

    Push `Closure.updates` afterwards. If the code fails, there is nothing to push.

    Args:
        token: what its updates will be known by.
        servers: where variables are; by default those that this process uses.

    Examples:
        ::

            with closure(token) as attempt:
                result = fn(*args)
            servers.push(token, attempt.updates)
    """

    def __init__(self, token: Token, servers: Servers | None = None) -> None:
        self._closure = Closure(token, current_servers() if servers is None else servers)

    def __enter__(self) -> Closure:
        self._before = _current.set(self._closure)
        return self._closure

    def __exit__(self, *error: object) -> None:
        _current.reset(self._before)


_current: contextvars.ContextVar[Closure | None] = contextvars.ContextVar("closure", default=None)
_servers: list[Servers] = []
_connects: list[Callable[[], Servers]] = []  # what gave, or will give, those servers
_turn = threading.RLock()  # `Servers` are for one thread at a time


def current_closure() -> Closure | None:
    """The closure that this code is a part of, if any."""
    return _current.get()


def use(servers: Servers | None) -> None:
    """Say where the variables of this process are; None to forget it."""
    _servers[:] = [] if servers is None else [servers]
    _connects.clear()


def use_when_needed(connect: Callable[[], Servers]) -> None:
    """Say how to reach the servers, which is done when they are first needed.

    What `use` says counts more. Of several calls the latest counts.
    """
    if _connects or not _servers:
        _servers.clear()
        _connects[:] = [connect]


def current_servers() -> Servers:
    """The parameter servers that this code talks to."""
    running = _current.get()
    if running is not None:
        return running.servers
    if not _servers and _connects:
        _servers[:] = [_connects[0]()]
    if not _servers:
        raise ContextError(
            "This process is not connected to parameter servers. Make a px.ParameterServerStrategy "
            "in the coordinator's program; workers get their work from it."
        )
    return _servers[0]


@contextmanager
def servers_in_turn() -> Iterator[Servers]:
    """The parameter servers that this code talks to, while no other thread of a coordinator does."""
    running = _current.get()
    if running is not None:  # whose servers are those of its thread
        yield running.servers
        return
    with _turn:
        yield current_servers()


class ServersHome:
    """The home of all variables on parameter servers."""

    def pending(self, variable: Any) -> Pending:
        """What the closure around this code has done to a variable; outside of closures, nothing."""
        running = _current.get()
        return Pending(variable) if running is None else running.pending(variable)

    def commit(self, changed: Mapping[Any, Pending]) -> None:
        """Record it in the closure around this code; outside of closures, push it."""
        running = _current.get()
        if running is not None:
            running.commit(changed)
            return
        updates = updates_of(changed)
        if updates:
            push_alone(updates)

    def pull(self, reads: Sequence[Rows]) -> list[np.ndarray[Any, Any]]:
        """Read variables, or rows of them, in one round trip."""
        wanted: list[Read] = []
        parts = [table.row_reads(indices, wanted) for table, indices in reads]
        pulled: list[Any] = []
        running = _current.get()
        if running is not None:
            pulled = running.servers.pull(wanted) if wanted else []
        elif wanted:
            with servers_in_turn() as servers:
                pulled = servers.pull(wanted)
        return [join(pulled) for join in parts]

    def preview(self, pending: Pending) -> np.ndarray[Any, Any]:
        """What a variable would hold after changes, which are not made."""
        updates = updates_of({pending.variable: pending})
        with servers_in_turn() as servers:
            return servers.preview(updates)[0]


HOME = ServersHome()
"""Where variables on parameter servers are."""


def push_alone(updates: Sequence[Update]) -> None:
    """Make updates that belong to no closure."""
    with servers_in_turn() as servers:
        commit = servers.push(own_token(), updates)
    if not commit.applied:
        raise AbortedError(
            "The parameter servers have refused an update, because its number had been used before. "
            f"Received: updates of {sorted({u.variable.name for u in updates})}"
        )


def updates_of(changed: Mapping[Any, Pending]) -> list[Update]:
    """What servers must do to the variables."""
    return [
        _update(variable, change) for variable, state in changed.items() for change in state.changes
    ]


def _update(variable: Any, change: Change) -> Update:
    method, operand, optimizer = change
    if not isinstance(operand, IndexedSlices):
        values = np.asarray(operand)
        if values.dtype != variable.dtype:
            values = values.astype(variable.dtype)
        return Update(variable.definition, method, values, None, optimizer)
    values, indices = np.asarray(operand.values), np.asarray(operand.indices)
    if values.dtype != variable.dtype:
        values = values.astype(variable.dtype)
    indices, exist = existing_rows(indices, variable.shape[0])
    values = values if exist is None else values.take(exist, axis=0)
    return Update(variable.definition, method, values, indices, optimizer)
