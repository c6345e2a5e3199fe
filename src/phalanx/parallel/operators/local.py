"""Operators that XLA gathers although each device could compute its own part.

On CPU devices (JAX 0.10.2) these are `top_k` and convolutions of groups of features. A plan that cuts
them says so device by device, in a `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from phalanx.parallel.operators.contraction import is_grouped

__all__ = ["computed_in_parts"]


def computed_in_parts(
    eqn: Any,
    operands: Sequence[Any],
    mesh: Mesh,
    into: Sequence[PartitionSpec],
    outs: Sequence[PartitionSpec],
) -> list[Any] | None:
    """The results of an equation, of which each device computes a part; None if XLA knows how to.

    Args:
        eqn: the equation.
        operands: their values.
        mesh: the devices.
        into: the layout of each operand.
        outs: the layout of each result.
    """
    if not any(any(spec) for spec in (*into, *outs)):
        return None
    params = dict(eqn.params)
    if eqn.primitive.name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        feature, out_feature = numbers.lhs_spec[1], numbers.rhs_spec[0]
        left, right = (x.shape for x in operands)
        if not is_grouped(params, left[feature], right[out_feature]):
            return None
        params["feature_group_count"] //= _parts(into[0], feature, mesh)
    elif eqn.primitive.name != "top_k":
        return None

    used = {axis: None for spec in into for entry in spec for axis in _axes(entry)}

    def local(*xs: Any) -> list[Any]:
        # What all devices have whole is summed over them in the gradient, along the axes that are cut.
        rest = [tuple(a for a in used if not _has(spec, a)) for spec in into]
        xs = tuple(lax.pcast(x, r, to="varying") if r else x for x, r in zip(xs, rest, strict=True))
        found = eqn.primitive.bind(*xs, **params)
        return list(found) if eqn.primitive.multiple_results else [found]

    found: list[Any] = jax.shard_map(local, mesh=mesh, in_specs=tuple(into), out_specs=list(outs))(
        *operands
    )
    return found


def _parts(spec: PartitionSpec, dim: int, mesh: Mesh) -> int:
    """Into how many parts a dim is cut."""
    return prod(mesh.shape[axis] for axis in _axes(spec[dim] if dim < len(spec) else None))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _has(spec: PartitionSpec, axis: str) -> bool:
    return any(axis in _axes(entry) for entry in spec)
