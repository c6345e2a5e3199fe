"""Slices: how arrays are divided over replicas so that each keeps a part. Pure functions.

An array is flattened, padded to a multiple of the number of parts, and cut into parts of one length.
So arrays of every shape can be divided, and elementwise arithmetic on slices is that on the array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.runtime import compat


@dataclass(frozen=True)
class Slicing:
    """The slices of an array.

    Args:
        shape: of the array.
        parts: how many slices there are.

    Examples:
        >>> slicing = Slicing((5,), 2)
        >>> slicing.length, slicing.cut(jnp.arange(5), 1).tolist()
        (3, [3, 4, 0])
        >>> slicing.join(jnp.array([0, 1, 2, 3, 4, 0])).tolist()
        [0, 1, 2, 3, 4]
    """

    shape: tuple[int, ...]
    parts: int

    @property
    def size(self) -> int:
        """How many elements the array has."""
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """How many elements each slice has, padding included."""
        return -(-self.size // self.parts)

    @property
    def is_padded(self) -> bool:
        """Whether the last slices have more elements than the array."""
        return self.length * self.parts != self.size

    def flat(self, whole: Any) -> jax.Array:
        """The array in one dimension, padded with zeros."""
        flat = jnp.reshape(whole, (-1,))
        return jnp.pad(flat, (0, self.length * self.parts - self.size)) if self.is_padded else flat

    def cut(self, whole: Any, index: Any) -> jax.Array:
        """One slice of the array."""
        start = index * self.length
        if isinstance(start, int):
            return self.flat(whole)[start : start + self.length]
        return lax.dynamic_slice_in_dim(self.flat(whole), start, self.length)

    def join(self, flat: Any) -> jax.Array:
        """The array, given all slices one after the other."""
        return jnp.reshape(flat[: self.size], self.shape)

    def is_real(self, index: Any) -> jax.Array:
        """Which elements of a slice are no padding."""
        real: jax.Array = index * self.length + jnp.arange(self.length) < self.size
        return real

    def reshaped(self, shape: tuple[int, ...]) -> Slicing:
        """The slices of the same elements in another shape: they are the same."""
        return Slicing(tuple(shape), self.parts)


@dataclass(frozen=True)
class Members:
    """The replicas of a program, in groups whose members hold one slice each.

    With fewer parts than replicas, each group of consecutive replicas holds a whole array.

    Args:
        axis: the mesh axis of the replicas.
        count: how many replicas there are.
        parts: how many of them make a group; divides `count`.

    Examples:
        >>> Members("replica", 4, 2).groups, Members("replica", 4, 2).across
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        >>> Members("replica", 4, 4).groups is None
        True
    """

    axis: str
    count: int
    parts: int

    @property
    def groups(self) -> list[list[int]] | None:
        """The replicas of each group; None if all are in one."""
        if self.parts == self.count:
            return None
        return [list(range(i, i + self.parts)) for i in range(0, self.count, self.parts)]

    @property
    def across(self) -> list[list[int]] | None:
        """The replicas that hold the same slice; None if no two do."""
        if self.parts == self.count:
            return None
        return [list(range(i, self.count, self.parts)) for i in range(self.parts)]

    def index(self) -> Any:
        """Which slice the replica holds that runs the program."""
        return lax.axis_index(self.axis) % self.parts

    def gather(self, x: jax.Array) -> jax.Array:
        """The arrays of all members of this replica's group, as rows."""
        rows: jax.Array = lax.all_gather(x, self.axis, axis_index_groups=self.groups)
        return self._agreed(rows)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of an array over the members of a group."""
        total: jax.Array = lax.psum(x, self.axis, axis_index_groups=self.groups)
        return self._agreed(total)

    def extreme(self, x: jax.Array, largest: bool) -> jax.Array:
        """The largest or smallest element of all members of a group, at each place."""
        choose: Any = lax.pmax if largest else lax.pmin
        found: jax.Array = choose(x, self.axis, axis_index_groups=self.groups)
        return self._agreed(found)

    def _agreed(self, x: jax.Array) -> jax.Array:
        """An array of a group that has the same slices as others."""
        return x if self.groups is None else compat.declare_same_on_all_replicas(x)
