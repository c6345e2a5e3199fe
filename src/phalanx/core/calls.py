"""Checks of the arguments with which a user's function is to be called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.core.showing import shown


def check_call(fn: Any, args: Any, kwargs: Any, name: str = "fn") -> None:
    """Require a callable with a list of positional and a dict of keyword arguments."""
    if not callable(fn):
        raise InvalidTypeError(f"{name} must be callable. Received: {shown(fn)}")
    check_arguments(args, kwargs)


def check_arguments(args: Any, kwargs: Any) -> None:
    """Require a list of positional and a dict of keyword arguments."""
    if not isinstance(args, list | tuple):
        raise InvalidValueError(
            "args must be a list or tuple of positional arguments; for one argument write "
            f"args=(x,). Received: {shown(args)} of type {type(args).__name__}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidValueError(f"kwargs must be a dict or None. Received: {shown(kwargs)}")
