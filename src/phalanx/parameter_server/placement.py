"""Which server holds which variable, and how initial values are made in parts."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.variables.variable_spec import InitialValue, initial_array
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer

__all__ = ["Placement", "VariablePlacer", "VariablePlan", "shard_count"]


@dataclass(frozen=True)
class VariablePlan:
    """A variable, or a shard of one, that needs a parameter server.

    Args:
        name: of the variable or the shard.
        shape: of its value.
        dtype: of its value.
        nbytes: how large it is.
        held: how many bytes each server holds already.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    nbytes: int
    held: tuple[int, ...]


Placement = str | Callable[[VariablePlan], int] | None


class VariablePlacer:
    """Chooses servers for new variables.

    Args:
        count: how many servers there are.
        placement: None or "round_robin" for one after the other, "by_size" for the one that holds the
            fewest bytes, or a function that takes a `VariablePlan` and returns the index of a server.
    """

    def __init__(self, count: int, placement: Placement = None) -> None:
        known = placement in (None, "round_robin", "by_size") if not callable(placement) else True
        if not known:
            raise InvalidValueError(
                "placement must be 'round_robin', 'by_size', a function or None. "
                f"Received: {shown(placement)}"
            )
        self.count = count
        self._placement = placement
        self._turn = itertools.count()
        self._held = [0] * count
        self._released: deque[tuple[int, int]] = deque()
        self._lock = threading.Lock()

    def choose(self, name: str, shape: tuple[int, ...], dtype: Any, near: int | None = None) -> int:
        """The server for a variable; `near` is the one of a variable that it must be with."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            while self._released:
                server, freed = self._released.popleft()
                self._held[server] -= freed
            if near is not None:
                server = near
            elif callable(self._placement):
                plan = VariablePlan(name, shape, dtype, nbytes, tuple(self._held))
                chosen = self._placement(plan)
                server = check_integer(chosen, "What placement returns", 0, self.count - 1)
            elif self._placement == "by_size":
                server = self._held.index(min(self._held))
            else:
                server = next(self._turn) % self.count
            self._held[server] += nbytes
        return server

    def release(self, server: int, nbytes: int) -> None:
        """A variable is not there any more; may be called at any moment, in any thread."""
        self._released.append((server, nbytes))


def shard_count(partitioner: Any, shape: tuple[int, ...], dtype: Any) -> int:
    """How many shards a variable has; 1 if it stays in one piece."""
    if partitioner is None or not shape:
        return 1
    answer = partitioner(shape=shape, dtype=dtype)
    listed = list(answer) if isinstance(answer, list | tuple) else []
    whole = len(listed) == len(shape) and all(isinstance(n, int | np.integer) for n in listed)
    if not whole or answer[0] < 1 or any(n != 1 for n in answer[1:]):
        raise InvalidValueError(
            "variable_partitioner must return a list with the number of shards, and 1 for every other "
            f"dimension: only rows are divided. Received: {shown(answer)} for the shape {list(shape)}"
        )
    return max(1, min(int(answer[0]), shape[0]))


def known_shape(initial: InitialValue) -> tuple[tuple[int, ...], Any] | None:
    """Shape and dtype of a value that can be made in parts; None if it must be made as a whole."""
    if initial.shape is None or not callable(initial.given) or not _takes_parts(initial.given):
        return None
    shape = tuple(int(n) for n in initial.shape)
    dtype = jax.dtypes.canonicalize_dtype(jnp.float32 if initial.dtype is None else initial.dtype)
    return shape, dtype


def parts_of(initial: InitialValue, shape: tuple[int, ...], sizes: Sequence[int]) -> Iterator[Any]:
    """The initial values of the shards, one at a time, from a function that makes them in parts."""
    first = 0
    for size in sizes:
        part, offset = (size, *shape[1:]), (first, *[0] * (len(shape) - 1))
        made = initial.given(partition_shape=part, partition_offset=offset)
        yield initial_array(made, initial.dtype, part, initial.name)
        first += size


def _takes_parts(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    names = {"partition_shape", "partition_offset"}
    return names <= set(parameters) or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def check_partitioner(partitioner: Any) -> Any:
    """Require a partitioner or None."""
    if partitioner is not None and not callable(partitioner):
        raise InvalidTypeError(
            "variable_partitioner must be one of px.partitioners, another function of shape and dtype, "
            f"or None. Received: {shown(partitioner)}"
        )
    return partitioner
