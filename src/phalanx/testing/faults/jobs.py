"""What goes wrong in a job of workers that train together: values that follow from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.laboratory import DELAYED, END

__all__ = ["ELASTIC_FAULTS", "JOB_FAULTS", "JobFault", "JobSchedule", "random_job_schedule"]

_ANYWHERE = ("input", "step", "save", "restore", "record")

JOB_FAULTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kill": ("start", *_ANYWHERE, "write", "commit", END),  # SIGKILL
        "freeze": (*_ANYWHERE, END),  # SIGSTOP, and SIGCONT after a while
        "raise": ("start", *_ANYWHERE),  # an exception
        "slow": (*_ANYWHERE, END),  # the worker sleeps for a while
        "notice": ("input", "step", "record", END),  # SIGTERM or SIGUSR1: the machine will go away
        "cut": ("input", "step", "record", END),  # all TCP connections of the worker end
        "corrupt": ("start",),  # a bit of the newest checkpoint flips, if there is an older one
        "truncate": ("start",),  # a file of the newest one loses its end, if there is an older one
        "full": ("write",),  # the disk is full
        "clock": ("start", "step"),  # Python's `time.time` jumps
    }
)
"""What can go wrong with a worker, and the phases in which schedules by seed let it happen."""

ELASTIC_FAULTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kill": ("join", "carry", *_ANYWHERE, "write", "commit", END),
        "freeze": ("join", *_ANYWHERE, END),
        "slow": ("join", "carry", *_ANYWHERE, END),
        "notice": ("input", "step", "record", END),
        "cut": ("join", "input", "step", "record", "save", END),
        "corrupt": ("join",),
        "truncate": ("join",),
        "full": ("write",),
        "clock": ("join", "step"),
        "raise": ("input", "step", "record", "save"),  # which ends the job
    }
)
"""What can go wrong with a worker of an elastic job, and where `random_elastic_schedule` does it."""

_AT_POINTS = ("kill", "freeze", "raise", "slow")  # what can go wrong where a program calls `point`
_FATAL = ("kill", "raise", "notice", "cut", "full")
_LASTING = ("freeze", "slow")
_DAMAGE = ("corrupt", "truncate")
_RARE = ("start", "save", "commit", "restore")  # phases that come a few times only


@dataclass(frozen=True, order=True)
class JobFault:
    """One thing that goes wrong with a worker, once.

    Args:
        kind: one of `JOB_FAULTS`.
        worker: with which worker. Workers that join an elastic job are counted on: in one that begins
            with three, the first that joins is worker 3.
        phase: where: one of `phalanx.runtime.laboratory.PHASES`, or a name that the program gives to
            `point`.
        step: the how-manieth time, from 0, that the process is there.
        attempt: in which start of the job; 0 is the first, 1 the one after the first restart.
        after: seconds after that point, for what may happen in the middle of native code: kill,
            freeze, notice and cut.
        seconds: how long a freeze or a slow phase lasts, or how far the clock jumps.
        signal: of a notice.

    Examples:
        >>> from phalanx.testing import faults
        >>> print(faults.JobFault("kill", worker=1, step=3).code())
        faults.JobFault("kill", worker=1, step=3)
    """

    kind: str
    worker: int = 0
    phase: str = "step"
    step: int = 0
    attempt: int = 0
    after: float = 0.0
    seconds: float = 0.0
    signal: str = "SIGTERM"

    def __post_init__(self) -> None:
        if self.kind not in JOB_FAULTS:
            raise InvalidValueError(
                f"`kind` must be one of {', '.join(JOB_FAULTS)}. Received: {shown(self.kind)}"
            )
        if self.signal not in ("SIGTERM", "SIGUSR1"):
            raise InvalidValueError(
                f"A notice is SIGTERM or SIGUSR1. Received: signal={shown(self.signal)}"
            )
        if min(self.worker, self.step, self.attempt) < 0 or min(self.after, self.seconds) < 0:
            raise InvalidValueError(
                "Workers, steps and attempts count from 0, and times are not negative. "
                f"Received: {self.code()}"
            )

    def ends_the_attempt(self, deadline: float) -> bool:
        """Whether the job must be started again, if workers wait for each other for so many seconds."""
        return self.kind in _FATAL or (self.kind in _LASTING and self.seconds >= deadline)

    def code(self) -> str:
        """The fault as Python code."""
        given = [
            f"{field.name}={getattr(self, field.name)!r}".replace("'", '"')
            for field in fields(self)
            if field.name != "kind" and getattr(self, field.name) != field.default
        ]
        return f"faults.JobFault({', '.join([json.dumps(self.kind), *given])})"

    def __str__(self) -> str:
        words = [
            f"attempt {self.attempt}: {self.kind} worker {self.worker} in {self.phase} {self.step}"
        ]
        if self.after:
            words.append(f"+ {self.after:.3f} s")
        if self.seconds:
            words.append(
                f"for {self.seconds:.1f} s" if self.kind != "clock" else f"{self.seconds:+.0f} s"
            )
        if self.kind == "notice":
            words.append(f"by {self.signal}")
        return " ".join(words)


@dataclass(frozen=True)
class JobSchedule:
    """The faults of one job.

    Args:
        seed: what they follow from, if they do.
        workers: how many workers there are, or are at first and at most in an elastic job.
        faults: all of them.
        least: how many workers an elastic job needs; None for a job that needs all of them.

    Examples:
        >>> from phalanx.testing import faults
        >>> schedule = faults.random_job_schedule(7, workers=2)
        >>> schedule == faults.random_job_schedule(7, workers=2)
        True
        >>> faults.JobSchedule.from_json(schedule.as_json()) == schedule
        True
        >>> eval(schedule.code()) == schedule
        True
    """

    seed: int = 0
    workers: int = 2
    faults: tuple[JobFault, ...] = ()
    least: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "faults", tuple(self.faults))
        most = self.workers if self.least is None else self.workers + len(self.faults)
        strange = [fault.code() for fault in self.faults if fault.worker >= most]
        if self.workers < 1 or strange:
            raise InvalidValueError(
                f"Faults must be of one of the {self.workers} workers. Received: {', '.join(strange)}"
            )
        if self.least is not None and not 1 <= self.least <= self.workers:
            raise InvalidValueError(
                f"An elastic job of {self.workers} workers needs at least 1 and at most as many. "
                f"Received: least={shown(self.least)}"
            )

    def as_json(self) -> str:
        """The schedule as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> JobSchedule:
        """What `as_json` made."""
        found = json.loads(text)
        faults = tuple(JobFault(**x) for x in found["faults"])
        return cls(found["seed"], found["workers"], faults, found.get("least"))

    def code(self) -> str:
        """The schedule as Python code, to paste into a test."""
        inside = "".join(f"\n    {fault.code()}," for fault in self.faults)
        end = "\n" if self.faults else ""
        least = "" if self.least is None else f", least={self.least}"
        return f"faults.JobSchedule({self.seed}, {self.workers}, ({inside}{end}){least})"

    def __str__(self) -> str:
        count = f"{self.workers}" if self.least is None else f"{self.least} to {self.workers}"
        head = f"The fault schedule of seed {self.seed}, {count} workers:"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults or ("nothing goes wrong",))])

    def attempts(self, deadline: float) -> int:
        """How often the job must be started again at most, or workers of an elastic one."""
        return sum(fault.ends_the_attempt(deadline) for fault in self.faults)

    def simpler(self, deadline: float) -> Iterator[JobSchedule]:
        """Schedules with less in them: without a fault, with fewer workers, with earlier faults."""
        for i, fault in enumerate(self.faults):
            yield self._without(i, fault.ends_the_attempt(deadline))
        if self.workers > 1:
            few = self.workers - 1
            kept = tuple(replace(x, worker=min(x.worker, few - 1)) for x in self.faults)
            least = None if self.least is None else min(self.least, few)
            yield replace(self, workers=few, faults=kept, least=least)
        for i, fault in enumerate(self.faults):
            for change in _smaller(fault):
                yield replace(self, faults=(*self.faults[:i], change, *self.faults[i + 1 :]))

    def _without(self, index: int, ended: bool) -> JobSchedule:
        """Without a fault: if that ended an attempt, later faults come an attempt earlier."""
        gone, rest = self.faults[index], [x for i, x in enumerate(self.faults) if i != index]
        moved = [
            replace(x, attempt=x.attempt - 1) if ended and x.attempt > gone.attempt else x for x in rest
        ]
        return replace(self, faults=tuple(moved))


def _smaller(fault: JobFault) -> Iterator[JobFault]:
    for step in dict.fromkeys((0, fault.step // 2, fault.step - 1)):
        if 0 <= step < fault.step:
            yield replace(fault, step=step)
    if fault.after:
        yield replace(fault, after=0.0)
    if fault.worker:
        yield replace(fault, worker=0)


def reachable_phases(
    known: Mapping[str, Sequence[str]],
    kinds: Sequence[str],
    phases: Mapping[str, int] | None,
    always: Sequence[str] = (),
) -> dict[str, list[str]]:
    """Where each kind of fault can happen in a program; kinds that nowhere can are left out.

    Args:
        known: `JOB_FAULTS` or `ELASTIC_FAULTS`.
        kinds: what may go wrong.
        phases: where a worker comes to, and how often; None if it is not known.
        always: phases that a worker comes to only when something goes wrong.

    >>> reachable_phases(JOB_FAULTS, ["kill", "cut", "full"], {"save": 2, "my point": 3})
    {'kill': ['save', 'restore', 'my point']}
    """
    if phases is None:
        return {kind: list(known[kind]) for kind in kinds}
    of_all = {phase for each in known.values() for phase in each}
    own = [phase for phase in phases if phase not in of_all]
    there = {*phases, *always, *(["restore"] if "save" in phases else [])}
    found = {
        kind: [
            *(x for x in known[kind] if x in there),
            *(own if kind in _AT_POINTS else ()),
        ]
        for kind in kinds
        if kind not in _DAMAGE or "commit" in phases
    }
    if not any(found.values()):
        raise InvalidValueError(
            "The program comes to no place where one of these faults could happen. It may name places "
            f"of its own by faults.point. Received: {', '.join(kinds)}, in a program that comes to "
            f"{', '.join(sorted(phases)) or 'none'}"
        )
    return {kind: where for kind, where in found.items() if where}


def random_job_schedule(
    seed: int,
    workers: int | None = None,
    *,
    kinds: Sequence[str] = tuple(JOB_FAULTS),
    steps: int = 10,
    most: int = 3,
    deadline: float = 3.0,
    phases: Mapping[str, int] | None = None,
) -> JobSchedule:
    """A schedule that follows from a seed.

    Args:
        seed: any number.
        workers: how many workers there are; None lets the seed choose 2, 3 or 4.
        kinds: what may go wrong; see `JOB_FAULTS`.
        steps: how many steps the program makes.
        most: how many faults there are at most, besides those that others need.
        deadline: after how many seconds workers stop waiting for each other.
        phases: where a worker comes to, and how often, as `JobHistory.phases` tells it of a run; also
            the program's own, see `point`. None: to all that are known, once in each step.

    Examples:
        >>> from phalanx.testing import faults
        >>> print(faults.random_job_schedule(3, workers=2, kinds=["kill"], most=1))
        The fault schedule of seed 3, 2 workers:
          attempt 0: kill worker 0 in start 0 + 0.032 s
    """
    if unknown := [kind for kind in kinds if kind not in JOB_FAULTS]:
        raise InvalidValueError(
            f"`kinds` must be of {', '.join(JOB_FAULTS)}. Received: {', '.join(unknown)}"
        )
    where = reachable_phases(JOB_FAULTS, kinds, phases)
    rng = random.Random(f"job faults {seed}")
    count = rng.choice((2, 2, 2, 3, 4)) if workers is None else workers
    found: list[JobFault] = []
    attempt = 0
    for _ in range(rng.randint(1, most)):
        kind = rng.choice(list(where))
        if kind in _DAMAGE and attempt == 0:  # there must be checkpoints, and they must be needed
            phase = "step" if phases is None or "step" in phases else "save"
            often = steps if phases is None else phases[phase]
            last = max(often // 2 + 1, often - 2)
            found.append(JobFault("kill", rng.randrange(count), phase, rng.randrange(often // 2, last)))
            attempt += 1
        known = [x for x in where[kind] if not (x == "restore" and attempt == 0)]
        phase = rng.choice(known or where[kind])
        often = steps if phases is None else phases.get(phase, 1)
        fault = _random_fault(rng, kind, phase, count, attempt, often, deadline)
        found.append(fault)
        attempt += fault.ends_the_attempt(deadline)
    return JobSchedule(seed, count, tuple(found))


def _times(phase: str, steps: int) -> int:
    """How often a process comes to a phase, of those times that are worth a fault."""
    if phase == END:
        return 2  # before the others are told, and after it
    return min(3, steps) if phase in _RARE else steps


def _random_fault(
    rng: random.Random,
    kind: str,
    phase: str,
    workers: int,
    attempt: int,
    often: int,
    deadline: float,
) -> JobFault:
    more: dict[str, Any] = {}
    if kind in DELAYED and phase != END and rng.random() < 0.5:  # a while later it has ended
        more["after"] = round(rng.random() ** 2 * 0.05, 4)
    if kind in _LASTING:  # now and then too long
        long = rng.random() < 0.3
        more["seconds"] = round(deadline * (2.0 if long else rng.uniform(0.05, 0.3)), 2)
    if kind == "clock":
        more["seconds"] = rng.choice((60.0, 3600.0, 86400.0 * 400))
    if kind == "notice":
        more["signal"] = rng.choice(("SIGTERM", "SIGUSR1"))
    latest = often if attempt == 0 else max(1, often // 3)
    step = 0 if phase in ("start", "restore") else rng.randrange(_times(phase, latest))
    # Only the first worker writes what all have.
    worker = 0 if phase in ("write", "commit") or kind in _DAMAGE else rng.randrange(workers)
    return JobFault(kind, worker, phase, step, attempt, **more)
