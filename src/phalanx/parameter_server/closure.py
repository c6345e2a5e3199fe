"""What a scheduled function does to variables on parameter servers.

While a closure runs, its reads go to the servers, once for each variable, and its updates are recorded.
It sees its own updates; other tasks do not until they are pushed, all of them as one commit. Which
servers these are is a matter of the worker that runs it: see `home` for code outside of closures.
"""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from typing import Any

import numpy as np

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.shard_slices import ShardSlices, split_rows
from phalanx.core.variables.recorded_updates import Change, Pending
from phalanx.errors import StrategyMismatchError
from phalanx.parameter_server.requests import Servers, Token, Update
from phalanx.parameter_server.updates import existing_rows
from phalanx.runtime.formatting import shown

__all__ = ["Closure", "closure", "current_closure", "updates_of"]


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
            if variable.home.run not in self.servers.runs:
                raise StrategyMismatchError(
                    "A scheduled function uses variables on the parameter servers of the strategy "
                    f"whose coordinator runs it, and no others. {variable.name!r} is on those of "
                    f"another one, {variable.distribute_strategy!r}. Give its value to the function as "
                    f"an argument. Received: {shown(variable.name)}"
                )
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
        servers: where its variables are.

    Examples:
        ::

            with closure(token, servers) as attempt:
                result = fn(*args)
            servers.push(token, attempt.updates)
    """

    def __init__(self, token: Token, servers: Servers) -> None:
        self._closure = Closure(token, servers)

    def __enter__(self) -> Closure:
        self._before = _current.set(self._closure)
        return self._closure

    def __exit__(self, *error: object) -> None:
        _current.reset(self._before)


_current: contextvars.ContextVar[Closure | None] = contextvars.ContextVar("closure", default=None)


def current_closure() -> Closure | None:
    """The closure that this code is a part of, if any."""
    return _current.get()


def updates_of(changed: Mapping[Any, Pending]) -> list[Update]:
    """What servers must do to the variables."""
    last: ShardSlices | None = None
    shared: tuple[Any, Any] = None, None  # what the shards of a table have in common
    updates = []
    for variable, state in changed.items():
        for change in state.changes:
            operand = change.operand
            if isinstance(operand, ShardSlices):
                if last is None or not last.shares_with(operand):
                    last = operand
                    parts = split_rows(np.asarray(operand.whole), operand.shard.ends)
                    shared = np.asarray(operand.values), parts
                updates.append(_update(variable, change, *shared))
            else:
                updates.append(_update(variable, change))
    return updates


def _values(variable: Any, given: Any) -> Any:
    values = np.asarray(given)
    return values if values.dtype == variable.dtype else values.astype(variable.dtype)


def _update(variable: Any, change: Change, values: Any = None, parts: Any = None) -> Update:
    """What a server must do; of slices of a whole table also their values, and the rows of shards."""
    method, operand, optimizer = change
    if parts is not None:
        values = _values(variable, values)
        exist, indices = parts[operand.shard.number]
    elif isinstance(operand, IndexedSlices):
        values = _values(variable, operand.values)
        indices, exist = existing_rows(np.asarray(operand.indices), variable.shape[0])
    else:
        return Update(variable.definition, method, _values(variable, operand), None, optimizer)
    values = values if exist is None else values.take(exist, axis=0)
    return Update(variable.definition, method, values, indices, optimizer)
