"""Looking at a running job from outside: questions to its hub, without joining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import DeadlineExceededError, HubLostError, UnavailableError
from phalanx.job.hub.connect import connect_to_hub
from phalanx.job.hub.worker_table import WorkerTable
from phalanx.net.client import RequestClient


class Observer:
    """A connection to a hub that only asks; a context manager."""

    def __init__(self, address: str, token: str, timeout: float = 10.0) -> None:
        self.address = address
        self._client = RequestClient(
            connect_to_hub(address, token, timeout), "phalanx-observer"
        ).start()

    def table(self, timeout: float = 10.0) -> WorkerTable:
        """Who does what at this moment."""
        return WorkerTable(self._ask({"type": "table"}, timeout)["rows"])

    def failure(self, timeout: float = 10.0) -> str | None:
        """Why the job cannot go on, or None."""
        failure = self._ask({"type": "table"}, timeout)["failure"]
        return None if failure is None else str(failure["text"])

    def workers_train(self, timeout: float = 10.0) -> bool:
        """Whether workers train on their own, although there are parameter servers."""
        return bool(self._ask({"type": "table"}, timeout).get("workers_train"))

    def stacks(self, timeout: float = 5.0) -> dict[str, str]:
        """The Python stacks of all workers, by task."""
        answer = self._ask({"type": "stacks", "patience": timeout}, timeout + 10.0)
        return dict(answer["stacks"])

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ask(self, message: dict[str, Any], timeout: float) -> Mapping[str, Any]:
        try:
            return self._client.request(message, timeout=timeout).fields
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"The hub at {self.address} did not answer within {timeout:g} seconds."
            ) from error
        except UnavailableError as error:
            raise HubLostError(f"The hub at {self.address} has closed the connection.") from error
