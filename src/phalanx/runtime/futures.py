"""Futures that are set by hand."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["settle"]

T = TypeVar("T")


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Give a future what some work returns, or raises.

    >>> future = Future()
    >>> settle(future, lambda: 1 / 0)
    >>> future.exception()
    ZeroDivisionError('division by zero')
    """
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the future has it
        future.set_exception(error)
    else:
        future.set_result(result)
