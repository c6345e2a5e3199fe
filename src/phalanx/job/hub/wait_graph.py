"""Who waits for whom, and whether that can ever end; pure.

A worker waits for others in three ways: in a program of the strategy that they have not begun, in an
exchange through the hub that they have not come to, and in an operation of px.comm whose members have
not all come. A worker that waits for one that waits for it can never go on: they have come to
different calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.job.hub import fields
from phalanx.job.hub.descriptions import Failure
from phalanx.job.hub.progress import TaskRecord

_MOST_WAITS = 64  # that one worker may report at once
_STABLE = 2.0  # seconds that a wait must have lasted before it proves anything


@dataclass(frozen=True)
class WaitEdge:
    """A worker waits for others."""

    rank: int  # the worker that waits
    ranks: tuple[int, ...]  # those that it waits for
    since: float  # when it began to wait
    heard: float  # when it last said so
    what: str  # the call, in words
    site: str  # where it was made
    blocks: bool = True  # whether it can do nothing else meanwhile, so that others wait for it in vain
    channel: str = ""  # who takes part in the operation, if operations are counted
    number: int = 0  # which operation of theirs it is

    def describe(self, names: Sequence[str]) -> str:
        """The wait as part of a sentence."""
        others = ", ".join(names[r] for r in self.ranks)
        return f"waits for {others} in {self.what}{f' at {self.site}' if self.site else ''}"


def reported(rank: int, message: Mapping[str, Any], size: int, now: float) -> list[WaitEdge]:
    """The waits that a worker reports with its status."""
    given = message.get("waits")
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > _MOST_WAITS:
        given = [None]
    found = []
    for item in given:
        wait = fields.mapping({"waits": item}, "waits")
        ranks = fields.wholes(wait, "ranks")
        found.append(
            WaitEdge(
                rank,
                tuple(r for r in ranks if r < size and r != rank),
                now - fields.seconds(wait, "seconds"),
                now,
                fields.label(wait, "what"),
                fields.label(wait, "site"),
                wait.get("blocks") is True,
                fields.label(wait, "channel", ""),
                fields.whole(wait, "number", 0),
            )
        )
    return [want for want in found if want.ranks]


def step_wants(records: Iterable[TaskRecord]) -> list[WaitEdge]:
    """The waits of workers that are in a program which others have not begun."""
    joined = [record for record in records if record.state == "joined"]
    wants = []
    for record in joined:
        late = tuple(s.rank for s in joined if s.sequence < record.sequence)
        if late and record.status.get("phase") == "wait":
            since = record.reported - record.status.get("seconds", 0.0)
            what = record.status.get("doing") or "a program of the strategy"
            site = record.status.get("site", "")
            wants.append(WaitEdge(record.rank, late, since, record.reported, what, site))
    return wants


def culprits(wants: Sequence[WaitEdge]) -> set[int]:
    """Those that others wait for and that wait for none; all of them if there is no such one."""
    awaited = {rank for want in wants for rank in want.ranks}
    return awaited - {want.rank for want in wants} or awaited


def deadlock(wants: Sequence[WaitEdge], names: Sequence[str]) -> Failure | None:
    """A failure if workers wait for each other, each in another call.

    Two waits prove it only if they went on at the same time, for so long that nothing can be on its
    way any more.
    """
    stable = [w for w in wants if w.blocks and w.heard - w.since >= _STABLE]
    start = max((w.since for w in stable), default=0.0)
    together = [w for w in stable if w.heard - start >= _STABLE / 2]
    circle = _circle({w.rank: w.ranks for w in together})
    if not circle:
        return None
    shown = {w.rank: w for w in together if w.rank in circle}
    lines = [f"  {names[rank]} {shown[rank].describe(names)}" for rank in sorted(circle)]
    rule = (
        "The workers wait for each other in different calls, and none can go on. All of them must make "
        "the same calls in the same order."
    )
    advice = "Usually a branch on the worker's id surrounds a call: communicate outside of the branch."
    return Failure("mismatch", "\n".join([rule, *lines, advice]))


def _circle(edges: Mapping[int, tuple[int, ...]]) -> set[int]:
    """Everybody who waits, over others or not, for itself.

    >>> sorted(_circle({0: (1,), 1: (2,), 2: (1,), 3: (0,)}))
    [1, 2]
    """
    reach = {rank: set(others) for rank, others in edges.items()}
    for _ in edges:
        for found in reach.values():
            found |= {r for other in tuple(found) for r in reach.get(other, ())}
    return {rank for rank, found in reach.items() if rank in found}
