"""Whether all workers run the same programs in the same order; pure.

A worker signs a program that it meets for the first time, and waits until all have signed the same
one under the same number. Of programs that it knows already, it tells afterwards which it has run, as
short codes. Where workers differ, those who have not signed are asked for details before the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.job.hub.descriptions import Failure, mismatch_text
from phalanx.job.hub.progress import TaskRecord

CODE = 8
"""The length of a code, in characters."""

UNKNOWN = "-" * CODE
"""Stands for a program that a worker does not remember."""

MOST_CODES = 4096 * CODE
"""How many characters of codes a member may tell at once."""

_PATIENCE = 5.0  # seconds that workers have for saying what they ran
_KEPT_CODES = 4096


@dataclass
class Verdict:
    """What has become clear: numbers that all agree on, questions (rank, number), and a failure."""

    agreed: list[int] = field(default_factory=list)
    questions: list[tuple[int, int]] = field(default_factory=list)
    failure: Failure | None = None


@dataclass
class _Dispute:
    """Workers that differ at a number: who must still say what it ran there, and until when."""

    missing: set[int]
    until: float
    is_asked: bool = False
    ran: dict[int, Any] = field(default_factory=dict)


class Agreement:
    """The programs of a job, by number.

    >>> from phalanx.job.hub.descriptions import Task
    >>> records = [TaskRecord(Task("worker", i), i, state="joined") for i in range(2)]
    >>> agreement = Agreement(records)
    >>> agreement.sign(0, 1, "digest", {"operation": "psum"})
    >>> agreement.settle(now=0.0).agreed
    []
    >>> agreement.sign(1, 1, "digest", {"operation": "psum"})
    >>> agreement.settle(now=0.0).agreed
    [1]
    """

    def __init__(self, records: Sequence[TaskRecord]) -> None:
        self._records = records
        self._signed: dict[int, dict[int, tuple[str, Any]]] = {}
        self._codes: dict[int, tuple[str, int]] = {}  # number -> code, and the rank that told it
        self._disputes: dict[int, _Dispute] = {}

    def sign(self, rank: int, number: int, digest: str, details: Any) -> None:
        """A worker wants to run a program for the first time."""
        self._signed.setdefault(number, {})[rank] = (digest, details)

    def ran_codes(self, rank: int, first: int, codes: str, now: float) -> None:
        """A worker has run programs, the first of them under the number `first`."""
        for i in range(0, len(codes), CODE):
            number, code = first + i // CODE, codes[i : i + CODE]
            if code == UNKNOWN:
                continue
            known, other = self._codes.setdefault(number, (code, rank))
            if known != code and number not in self._disputes:
                self._disputes[number] = _Dispute({rank, other}, now + _PATIENCE)
        while len(self._codes) > _KEPT_CODES:
            del self._codes[next(iter(self._codes))]

    def ran(self, rank: int, number: int, details: Any) -> None:
        """A worker says which program it ran under a number."""
        dispute = self._disputes.get(number)
        if dispute is not None and rank in dispute.missing:
            dispute.missing.discard(rank)
            dispute.ran[rank] = details

    def settle(self, now: float) -> Verdict:
        """What has become clear."""
        verdict = Verdict()
        for number in sorted(self._signed):
            self._settle_signatures(number, verdict, now)
        for number in sorted(self._disputes):
            self._settle_dispute(number, verdict, now)
        return verdict

    def _settle_signatures(self, number: int, verdict: Verdict, now: float) -> None:
        signed = self._signed[number]
        others = [record for record in self._records if record.rank not in signed]
        if len({digest for digest, _ in signed.values()}) > 1:
            verdict.failure = verdict.failure or self._mismatch(number, {})
        elif not others:
            del self._signed[number]
            verdict.agreed.append(number)
        elif left := [record for record in others if record.state == "left"]:
            nothing = {left[0].rank: {"operation": "nothing more: it has finished"}}
            verdict.failure = verdict.failure or self._mismatch(number, nothing)
        elif passed := {s.rank for s in others if s.state == "joined" and s.sequence >= number}:
            self._disputes.setdefault(number, _Dispute(passed, now + _PATIENCE))

    def _settle_dispute(self, number: int, verdict: Verdict, now: float) -> None:
        dispute = self._disputes[number]
        signed = self._signed.get(number, {})
        waiting = {r for r in dispute.missing - set(signed) if self._records[r].state == "joined"}
        if not dispute.is_asked:
            dispute.is_asked = True
            verdict.questions += [(rank, number) for rank in sorted(waiting)]
        if waiting and now < dispute.until:
            return
        unheard = dict.fromkeys(dispute.missing - set(signed))
        verdict.failure = verdict.failure or self._mismatch(number, {**unheard, **dispute.ran})

    def _mismatch(self, number: int, passed: dict[int, Any]) -> Failure:
        signed = self._signed.get(number, {})
        names = {record.rank: str(record.task) for record in self._records}
        programs = {names[rank]: details for rank, (_, details) in signed.items()}
        text = mismatch_text(number, programs, {names[r]: details for r, details in passed.items()})
        return Failure("mismatch", text)
