"""`ShardedVariable`: a variable in several parts, each on a parameter server."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.shard_slices import Shard, ShardSlices, split_rows
from phalanx.core.values import DistributedValues
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.recorded_updates import TableRead, read
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import VariableSpec
from phalanx.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.parameter_server.home import ServersHome
from phalanx.parameter_server.remote_variable import Join, RemoteVariable
from phalanx.parameter_server.requests import Read
from phalanx.parameter_server.rows import read_rows
from phalanx.runtime.formatting import shown
from phalanx.runtime.pickling import OnePerProcess

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

__all__ = ["ShardedVariable", "shard_sizes"]


def shard_sizes(rows: int, shards: int) -> list[int]:
    """How many rows each shard has: the first ones have one more if they cannot be equal.

    >>> shard_sizes(13, 5)
    [3, 3, 3, 2, 2]
    """
    size, larger = divmod(rows, shards)
    return [size + (i < larger) for i in range(shards)]


class _RowError(InvalidValueError, IndexError):
    """There is no such row."""


class ShardedVariable(OnePerProcess, Variable):
    """A variable whose rows are divided among parameter servers.

    `px.ParameterServerStrategy` makes it, where the partitioner asks for more than one shard. It can be
    used as any other variable, but iterating gives its shards. `sparse_read`, `px.nn.embedding_lookup`
    and slices ask only for the rows they need, and sparse updates travel to the shards of their rows.

    Args:
        variables: the shards, in their order.
        spec: what the user asked for; of the value only shape and dtype count.
        strategy: which made it.
    """

    home: ServersHome

    def __init__(
        self, variables: Sequence[RemoteVariable], spec: VariableSpec, strategy: Strategy
    ) -> None:
        self._variables = tuple(variables)
        self.home = self._variables[0].home
        self._spec = spec
        self._strategy = strategy
        self._device = strategy.extended._replica_devices[0]  # where this process computes updates
        self._ends = tuple(itertools.accumulate(v.shape[0] for v in self._variables))
        self._parts = list(zip(self._variables, (0, *self._ends[:-1]), strict=True))

    # -- description -----------------------------------------------------------------------------

    @property
    def variables(self) -> list[RemoteVariable]:
        """The shards."""
        return list(self._variables)

    @property
    def values(self) -> tuple[RemoteVariable, ...]:
        """The shards."""
        return self._variables

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._variables)

    @property
    def parts(self) -> Sequence[tuple[RemoteVariable, int]]:
        """The shards, and the index of the first row of each."""
        return self._parts

    def __iter__(self) -> Iterator[Any]:
        """The shards, as in TensorFlow."""
        return iter(self._variables)

    def __len__(self) -> int:
        """How many shards there are."""
        return len(self._variables)

    def __repr__(self) -> str:
        body = "\n".join(f"  {i}: {v!r}" for i, v in enumerate(self._variables))
        return f"ShardedVariable:{{\n{body}\n}}"

    __str__ = __repr__

    def recipe(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What makes the variable in another process that unpickles it."""
        return ShardedVariable, (self._variables, self._spec, self._strategy)

    def __copy__(self) -> ShardedVariable:
        raise UnsupportedError(
            "A shallow copy of a variable on parameter servers would be the same variable. Use "
            f"copy.deepcopy, which makes another one. Received: {shown(self.name)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedVariable:
        shards = [copy.deepcopy(v, memo) for v in self._variables]
        memo[id(self)] = clone = ShardedVariable(shards, self._spec, self.distribute_strategy)
        return clone

    def _check_access(self, what: str) -> None:
        assert self._strategy is not None
        ctx.require_same_strategy(self._strategy, what)

    # -- reading ---------------------------------------------------------------------------------

    def whole(self) -> jax.Array:
        """The value, as this code sees it: all shards, one after the other."""
        program = traced_variables.current()
        if isinstance(program, traced_variables.Substitution) and self in program.taps:
            program.check_read()
            value: jax.Array = program.held(self)
            return value
        if program is None:
            shards = read(self.home, [TableRead(v) for v in self._variables])
        else:
            shards = [v.whole() for v in self._variables]
        return jnp.concatenate([jnp.asarray(x) for x in shards])

    def _held(self) -> Any:
        return self.whole()

    def row_reads(self, indices: Any, wanted: list[Read]) -> Join:
        """Add what to ask servers for; returns what makes the rows of the answers."""
        asked = np.asarray(indices)
        places: list[tuple[Any, int]] = []
        for shard, (mine, part) in zip(self._variables, split_rows(asked, self._ends), strict=True):
            if mine is None:
                return shard.row_reads(part, wanted)
            if mine.size:
                places.append((mine, len(wanted)))
                wanted.append(Read(shard.definition, part))
        shape, dtype = (asked.size, *self.shape[1:]), self.dtype

        def join(answers: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
            rows = np.empty(shape, dtype)
            for mine, place in places:
                rows[mine] = answers[place]
            return rows

        return join

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Some rows of the value, in the order of the indices; only those travel.

        Args:
            indices: integers from 0 on, of any shape.
            name: accepted for ported code.
        """
        del name
        self._check_access(f"ShardedVariable.sparse_read of {self.name!r}")
        return read_rows(self, indices)

    def __getitem__(self, index: Any) -> jax.Array:
        """A part of the value; only the rows in it travel.

        Args:
            index: integers, slices, ``...`` and None, as for arrays. Arrays are no indices here: use
                `sparse_read` or `px.nn.embedding_lookup`.
        """
        self._check_access(f"a slice of {self.name!r}")
        first, *rest = index if isinstance(index, tuple) else (index,)
        if any(isinstance(x, jax.Array | np.ndarray | Variable | list) for x in (first, *rest)):
            raise InvalidTypeError(
                "A sharded variable cannot be indexed by an array. Use v.sparse_read(indices) or "
                f"px.nn.embedding_lookup(v, indices). Received: {shown(index)}"
            )
        count = self.shape[0]
        if isinstance(first, slice):
            rows = np.arange(count)[first]
            value = self.whole() if rows.size == count else read_rows(self, rows)
            if rows.size == count and first.step is not None and first.step < 0:
                value = value[::-1]
            return value[(slice(None), *rest)]
        if first is None or first is Ellipsis:
            return self.whole()[(first, *rest)]
        row = _whole_number(first, index)
        if not -count <= row < count:
            raise _RowError(f"Variable {self.name!r} has {count} rows. Received: the index {row}")
        return read_rows(self, np.array([row % count]))[(0, *rest)]

    # -- writing ---------------------------------------------------------------------------------

    def _update(self, method: str, operand: Any) -> Any:
        if isinstance(operand, IndexedSlices):
            for shard, mine in self.split_slices(operand):
                shard._update_in_step(method, mine)
            return self
        if isinstance(operand, DistributedValues):
            operand = self._checked(method, operand)
        for shard, mine in self.split(operand):
            shard._update_in_step(method, mine)
        return self

    def _update_in_step(self, method: str, operand: Any) -> Any:
        if traced_variables.in_program():
            return self._update(method, operand)
        return transactions.atomically(self._update, method, operand)

    def split(self, operand: Any) -> list[tuple[RemoteVariable, Any]]:
        """A dense operand, divided like the rows."""
        if np.ndim(operand) < self.ndim or np.shape(operand)[0] != self.shape[0]:
            return [(v, operand) for v in self._variables]  # each row gets the same
        if not isinstance(operand, jax.Array):
            operand = np.asarray(operand)
        return [(v, operand[first : first + v.shape[0]]) for v, first in self.parts]

    def split_slices(self, operand: IndexedSlices) -> list[tuple[RemoteVariable, IndexedSlices]]:
        """A sparse operand for each shard; rows of other shards have indices that it does not have."""
        indices = jnp.asarray(operand.indices)
        return [
            (shard, ShardSlices(operand.values, indices, Shard(self._ends, i)))
            for i, shard in enumerate(self._variables)
        ]

    def apply_gradient(self, gradient: Any, optimizer: int) -> None:
        """Let an optimizer on the servers make a step.

        Args:
            gradient: an array, or `IndexedSlices`.
            optimizer: its id.
        """
        is_sparse = isinstance(gradient, IndexedSlices)
        for shard, mine in self.split_slices(gradient) if is_sparse else self.split(gradient):
            shard.apply_gradient(mine, optimizer)

    # -- saving ----------------------------------------------------------------------------------

    def load_state(self, state: Any) -> None:
        """Take back what `state` returned, also of a variable with other shards or none.

        Each shard gets its rows by itself, so that `state` may be a file that is mapped into memory.
        """
        if tuple(np.shape(state)) != self.shape:
            raise InvalidValueError(
                f"Variable {self.name!r} has the shape {list(self.shape)}. "
                f"Received: a state of shape {list(np.shape(state))}"
            )
        with ctx.push(ctx.default_mode()):
            for shard, first in self.parts:
                shard.assign(state[first : first + shard.shape[0]])


def _whole_number(x: Any, index: Any) -> int:
    try:
        return operator.index(x)
    except TypeError:
        raise InvalidTypeError(
            f"A sharded variable is indexed by integers and slices. Received: {shown(index)}"
        ) from None
