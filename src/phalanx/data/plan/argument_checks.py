"""Checks of arguments: bad plans fail when they are made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx.data.plan.elements import LeafBase
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer

AUTOTUNE = -1
"""Let Phalanx choose: how many elements to prefetch, how many calls to make in parallel."""


def integer(value: Any, name: str, minimum: int | None = None, maximum: int | None = None) -> int:
    """An int (of any integer type) within bounds, of at most 64 bits."""
    number = check_integer(value, name, minimum, maximum)
    if abs(number) > sys.maxsize:
        raise InvalidValueError(f"{name} must fit into 64 bits. Received: {shown(number)}")
    return number


def seed(value: Any) -> int | None:
    """An optional seed, of any size."""
    if value is None:
        return None
    return value % 2**64 if type(value) is int else integer(value, "seed")


def function(value: Any, name: str) -> Callable[..., Any]:
    """Something that can be called."""
    if not callable(value):
        raise InvalidTypeError(
            f"{name} needs a function. Received: {shown(value)} of type {type(value).__name__}"
        )
    return value


def parallelism(value: Any) -> int | None:
    """`num_parallel_calls`: None, AUTOTUNE or a positive number."""
    if value is None:
        return None
    number = integer(value, "num_parallel_calls")
    if number != AUTOTUNE and number < 1:
        raise InvalidValueError(
            f"num_parallel_calls must be positive, px.data.AUTOTUNE or None. Received: {shown(number)}"
        )
    return number


def dtype(value: Any, name: str) -> np.dtype[Any]:
    """A dtype."""
    try:
        return np.dtype(value)
    except TypeError:
        raise InvalidTypeError(f"{name} must be a dtype. Received: {shown(value)}") from None


def boolean(value: Any, name: str) -> bool:
    """A bool."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidTypeError(
            f"{name} must be True or False. Received: {shown(value)} of type {type(value).__name__}"
        )
    return bool(value)


def dataset(value: Any, what: str) -> Any:
    """A dataset."""
    if not isinstance(value, LeafBase):
        raise InvalidTypeError(
            f"{what} needs datasets. Received: {shown(value)} of type {type(value).__name__}"
        )
    return value
