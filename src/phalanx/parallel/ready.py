"""Calls whose arguments are where they belong: what the call before them returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx.parallel.modes import ParallelProgram
from phalanx.runtime import compat

__all__ = ["ReadyProgram"]


@dataclass(frozen=True)
class ReadyProgram:
    """The program of the latest call, for calls with arrays like those, which are where they belong.

    A step of training is called with what the step before it returned, so most calls are of this kind.
    """

    program: ParallelProgram
    kinds: tuple[tuple[Any, Any, Any], ...]

    @classmethod
    def for_arrays(cls, program: ParallelProgram, arrays: Sequence[jax.Array]) -> ReadyProgram:
        """The program for arrays like these."""
        return cls(program, tuple((x.shape, x.dtype, x.sharding) for x in arrays))

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether it can run with these as they are."""
        return all(
            isinstance(x, jax.Array)
            and not compat.is_tracer(x)
            and x.shape == shape
            and x.dtype == dtype
            and (x.sharding is sharding or x.sharding == sharding)
            for x, (shape, dtype, sharding) in zip(leaves, self.kinds, strict=True)
        )
