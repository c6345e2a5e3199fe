"""How large the global batch is, by the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer

__all__ = ["BatchPolicy", "batch_size_for", "check_policy"]

BatchPolicy = str | Callable[[int], int]
"""``"keep_global_batch"``, ``"scale"``, or a function of the number of workers."""

_NAMES = ("keep_global_batch", "scale")


def check_policy(policy: Any) -> BatchPolicy:
    """The policy, if it is one."""
    if isinstance(policy, str) and policy in _NAMES:
        return policy
    if callable(policy):
        return policy
    raise InvalidValueError(
        f"`policy` must be one of {', '.join(map(repr, _NAMES))}, or a function that takes the number "
        f"of workers and returns the size of the global batch. Received: {shown(policy)}"
    )


def batch_size_for(policy: BatchPolicy, batch_size: int, workers: int, maximum: int) -> int:
    """The size of the global batch.

    Args:
        policy: how it depends on the workers.
        batch_size: the size with as many workers as there may be.
        workers: how many there are.
        maximum: how many there may be.

    Examples:
        >>> [batch_size_for("keep_global_batch", 64, workers, 4) for workers in (4, 3, 2)]
        [64, 64, 64]
        >>> [batch_size_for("scale", 64, workers, 4) for workers in (4, 3, 2)]
        [64, 48, 32]
        >>> batch_size_for(lambda workers: 10 * workers, 64, 3, 4)
        30
    """
    if callable(policy):
        size = policy(workers)
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise InvalidTypeError(
                f"`policy` must return the size of the global batch. Received: {shown(size)}"
            )
        return check_integer(size, "the size that `policy` returns", 1)
    if policy == "keep_global_batch":
        return batch_size
    return max(1, batch_size * workers // maximum)
