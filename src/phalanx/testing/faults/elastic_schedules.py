"""What goes wrong in an elastic job, whose workers come and go: values that follow from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from phalanx.errors import InvalidValueError
from phalanx.testing.faults.jobs import ELASTIC_FAULTS, JobFault, JobSchedule

__all__ = ["random_elastic_schedule"]

_LONG = 2.0  # deadlines: the others stop waiting, and the worker comes back to them
_SHARE_OF_LONG = 0.2


def random_elastic_schedule(
    seed: int,
    workers: int | None = None,
    *,
    least: int = 1,
    kinds: Sequence[str] = tuple(ELASTIC_FAULTS),
    steps: int = 20,
    most: int = 3,
    deadline: float = 3.0,
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

    Examples:
        >>> from phalanx.testing import faults
        >>> print(faults.random_elastic_schedule(3, workers=3, kinds=["kill"]))
        The fault schedule of seed 3, 1 to 3 workers:
          attempt 0: kill worker 1 in record 7
          attempt 0: kill worker 2 in join 0 + 0.001 s
    """
    if unknown := [kind for kind in kinds if kind not in ELASTIC_FAULTS]:
        raise InvalidValueError(
            f"`kinds` must be of {', '.join(ELASTIC_FAULTS)}. Received: {', '.join(unknown)}"
        )
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
        possible = [x for x in kinds if x != "notice" or leaving < count - least]
        if not possible:
            break
        fault = _random_fault(rng, rng.choice(possible), worker, worker >= count, steps, deadline)
        found.append(fault)
        if fault.kind == "kill":  # another one is started, and may be hit as well
            targets.append(joining)
            joining += 1
    return JobSchedule(seed, count, tuple(found), least=min(least, count))


def _random_fault(
    rng: random.Random, kind: str, worker: int, joins: bool, steps: int, deadline: float
) -> JobFault:
    phase = rng.choice([x for x in ELASTIC_FAULTS[kind] if joins or x != "carry"])
    more: dict[str, Any] = {}
    if kind in ("kill", "freeze", "notice") and rng.random() < 0.5:
        more["after"] = round(rng.random() ** 2 * 0.05, 4)
    if kind in ("freeze", "slow"):
        long = rng.random() < _SHARE_OF_LONG
        more["seconds"] = round(deadline * (_LONG if long else rng.uniform(0.05, 0.3)), 2)
    if kind == "notice":
        more["signal"] = rng.choice(("SIGTERM", "SIGUSR1"))
    step = rng.randrange(3 if joins else max(1, steps // 2))
    return JobFault(kind, worker, phase, 0 if phase in ("join", "carry") else step, **more)
