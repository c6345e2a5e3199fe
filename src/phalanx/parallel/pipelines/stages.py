"""The stages of a pipeline: functions, where they run, and how a row of layers is cut into them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.devices import DeviceLike, default_devices, resolve_devices
from phalanx.runtime.formatting import shown

__all__ = ["STAGE_AXIS", "Stage", "StagePlace", "balanced", "places", "split"]

STAGE_AXIS, DATA_AXIS = "stage", "data"


@dataclass(frozen=True)
class Stage:
    """A part of a model.

    Args:
        function: takes parameters, what the stage before it returns (not in the first stage), and the
            arguments of the batch that it `takes`; returns a nest of arrays.
        takes: the numbers of arguments of the batch. By default the first stage takes the first one,
            and the last stage all others, or the loss, if there is one.
        carries: for slices of sequences: the function takes one more argument, what it carried out of
            the slice before (None for the first one), and returns a pair, of which the second is
            carried on.
        layers: of how many layers `split` has made it; None if it has not.

    >>> Stage(lambda p, x: x * p).carries
    False
    """

    function: Callable[..., Any]
    takes: tuple[int, ...] | None = None
    carries: bool = False
    layers: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidTypeError(f"A stage is a function. Received: {shown(self.function)}")


def split(
    model: Sequence[Callable[..., Any]], count: int, costs: Sequence[float] | None = None
) -> list[Stage]:
    """Cut a row of layers into stages, so that the most costly stage costs as little as possible.

    The parameters of a stage are the list of those of its layers. `Pipelined.grouped` cuts a list of
    parameters in the same way.

    Args:
        model: layers: functions of parameters and of what the layer before returns.
        count: how many stages to make.
        costs: of each layer; equal by default.

    >>> double = lambda p, x: 2 * x * p
    >>> stages = split([double] * 4, 2)
    >>> len(stages), stages[0].function([1.0, 1.0], 3.0)
    (2, 12.0)
    """
    layers = list(model) if isinstance(model, Iterable) else [None]
    if not all(callable(layer) for layer in layers):
        raise InvalidTypeError(
            "split takes a list of layers, which are functions of parameters and of what the layer "
            "before returns. px.parallel.search_pipeline and PipelineCell cut a whole loss. "
            f"Received: {shown(model)}"
        )
    bounds = [0, *itertools.accumulate(balanced(costs or [1.0] * len(layers), count))]
    return [Stage(_chained(layers[a:b]), layers=b - a) for a, b in itertools.pairwise(bounds)]


def _chained(layers: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def chained(parameters: Sequence[Any], x: Any, *others: Any) -> Any:
        for layer, own in zip(layers[:-1], parameters[:-1], strict=True):
            x = layer(own, x)
        return layers[-1](parameters[-1], x, *others)

    return chained


def balanced(costs: Sequence[float], count: int) -> list[int]:
    """How many neighbours to take together, so that the largest sum is as small as possible.

    >>> balanced([1, 1, 1, 3], 2)
    [3, 1]
    """
    layers = len(costs)
    if isinstance(count, bool) or not isinstance(count, int):
        raise InvalidTypeError(f"The number of stages must be a whole number. Received: {shown(count)}")
    if not 1 <= count <= layers:
        raise InvalidValueError(
            f"{layers} layers can be cut into 1 to {layers} stages. Received: {count} stages"
        )
    sums = [0.0, *itertools.accumulate(costs)]
    best: list[tuple[float, tuple[int, ...]]] = [(sums[b], (b,)) for b in range(layers + 1)]
    for parts in range(2, count + 1):
        best = [
            min((max(best[a][0], sums[b] - sums[a]), (*best[a][1], b - a)) for a in range(parts - 1, b))
            if b >= parts
            else (float("inf"), ())
            for b in range(layers + 1)
        ]
    return list(best[layers][1])


@dataclass(frozen=True)
class StagePlace:
    """Where a stage runs.

    Args:
        mesh: its devices.
        data_axis: the mesh axis along which batches are cut; None if they are not.
    """

    mesh: Mesh
    data_axis: str | None

    def rows(self, x: Any) -> NamedSharding:
        """How an array of examples is laid out: cut along its first dim, if that divides."""
        parts = self._parts
        shape = np.shape(x)
        cut = parts > 1 and shape and shape[0] and shape[0] % parts == 0
        return self._cut if cut else self._whole

    @cached_property
    def _parts(self) -> int:
        return dict(self.mesh.shape).get(self.data_axis or "", 1)

    @cached_property
    def _cut(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(self.data_axis))

    @cached_property
    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def whole(self) -> NamedSharding:
        """The layout of what every device holds."""
        return self._whole

    def put_rows(self, nest: Any) -> Any:
        """A nest of arrays of examples, here; the copy goes on while others compute."""
        return jax.tree.map(self._put_row, nest)

    def _put_row(self, x: Any) -> Any:
        if self.mesh.size == 1 and _is_in_one_piece(x):  # which is much cheaper than what follows
            return compat.put_pieces(x.shape, self._whole, [x], [self.mesh.devices.flat[0]])
        return jax.device_put(x, self.rows(x))

    def put(self, nest: Any, layouts: Mapping[str, Any] | None = None) -> Any:
        """Parameters, here. What is here already stays as it is laid out, if no layout is given."""

        def put(x: Any, sharding: NamedSharding) -> Any:
            is_here = isinstance(x, jax.Array) and x.sharding == sharding
            return x if is_here else jax.device_put(x, sharding)

        return jax.tree.map(put, nest, self.shardings(nest, layouts))

    def shardings(self, nest: Any, layouts: Mapping[str, Any] | None = None) -> Any:
        """How parameters are laid out here: as given by name, as they are, or whole."""

        def sharding(path: Any, x: Any) -> NamedSharding:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if layouts is not None and name in layouts:
                return NamedSharding(self.mesh, PartitionSpec(*layouts[name]))
            present = getattr(x, "sharding", None)
            if isinstance(present, NamedSharding) and present.mesh == self.mesh:
                return present
            return self.whole()

        return jax.tree_util.tree_map_with_path(sharding, nest)


def _is_in_one_piece(x: Any) -> bool:
    """Whether an array is on one device, and of a dtype that needs no care."""
    if not isinstance(x, jax.Array) or compat.is_tracer(x) or compat.is_key_array(x):
        return False
    return x.is_fully_addressable and len(x.sharding.device_set) == 1


def places(
    stages: int,
    devices: Sequence[DeviceLike] | None = None,
    mesh: Mesh | None = None,
    data_axis: str = DATA_AXIS,
) -> list[StagePlace]:
    """The devices of each stage: equal blocks of neighbours, or the parts of a mesh."""
    if mesh is not None:
        if devices is not None:
            raise InvalidValueError(f"Give a mesh, or devices, not both. Received: {shown(devices)}")
        sizes = dict(mesh.shape)
        if sizes.get(STAGE_AXIS) != stages:
            raise InvalidValueError(
                f"The mesh must have an axis {STAGE_AXIS!r} of {stages} stages. Received: {sizes}"
            )
        number = mesh.axis_names.index(STAGE_AXIS)
        names = tuple(name for name in mesh.axis_names if name != STAGE_AXIS)
        blocks = [np.take(mesh.devices, i, axis=number) for i in range(stages)]
    else:
        found = default_devices() if devices is None else resolve_devices(devices)
        if len(found) < stages or len(found) % stages:
            raise InvalidValueError(
                f"The number of devices must be a multiple of the number of stages. Received: "
                f"{len(found)} devices for {stages} stages"
            )
        names = (data_axis,)
        blocks = list(np.asarray(found).reshape(stages, -1))
    if not names:
        names, blocks = (data_axis,), [np.asarray(block).reshape(1) for block in blocks]
    kinds = (AxisType.Auto,) * len(names)
    axis = data_axis if data_axis in names else None
    return [StagePlace(Mesh(block, names, axis_types=kinds), axis) for block in blocks]
