"""The short forms in which Slurm writes lists, and the order in which it deals tasks to hosts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence

from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import parse_digits

MOST_HOSTS = 100_000
"""More than Slurm can manage; a list of more is a mistake, and might be too large for the memory."""

MOST_TASKS = 1_000_000

# Names without and with ranges of numbers, such as n[1-6,8]-ib or rack[0-1]n[01-16].
_HOSTS = re.compile(r"[^\[\],\s]*(?:\[[0-9,-]+\][^\[\],\s]*)*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_REPEATED = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the names that a node list of Slurm stands for, in its order.

    Numbers keep their leading zeros. Several brackets in a name are combined, the last one fastest. A
    list of more than 100,000 names is refused before it is written out.

    >>> expand_hostlist("n[1-3,8],m[09-10]-ib")
    ['n1', 'n2', 'n3', 'n8', 'm09-ib', 'm10-ib']
    """
    parts = _split(hostlist)
    if not all(part and _HOSTS.fullmatch(part) for part in parts):
        raise _wrong_hostlist(hostlist)
    ranges = [[_ranges(text, hostlist) for text in _BRACKETS.findall(part)] for part in parts]
    sizes = [[sum(last - first + 1 for first, last, _ in r) for r in part] for part in ranges]
    _check_total(sum(map(math.prod, sizes)), MOST_HOSTS, "hosts", hostlist)
    return [name for part, found in zip(parts, ranges, strict=True) for name in _names(part, found)]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns the numbers that Slurm writes for the tasks of each node.

    >>> expand_tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _REPEATED.fullmatch(part)
        number, times = (
            (parse_digits(match[1]), parse_digits(match[2] or "1")) if match else (None, None)
        )
        if number is None or times is None:
            raise InvalidValueError(
                "The number of tasks per node must be a list of numbers in which `(x3)` repeats a "
                f"number, such as '2(x3),1'. Received: {shown(tasks_per_node)}"
            )
        _check_total(len(counts) + times, MOST_HOSTS, "hosts", tasks_per_node)
        _check_total(sum(counts) + number * times, MOST_TASKS, "tasks", tasks_per_node)
        counts += [number] * times
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


def _split(hostlist: str) -> list[str]:
    """The parts between the commas that are outside of brackets."""
    parts, start, inside = [], 0, False
    for at, char in enumerate(hostlist):
        inside = char == "[" or (inside and char != "]")
        if char == "," and not inside:
            parts.append(hostlist[start:at])
            start = at + 1
    return [*parts, hostlist[start:]]


def _ranges(text: str, hostlist: str) -> list[tuple[int, int, int]]:
    """The ranges of numbers in brackets: the first, the last, and how many digits they have."""
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = parse_digits(match[1]) if match else None
        last = parse_digits(match[2] or match[1]) if match else None
        if match is None or first is None or last is None or last < first:
            raise _wrong_hostlist(hostlist)
        found.append((first, last, len(match[1])))
    return found


def _names(part: str, ranges: Sequence[Sequence[tuple[int, int, int]]]) -> Iterator[str]:
    """The names that a part stands for, given the ranges in its brackets."""
    numbers = [
        [str(n).zfill(width) for first, last, width in bracket for n in range(first, last + 1)]
        for bracket in ranges
    ]
    texts = _BRACKETS.sub("\0", part).split("\0")
    for chosen in itertools.product(*numbers):
        yield texts[0] + "".join(n + text for n, text in zip(chosen, texts[1:], strict=True))


def _check_total(total: int, most: int, what: str, given: str) -> None:
    if total > most:
        raise InvalidValueError(
            f"This stands for more than {most:,} {what}, which no job has. Check the numbers in it. "
            f"Received: {shown(given)}"
        )


def _wrong_hostlist(hostlist: str) -> InvalidValueError:
    return InvalidValueError(
        "A node list must be names with ranges of numbers in brackets, such as 'n[1-6,8],m[07-12]-ib'. "
        f"Received: {shown(hostlist)}"
    )
