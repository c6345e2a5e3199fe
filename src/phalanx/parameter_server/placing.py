"""Which servers a commit concerns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from phalanx.parameter_server.requests import Token, Update, VariableDefinition

__all__ = ["by_server", "home_of", "variables_of"]


def by_server(updates: Iterable[Update]) -> dict[int, list[Update]]:
    """The updates of each server, in their order."""
    parts: dict[int, list[Update]] = {}
    for update in updates:
        parts.setdefault(update.variable.server, []).append(update)
    return parts


def variables_of(updates: Iterable[Update]) -> list[VariableDefinition]:
    """The variables that updates concern, each once, in the order of their first updates."""
    return list({update.variable.id: update.variable for update in updates}.values())


def home_of(token: Token, servers: int, parts: Mapping[int, Any], arbiter: bool) -> int | None:
    """The server whose commit is the commit of all; None if all must have staged their parts first.

    Args:
        token: the attempt.
        servers: how many there are.
        parts: what each server concerned is to do.
        arbiter: whether several attempts of a closure may run at the same time. Then one server, the
            same for all of them, takes the first and refuses the others.
    """
    if arbiter and token.closure >= 0:
        return token.closure % servers
    return next(iter(parts)) if len(parts) == 1 else None
