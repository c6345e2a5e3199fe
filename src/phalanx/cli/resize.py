"""``phalanx resize``: let a running elastic job have more or fewer workers."""

from __future__ import annotations

import argparse

from phalanx.cli.arguments import add_job_arguments, one_job, positive
from phalanx.errors import InvalidValueError
from phalanx.job.elastic.door import ask_door
from phalanx.job.registry import find_job

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
    add_job_arguments(
        parser,
        "the name of the program, or the process id of the launcher (default: the only job of this "
        "user here)",
    )
    parser.set_defaults(function=resize)


def resize(options: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit code."""
    job = find_job(one_job(options))
    if not job.door:
        raise InvalidValueError(
            "This job has a fixed number of workers. Start it by phalanx run --workers MIN:MAX. "
            f"Received: {job}"
        )
    workers, wanted = ask_door(job.door, job.token, _SECONDS, options.workers)
    print(*workers, wanted, sep="\n")
    return 0
