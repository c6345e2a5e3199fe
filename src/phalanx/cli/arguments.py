"""Arguments that commands have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.cluster.resolvers import ClusterResolver
from phalanx.errors import InvalidValueError
from phalanx.job.launch.from_resolver import parse_arguments, parse_task, resolved

__all__ = [
    "WantedWorkers",
    "add_job_arguments",
    "add_resolver_arguments",
    "count",
    "one_job",
    "positive",
    "resolver_of",
    "seconds",
    "wanted_workers",
    "worker_range",
]


def add_resolver_arguments(group: argparse._ActionsContainer) -> None:
    """Add what belongs to the argument ``--resolver``."""
    group.add_argument(
        "--resolver-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the resolver's class, such as port_base=8888",
    )
    group.add_argument("--task", metavar="TYPE:INDEX", help="this task, if the resolver cannot know it")


def resolver_of(options: argparse.Namespace) -> ClusterResolver:
    """The resolver that the command line asks for."""
    task = None if options.task is None else parse_task(options.task)
    return resolved(options.resolver, parse_arguments(options.resolver_arg), task)


def count(text: str) -> int:
    """A whole number from 0."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return number


def positive(text: str) -> int:
    """A whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return number


def seconds(text: str) -> float:
    """A number of seconds."""
    number = float(text)
    if not (number >= 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text}")
    return number


def worker_range(text: str) -> tuple[int, int | None]:
    """A number of workers, or the least and the most of them.

    >>> worker_range("4"), worker_range("2:8")
    ((4, None), (2, 8))
    """
    least, colon, most = text.partition(":")
    if not colon:
        return count(least), None
    if positive(least) > positive(most):
        raise argparse.ArgumentTypeError(f"must be MIN:MAX, the smaller number first, not {text}")
    return int(least), int(most)


@dataclass(frozen=True)
class WantedWorkers:
    """How many workers a job has: at least, at most, and at first."""

    least: int
    most: int
    first: int
    is_range: bool


def wanted_workers(given: Sequence[tuple[int, int | None]]) -> WantedWorkers:
    """What ``-n N``, ``--workers MIN:MAX`` or both mean.

    >>> wanted_workers([(2, 8)])
    WantedWorkers(least=2, most=8, first=8, is_range=True)
    >>> wanted_workers([(3, None), (2, 8)]).first
    3
    """
    numbers = [least for least, most in given if most is None]
    ranges = [(least, most) for least, most in given if most is not None]
    if len(ranges) > 1:
        raise InvalidValueError(f"Give one range of workers. Received: {ranges}")
    if not ranges:
        number = numbers[-1] if numbers else 1
        return WantedWorkers(number, number, number, False)
    least, most = ranges[0]
    first = numbers[-1] if numbers else most
    if not least <= first <= most:
        raise InvalidValueError(
            f"The job has {least} to {most} workers, so it cannot begin with another number. "
            f"Received: -n {first}"
        )
    return WantedWorkers(least, most, first, True)


def add_job_arguments(parser: argparse.ArgumentParser, help: str) -> None:
    """Let a command line name a running job, as its last word or by ``--job``; see `one_job`."""
    parser.add_argument("job", nargs="?", help=help)
    parser.add_argument("--job", dest="named_job", metavar="JOB", help="the same")


def one_job(options: argparse.Namespace) -> str | None:
    """The job that a command line names, if it names one."""
    if options.job is not None and options.named_job is not None:
        raise InvalidValueError(
            f"Name the job once. Received: {options.job} and --job {options.named_job}"
        )
    named: str | None = options.named_job
    return named if options.job is None else options.job
