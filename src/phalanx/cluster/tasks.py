"""Checks of the parts of a cluster: names, indices and addresses."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

_LAST_PORT = 65535
_INDEX_LIMIT = 2**31  # task indices travel as 32-bit integers


def task_index(value: object, what: str = "A task index") -> int:
    """Returns a task index as an int; digits in a string count, because JSON keys are strings.

    `what` begins the message of the error for anything that is not a whole number from 0.

    >>> task_index("3")
    3
    """
    problem = f"{what} must be a whole number from 0, such as 0 or '0'. Received: {shown(value)}"
    try:
        index = int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except ValueError as error:  # also for thousands of digits
        raise InvalidValueError(problem) from error
    except Exception as error:  # whatever the class of the value raises
        raise InvalidTypeError(problem) from error
    if not 0 <= index < _INDEX_LIMIT:
        raise InvalidValueError(problem)
    return index


def port(value: object, what: str = "`port`") -> int:
    """Returns a port as an int. `what` begins the message of the error.

    >>> port("8470")
    8470
    """
    number = task_index(value, what)
    if number > _LAST_PORT:
        raise InvalidValueError(
            f"{what} must be a port, at most {_LAST_PORT}. Received: {shown(value)}"
        )
    return number


def text(value: object, what: str) -> str:
    """Returns a string; bytes are taken as UTF-8. `what` begins the message of the error.

    >>> text(b"host0:2222", "A task address")
    'host0:2222'
    """
    if not isinstance(value, str | bytes):
        raise InvalidTypeError(f"{what} must be a string. Received: {shown(value)}")
    try:
        data = value.encode() if isinstance(value, str) else value
        return data.decode()
    except UnicodeError as error:
        raise InvalidValueError(f"{what} must be text in UTF-8. Received: {shown(value)}") from error


def normal_tasks(owner: str, tasks: object) -> dict[int, str]:
    """Returns the addresses of a job by index, sorted, from a list or a dict of addresses.

    `owner` is the job in messages of errors.

    >>> normal_tasks("job 'worker'", {"1": "host1:2222", 0: "host0:2222"})
    {0: 'host0:2222', 1: 'host1:2222'}
    """
    if isinstance(tasks, list | tuple):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise InvalidTypeError(
            f"The tasks of {owner} must be a list of addresses, for example "
            "['host0:2222'], or a dict from index to address, for example {0: 'host0:2222'}. "
            f"Received: {shown(tasks)}"
        )
    indices = [task_index(key, f"A task index of {owner}") for key in tasks]
    if len(set(indices)) < len(indices):
        raise InvalidValueError(
            f"A task of {owner} is given twice. Write each index once. Received: {shown(tasks)}"
        )
    addresses = [text(address, f"A task address of {owner}") for address in tasks.values()]
    return dict(sorted(zip(indices, addresses, strict=True)))
