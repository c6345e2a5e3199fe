"""Parameter servers inside this process: the same stores, without connections."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from phalanx.parameter_server.placing import by_server, home_of, variables_of
from phalanx.parameter_server.recovery import verdict
from phalanx.parameter_server.requests import (
    Commit,
    OptimizerDefinition,
    Read,
    Settled,
    Token,
    Update,
    VariableDefinition,
)
from phalanx.parameter_server.store import Outcome, Store
from phalanx.parameter_server.updates import checked, has_dtype

__all__ = ["LocalServers"]


class LocalServers:
    """All parameter servers of a job in this process.

    Args:
        count: how many servers there are.
        delivery: "exactly_once", or "at_least_once": servers do not remember what they have applied.
        arbiter: whether several attempts of a closure may run at the same time.

    >>> servers = LocalServers(2)
    >>> variable = VariableDefinition(id=0, name="v", shape=(2,), dtype="float32", server=1)
    >>> servers.create(variable, np.zeros(2, np.float32))
    >>> for _ in range(2):  # the second is a repetition
    ...     servers.push(Token(7), [Update(variable, "assign_add", np.ones(2, np.float32))])
    Commit(applied=True, error=None)
    Commit(applied=True, error=None)
    >>> servers.pull([Read(variable)])[0].tolist()
    [1.0, 1.0]
    """

    def __init__(
        self, count: int = 1, delivery: str = "exactly_once", *, arbiter: bool = False
    ) -> None:
        self.runs = frozenset({secrets.token_hex(8)})
        """Names what they serve; no others have this name."""
        self.stores = [Store() for _ in range(count)]
        """What each server holds."""
        self._remembers, self._arbiter = delivery == "exactly_once", arbiter

    def create(self, definition: VariableDefinition, value: np.ndarray[Any, Any]) -> None:
        """Let its server hold a variable; if it does already, nothing happens."""
        value = np.array(value, has_dtype(definition))
        self.stores[definition.server].create(definition, value)

    def define_optimizer(self, definition: OptimizerDefinition) -> None:
        """Tell all servers of an optimizer."""
        for store in self.stores:
            store.define_optimizer(definition)

    def free(self, server: int, variables: Sequence[int], optimizers: Sequence[int] = ()) -> None:
        """Let a server hold variables no more, and forget optimizers."""
        self.stores[server].free(variables, optimizers)

    def end(self, without: Collection[int] = ()) -> None:
        """Servers forget everything."""
        self.stores = [Store() for _ in self.stores]

    def close(self) -> None:
        """There are no connections."""

    def pull(self, reads: Sequence[Read]) -> list[np.ndarray[Any, Any]]:
        """Read variables."""
        return [self._read(*read) for read in reads]

    def _read(
        self, variable: VariableDefinition, rows: np.ndarray[Any, Any] | None
    ) -> np.ndarray[Any, Any]:
        store = self.stores[variable.server]
        store.counts["pulls"] += 1
        if rows is not None:
            return store.rows(variable.id, np.asarray(rows))
        return store.held(variable.id).value.copy()

    def preview(self, updates: Sequence[Update]) -> list[np.ndarray[Any, Any]]:
        """What variables would hold after updates."""
        parts = by_server(_copied(checked(u)) for u in updates)
        found = {server: iter(self.stores[server].preview(part)) for server, part in parts.items()}
        return [next(found[variable.server]) for variable in variables_of(updates)]

    def push(self, token: Token, updates: Sequence[Update], value: bytes = b"") -> Commit:
        """Make all updates, or none, once for all attempts of the token's closure."""
        parts = by_server(_copied(checked(u)) for u in updates)
        if not self._remembers:
            for server, part in parts.items():
                self.stores[server].apply(part)
            return Commit(True)
        home = home_of(token, len(self.stores), parts, self._arbiter and bool(parts))
        others = [server for server in parts if server != home]
        for server in others:
            if self.stores[server].stage(token, parts[server], value) is Outcome.REFUSED:
                return self._dropped(token, others)
        if (
            home is not None
            and self.stores[home].push(token, parts.get(home, []), value) is Outcome.REFUSED
        ):
            return self._dropped(token, others)
        done = [self.stores[server].commit(token) for server in others]
        return Commit(Outcome.REFUSED not in done)

    def _dropped(self, token: Token, servers: Sequence[int]) -> Commit:
        for server in servers:
            self.stores[server].drop(token)
        return Commit(False)

    def push_later(
        self,
        token: Token,
        updates: Sequence[Update],
        value: bytes,
        then: Callable[[Commit], None],
        hold: bool = False,
    ) -> None:
        """As `push`, and call `then` at once."""
        then(self.push(token, updates, value))

    is_ahead = False
    """What was read counts."""

    def collect(self, wait: bool = False) -> None:
        """Nothing waits."""

    def drop_known(self, variable: int) -> None:
        """Nothing is known."""

    def settle(self, tokens: Sequence[Token]) -> dict[Token, Settled]:
        """Find out, and decide, what became of attempts whose worker is lost."""
        settled: dict[Token, Settled] = {}
        for token in tokens:
            found = [store.inquire(token) for store in self.stores]
            home = home_of(token, len(self.stores), {}, self._arbiter)
            settled[token] = verdict(found, home)
            for store in self.stores:
                store.decide(token, settled[token].committed)
        return settled

    def forget(self, below: int) -> None:
        """Closures with smaller numbers are done."""
        for store in self.stores:
            store.forget(below)

    def status(self) -> list[dict[str, Any]]:
        """What each server holds and has done."""
        return [store.status() for store in self.stores]


def _copied(update: Update) -> Update:
    """An update whose operand the store may keep."""
    return update._replace(values=np.array(update.values))
