"""What the search knows of an operator: its loops, and which dim of which tensor each loop runs over.

``C[i, j] = sum(A[i, k] * B[k, j] for k in …)`` has the loops ``i``, ``j`` and ``k``. A strategy gives
each mesh axis one loop to share out, or none. All else follows: the layouts of operands and results;
the results that are terms of a sum, because a loop of theirs is not in the result; and the gradients
that are terms of a sum, because a loop is not in the operand.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np

from phalanx.parallel.layout import NONE, PARTIAL, Layout, Shape

Dims = tuple[int, ...]
"""The loop of each dim of a tensor; `NONE` for dims that cannot be cut."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a tensor."""

    shape: Shape
    dtype: str
    itemsize: float

    @property
    def bytes(self) -> float:
        """The bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @property
    def is_floating(self) -> bool:
        """Whether it has a gradient."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def spec_of(aval: Any) -> Spec:
    """The spec of an abstract value of JAX."""
    return _spec(tuple(aval.shape), aval.dtype)


@lru_cache(maxsize=65536)
def _spec(shape: Shape, dtype: Any) -> Spec:
    return Spec(shape, str(dtype), float(getattr(dtype, "itemsize", 8)))


@dataclass(frozen=True)
class Equation:
    """One operation of a program, as the rules see it."""

    name: str
    params: Mapping[str, Any]
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]


class Keeps(Enum):
    """Which tensors the gradient of an operator needs."""

    NOTHING = "nothing"
    OPERANDS = "operands"
    OTHERS = "the other operands"
    RESULT = "the result"


@dataclass(frozen=True)
class Operator:
    """An operator and its loops.

    Args:
        name: of its primitive.
        family: of operators that are cut in the same way.
        loops: the size of each loop; the pieces of a loop are equal.
        operands: the loop of each dim of each operand.
        results: the loop of each dim of each result.
        operand_specs: the operands.
        result_specs: the results.
        flops: the floating-point operations of the whole operator.
        fused: whether XLA computes it within the operator before or after, so that it reads nothing.
        gathers: whether it reads a part of its operands, no larger than the results.
        keeps: what its gradient needs.
        free: whether it takes no time: it only stands for a tensor.
        counts: whether its gradient counts the elements that make each result, over all devices.
    """

    name: str
    family: str
    loops: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
    flops: float = 0.0
    fused: bool = False
    gathers: bool = False
    keeps: Keeps = Keeps.NOTHING
    free: bool = False
    counts: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.loops, self.operands, self.results, self.operand_specs))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, eq=False)
class Strategies:
    """Every way to share an operator out over the axes of a mesh.

    Args:
        loops: the loop of each axis, or `NONE`, for each strategy.
        operands: the layout of each operand, for each strategy.
        results: the layout of each result, for each strategy.
        gradients: the layout that the gradient of each operand is computed in, for each strategy.
        shares: into how many parts the work is divided.
        counts: into how many pieces each loop is cut.
    """

    loops: tuple[Layout, ...]
    operands: tuple[tuple[Layout, ...], ...]
    results: tuple[tuple[Layout, ...], ...]
    gradients: tuple[tuple[Layout, ...], ...]
    shares: np.ndarray[Any, Any] = field(repr=False)
    counts: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.loops)


@lru_cache(maxsize=8192)
def strategies(operator: Operator, sizes: tuple[int, ...]) -> Strategies:
    """Every way to share an operator out over mesh axes of these sizes, the first loops first."""
    options = [*range(len(operator.loops)), NONE]
    found, cut = [], []
    for chosen in itertools.product(options, repeat=len(sizes)):
        counts = [1] * len(operator.loops)
        for loop, size in zip(chosen, sizes, strict=True):
            if loop != NONE:
                counts[loop] *= size
        if all(size % count == 0 for size, count in zip(operator.loops, counts, strict=True)):
            found.append(chosen)
            cut.append(tuple(counts))
    shares = [prod(n for loop, n in zip(c, sizes, strict=True) if loop != NONE) for c in found]
    return Strategies(
        tuple(found),
        tuple(tuple(_cut(dims, c, NONE) for c in found) for dims in operator.operands),
        tuple(tuple(_cut(dims, c, PARTIAL) for c in found) for dims in operator.results),
        tuple(tuple(_cut(dims, c, PARTIAL) for c in found) for dims in operator.operands),
        np.asarray(shares, float),
        tuple(cut),
    )


def _cut(dims: Dims, chosen: Sequence[int], without: int) -> Layout:
    """The layout of a tensor; `without` for axes on loops that it has not."""
    return tuple(NONE if c == NONE else dims.index(c) if c in dims else without for c in chosen)


def free_dims(shape: Shape) -> tuple[tuple[int, ...], Dims]:
    """A loop for each dim that has more than one element: their sizes, and the loop of each dim."""
    loops: list[int] = []
    dims = []
    for size in shape:
        dims.append(len(loops) if size > 1 else NONE)
        if size > 1:
            loops.append(size)
    return tuple(loops), tuple(dims)
