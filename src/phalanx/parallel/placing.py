"""Cuts and layouts as MindSpore writes them, on the axes of one mesh of JAX."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.device_layout import Layout
from phalanx.parallel.layout import from_spec
from phalanx.parallel.mesh import MAX_AXES, factorisations
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import REPLICA_AXIS

__all__ = [
    "Cuts",
    "checked_spec",
    "factored_mesh",
    "fitting",
    "layerwise_specs",
    "mesh_for",
    "names_of",
    "specs_on",
    "with_auto_axes",
]

Cuts = tuple[int, ...] | Layout | PartitionSpec | None
"""How one tensor is cut: parts per dim, a layout, a spec of JAX, or None if nothing is said."""


def mesh_of_sizes(devices: Sequence[jax.Device], sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    """Devices, in their order, as a mesh."""
    grid = np.array(list(devices), dtype=object).reshape(tuple(sizes))
    return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * len(sizes))


def factored_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with one axis for each prime factor, so that dims can be cut into any number of parts.

    >>> import jax
    >>> dict(factored_mesh(jax.devices()[:6]).shape)
    {'d0': 2, 'd1': 3}
    """
    sizes = _prime_factors(len(devices)) or [1]
    return mesh_of_sizes(devices, sizes, [f"d{i}" for i in range(len(sizes))])


def _prime_factors(count: int) -> list[int]:
    found, factor = [], 2
    while count > 1:
        while count % factor == 0:
            found.append(factor)
            count //= factor
        factor += 1
    return found


def with_auto_axes(mesh: Mesh) -> Mesh:
    """A mesh whose axes lay out arrays by constraints; those of `jax.make_mesh` are for types.

    >>> with_auto_axes(jax.make_mesh((2,), ("x",))).axis_types
    (Auto,)
    """
    if set(mesh.axis_types) == {AxisType.Auto}:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def layerwise_specs(given: Sequence[str] | Mapping[str, Any]) -> dict[str, PartitionSpec]:
    """The layouts of parameters of which each device has its own part; along the first dim by default.

    >>> layerwise_specs(["table"])
    {'table': P('replica',)}
    """
    if isinstance(given, str):
        raise InvalidTypeError(
            f"layerwise_parallel must be a list of names, or layouts by name. Received: {shown(given)}"
        )
    if isinstance(given, Mapping):
        return {name: PartitionSpec(*spec) for name, spec in given.items()}
    return {name: PartitionSpec(REPLICA_AXIS) for name in given}


def mesh_for(given: Iterable[Cuts], devices: Sequence[jax.Device]) -> Mesh | None:
    """A mesh on which all of these can be had; None if they ask for nothing in particular.

    A layout brings its own mesh. Cuts get one of at most three axes, as the search needs it.
    """
    listed = [cuts for cuts in given if cuts is not None]
    layouts = [cuts for cuts in listed if isinstance(cuts, Layout)]
    if layouts:
        return layouts[0].mesh(tuple(devices))
    counted = [cuts for cuts in listed if isinstance(cuts, tuple) and not _is_spec(cuts)]
    if not any(count > 1 for cuts in counted for count in cuts):
        return None
    for sizes in sorted(factorisations(len(devices), MAX_AXES), key=len, reverse=True):
        mesh = mesh_of_sizes(devices, sizes, [f"d{i}" for i in range(len(sizes))])
        try:
            _Assignment(mesh).all(counted)
        except InvalidValueError:
            continue
        return mesh
    return factored_mesh(devices)


def _is_spec(cuts: Any) -> bool:
    return isinstance(cuts, PartitionSpec)


def specs_on(
    mesh: Mesh, given: Sequence[Cuts], shapes: Sequence[Sequence[int]], names: Sequence[str]
) -> list[PartitionSpec]:
    """The specs of tensors that are cut together, on the axes of a mesh.

    Args:
        mesh: whose axes cut.
        given: how each tensor is cut.
        shapes: of the tensors.
        names: of the tensors, for errors.
    """
    assignment = _Assignment(mesh)
    found = []
    for cuts, shape, name in zip(given, shapes, names, strict=True):
        found.append(assignment.one(_checked(cuts, shape, name)))
        _check_divisible(found[-1], mesh, shape, name)
    return found


def fitting(mesh: Mesh, cuts: Cuts, shape: Sequence[int], name: str) -> PartitionSpec:
    """The spec of a batch. A dim that cannot be divided, as that of the last batch, is cut less.

    >>> mesh = mesh_of_sizes(jax.devices()[:4], (2, 2), ("a", "b"))
    >>> fitting(mesh, (4, 1), (6, 3), "x"), fitting(mesh, (2, 1), (5, 3), "x")
    (P('a', None), P(None, None))
    """
    spec = _Assignment(mesh).one(_checked(cuts, shape, name))
    sizes = dict(mesh.shape)
    entries: list[Any] = []
    for entry, size in zip(spec, shape, strict=False):
        axes: list[str] = []
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            if size % prod([*(sizes[a] for a in axes), sizes[axis]]) == 0:
                axes.append(axis)
        entries.append(None if not axes else axes[0] if len(axes) == 1 else tuple(axes))
    return PartitionSpec(*entries)


def checked_spec(cuts: Cuts, shape: Sequence[int], name: str) -> PartitionSpec:
    """The spec of a tensor that is laid out by one, or not cut at all.

    >>> checked_spec((1, 1), (6, 3), "x"), checked_spec(PartitionSpec("a"), (6, 3), "x")
    (P(), P('a',))
    """
    found = _checked(cuts, shape, name)
    return found if isinstance(found, PartitionSpec) else PartitionSpec()


def _checked(cuts: Any, shape: Sequence[int], name: str) -> Cuts:
    if cuts is None or _is_spec(cuts) or isinstance(cuts, Layout):
        length = 0 if cuts is None else len(cuts.axes if isinstance(cuts, Layout) else cuts)
        if length > len(shape):
            raise InvalidValueError(
                f"{name!r} has {len(shape)} dims, and {length} are laid out. Received: {shown(cuts)}"
            )
        return cuts
    if not isinstance(cuts, tuple) or not all(type(count) is int for count in cuts):
        raise InvalidTypeError(
            f"{name!r} can be cut by a px.parallel.Layout, or by a tuple of the numbers of parts of "
            f"each dim. Received: {shown(cuts)}"
        )
    if len(cuts) != len(shape):
        raise InvalidValueError(
            f"The input shapes item size {len(shape)} is not equal to dataset strategy item size "
            f"{len(cuts)}. Received: {cuts} for {name!r} of shape {tuple(shape)}"
        )
    if any(count < 1 for count in cuts):
        raise InvalidValueError(
            f"A dim is cut into 1 part or more. Received: {cuts} for {name!r} of shape {tuple(shape)}"
        )
    return cuts


def _check_divisible(spec: PartitionSpec, mesh: Mesh, shape: Sequence[int], name: str) -> None:
    counts = tuple(parts_of(entry, mesh) for entry in spec)
    for dim, count in enumerate(counts):
        if shape[dim] % count:
            raise InvalidValueError(
                f"For '{name}', the param_shape is {tuple(shape)} and the setting param_strategy is "
                f"{counts}. The param_shape[{dim}]: {shape[dim]} cannot be divisible by "
                f"param_strategy[{dim}]: {count}."
            )
    from_spec(spec, list(dict(mesh.shape)), tuple(shape), list(dict(mesh.shape).values()))


def parts_of(entry: Any, mesh: Mesh) -> int:
    """Into how many parts an entry of a spec cuts its dim."""
    sizes = dict(mesh.shape)
    names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    for name in names:
        if name not in sizes:
            raise InvalidValueError(f"The mesh has the axes {tuple(sizes)}. Received: {name!r}")
    return prod(sizes[name] for name in names)


class _Assignment:
    """Gives mesh axes to the dims of tensors, and the same ones to dims that belong together.

    Numbers of parts do not say which axes cut. Dims of several tensors with the same number of parts
    get the same axes if they are at the same place, or if one is the last of its tensor and the other
    the first, as in a product of matrices. Other dims get axes of their own as long as there are some.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.sizes = dict(mesh.shape)
        self.known: list[tuple[int, int, bool, tuple[str, ...]]] = []  # count, dim, is last, axes
        self.used: set[str] = set()

    def all(self, given: Iterable[Cuts]) -> list[PartitionSpec]:
        """The specs of several tensors."""
        return [self.one(cuts) for cuts in given]

    def one(self, cuts: Cuts) -> PartitionSpec:
        """The spec of one tensor."""
        if cuts is None:
            return PartitionSpec()
        if isinstance(cuts, PartitionSpec):
            return cuts
        if isinstance(cuts, Layout):
            return self._of_layout(cuts)
        mine: set[str] = set()
        entries: list[Any] = []
        for dim, count in enumerate(cuts):
            axes = self._axes(count, dim, len(cuts), mine) if count > 1 else ()
            if axes is None:
                raise InvalidValueError(
                    f"A tensor cannot be cut into {cuts} parts on a mesh of {self.sizes}. Use a "
                    f"px.parallel.Layout, or numbers that divide {self.mesh.size}. Received: {cuts}"
                )
            mine.update(axes)
            if axes:
                self.known.append((count, dim, dim == len(cuts) - 1, axes))
            entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        self.used |= mine
        return PartitionSpec(*entries)

    def _axes(self, count: int, dim: int, rank: int, mine: set[str]) -> tuple[str, ...] | None:
        for known, where, was_last, axes in self.known:
            belongs = where == dim or (was_last and dim == max(0, rank - 2))
            if known == count and belongs and not mine & set(axes):
                return axes
        free = [name for name, size in self.sizes.items() if name not in mine and size > 1]
        unused = [name for name in free if name not in self.used]
        for names in (unused, free):
            for length in range(1, len(names) + 1):
                for chosen in itertools.combinations(names, length):
                    if prod(self.sizes[name] for name in chosen) == count:
                        return chosen
        return None

    def _of_layout(self, layout: Layout) -> PartitionSpec:
        own = layout.axis_sizes
        if all(self.sizes.get(name) == size for name, size in own.items()):
            if layout.ranks != list(range(self.mesh.size)) and not self._has_order(layout):
                raise InvalidValueError(
                    "The layout has a rank_list, and the devices have another order. Give the mesh of "
                    f"the layout, as mesh=layout.mesh(). Received: {layout!r}"
                )
            return layout.partition_spec
        if prod(own.values()) != self.mesh.size or layout.ranks != list(range(self.mesh.size)):
            raise InvalidValueError(
                f"The layout is for other devices than the mesh of {self.sizes}. Give the mesh of the "
                f"layout, as mesh=layout.mesh(). Received: {layout!r}"
            )
        return _renamed(layout.partition_spec, _regrouped(own, self.sizes, layout))

    def _has_order(self, layout: Layout) -> bool:
        here = [d.id for d in self.mesh.devices.flat]
        return here == [jax.devices()[rank].id for rank in layout.ranks]


def _regrouped(
    own: Mapping[str, int], sizes: Mapping[str, int], layout: Layout
) -> dict[str, tuple[str, ...]]:
    """For each axis of a layout, the axes of a mesh over the same devices that it is made of."""
    found: dict[str, tuple[str, ...]] = {}
    left = list(sizes.items())
    for name, size in own.items():
        axes: list[str] = []
        while prod(sizes[a] for a in axes) < size and left:
            axes.append(left.pop(0)[0])
        if prod(sizes[a] for a in axes) != size:
            raise InvalidValueError(
                f"The axes of the layout are not made of those of the mesh, {dict(sizes)}. Give the "
                f"mesh of the layout, as mesh=layout.mesh(). Received: {layout!r}"
            )
        found[name] = tuple(axes)
    return found


def _renamed(spec: PartitionSpec, names: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
    entries: list[Any] = []
    for entry in spec:
        listed = () if entry is None else (entry,) if isinstance(entry, str) else entry
        axes = tuple(axis for name in listed for axis in names[name])
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return PartitionSpec(*entries)


def names_of(nest: Any) -> list[str]:
    """The paths of the leaves of a nest, as plans write them."""
    paths = jax.tree_util.tree_flatten_with_path(nest)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def batch_spec(shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """The first dim, cut by as many axes of a mesh as divide it; the rest of the devices repeat.

    >>> sizes = {"a": 2, "b": 4}
    >>> batch_spec((16, 3), sizes), batch_spec((6, 3), sizes), batch_spec((), sizes)
    (P(('a', 'b'),), P('a',), P())
    """
    axes: list[str] = []
    for name, size in sizes.items():
        if shape and size > 1 and shape[0] % prod([*(sizes[a] for a in axes), size]) == 0:
            axes.append(name)
    return PartitionSpec(tuple(axes) if len(axes) > 1 else axes[0]) if axes else PartitionSpec()
