"""The collectives, as a table: what each takes, what must agree between ranks, and what moves its data.

A row of `OPERATIONS` describes one operation. `Request.of` checks the arguments of a call against it,
once for all backends. A `Backend` knows a few movements, from which all operations are made; there is
one for workers over sockets, one for workers on devices, and one each for replicas that run eagerly and
for compiled ones.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.collectives.mismatches import different_parts
from phalanx.collectives.reductions import Reduction, as_reduction, check_dtype, kind_of, name_of
from phalanx.core.operators import ArrayOperators, operand_of
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import array_text, shown


class Takes(Enum):
    """What an operation takes from each rank."""

    NOTHING = "nothing"
    ARRAY = "one array"
    ARRAYS = "any number of arrays"
    LIST = "a list of one array per rank"
    ROWS = "one array with a first dimension, along which results are joined"
    PARTS = "one array, of which each rank gets its part along the first dimension"


class Backend(Protocol):
    """Moves data between the ranks of a group; `root` is a place in the group.

    A list stands for one array per rank; an array in its place is cut along the first dimension. `out`
    is where results may be put, if they fit: a NumPy array in one piece, or a list of them.
    """

    def reduce(self, xs: list[Any], op: Reduction, root: int | None, out: Any) -> Any:
        """The reduction of each of some arrays; at one place only, where others get their own back."""

    def broadcast(self, x: Any, root: int, out: Any) -> Any:
        """The array of one rank."""

    def gather(self, x: Any, root: int | None, joined: bool, out: Any) -> Any:
        """The arrays of all ranks: as a list, or joined along the first dimension.

        At one place only, others get None, or zeros.
        """

    def scatter(self, xs: Any, root: int, out: Any) -> Any:
        """This rank's array of those that one rank has; the others may give None."""

    def reduce_scatter(self, xs: Any, op: Reduction, out: Any) -> Any:
        """The reduction of the arrays that all ranks have for this one."""

    def exchange(self, xs: Any, splits: Splits | None, out: Any) -> Any:
        """Array i goes to rank i; those that came, as a list, or joined if `splits` are given."""

    def barrier(self) -> Any:
        """Nothing, when all ranks are here."""


@dataclass(frozen=True)
class Splits:
    """How many rows go to each rank, and how many are expected from each, if that is known."""

    inputs: list[int]
    outputs: list[int] | None


Movement = Callable[[Backend, "Request"], Any]


@dataclass(frozen=True)
class Operation:
    """A row of the table."""

    name: str
    takes: Takes  # what each rank gives
    movement: Movement  # what a backend does with a request
    root: str | None = None  # the name of the argument that says which rank is special
    reduces: bool = False  # whether it has a reduction
    may_differ: bool = False  # whether ranks may have arrays of different shapes, which all are told
    finish: Callable[[Request, Any], Any] = lambda _, result: result


@dataclass
class Request:
    """A call of an operation, with checked arguments."""

    operation: Operation  # its row of the table
    ranks: tuple[int, ...]  # the members of the group
    x: Any = None  # an array, a list of arrays, or None
    op: Any = None  # the reduction
    root: Any = None  # the place of the special rank
    splits: Splits | None = None  # how an array is cut
    out: Any = None  # where the result may be put
    me: Any = field(default=None, compare=False)
    """The place of this rank in the group, which is an array where replicas are compiled."""

    @staticmethod
    def of(
        name: str,
        ranks: tuple[int, ...],
        x: Any = None,
        op: Any = None,
        root: Any = None,
        splits: tuple[Any, Any] | None = None,
        out: Any = None,
    ) -> Request:
        """Check the arguments of a call."""
        row = OPERATIONS[name]
        count = len(ranks)
        request = Request(row, ranks, out=out)
        if row.root is not None:
            request.root = place_of(root, row.root, ranks)
        if row.takes is Takes.LIST:
            optional = x is None and row.root == "src"
            request.x = None if optional else _one_per_rank(x, count, f"The list of {name}")
        elif row.takes is Takes.ARRAYS:
            request.x = [as_array(each) for each in x]
        elif row.takes is not Takes.NOTHING:
            request.x = as_array(x)
        if row.reduces:
            request.op = as_reduction(op)
            for each in request.arrays[:1] if row.takes is Takes.LIST else request.arrays:
                check_dtype(request.op, each.dtype)
        if row.takes in (Takes.ROWS, Takes.PARTS) and not request.x.ndim:
            raise InvalidValueError(f"The tensor needs a first dimension. Received: {kind(request.x)}")
        if row.takes is Takes.PARTS:
            inputs, outputs = splits or (None, None)
            request.splits = _splits(request.x, inputs, outputs, count)
        return request

    @property
    def arrays(self) -> list[Any]:
        """All arrays that this rank gives."""
        if self.x is None:
            return []
        return self.x if isinstance(self.x, list) else [self.x]

    @property
    def same(self) -> str:
        """What must be the same on all ranks, in words."""
        row, parts = self.operation, []
        if row.root is not None:
            way = "from" if row.root == "src" else "to"
            parts.append(f"{way} {self.ranks[self.root]}")
        if self.op is not None:
            parts.append(name_of(self.op))
        if row.takes is Takes.PARTS and row.may_differ:
            trailing = json.dumps(self.x.shape[1:])
            parts.append(f"{jnp.dtype(self.x.dtype).name} with the trailing shape {trailing}")
        elif row.may_differ and row.root != "src":
            parts += [jnp.dtype(x.dtype).name for x in self.arrays[:1]]
        elif not row.may_differ:
            parts += [kind(x) for x in self.arrays]
        return ", ".join(parts)

    @property
    def told(self) -> Any:
        """What all ranks are told, as JSON has it: the shapes, where they may differ."""
        row = self.operation
        if not row.may_differ or self.x is None:
            return None
        if row.takes is Takes.PARTS:
            assert self.splits is not None
            return [self.splits.inputs, self.splits.outputs]
        shapes = [list(x.shape) for x in self.arrays]
        if row.root == "src":
            return [jnp.dtype(self.x[0].dtype).name, shapes]
        return shapes if row.takes is Takes.LIST else shapes[0]

    def perform(self, backend: Backend) -> Any:
        """Do it, and return the result."""
        return self.operation.finish(self, self.operation.movement(backend, self))


# -- the table ---------------------------------------------------------------------------------------


_MOVEMENTS: dict[str, Movement] = {
    "reduce": lambda backend, r: backend.reduce(r.arrays, r.op, r.root, r.out),
    "broadcast": lambda backend, r: backend.broadcast(r.x, r.root, r.out),
    "gather": lambda backend, r: backend.gather(r.x, r.root, r.operation.takes is Takes.ROWS, r.out),
    "scatter": lambda backend, r: backend.scatter(r.x, r.root, r.out),
    "reduce_scatter": lambda backend, r: backend.reduce_scatter(r.x, r.op, r.out),
    "exchange": lambda backend, r: backend.exchange(r.x, r.splits, r.out),
    "barrier": lambda backend, _: backend.barrier(),
}


def _row(name: str, takes: Takes, movement: str, root: str | None = None, **rest: Any) -> Operation:
    return Operation(name, takes, _MOVEMENTS[movement], root, **rest)


def _first(_: Request, results: Any) -> Any:
    return results[0]


_ROWS = (
    _row("all_reduce", Takes.ARRAY, "reduce", reduces=True, finish=_first),
    _row("all_reduce_coalesced", Takes.ARRAYS, "reduce", reduces=True),
    _row("reduce", Takes.ARRAY, "reduce", "dst", reduces=True, finish=_first),
    _row("broadcast", Takes.ARRAY, "broadcast", "src"),
    _row("all_gather", Takes.ARRAY, "gather", may_differ=True),
    _row("all_gather_into_tensor", Takes.ROWS, "gather"),
    _row("gather", Takes.ARRAY, "gather", "dst", may_differ=True),
    _row("gather_into_tensor", Takes.ROWS, "gather", "dst"),
    _row("scatter", Takes.LIST, "scatter", "src", may_differ=True),
    _row("scatter_tensor", Takes.PARTS, "scatter", "src"),
    _row("reduce_scatter", Takes.LIST, "reduce_scatter", reduces=True),
    _row("reduce_scatter_tensor", Takes.PARTS, "reduce_scatter", reduces=True),
    _row("all_to_all", Takes.LIST, "exchange", may_differ=True),
    _row("all_to_all_single", Takes.PARTS, "exchange", may_differ=True),
    _row("barrier", Takes.NOTHING, "barrier"),
)
OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}
"""All operations by name."""


# -- checks ------------------------------------------------------------------------------------------


def as_array(x: Any, what: str = "The tensor") -> Any:
    """An array or a number as NumPy's or JAX's array; a NumPy array stays one."""
    if isinstance(x, ArrayOperators):
        x = operand_of(x)
    if isinstance(x, bool | int | float | complex):
        x = jnp.asarray(x)
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        x = np.asarray(x) if isinstance(x, np.generic) else x
        if not compat.is_key_array(x) and kind_of(x.dtype):
            return x
    raise InvalidTypeError(
        f"{what} must be an array of numbers or a px.Variable. Received: {shown(x)} of type "
        f"{type(x).__name__}"
    )


def kind(x: Any) -> str:
    """The dtype and shape of an array, for people and for comparing."""
    return kind_text(x.dtype, tuple(x.shape))


@functools.lru_cache(maxsize=1000)
def kind_text(dtype: Any, shape: tuple[int, ...]) -> str:
    """A dtype and a shape in words."""
    return array_text(jnp.dtype(dtype).name, shape)


def like(x: Any, result: Any) -> Any:
    """The result as NumPy's array if `x` is one."""
    return np.array(result) if isinstance(x, np.ndarray) else result


def rows_of(x: Any, count: int) -> Any:
    """An array as so many equal parts of its first dimension, one under another."""
    return x.reshape((count, x.shape[0] // count, *x.shape[1:]))


def join_rows(rows: Any) -> Any:
    """Parts that stand one under another as one array."""
    return rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:]))


def parts_of(x: Any, sizes: Sequence[int]) -> list[Any]:
    """An array cut along the first dimension."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [x[e - n : e] for e, n in zip(ends, sizes, strict=True)]


def check_splits(
    told: Sequence[Any], ranks: tuple[int, ...], mismatch: Callable[[str], Exception]
) -> None:
    """Require that every rank expects what the others send to it; all ranks find the same."""
    for place, (_, expected) in enumerate(told):
        comes = [sent[place] for sent, _ in told]
        if expected is not None and expected != comes:
            raise mismatch(different_parts(f"rank {ranks[place]}", expected, "ranks", ranks, comes))


def place_of(rank: Any, what: str, ranks: tuple[int, ...], where: str = "the group") -> int:
    """The place of a rank among some, which it must be one of."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank not in ranks:
        raise InvalidValueError(
            f"{what} must be one of the ranks {list(ranks)} of {where}. Received: {shown(rank)}"
        )
    return ranks.index(rank)


def _one_per_rank(xs: Any, count: int, what: str) -> list[Any]:
    """A list of one array per rank, all of one dtype."""
    if not isinstance(xs, Sequence) or isinstance(xs, str) or len(xs) != count:
        raise InvalidValueError(
            f"{what} must be a list of {count} arrays, one for each rank of the group. "
            f"Received: {shown(xs)}"
        )
    arrays = [as_array(x, what) for x in xs]
    if len({jnp.dtype(x.dtype) for x in arrays}) > 1:
        raise InvalidValueError(
            f"{what} must have arrays of one dtype. Received: {[str(x.dtype) for x in arrays]}"
        )
    return arrays


def _splits(x: Any, inputs: Any, outputs: Any, count: int) -> Splits:
    expected = None if outputs is None else _sizes(outputs, count, None)
    if inputs is not None:
        return Splits(_sizes(inputs, count, x.shape[0]), expected)
    if x.shape[0] % count:
        raise InvalidValueError(
            f"The first dimension must be divisible by the {count} ranks of the group. "
            f"Received: {kind(x)}"
        )
    return Splits([x.shape[0] // count] * count, expected)


def _sizes(sizes: Any, count: int, total: int | None) -> list[int]:
    if not isinstance(sizes, Sequence | np.ndarray) or isinstance(sizes, str):
        raise InvalidTypeError(f"Split sizes must be a list of whole numbers. Received: {shown(sizes)}")
    found = [int(n) for n in sizes]
    if len(found) != count or min(found) < 0 or (total is not None and sum(found) != total):
        whole = "" if total is None else f" that add up to {total}"
        raise InvalidValueError(
            f"There must be {count} split sizes from 0, one for each rank of the group{whole}. "
            f"Received: {found}"
        )
    return found
