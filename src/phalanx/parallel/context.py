"""The options that are in force: for the whole process, or for a block of code."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import jax

from phalanx.errors import InvalidTypeError
from phalanx.parallel.options import ParallelOptions, changed, read

__all__ = [
    "current_options",
    "get_auto_parallel_context",
    "options_in_force",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
]

_lock = threading.Lock()
_process = [ParallelOptions()]
_scoped: contextvars.ContextVar[ParallelOptions | None] = contextvars.ContextVar(
    "parallel options", default=None
)
_seen: list[ParallelOptions] = [ParallelOptions()]
_cache_key = jax.make_user_context(0)
"""The number of the options in force, for `jax.jit`: what it traced with others is not used."""


def set_auto_parallel_context(*unexpected: Any, **options: Any) -> None:
    """Set options of automatic parallelism for this process, as MindSpore does.

    All options are checked before any of them counts.

    Args:
        *unexpected: refused.
        **options: MindSpore's options by their names; see the guide for what each does.

    Examples:
        >>> set_auto_parallel_context(parallel_mode="auto_parallel", pipeline_stages=2)
        >>> get_auto_parallel_context("parallel_mode")
        'auto_parallel'
        >>> reset_auto_parallel_context()
    """
    if unexpected:
        raise InvalidTypeError("too many positional arguments")
    with _lock:
        _set(changed(_process[0], options))


def get_auto_parallel_context(attr_key: str) -> Any:
    """The value of an option that is in force.

    Examples:
        >>> get_auto_parallel_context("pipeline_stages")
        1
    """
    return read(current_options(), attr_key)


def reset_auto_parallel_context() -> None:
    """Give all options their defaults again.

    Examples:
        >>> reset_auto_parallel_context()
    """
    with _lock:
        _set(ParallelOptions())


def _set(options: ParallelOptions) -> None:
    _process[0] = options
    _cache_key.set_global(_number(options))


def _number(options: ParallelOptions) -> int:
    """The same for options that are equal."""
    if options not in _seen:
        _seen.append(options)
    return _seen.index(options)


def current_options() -> ParallelOptions:
    """The options that are in force here."""
    scoped = _scoped.get()
    return _process[0] if scoped is None else scoped


@contextlib.contextmanager
def options_in_force(options: ParallelOptions) -> Iterator[None]:
    """Let other options be in force for a block of code, in this thread or task."""
    token = _scoped.set(options)
    with _lock:
        number = _number(options)
    try:
        with _cache_key(number):
            yield
    finally:
        _scoped.reset(token)
