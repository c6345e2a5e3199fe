"""Parameter servers that run in threads of the test's process."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.net.endpoint import Endpoint
from phalanx.parameter_server.client import ServerConnections
from phalanx.parameter_server.requests import Read, Token, Update, VariableDefinition
from phalanx.parameter_server.service import PURPOSE, ParameterService

KEY = b"the secret of a test"
SECONDS = 20.0


class RunningServer:
    """A server at an address, which can be stopped and started again."""

    def __init__(self, folder: Path | None = None, address: str = "127.0.0.1:0") -> None:
        self.folder, self.address = folder, address
        self.start()

    def start(self) -> None:
        self.endpoint = Endpoint(self.address, KEY)
        self.address = self.endpoint.address
        self.service = ParameterService(self.endpoint.loop, self.folder)
        self.endpoint.serve(PURPOSE, self.service.admit)
        self.endpoint.start()

    def stop(self) -> None:
        self.service.close()
        self.endpoint.close()

    def restart(self) -> None:
        self.stop()
        self.start()


@contextlib.contextmanager
def running(count: int = 2, folder: Path | None = None) -> Iterator[list[RunningServer]]:
    servers = [RunningServer(folder and folder / str(i)) for i in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


def connections(servers: list[RunningServer], run: str = "", **options: Any) -> ServerConnections:
    """What a task has; without a run, that of a coordinator, which begins one."""
    options.setdefault("timeout", SECONDS)
    begin = {} if run else {"begin": True}
    run = run or secrets.token_hex(4)
    found = ServerConnections([s.address for s in servers], KEY, run, **begin, **options)
    found.run = run  # type: ignore[attr-defined]
    return found


def variable(id: int, shape: tuple[int, ...] = (), dtype: str = "float32", server: int = 0) -> Any:
    return VariableDefinition(id, f"v{id}", shape, dtype, server)


def add(variable: VariableDefinition, amount: float = 1.0) -> Update:
    return Update(variable, "assign_add", np.full(variable.shape, amount, np.dtype(variable.dtype)))


def value_of(servers: Any, variable: VariableDefinition) -> Any:
    return servers.pull([Read(variable)])[0].tolist()


__all__ = ["KEY", "SECONDS", "RunningServer", "Token", "add", "connections", "running", "value_of"]
