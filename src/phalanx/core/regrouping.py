"""Between replicas and nests: joining what replicas return, and taking it apart again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.structure import leaves, map_nest, merge_nests
from phalanx.core.values import DistributedValues, Mirrored, PerReplica
from phalanx.runtime import compat
from phalanx.runtime.placement import Span


def regroup(
    nests: Sequence[Any],
    wrap: type[PerReplica] | type[Mirrored] = PerReplica,
    always_wrap: bool = False,
    span: Span | None = None,
) -> Any:
    """Join one nest per replica of this process into one nest with distributed leaves.

    A leaf stays plain if every replica gave the very same object, unless `always_wrap`. Components
    of one variable, in order, become that variable. Where other processes have replicas too, as `span`
    says, the array of a single replica is wrapped, because theirs may differ.
    """

    def merge(column: tuple[Any, ...]) -> Any:
        container = _common_container(column)
        if container is not None:
            return container
        first = column[0]
        alone = span is not None and len(column) == 1 and isinstance(first, jax.Array | IndexedSlices)
        whole = not always_wrap or isinstance(first, DistributedValues)  # such as a variable
        if whole and not alone and all(_same_object(x, first) for x in column):
            return first
        return wrap(column, span)

    return merge_nests(nests, merge)


def _same_object(a: Any, b: Any) -> bool:
    # Whether two equal ints are one object is an accident of the interpreter.
    return a is b or (type(a) is int and type(b) is int and a == b)


def _common_container(column: tuple[Any, ...]) -> Any | None:
    container = getattr(column[0], "replica_container", None)
    if container is None or len(container.values) != len(column):
        return None
    return container if all(a is b for a, b in zip(container.values, column, strict=True)) else None


def local_results(nest: Any) -> tuple[Any, ...]:
    """One nest per replica; a nest without distributed values gives a tuple of itself."""
    distributed = [x for x in leaves(nest) if isinstance(x, DistributedValues)]
    if not distributed:
        return (nest,)

    def select(index: int, leaf: Any) -> Any:
        return leaf.values[index] if isinstance(leaf, DistributedValues) else leaf

    count = max(len(x.values) for x in distributed)
    return tuple(map_nest(functools.partial(select, i), nest) for i in range(count))


def same_value(a: Any, b: Any) -> bool:
    """Whether two components hold the same value, bit for bit (nan equals nan)."""
    if a is b:
        return True
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(_equal_arrays(_bits(x), _bits(y)) for x, y in pairs)


def _bits(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(x) if compat.is_key_array(x) else x)


def _equal_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
