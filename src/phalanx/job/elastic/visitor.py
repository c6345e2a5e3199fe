"""A worker's end of the door: how it waits for its generation, and says where it stands."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import AbortedError, HubLostError, InvalidValueError
from phalanx.job.elastic.door import connect_to_door
from phalanx.net.client import RequestClient
from phalanx.net.framing import Message
from phalanx.runtime.formatting import shown

__all__ = ["ADDRESS", "NUMBER", "GenerationEntry", "Released", "Visitor"]

ADDRESS, NUMBER = "PHALANX_DOOR", "PHALANX_DOOR_NUMBER"
"""Where the door of the job is, and which worker this process is there."""

_log = logging.getLogger("phalanx")

_CONNECT = 60.0  # seconds
_SAY_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class GenerationEntry:
    """What a worker is told when its generation begins.

    Args:
        generation: its number.
        rank: the number of this worker in it.
        addresses: of all workers, by rank.
        names: of all workers for people, by rank; they stay the same in all generations.
        hub: where the hub of the generation is; None if the worker is alone.
        step: how many steps have been made.
        source: the rank of a worker that has the state of that step in memory, if one has.
        holders: the ranks of all workers that have it.
        reason: why there is a new generation.
        maximum: how many workers there may be.
    """

    generation: int = 1
    rank: int = 0
    addresses: tuple[str, ...] = ("",)
    names: tuple[str, ...] = ("worker 0",)
    hub: str | None = None
    step: int = 0
    source: int | None = None
    holders: tuple[int, ...] = ()
    reason: str = ""
    maximum: int = 1

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.addresses)

    def environment(self) -> dict[str, str | None]:
        """What the environment says to a strategy that is made in this generation; None is nothing."""
        task = {"type": "worker", "index": self.rank}
        config = {"cluster": {"worker": list(self.addresses)}, "task": task}
        return {"TF_CONFIG": json.dumps(config), "PHALANX_HUB": self.hub}

    @classmethod
    def from_message(cls, fields: Mapping[str, Any]) -> GenerationEntry:
        """What the door has sent."""
        return cls(
            int(fields["generation"]),
            int(fields["rank"]),
            tuple(map(str, fields["addresses"])),
            tuple(map(str, fields["names"])),
            None if fields["hub"] is None else str(fields["hub"]),
            int(fields["step"]),
            None if fields["source"] is None else int(fields["source"]),
            tuple(map(int, fields["holders"])),
            str(fields["reason"]),
            int(fields["maximum"]),
        )


@dataclass(frozen=True)
class Released:
    """The worker may end; `why` is "finished", "left" or "late"."""

    why: str


class Visitor:
    """One worker's connection to the door. Made by `find`.

    Args:
        address: of the door.
        token: the job's secret.
        number: which worker this is.
    """

    def __init__(self, address: str, token: str, number: int) -> None:
        self._number = number
        self._changed = threading.Condition()
        self._answer: GenerationEntry | Released | str | None = (
            None  # a string is why the job has failed
        )
        self._is_closed = False
        self._wants_stop: bool | None = None  # whether with a checkpoint
        self._on_stop: Callable[[], None] = lambda: None
        sock = connect_to_door(address, token, _CONNECT)
        self._client = RequestClient(sock, "phalanx-visitor", self._handle, self._closed).start()
        self._tell("back")

    @classmethod
    def find(cls) -> Visitor | None:
        """A connection to the door that the environment names, if it names one."""
        address, number = os.environ.get(ADDRESS), os.environ.get(NUMBER, "")
        if not address:
            return None
        token = os.environ.get("PHALANX_TOKEN")
        if not token or not number.isdigit():
            raise InvalidValueError(
                f"{ADDRESS} names a door, but PHALANX_TOKEN or {NUMBER} is missing; `phalanx run` sets "
                f"all of them. Received: {NUMBER}={shown(number)}"
            )
        return cls(address, token, int(number))

    # -- what this worker tells ------------------------------------------------------------------

    def arrive(self, recoverable: bool) -> None:
        """Say that this worker is there; `recoverable` whether it can restore checkpoints."""
        self._tell("arrived", recoverable=recoverable)

    def stopped(self, step: int, holds: bool) -> None:
        """Say that this worker has left its generation, at a step whose state it may hold."""
        with self._changed:
            self._answer = self._wants_stop = None
        self._tell("stopped", step=step, holds=holds)

    def finished(self, step: int) -> None:
        """Say that this worker has come to the end of the training."""
        with self._changed:
            self._answer = None
        self._tell("finished", step=step)

    def leave(self) -> None:
        """Say that this worker wants to leave after the next common step."""
        self._tell("leaves")

    def _tell(self, kind: str, **about: Any) -> None:
        self._client.send({"type": kind, "worker": self._number, **about})

    # -- what it hears ---------------------------------------------------------------------------

    @property
    def wants_stop(self) -> bool:
        """Whether the generation shall stop at a common step."""
        return self._wants_stop is not None

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint shall be saved then."""
        return bool(self._wants_stop)

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call a function, in the connection's thread, when the generation shall stop."""
        with self._changed:
            self._on_stop = callback
            known = self.wants_stop
        if known:
            callback()

    def wait(self) -> GenerationEntry | Released:
        """Wait until this worker is let in, or may end.

        It lasts as long as the launcher says nothing else. The end of the launcher, and a job that has
        failed, are errors.
        """
        begun = told = time.monotonic()
        with self._changed:
            while self._answer is None and not self._is_closed:
                self._changed.wait(0.25)
                now = time.monotonic()
                if now - told > _SAY_EVERY:
                    told = now
                    _log.warning("This worker has waited at the door for %.0f s.", now - begun)
            answer = self._answer
        if isinstance(answer, str):
            raise AbortedError(answer)
        if answer is None:
            raise HubLostError(
                "The connection to the launcher has closed: it has ended, or its machine is down."
            )
        return answer

    def wait_for_end(self) -> Released | None:
        """Wait until all have come to their end; None if this worker is needed once more."""
        answer = self.wait()
        return answer if isinstance(answer, Released) else None

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def _handle(self, message: Message) -> None:
        fields = message.fields
        kind = fields.get("type")
        callback: Callable[[], None] = lambda: None  # noqa: E731
        with self._changed:
            if kind == "begin":
                self._answer, self._wants_stop = GenerationEntry.from_message(fields), None
            elif kind == "release":
                self._answer = Released(str(fields["why"]))
            elif kind == "again":
                self._answer = GenerationEntry()
            elif kind == "failure":
                self._answer = str(fields["text"])
            elif kind == "stop":
                self._wants_stop = bool(fields["save"]) or bool(self._wants_stop)
                callback = self._on_stop
            self._changed.notify_all()
        callback()

    def _closed(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
