"""Operations on small arrays, the same for every library: what each rank gives, and what it gets.

`record_torch.py` runs them with torch.distributed, the tests with Phalanx, and `expected` with NumPy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn"]
WHOLE = ["int8", "uint8", "int16", "int32", "int64"]
DTYPES = [*FLOATS, *WHOLE, "bool", "complex64", "complex128"]
REDUCTIONS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
MOVES = [
    "all_gather_into_tensor",
    "all_gather",
    "broadcast",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_single uneven",
    "all_to_all_single zero",
    "ring",
]
UNEVEN = ["all_to_all_single uneven", "all_to_all_single zero", "reduce_scatter uneven"]
"""Whose results have different shapes on different ranks."""


@dataclass(frozen=True)
class Case:
    """One operation.

    Args:
        name: the operation.
        dtype: of the arrays.
        ranks: the members of its group.
        op: the reduction, if it is one.
    """

    name: str
    dtype: str
    ranks: tuple[int, ...]
    op: str = ""

    @property
    def key(self) -> str:
        """A name for the case."""
        return f"{self.name} {self.op} {self.dtype} {list(self.ranks)}".replace("  ", " ")

    @property
    def root(self) -> int:
        """The source or destination: the last member."""
        return self.ranks[-1]


def cases(world: int) -> list[Case]:
    """All cases for a number of ranks: in the world, and some in the group of the first and last."""
    everyone, ends = tuple(range(world)), (0, world - 1)
    found = [Case("all_reduce", d, everyone, op) for d in DTYPES for op in REDUCTIONS]
    for name in ("all_reduce", "reduce", "reduce_scatter_tensor", "reduce_scatter uneven"):
        for ranks in {everyone, ends}:
            found += [Case(name, "float32", ranks, op) for op in REDUCTIONS[:5]]
            found += [Case(name, "int32", ranks, op) for op in REDUCTIONS]
    moved = ["float32", "bfloat16", "int64", "bool", "complex64", "uint8"]
    found += [Case(name, d, everyone) for name in MOVES for d in moved]
    found += [Case(name, "float32", ends) for name in MOVES]
    return sorted(set(found), key=lambda case: case.key)


def dtype_of(name: str) -> Any:
    """A dtype of NumPy or of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def values(case: Case, rank: int, length: int) -> Array:
    """Small whole numbers, which all dtypes hold and add without rounding."""
    numbers = (np.arange(length) * (rank + 2) + rank) % 4 + 1
    if case.dtype == "bool":
        return (numbers % 2) == 0
    return numbers.astype(dtype_of(case.dtype))


def splits(case: Case, rank: int) -> list[int]:
    """How much a rank sends to each member."""
    count, me = len(case.ranks), case.ranks.index(rank)
    if case.name.endswith("uneven"):
        return [(me + 2 * i) % 3 + 1 for i in range(count)]
    if case.name.endswith("zero"):
        return [0 if i == 0 else 2 * me for i in range(count)]
    return [2] * count


def came(case: Case, rank: int) -> list[int]:
    """How much a rank gets from each member."""
    me = case.ranks.index(rank)
    return [splits(case, r)[me] for r in case.ranks]


def given(case: Case, rank: int) -> Any:
    """What a rank gives: an array, or a list of one per member."""
    count = len(case.ranks)
    if case.name in ("scatter", "all_to_all"):
        return [values(case, rank + 5 * i, 2) for i in range(count)]
    if case.name == "reduce_scatter uneven":
        return [values(case, rank + 5 * i, i + 1) for i in range(count)]
    if case.name.startswith("all_to_all_single"):
        return values(case, rank, sum(splits(case, rank)))
    return values(case, rank, 2 * count)


def reduced(op: str, rows: list[Array]) -> Array:
    """What a reduction means, in NumPy."""
    dtype = rows[0].dtype
    if dtype == np.bool_:
        names = {"SUM": "MAX", "PRODUCT": "MIN", "BOR": "MAX", "BAND": "MIN"}
        functions = {"MAX": np.logical_or, "MIN": np.logical_and, "BXOR": np.logical_xor}
        return functions[names.get(op, op)].reduce(rows)
    if op in ("BAND", "BOR", "BXOR"):
        bits = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
        return bits[op].reduce(rows)
    if op in ("MIN", "MAX", "PRODUCT"):
        functions = {"MIN": np.minimum, "MAX": np.maximum, "PRODUCT": np.multiply}
        return functions[op].reduce(np.stack(rows)).astype(dtype)
    wide = np.stack(rows).astype(np.complex128 if dtype.kind == "c" else np.float64)
    total = wide.sum(0)
    if op == "AVG":
        total = total // len(rows) if dtype.kind in "iu" else total / len(rows)
    return total.astype(dtype)


def expected(case: Case, rank: int) -> Any:
    """What a rank gets, in NumPy; None if it is not a member, or gets nothing."""
    if rank not in case.ranks:
        return None
    me, count = case.ranks.index(rank), len(case.ranks)
    gives = [given(case, r) for r in case.ranks]
    if case.name == "all_reduce":
        return reduced(case.op, gives)
    if case.name == "reduce":
        return reduced(case.op, gives) if rank == case.root else gives[me]
    if case.name == "reduce_scatter_tensor":
        return np.split(reduced(case.op, gives), count)[me]
    if case.name == "reduce_scatter uneven":
        return reduced(case.op, [g[me] for g in gives])
    if case.name == "all_gather_into_tensor":
        return np.concatenate(gives)
    if case.name == "all_gather":
        return gives
    if case.name == "broadcast":
        return gives[case.ranks.index(case.root)]
    if case.name == "gather":
        return gives if rank == case.root else None
    if case.name == "scatter":
        return gives[case.ranks.index(case.root)][me]
    if case.name == "all_to_all":
        return [g[me] for g in gives]
    if case.name == "ring":
        return gives[me - 1]
    sent = []
    for r, g in zip(case.ranks, gives, strict=True):
        ends = np.cumsum(splits(case, r))
        sent.append(g[ends[me] - splits(case, r)[me] : ends[me]])
    return np.concatenate(sent)


def plain(x: Any) -> Any:
    """An array, or a list of them, as JSON has it."""
    if x is None:
        return None
    if isinstance(x, list | tuple):
        return [plain(part) for part in x]
    x = np.asarray(x)
    if x.dtype.kind == "c":
        return [[float(v.real), float(v.imag)] for v in x.reshape(-1)]
    return [float(v) for v in x.reshape(-1)]
