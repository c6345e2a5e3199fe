"""Looking at a running job from outside: questions to its hub, without joining."""

from __future__ import annotations

import itertools
import time
from typing import Any

from phalanx.cluster.hub.dialling import dial
from phalanx.cluster.hub.frames import ProtocolError
from phalanx.cluster.hub.table import Table
from phalanx.core.errors import DeadlineExceededError, HubLostError

__all__ = ["Observer"]


class Observer:
    """A connection to a hub that only asks; a context manager.

    Args:
        address: the hub's ``host:port``.
        token: the job's secret.
        timeout: seconds within which the hub must be reached.
    """

    def __init__(self, address: str, token: str, timeout: float = 10.0) -> None:
        self.address = address
        self._socket, self._stream = dial(address, token, timeout)
        self._numbers = itertools.count(1)

    def table(self, timeout: float = 10.0) -> Table:
        """Who does what at this moment."""
        return Table(self._ask({"type": "table"}, timeout)["rows"])

    def failure(self, timeout: float = 10.0) -> str | None:
        """Why the job cannot go on, or None."""
        failure = self._ask({"type": "table"}, timeout)["failure"]
        return None if failure is None else str(failure["text"])

    def stacks(self, timeout: float = 5.0) -> dict[str, str]:
        """The Python stacks of all workers, by task."""
        answer = self._ask({"type": "stacks", "patience": timeout}, timeout + 10.0)
        return dict(answer["stacks"])

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        number = next(self._numbers)
        end = time.monotonic() + timeout
        self._stream.send({**message, "request": number})
        try:
            self._socket.sendall(self._stream.take())
            while True:
                self._socket.settimeout(max(0.01, end - time.monotonic()))
                data = self._socket.recv(1 << 16)
                if not data:
                    raise HubLostError(f"The hub at {self.address} has closed the connection.")
                for answer in self._stream.receive(data):
                    if answer.get("request") == number:
                        return answer
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"The hub at {self.address} did not answer within {timeout:g} seconds."
            ) from error
        except OSError as error:
            if isinstance(error, ProtocolError | HubLostError):
                raise
            raise HubLostError(f"The connection to the hub at {self.address} broke: {error}") from error
