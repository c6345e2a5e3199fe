"""What a running job is doing: the logic of ``phalanx explain``.

`explain` prints the table of workers and the Python stacks of all of them.
"""

from __future__ import annotations

import os

from rich.console import Console

from phalanx.errors import NotFoundError
from phalanx.job.elastic.door import ask_door
from phalanx.job.observer import Observer
from phalanx.job.registry import find_job


def explain(
    job: str | None = None,
    *,
    token: str | None = None,
    stacks: bool = True,
    timeout: float = 5.0,
    console: Console | None = None,
) -> int:
    """Print what the workers of a running job do; returns an exit code: 1 if the job has failed.

    Args:
        job: the job's name or number in the list of running jobs, or its hub's ``host:port``; without
            any, the only job of this user on this machine.
        token: the job's token, by default from the list of running jobs or from PHALANX_TOKEN.
        stacks: whether to ask for the Python stacks too.
        timeout: seconds within which workers must answer.
        console: where to print.
    """
    console = console or Console()
    address, token, door = _find(job, token)
    if address == door:
        workers, wanted = ask_door(door, token, timeout)
        console.print("There is no hub: one worker is alone, or they have not met yet.")
        console.print(*workers, wanted, sep="\n", markup=False, highlight=False)
        return 0
    with Observer(address, token, timeout=timeout) as observer:
        failure = observer.failure()
        console.print(observer.table())
        if failure is not None:
            console.print(f"\nThe job has failed: {failure}", markup=False, style="red")
        for worker, text in sorted(observer.stacks(timeout).items()) if stacks else ():
            console.print(f"\n{worker}", style="bold", markup=False)
            console.print(text.rstrip(), markup=False, highlight=False)
    return 0 if failure is None else 1


def _find(job: str | None, token: str | None) -> tuple[str, str, str]:
    """The address of the hub, the token, and the address of the door if there is one."""
    given = token or os.environ.get("PHALANX_TOKEN")
    try:
        found = find_job(job)
    except NotFoundError:
        if job is not None and ":" in job and given:
            return job, given, ""
        raise
    return found.address, token or found.token, found.door
