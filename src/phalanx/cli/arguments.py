"""Arguments that commands have in common."""

from __future__ import annotations

import argparse
import math

from phalanx.cluster.resolvers import ClusterResolver
from phalanx.job.launch.from_resolver import parse_arguments, parse_task, resolved

__all__ = ["add_resolver_arguments", "count", "positive", "resolver_of", "seconds"]


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
