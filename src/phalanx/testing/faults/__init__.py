"""Faults of real processes: seeded schedules, histories, and what must be true of these.

A `Schedule` says what goes wrong and when; it follows from a seed. `Proxies` stand between tasks, and
end, delay and repeat what they carry. A `History` has what was seen of a run. `closure_violations`
tells what is wrong with a history of functions that a coordinator has scheduled: events and checks of
closures have the word in their names.

Examples:
    >>> from phalanx.testing import faults
    >>> tasks = {"worker 0": ["kill", "freeze"], "ps 0": ["cut"]}
    >>> schedule = faults.random_schedule(7, tasks, waves=2)
    >>> schedule == faults.random_schedule(7, tasks, waves=2)
    True
    >>> history = faults.History()
    >>> history.add(faults.ClosureSubmitted(run=0, closure=0, servers=(0,)))
    >>> history.add(faults.ClosureEnded(run=0, closure=0, at=1.0, outcome="done"))
    >>> history.add(faults.ServersAtEnd(at=2.0, effects=((2,),), later=((0,),)))
    >>> faults.closure_violations(history)
    ['closure 0 counts 2 times on server 0, not 1']
"""

from phalanx.testing.faults.checkers import (
    closure_violations,
    effects_once,
    errors_once,
    failures_named,
    nothing_lost,
    reads_advance,
    staleness_held,
)
from phalanx.testing.faults.elastic_schedules import random_elastic_schedule
from phalanx.testing.faults.exploring import JobVerdict, Laboratory, shrink
from phalanx.testing.faults.history import (
    ClosureEnded,
    ClosureRaised,
    ClosureSubmitted,
    CoordinatorRestarted,
    Happened,
    History,
    Named,
    ServersAtEnd,
    ServersRead,
)
from phalanx.testing.faults.job_checkers import (
    checkpoints_kept,
    ended_well,
    examples_once,
    job_failures_named,
    job_violations,
    nothing_left,
    same_state,
)
from phalanx.testing.faults.job_history import JobHistory, Life
from phalanx.testing.faults.jobs import (
    ELASTIC_FAULTS,
    JOB_FAULTS,
    JobFault,
    JobSchedule,
    random_job_schedule,
)
from phalanx.testing.faults.playing import JobRun, run
from phalanx.testing.faults.proxies import Proxies
from phalanx.testing.faults.recording import point, record
from phalanx.testing.faults.schedules import KINDS, Fault, Schedule, random_schedule

__all__ = [
    "ELASTIC_FAULTS",
    "JOB_FAULTS",
    "KINDS",
    "ClosureEnded",
    "ClosureRaised",
    "ClosureSubmitted",
    "CoordinatorRestarted",
    "Fault",
    "Happened",
    "History",
    "JobFault",
    "JobHistory",
    "JobRun",
    "JobSchedule",
    "JobVerdict",
    "Laboratory",
    "Life",
    "Named",
    "Proxies",
    "Schedule",
    "ServersAtEnd",
    "ServersRead",
    "checkpoints_kept",
    "closure_violations",
    "effects_once",
    "ended_well",
    "errors_once",
    "examples_once",
    "failures_named",
    "job_failures_named",
    "job_violations",
    "nothing_left",
    "nothing_lost",
    "point",
    "random_elastic_schedule",
    "random_job_schedule",
    "random_schedule",
    "reads_advance",
    "record",
    "run",
    "same_state",
    "shrink",
    "staleness_held",
]


def __dir__() -> list[str]:
    return __all__
