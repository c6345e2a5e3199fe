"""Reads the fields of messages: a member may send anything, and the state must stay sound.

Every function returns a value of the type and the range that it promises, or raises an
`InvalidValueError` that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from phalanx.errors import InvalidValueError
from phalanx.job.hub.descriptions import Failure, shorten

_LARGEST = 1 << 62
_LONGEST_LABEL = 4096
_LONGEST_WAIT = 1e9  # seconds


def whole(message: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number from 0; needed unless there is a default.

    >>> whole({"step": 3}, "step"), whole({}, "step", 0)
    (3, 0)
    """
    value = message.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        _refuse(name, "a whole number from 0", value)
    return value


def wholes(message: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A list of whole numbers from 0."""
    values = message.get(name)
    if not isinstance(values, list):
        _refuse(name, "a list of whole numbers", values)
    return tuple(whole({name: value}, name) for value in values)


def seconds(message: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A time of at least 0 seconds that is no infinity; needed unless there is a default.

    >>> seconds({"seconds": 1}, "seconds")
    1.0
    """
    value = message.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, "a number of seconds", value)
    if not 0 <= value <= _LONGEST_WAIT or math.isnan(value):
        _refuse(name, "a number of seconds from 0", value)
    return float(value)


def text(message: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A text, shortened where it is too long for people; needed unless there is a default."""
    value = message.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        _refuse(name, "a text", value)
    return shorten(value)


def label(message: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A text of a line or so."""
    value = text(message, name, default)
    if len(value) > _LONGEST_LABEL:
        _refuse(name, f"a text of at most {_LONGEST_LABEL} characters", value)
    return value


def mapping(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A dict; an empty one if there is none."""
    value = message.get(name)
    if value is not None and not isinstance(value, Mapping):
        _refuse(name, "a dict", value)
    return value or {}


def failure(message: Mapping[str, Any], name: str) -> Failure | None:
    """What is wrong with a worker, if anything is."""
    found = mapping(message, name)
    if not found:
        return None
    return Failure(*(text(found, part, "") for part in ("kind", "text", "task")))


def _refuse(name: str, what: str, value: Any) -> NoReturn:
    raise InvalidValueError(f"The field {name!r} must be {what}. Received: {value!r:.80}")
