"""The short forms in which Slurm writes lists, and the order in which it deals tasks to hosts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from phalanx.core.errors import InvalidValueError

__all__ = ["deal_tasks", "expand_hostlist", "expand_tasks_per_node"]

# A comma outside of brackets.
_SEPARATOR = re.compile(r",(?![^\[]*\])")
# Names without and with ranges of numbers, such as n[1-6,8]-ib or rack[0-1]n[01-16].
_HOSTS = re.compile(r"[^\[\],\s]+|(?:[^\[\],\s]*\[[0-9,-]+\][^\[\],\s]*)+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the names that a node list of Slurm stands for, in its order.

    Numbers keep their leading zeros. Several brackets in a name are combined, the last one fastest.

    >>> expand_hostlist("n[1-3,8],m[09-10]-ib")
    ['n1', 'n2', 'n3', 'n8', 'm09-ib', 'm10-ib']
    """
    parts = _SEPARATOR.split(hostlist)
    if not all(_HOSTS.fullmatch(part) for part in parts):
        raise _wrong_hostlist(hostlist)
    return [host for part in parts for host in _expand_brackets(part, hostlist)]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the numbers that Slurm writes for the tasks of each node.

    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None:
            raise InvalidValueError(
                "The number of tasks per node must be a list of numbers in which `(x3)` repeats a "
                f"number, such as '2(x3),1'. Received: {tasks_per_node!r}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def deal_tasks(counts: Sequence[int], at_once: int) -> list[int]:
    """Returns the node of each task, given the number of tasks of each node.

    Tasks are dealt to the nodes in turn, `at_once` at a time, until each node has its number.

    >>> deal_tasks([2, 2, 1], at_once=2)
    [0, 0, 1, 1, 2]
    >>> deal_tasks([2, 2, 1], at_once=1)
    [0, 1, 2, 0, 1]
    """
    rounds = range(0, max(counts, default=0), max(at_once, 1))
    return [
        node
        for done in rounds
        for node, count in enumerate(counts)
        for _ in range(min(at_once, count - done))
    ]


def _expand_brackets(part: str, hostlist: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # texts and what is in the brackets between them
    choices = [
        _expand_ranges(piece, hostlist) if position % 2 else [piece]
        for position, piece in enumerate(pieces)
    ]
    return ("".join(choice) for choice in itertools.product(*choices))


def _expand_ranges(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _wrong_hostlist(hostlist)
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _wrong_hostlist(hostlist: str) -> InvalidValueError:
    return InvalidValueError(
        "A node list must be names with ranges of numbers in brackets, such as 'n[1-6,8],m[07-12]-ib'. "
        f"Received: {hostlist!r}"
    )
