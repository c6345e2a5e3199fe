"""`OptimizerSharding`: which part of an optimizer's work each replica does and keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer

LEVELS = {"states": 1, "gradients": 2, "parameters": 3}
"""What is divided at each level, besides what is at those before it."""

_NAMES = {
    **LEVELS,
    **{f"level{n}": n for n in (1, 2, 3)},
}


@dataclass(frozen=True)
class OptimizerSharding:
    """How an optimizer divides its work, and what it keeps, over the replicas.

    Args:
        level: "states" divides the state of the transformation. "gradients" also sums gradients in
            slices, so that no replica holds a whole sum. "parameters" also divides the parameters
            between steps; they are gathered where they are read. MindSpore's "level1", "level2" and
            "level3", or 1, 2 and 3, mean the same.
        threshold: arrays of fewer kilobytes stay whole, because sending them apart costs more than it
            saves.
        shard_size: over how many replicas, next to each other, arrays are divided; -1 for all. It must
            divide the number of replicas. Fewer replicas need more memory, and gather among fewer.
        regather: whether gradients gather parameters again, level "parameters" only. Otherwise a step
            keeps them from where the loss reads them until its gradient needs them. The loss must then
            write no variables, and return arrays. On CPU devices XLA merges both gathers again.
        accumulate: whether `Optimizer.minimize_in_pieces` adds up slices of summed gradients, which
            costs a sum over the replicas for each piece, and not whole gradients. None: where gradients
            are divided.

    Examples:
        >>> import phalanx as px
        >>> px.train.OptimizerSharding("gradients", threshold=0).parts_of(replicas=8)
        8
    """

    level: str | int = "states"
    threshold: int = 64
    shard_size: int = -1
    regather: bool = False
    accumulate: bool | None = None

    def __post_init__(self) -> None:
        if self.number is None:
            raise InvalidValueError(
                "The level of a sharded optimizer is 'states', 'gradients' or 'parameters' (or 1, 2 or "
                f"3). Received: {shown(self.level)}"
            )
        check_integer(self.threshold, "threshold", 0, 2**40)
        if self.shard_size != -1:
            check_integer(self.shard_size, "shard_size", 1, 2**31 - 1)
        if not isinstance(self.regather, bool):
            raise InvalidTypeError(f"regather must be True or False. Received: {shown(self.regather)}")
        if not isinstance(self.accumulate, bool | None):
            raise InvalidTypeError(
                f"accumulate must be True, False or None. Received: {shown(self.accumulate)}"
            )

    @property
    def number(self) -> int | None:
        """The level as a number."""
        level = self.level
        if isinstance(level, bool) or not isinstance(level, str | int):
            return None
        return _NAMES.get(level) if isinstance(level, str) else level if level in (1, 2, 3) else None

    @property
    def accumulates_slices(self) -> bool:
        """Whether pieces of a batch are added up in slices."""
        level = self.number or 1
        return level > 1 if self.accumulate is None else self.accumulate

    def parts_of(self, replicas: int) -> int:
        """Over how many replicas an array is divided."""
        parts = replicas if self.shard_size == -1 else self.shard_size
        if parts > replicas or replicas % parts:
            raise InvalidValueError(
                "shard_size must divide the number of replicas, so that each group of that many "
                f"replicas holds every slice once. Received: {parts}, and {replicas} replicas"
            )
        return parts

    def divides(self, x: Any) -> bool:
        """Whether an array is large enough to be divided."""
        if compat.is_key_array(x) or not x.shape:
            return False
        size = math.prod(x.shape)
        return size > 1 and size * jnp.dtype(x.dtype).itemsize >= self.threshold * 1024


def as_sharding(shard: Any) -> OptimizerSharding | None:
    """What the argument `shard` of an optimizer says."""
    if shard is None or isinstance(shard, OptimizerSharding):
        return shard
    if isinstance(shard, str | int):
        return OptimizerSharding(shard)
    raise InvalidTypeError(
        "shard must be 'states', 'gradients', 'parameters', a px.train.OptimizerSharding or None. "
        f"Received: {shown(shard)}"
    )
