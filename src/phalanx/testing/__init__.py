"""`px.testing`: what tests of distributed code need.

* ``devices``, ``equivalence``, ``traffic``   in one process
* ``multi_process``   a cluster of real processes, with ``runs`` (a function on all of them),
  ``pool`` (the processes) and ``copies`` (that start fast); ``child`` and ``template`` are programs
* ``faults``   what goes wrong in such clusters
"""

from phalanx.testing import faults
from phalanx.testing.devices import logical_devices
from phalanx.testing.equivalence import assert_equivalent
from phalanx.testing.multi_process import MultiProcess
from phalanx.testing.runs import MultiProcessRun, WorkerOutcome
from phalanx.testing.traffic import Communication, Traffic, assert_communication, communication

__all__ = [
    "Communication",
    "MultiProcess",
    "MultiProcessRun",
    "Traffic",
    "WorkerOutcome",
    "assert_communication",
    "assert_equivalent",
    "communication",
    "faults",
    "logical_devices",
]


def __dir__() -> list[str]:
    return __all__
