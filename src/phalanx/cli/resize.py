"""``phalanx resize``: let a running elastic job have more or fewer workers."""

from __future__ import annotations

import argparse
from typing import Any

from phalanx.cli.arguments import positive
from phalanx.errors import InvalidValueError
from phalanx.job.elastic.door import connect_to_door
from phalanx.job.registry import RunningJob, find_job
from phalanx.net.client import RequestClient

__all__ = ["add_resize_parser", "resize"]

_SECONDS = 10.0  # for the launcher to answer

_DESCRIPTION = """\
Let a job that was started by phalanx run --workers MIN:MAX have another number of workers. New ones are
started where the launcher is, and join at the next step that all workers agree on. If there are too
many, the last ones leave after that step. Without a number, the workers are listed.
"""


def add_resize_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``phalanx resize`` to the command line."""
    parser = commands.add_parser(
        "resize", help="change the number of workers of a running job", description=_DESCRIPTION
    )
    parser.add_argument("workers", type=positive, nargs="?", help="how many workers are wanted")
    parser.add_argument(
        "--job", metavar="JOB", help="the job's process id or name (default: the only one)"
    )
    parser.set_defaults(function=resize)


def resize(options: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit code."""
    answer = _ask(find_job(options.job), options.workers)
    for name, doing in answer["workers"]:
        print(f"{name} {doing}")
    print(f"{answer['wanted']} wanted, of {answer['minimum']} to {answer['maximum']}")
    return 0


def _ask(job: RunningJob, workers: int | None) -> dict[str, Any]:
    if not job.door:
        raise InvalidValueError(
            "This job has a fixed number of workers. Start it by phalanx run --workers MIN:MAX. "
            f"Received: {job}"
        )
    client = RequestClient(connect_to_door(job.door, job.token, _SECONDS), "phalanx-resize").start()
    try:
        question = {"type": "list"} if workers is None else {"type": "resize", "workers": workers}
        answer = dict(client.request(question, timeout=_SECONDS).fields)
    finally:
        client.close()
    if "error" in answer:
        raise InvalidValueError(str(answer["error"]))
    return answer
