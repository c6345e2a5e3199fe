"""What is wrong with those who come to a job, and with those who leave it too early, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.job.hub.descriptions import Failure, Task
from phalanx.job.hub.progress import TaskRecord


def refusal(
    task: Task, record: TaskRecord | None, info: Mapping[str, Any], known: Sequence[str]
) -> Failure:
    """Why a newcomer cannot be a task: there is no such one, or another process is it already."""
    newcomer = f"pid {info['pid']} on {info['host']}"
    if record is None:
        text = f"{task} ({newcomer}) is not in this job, which has {', '.join(known)}."
        return Failure("cluster", text, str(task))
    text = (
        f"Two processes are {task}: pid {record.info.get('pid')} on {record.info.get('host')}, and "
        f"{newcomer}. Give each process an index of its own (the key 'task' of TF_CONFIG), and "
        "make sure that no worker of an older run is still alive."
    )
    return Failure("duplicate", text, str(task))


def difference(first: TaskRecord, record: TaskRecord) -> Failure | None:
    """In what a newcomer differs from the first that joined although all must share it."""
    for name in ("phalanx", "jax"):
        if first.info.get(name) != record.info.get(name):
            text = (
                f"The workers run different versions of {name}: {first} has {first.info.get(name)}, "
                f"{record} has {record.info.get(name)}. Install the same version everywhere."
            )
            return Failure("version", text, str(record.task))
    if first.info.get("cluster") != record.info.get("cluster"):
        text = (
            f"The workers describe the cluster differently. {first}: {first.info.get('cluster')}; "
            f"{record}: {record.info.get('cluster')}. Give all of them the same description."
        )
        return Failure("cluster", text, str(record.task))
    return None


def not_joined(records: Sequence[TaskRecord], seconds: float) -> Failure:
    """Some tasks have not come to the start in time."""
    missing = [record.task for record in records if record.state == "absent"]
    where = ", ".join(f"{t} ({t.address})" if t.address else str(t) for t in missing)
    here = ", ".join(str(record) for record in records if record.state == "joined")
    text = (
        f"{len(missing)} of {len(records)} workers did not join within {seconds:g} seconds. "
        f"Missing: {where}. Joined: {here}. Start the missing ones, or look into their output."
    )
    return Failure("deadline", text)


def finished(ended: Sequence[TaskRecord], record: TaskRecord, site: Any) -> Failure:
    """Some have come to their end while another goes on."""
    names = " and ".join(str(s) for s in ended)
    text = (
        f"{names} finished while {record.task} still communicates, at {site or 'an unknown place'}. "
        "All workers must run the same number of steps."
    )
    return Failure("left", text, str(ended[0].task))
