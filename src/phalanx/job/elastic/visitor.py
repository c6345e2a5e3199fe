"""A worker's end of the door: how it waits for its generation, and says where it stands."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import (
    AbortedError,
    DeadlineExceededError,
    HubLostError,
    InvalidValueError,
    PhalanxError,
    UnavailableError,
)
from phalanx.job.elastic.door import connect_to_door
from phalanx.job.elastic.letters import Letters
from phalanx.net.client import RequestClient
from phalanx.net.framing import Message
from phalanx.runtime.formatting import shown

__all__ = ["ADDRESS", "NUMBER", "GenerationEntry", "Released", "Visitor"]

ADDRESS, NUMBER = "PHALANX_DOOR", "PHALANX_DOOR_NUMBER"
"""Where the door of the job is, and which worker this process is there."""

_log = logging.getLogger("phalanx")

_CONNECT = 60.0  # seconds
_CONNECT_AGAIN = 15.0  # seconds
_REFUSALS = 1.0  # seconds after which a launcher at whose address nothing listens has ended
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

    If the connection closes, it is made again: the network of a worker may be gone for a moment.

    Args:
        address: of the door.
        token: the job's secret.
        number: which worker this is.
    """

    def __init__(self, address: str, token: str, number: int) -> None:
        self._address, self._token, self._number = address, token, number
        self._changed = threading.Condition()
        self._answer: GenerationEntry | Released | str | None = (
            None  # a string is why the job has failed
        )
        self._letters = Letters()
        self._client: RequestClient | None = None
        self._is_closed = False
        self._wants_stop: bool | None = None  # whether with a checkpoint
        self._on_stop: Callable[[], None] = lambda: None
        self._connect(connect_to_door(address, token, _CONNECT), anew=True)

    def _connect(self, sock: socket.socket, anew: bool) -> None:
        client = RequestClient(sock, "phalanx-visitor", self._handle, self._closed)
        with self._changed:
            if self._is_closed:
                sock.close()
                return
            self._client = client
            about = {"worker": self._number, "pid": os.getpid(), "anew": anew}
            client.send({"type": "back", **about, "heard": self._letters.heard})
            self._changed.notify_all()
        client.start()

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

    def made(self, step: int) -> None:
        """Say that there is a state to lose: so many steps have been made."""
        self._tell("made", step=step)

    def leave(self) -> None:
        """Say that this worker wants to leave after the next common step. For signal handlers, too."""
        # Not in this thread: the handler may have interrupted it while it had the lock of a queue.
        thread = threading.Thread(
            target=self._tell, args=("leaves",), name="phalanx-leave", daemon=True
        )
        thread.start()

    def _tell(self, kind: str, **about: Any) -> None:
        with self._changed:
            letter = self._letters.written({"type": kind, "worker": self._number, **about})
            if self._client is not None:
                self._client.send(letter)

    # -- what it hears ---------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the launcher could not be reached again."""
        return self._is_closed

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
        failed, are errors. A connection that has closed is made again before.
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
                "The connection to the launcher has closed: it has ended, or its machine is down. "
                f"Received: {self._address}, which could not be reached again"
            )
        return answer

    def is_reachable(self) -> bool:
        """Whether the launcher answers; waits for a connection that is being made again."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._client is not None or self._is_closed, 2 * _CONNECT_AGAIN
                )
                client = self._client
            if client is None:
                return False
            try:
                client.request({"type": "list"}, timeout=_CONNECT_AGAIN)
            except DeadlineExceededError:
                return False
            except UnavailableError:  # it has closed just now
                with self._changed:
                    if self._client is client:
                        self._client = None
                continue
            return True

    def wait_for_end(self) -> Released | None:
        """Wait until all have come to their end; None if this worker is needed once more."""
        answer = self.wait()
        return answer if isinstance(answer, Released) else None

    def close(self) -> None:
        """End the connection."""
        with self._changed:
            self._is_closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _handle(self, message: Message) -> None:
        fields = message.fields
        kind = fields.get("type")
        callback: Callable[[], None] = lambda: None  # noqa: E731
        with self._changed:
            if kind == "back":  # what the door has of this worker
                for letter in self._letters.after(int(fields["heard"])):
                    if self._client is not None:
                        self._client.send(letter)
                return
            if kind == "there":
                if self._client is not None:
                    self._client.send({"type": "there", "worker": self._number})
                return
            if not self._letters.is_next(fields):
                return
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
            self._client = None  # until there is another connection
            if self._is_closed:
                return
        threading.Thread(target=self._connect_again, name="phalanx-visitor-again", daemon=True).start()

    def _connect_again(self) -> None:
        try:
            sock = connect_to_door(self._address, self._token, _CONNECT_AGAIN, _REFUSALS)
            self._connect(sock, anew=False)
        except PhalanxError as error:
            _log.warning("The launcher is not there: %s", error)
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
