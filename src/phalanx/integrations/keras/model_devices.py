"""Where the arrays of a model lie: on the devices of all replicas, or as a plan lays them out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from phalanx.core.values import PerReplica
from phalanx.data.distribute.input_topology import InputTopology
from phalanx.errors import InvalidValueError
from phalanx.execution.throttle import THROTTLE, token
from phalanx.integrations.keras.batches import Cut, PlacedBatch, part_sizes
from phalanx.job.shared_programs import SharedProgram
from phalanx.parallel.strategy import AutoParallelExtended
from phalanx.runtime import compat
from phalanx.runtime.devices import default_device, resolve_device
from phalanx.runtime.placement import replica_mesh, replicated_over, stacked_over


class ModelDevices:
    """State on every replica's device, and the rows of batches divided over them.

    Args:
        strategy: whose replicas they are.
    """

    def __init__(self, strategy: Any) -> None:
        extended = strategy.extended
        self.local = tuple(d or default_device() for d in extended._replica_devices)
        self.devices = tuple(extended._span or self.local)
        self.mesh = replica_mesh(self.devices)
        self.count = len(self.devices)
        self.spans_workers = len(self.local) != self.count
        topology = InputTopology.of(strategy)
        self.workers, self.worker = topology.workers, topology.worker
        self._exchange = topology.exchange
        self._whole, self._divided = replicated_over(self.devices), stacked_over(self.devices)
        self._resting: dict[Hashable, tuple[jax.Array, jax.Array]] = {}
        homes: Sequence[str] = () if self.spans_workers else extended.parameter_devices
        self._home = resolve_device(homes[0]) if len(homes) == 1 < self.count else None

    def exchange(self, name: str, value: Any) -> list[Any]:
        """What each worker gives under a name; see `StrategyExtended._exchange`."""
        return self._exchange(f"keras: {name}", value)

    # -- state ---------------------------------------------------------------------------------------

    @property
    def whole(self) -> NamedSharding:
        """The sharding of what every device has."""
        return self._whole

    def sharding_of(self, path: str, shape: Sequence[int]) -> NamedSharding:
        """How a variable lies on the devices while steps run."""
        del path, shape
        return self._whole

    def placed(
        self, values: Sequence[Any], shardings: Sequence[NamedSharding], names: Sequence[Hashable]
    ) -> list[Any]:
        """Arrays on all devices; with several workers those of the first worker count.

        Args:
            values: what variables hold.
            shardings: how they are to lie.
            names: of the variables, as `at_rest` got them.
        """
        found = list(values)
        for i, name in enumerate(names):
            here, everywhere = self._resting.pop(name, (None, None))
            if here is found[i]:
                found[i] = everywhere
        new = [i for i, x in enumerate(found) if getattr(x, "sharding", None) != shardings[i]]
        if not new:
            return found
        if self.spans_workers:
            given: Sequence[Any] = self._from_first([np.asarray(found[i]) for i in new])
        else:
            # Keras may still hold what comes in, and programs overwrite what they are given.
            given = [jax.device_put(found[i], shardings[i], may_alias=False) for i in new]
        for i, x in zip(new, given, strict=True):
            found[i] = x
        return found

    def at_rest(self, value: jax.Array, name: Hashable) -> jax.Array:
        """An array of the state as the variable of a name holds it between steps.

        Other workers take no part in what Keras and callbacks compute with it, so it must be here.
        """
        if self._home is not None:
            return jax.device_put(value, self._home)
        if not self.spans_workers or value.is_fully_addressable:
            return value
        here = value.addressable_data(0)
        self._resting[name] = here, value  # so that it need not be sent again, if it stays as it is
        return here

    def _from_first(self, values: Sequence[Any]) -> Sequence[Any]:
        rows = [
            jax.make_array_from_single_device_arrays(
                (self.count, *x.shape), self._divided, [jax.device_put(x[None], d) for d in self.local]
            )
            for x in values
        ]
        kinds = tuple((x.shape, str(x.dtype)) for x in values)
        operation = "the first worker's values of a Keras model"
        shared = SharedProgram((operation, kinds), operation, rows)
        result: Sequence[Any] = THROTTLE.dispatch(self._first, rows, shared=shared)
        return result

    @functools.cached_property
    def _first(self) -> Callable[..., Any]:
        def first(rows: Sequence[Any]) -> Any:
            return [x[0] for x in rows], token(True)

        return jax.jit(first, out_shardings=(self._whole, None))

    # -- batches --------------------------------------------------------------------------------------

    def put(self, x: Any, number: int = 0) -> PlacedBatch:
        """An array of a batch that every process has whole, or a value of a distributed dataset.

        Args:
            x: the array.
            number: which of the arrays of a batch it is.
        """
        del number
        if isinstance(x, PlacedBatch):
            return x
        if isinstance(x, PerReplica):
            return self._joined(x)
        if isinstance(x, jax.Array) and x.sharding == self._divided:
            return PlacedBatch(x)
        x = np.asarray(x)
        if not x.ndim:
            return PlacedBatch(self._spread(x, self._whole))
        rows = x.shape[0]
        if rows % self.count == 0:
            return PlacedBatch(self._spread(x, self._divided))
        sizes = part_sizes(rows, self.count)
        padded = np.zeros((sizes[0] * self.count, *x.shape[1:]), x.dtype)
        padded[:rows] = x
        return PlacedBatch(self._spread(padded, self._divided), Cut(sizes))

    def _spread(self, x: Any, sharding: NamedSharding) -> jax.Array:
        if not self.spans_workers:
            return jax.device_put(x, sharding)
        narrow = jax.dtypes.canonicalize_dtype(x.dtype)
        x = x.astype(narrow, copy=False)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def _joined(self, value: PerReplica) -> PlacedBatch:
        """The parts of replicas, perhaps of different sizes, as one array."""
        if value.array is not None:
            return PlacedBatch(value.array)
        padded = value.padded
        if padded is not None:
            sizes, trailing = tuple(s[0] for s in padded.shapes), {s[1:] for s in padded.shapes}
            if len(trailing) > 1:
                raise InvalidValueError(
                    "The rows of all replicas must have one shape, because a step of Keras sees the "
                    f"whole batch. Pad them in the dataset. Received: shapes {list(padded.shapes)}"
                )
            return PlacedBatch(padded.array, Cut(sizes))
        return self._padded_here(value)

    def _padded_here(self, value: PerReplica) -> PlacedBatch:
        """Parts of which no worker knows the sizes on the others."""
        own = [int(x.shape[0]) for x in value.values]
        sizes = tuple(n for each in self.exchange("rows of an uneven batch", own) for n in each)
        pieces = []
        for x, device in zip(value.values, self.local, strict=True):
            padded = np.zeros((max(sizes), *x.shape[1:]), x.dtype)
            padded[: x.shape[0]] = np.asarray(x)
            pieces.append(jax.device_put(padded, device))
        shape = (max(sizes) * self.count, *pieces[0].shape[1:])
        return PlacedBatch(compat.assemble(shape, self._divided, pieces), Cut(sizes))


class PlannedDevices(ModelDevices):
    """State and batches laid out by `px.AutoParallelStrategy`: by the names of variables.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._strategy = strategy
        self.mesh, self.count = strategy.mesh, 1
        self._whole = NamedSharding(self.mesh, PartitionSpec())
        self._home = None

    def sharding_of(self, path: str, shape: Sequence[int]) -> NamedSharding:
        """How a variable lies on the devices while steps run."""
        extended = self._strategy.extended
        assert isinstance(extended, AutoParallelExtended)
        return extended.layout_of(path, jax.ShapeDtypeStruct(tuple(shape), jnp.float32))

    def put(self, x: Any, number: int = 0) -> PlacedBatch:
        """An array of a batch, laid out as the strategy says."""
        if isinstance(x, PlacedBatch):
            return x
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh:
            return PlacedBatch(x)
        place = self._strategy.extended._input_place()
        assert place is not None
        return PlacedBatch(place(number, np.asarray(x)))


def devices_of(strategy: Any) -> ModelDevices:
    """Where a strategy has the arrays of models."""
    planned = isinstance(strategy.extended, AutoParallelExtended)
    return PlannedDevices(strategy) if planned else ModelDevices(strategy)
