"""Jobs with parameter servers in this process, for tests of what talks to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import phalanx as px
from phalanx.parameter_server.closure import closure
from phalanx.parameter_server.local import LocalServers
from phalanx.parameter_server.requests import Read, Token, Update


class CountingServers(LocalServers):
    """Servers that note what they are asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.pulls: list[list[Read]] = []
        self.pushes: list[list[Update]] = []
        self.created: list[tuple[int, ...]] = []

    def create(self, definition: Any, value: Any) -> None:
        self.created.append(value.shape)
        super().create(definition, value)

    def pull(self, reads: Sequence[Read]) -> list[np.ndarray[Any, Any]]:
        self.pulls.append(list(reads))
        return super().pull(reads)

    def push(self, token: Token, updates: Sequence[Update], value: bytes = b"") -> Any:
        self.pushes.append(list(updates))
        return super().push(token, updates, value)


class Job:
    """A strategy with servers in this process, and a worker that is this process too."""

    def __init__(self, servers: int = 2, partitioner: Any = None, **kwargs: Any) -> None:
        self.servers = CountingServers(servers)
        tasks = {"worker": ["host:1"], "ps": [f"host:{2 + i}" for i in range(servers)]}
        resolver = px.cluster_resolver.SimpleClusterResolver(px.train.ClusterSpec(tasks))
        self.strategy = px.ParameterServerStrategy(resolver, partitioner, **kwargs)
        self.use(self.servers)
        self._closures = 0

    def use(self, servers: Any) -> None:
        """Let the variables of the job be on these servers."""
        self.servers = servers
        self.strategy.extended.home.use(servers)

    def variable(self, *args: Any, **kwargs: Any) -> Any:
        with self.strategy.scope():
            return px.Variable(*args, **kwargs)

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Run a function as a worker does: as a closure whose updates are one commit."""
        self._closures += 1
        token = Token(self._closures)
        with closure(token, self.servers) as attempt:
            result = fn(*args)
        assert self.servers.push(token, attempt.updates).applied
        return result
