"""What goes wrong in an elastic job, whose workers come and go: values that follow from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.errors import InvalidValueError
from phalanx.runtime.laboratory import DELAYED, END
from phalanx.testing.faults.jobs import (
    ELASTIC_FAULTS,
    JobFault,
    JobSchedule,
    reachable_phases,
)

__all__ = ["random_elastic_schedule"]

_LONG = 2.0  # deadlines: the others stop waiting, and the worker comes back to them
_SHARE_OF_LONG = 0.2
_CHANGES = ("join", "carry")  # what a worker does when the generation changes
_ONCE = (*_CHANGES, END)  # what each worker does once in a generation
_RARE = ("save", "commit", "restore")  # what happens every few steps
_OF_CHECKPOINTS = (*_RARE, "write")
_DAMAGE = ("corrupt", "truncate")


def random_elastic_schedule(
    seed: int,
    workers: int | None = None,
    *,
    least: int = 1,
    kinds: Sequence[str] = tuple(ELASTIC_FAULTS),
    steps: int = 20,
    most: int = 3,
    deadline: float = 3.0,
    saves: bool = True,
    phases: Mapping[str, int] | None = None,
) -> JobSchedule:
    """A schedule for ``phalanx run --workers 1:N`` that follows from a seed.

    Each worker has at most one fault, and one of those at the beginning has none, so that the state is
    never lost. Workers that join in place of killed ones may be hit, too.

    Args:
        seed: any number.
        workers: how many there are at first and at most; None lets the seed choose 2, 3 or 4.
        least: how many the job needs. Workers that leave after a notice are not replaced, so there are
            only as many notices as the job can do without.
        kinds: what may go wrong; see `ELASTIC_FAULTS`.
        steps: how many steps the program makes.
        most: how many faults there are at most.
        deadline: after how many seconds workers stop waiting for each other.
        saves: whether the program saves checkpoints; else nothing goes wrong with them.
        phases: where a worker comes to, and how often; see `random_job_schedule`.

    Examples:
        >>> from phalanx.testing import faults
        >>> print(faults.random_elastic_schedule(3, workers=3, kinds=["kill"]))
        The fault schedule of seed 3, 1 to 3 workers:
          attempt 0: kill worker 1 in end 1
          attempt 0: kill worker 3 in record 0
    """
    if unknown := [kind for kind in kinds if kind not in ELASTIC_FAULTS]:
        raise InvalidValueError(
            f"`kinds` must be of {', '.join(ELASTIC_FAULTS)}. Received: {', '.join(unknown)}"
        )
    where = {
        kind: [x for x in found if saves or x not in _OF_CHECKPOINTS]
        for kind, found in reachable_phases(ELASTIC_FAULTS, kinds, phases, _CHANGES).items()
        if saves or kind not in _DAMAGE
    }
    rng = random.Random(f"elastic faults {seed}")
    count = rng.choice((2, 3, 3, 4)) if workers is None else workers
    targets = list(range(count))
    rng.shuffle(targets)
    targets.pop()  # it keeps the state
    found: list[JobFault] = []
    joining = count
    for _ in range(rng.randint(1, most)):
        if not targets:
            break
        worker = targets.pop(rng.randrange(len(targets)))
        leaving = sum(fault.kind == "notice" for fault in found)
        possible = [x for x in where if where[x] and (x != "notice" or leaving < count - least)]
        if not possible:
            break
        kind, joins = rng.choice(possible), worker >= count
        phase = rng.choice([x for x in where[kind] if joins or x != "carry"])
        often = steps if phases is None else phases.get(phase, 1)
        fault = _random_fault(rng, kind, phase, worker, joins, often, deadline)
        found.append(fault)
        if fault.kind == "kill":  # another one is started, and may be hit as well
            targets.append(joining)
            joining += 1
    return JobSchedule(seed, count, tuple(found), least=min(least, count))


def _random_fault(
    rng: random.Random,
    kind: str,
    phase: str,
    worker: int,
    joins: bool,
    often: int,
    deadline: float,
) -> JobFault:
    more: dict[str, Any] = {}
    if kind in DELAYED and phase != END and rng.random() < 0.5:  # a while later it has ended
        more["after"] = round(rng.random() ** 2 * 0.05, 4)
    if kind in ("freeze", "slow"):
        long = rng.random() < _SHARE_OF_LONG
        more["seconds"] = round(deadline * (_LONG if long else rng.uniform(0.05, 0.3)), 2)
    if kind == "clock":
        more["seconds"] = rng.choice((60.0, 3600.0, 86400.0 * 400))
    if kind == "notice":
        more["signal"] = rng.choice(("SIGTERM", "SIGUSR1"))
    step = rng.randrange(min(3, often) if joins or phase in _RARE else max(1, often // 2))
    if kind in _DAMAGE:
        step = 0 if joins else 1  # a worker of the beginning finds checkpoints when it joins again
    elif phase in _ONCE or phase == "restore":
        step = rng.randrange(2) if phase == END else 0  # before the others are told, and after it
    return JobFault(kind, worker, phase, step, **more)
