"""What happens in a coordinator, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.coordinator.actions import WorkerState
from phalanx.coordinator.state import Machine
from phalanx.coordinator.worker_link import WorkerLink

__all__ = ["report_of"]


def report_of(
    machine: Machine, links: Sequence[WorkerLink], paces: Sequence[float], queued: int, last_error: str
) -> dict[str, Any]:
    """What happens; see `ClusterCoordinator.report`. To be called in the thread that has the machine.

    Args:
        machine: knows all closures that were taken up.
        links: to the workers.
        paces: how many seconds a closure takes on each worker.
        queued: how many closures wait.
        last_error: of a closure.
    """
    workers = []
    for i, link in enumerate(links):
        state = machine.state(i)
        workers.append(
            {
                "task": str(link.task),
                "address": link.task.address,
                "state": state.value,
                "in_flight": len(machine.running(i)),
                "staleness": machine.staleness(i),
                "seconds_per_closure": paces[i],
                "doing": dict(link.doing),
                "reason": "" if state is WorkerState.UP else link.reason,
            }
        )
    return {
        "queued": queued,
        "in_flight": sum(len(machine.running(i)) for i in range(len(workers))),
        "in_doubt": machine.in_doubt,
        "done": machine.done_count,
        "retried": machine.retried_count,
        "last_error": last_error,
        "workers": workers,
    }
