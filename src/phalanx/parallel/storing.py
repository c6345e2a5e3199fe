"""How state is kept between steps: laid out like its parameters, or in smaller parts.

A parallel optimizer keeps parameters, and all that belongs to them, in parts on devices that would hold
the same. Programs gather what they compute with.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from phalanx.execution.throttle import token
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.placing import parts_of
from phalanx.parallel.spanning import dispatched, spans_workers

__all__ = ["Known", "is_named", "like", "made_in_parts", "stored"]

Known = Mapping[str, tuple[tuple[int, ...], PartitionSpec]]
"""The shapes and layouts of parameters by name."""


def is_named(path: str, name: str) -> bool:
    """Whether a path is that of a parameter, or ends with it: in a larger state, or in an optimizer's.

    >>> is_named("0/mu/layer/kernel", "layer/kernel"), is_named("0/mu/layer/kernel", "nel")
    (True, False)
    """
    return not name or path == name or path.endswith(f"/{name}")


def like(name: str, shape: Sequence[int], known: Known) -> PartitionSpec | None:
    """The layout of what is like a parameter: one name ends with the other, and the shapes are equal.

    So the slots of an optimizer, gradients and new values are laid out as their parameters are.

    >>> known = {"a/w": ((4, 2), PartitionSpec("x")), "w": ((4, 2), PartitionSpec())}
    >>> like("0/mu/a/w", (4, 2), known), like("0/count", (), known)
    (P('x',), None)
    """
    of_shape = [n for n, (known_shape, _) in known.items() if known_shape == tuple(shape)]
    ends = [n for n in of_shape if is_named(name, n)]
    if ends:
        return known[max(ends, key=len)][1]
    begins = [n for n in of_shape if name and is_named(n, name)]
    return known[begins[0]][1] if begins else None


def stored(spec: PartitionSpec, leaf: Any, mesh: Mesh, options: ParallelOptions) -> PartitionSpec:
    """How a part of the state is kept; also along the first dim, if there is a parallel optimizer.

    What is smaller than the threshold, or cannot be divided, is kept as it is used.

    >>> import jax
    >>> from phalanx.parallel.placing import mesh_of_sizes
    >>> mesh = mesh_of_sizes(jax.devices()[:4], (2, 2), ("a", "b"))
    >>> options = ParallelOptions(enable_parallel_optimizer=True, parallel_optimizer_threshold=0)
    >>> leaf = jax.ShapeDtypeStruct((8, 4), "float32")
    >>> stored(PartitionSpec(None, "b"), leaf, mesh, options)
    P('a', 'b')
    """
    size = prod(leaf.shape) * leaf.dtype.itemsize
    if not options.enable_parallel_optimizer or not leaf.shape:
        return spec
    if size < options.parallel_optimizer_threshold * 1024:
        return spec
    entries = [*spec, *[None] * (len(leaf.shape) - len(spec))]
    axes = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    used = {axis for listed in axes for axis in listed}
    free = {name: n for name, n in mesh.shape.items() if name not in used and n > 1}
    chosen = _chosen(free, options.optimizer_weight_shard_size)
    if not chosen or leaf.shape[0] % (parts_of(entries[0], mesh) * prod(free[a] for a in chosen)):
        return spec
    names = list(mesh.shape)
    first = tuple(sorted((*axes[0], *chosen), key=names.index))
    return PartitionSpec(first if len(first) > 1 else first[0], *entries[1:])


def _chosen(free: Mapping[str, int], size: int) -> Sequence[str]:
    """The axes along which the state is cut: all that are free, or some with so many devices."""
    if size <= 1:
        return list(free)
    names = list(free)[::-1]  # neighbours first
    for count in range(1, len(names) + 1):
        for some in itertools.combinations(names, count):
            if prod(free[a] for a in some) == size:
                return some
    return ()


def made_in_parts(make: Callable[..., Any], shardings: Any, *args: Any) -> Any:
    """What a function makes, of which each device makes its own part only.

    Args:
        make: returns a nest of arrays.
        shardings: a nest like it.
        *args: of `make`.
    """
    devices = tuple(jax.tree.leaves(shardings)[0].mesh.devices.flat)

    def program(*args: Any) -> Any:
        return make(*args), token(between_workers=spans_workers(devices))

    name = getattr(make, "__name__", "that makes a state")
    return dispatched(jax.jit(program, out_shardings=(shardings, None)), args, devices, name)
