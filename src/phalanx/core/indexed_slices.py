"""Sparse updates: rows of a larger array, named by their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core.reduction import ReduceOp, divide
from phalanx.core.structure import Leaf
from phalanx.errors import InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import place


@jax.tree_util.register_pytree_node_class
class IndexedSlices(Leaf):
    """Values for some rows of an array: ``values[i]`` belongs to row ``indices[i]``.

    An index may occur several times; adding the slices then adds all of its rows.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> table = px.Variable(jnp.zeros((3, 2)))
        >>> rows = px.IndexedSlices(values=jnp.ones((2, 2)), indices=jnp.array([0, 2]))
        >>> table.scatter_add(rows).numpy().tolist()
        [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """

    __slots__ = ("dense_shape", "indices", "values")

    def __init__(self, values: Any, indices: Any, dense_shape: Any = None) -> None:
        self.values = values
        self.indices = indices
        self.dense_shape = dense_shape

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        """The arrays, for JAX."""
        shape = self.dense_shape
        return (self.values, self.indices), None if shape is None else tuple(int(n) for n in shape)

    @classmethod
    def tree_unflatten(cls, dense_shape: Any, children: Sequence[Any]) -> IndexedSlices:
        """The slices with new arrays, for JAX."""
        return cls(children[0], children[1], dense_shape)

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self.values!r}, indices={self.indices!r})"


def checked_slices(slices: Any, shape: tuple[int, ...], what: str) -> IndexedSlices:
    """Require slices that fit an array of the given shape."""
    if not isinstance(slices, IndexedSlices):
        raise InvalidValueError(
            f"{what} needs px.IndexedSlices(values=…, indices=…). Received: {shown(slices)}"
        )
    values, indices = jnp.asarray(slices.values), jnp.asarray(slices.indices)
    fits = indices.ndim == 1 and values.shape == indices.shape + shape[1:]
    if not fits or not jnp.issubdtype(indices.dtype, jnp.integer) or not shape:
        raise InvalidValueError(
            f"{what} needs one integer index per row and rows of shape {list(shape[1:])}. "
            f"Received: values of shape {list(values.shape)}, indices of shape "
            f"{list(indices.shape)} and dtype {indices.dtype}, for an array of shape {list(shape)}"
        )
    return IndexedSlices(values, indices, slices.dense_shape)


def reduce_slices(op: ReduceOp, slices: Sequence[IndexedSlices], device: jax.Device) -> IndexedSlices:
    """Sum or average slices of several replicas on one device, by joining their rows."""
    values = jnp.concatenate([place(s.values, device) for s in slices])
    indices = jnp.concatenate([place(s.indices, device) for s in slices])
    if op is ReduceOp.MEAN:
        values = divide(values, len(slices))
    return IndexedSlices(values, indices, slices[0].dense_shape)
