"""Requests to members for their stacks, until all have answered or time is up; pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.job.hub.progress import TaskRecord

STACK_PATIENCE = 5.0
"""For how many seconds members may be asked for their stacks before the rest must do without."""
SILENT_PATIENCE = 0.5
"""The same for members of which nothing has been heard for a while, as of frozen ones."""

Out = tuple[int, dict[str, Any]]
"""A message and the peer that it is for."""


@dataclass
class StackRequest:
    """A question for stacks that is under way: to whom the answers go, and who has not answered."""

    asker: int | None
    name: Any  # what the asker calls the request
    missing: set[int]  # ranks
    until: float
    texts: dict[str, str] = field(default_factory=dict)
    deadline: dict[str, Any] | None = None  # the message that will end the job, once there are stacks


class StackRequests:
    """The requests of one job that are under way."""

    def __init__(self, records: Sequence[TaskRecord]) -> None:
        self._records = records
        self._numbers = itertools.count(2, 2)  # odd are the requests of members
        self._open: dict[int, StackRequest] = {}

    @property
    def about_a_deadline(self) -> bool:
        """Whether a question is under way whose answers will end the job."""
        return any(request.deadline for request in self._open.values())

    def ask(
        self,
        asker: int | None,
        name: Any,
        records: Sequence[TaskRecord],
        until: float,
        deadline: dict[str, Any] | None = None,
    ) -> list[Out]:
        """Ask members for their stacks."""
        number = next(self._numbers)
        self._open[number] = StackRequest(asker, name, {s.rank for s in records}, until, {}, deadline)
        question = {"type": "stack?", "request": number}
        return [(record.peer, question) for record in records if record.peer is not None]

    def answer(self, record: TaskRecord, number: int, text: str) -> None:
        """A member has sent its stacks."""
        request = self._open.get(number)
        if request is not None and record.rank in request.missing:
            request.missing.discard(record.rank)
            request.texts[str(record.task)] = text

    def forget(self, peer: int) -> None:
        """A peer that asked is gone."""
        for request in self._open.values():
            if request.asker == peer:
                request.asker = None

    def settle(self, now: float) -> list[StackRequest]:
        """The questions that are over: all have answered, or have had their time."""
        over = []
        for number, request in list(self._open.items()):
            waiting = {r for r in request.missing if self._records[r].state == "joined"}
            if waiting and now < request.until:
                continue
            for rank in waiting:
                request.texts[str(self._records[rank].task)] = "It did not answer in time."
            over.append(self._open.pop(number))
        return over


def acknowledged(message: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a message that needs no other."""
    return {"type": "heard", "request": message.get("request")}
