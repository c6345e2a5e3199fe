"""Distributed values: what `Strategy.run` takes and returns.

A `PerReplica` value may differ between replicas, a `Mirrored` value is the same on all. Both have two
faces: one array per replica, each on its own device, which is what replicas see; and, where shapes
agree, one global `jax.Array` over the mesh of those devices, which is what `jax.jit` sees. Each face is
made from the other on demand, without copying. Where shapes differ, one padded array takes the place of
the global one in programs.

Both are pytrees. Outside of replicas their leaf is the global array. Inside `Strategy.run` they
flatten to the replica's own component, so a captured value can be given to any JAX function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.context import active_replica
from phalanx.core.operators import ArrayOperators
from phalanx.core.padding import CannotJoin, Padded, pad
from phalanx.core.replica_context import current_index, index_of, is_compiled
from phalanx.core.structure import Leaf, map_nest
from phalanx.errors import InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import Span, device_of, place, replicated_over, stacked_over
from phalanx.runtime.printing import components_html, format_component, format_components

if TYPE_CHECKING:
    from phalanx.core.replica_context import ReplicaContext


class DistributedValues(Leaf):
    """Base of everything that holds one value per replica; strategies make instances."""

    __slots__ = ()

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, by replica."""
        raise NotImplementedError

    def __str__(self) -> str:
        return format_components(type(self).__name__, [format_component(v, str) for v in self.values])

    def __repr__(self) -> str:
        return format_components(type(self).__name__, [format_component(v, repr) for v in self.values])

    _repr_html_ = components_html


class ReplicaValues(DistributedValues):
    """Shared machinery: components on one side, a global array on the other.

    Args:
        values: the components of this process's replicas.
        span: the devices of all replicas, where other processes have some of them.
        joins: whether components of one shape make a global array; not if those of other processes
            have other shapes.
    """

    __slots__ = ("_components", "_global", "_joins", "_layout", "_leaf", "_padded", "_span")

    def __init__(self, values: Sequence[Any], span: Span | None = None, joins: bool = True) -> None:
        self._components: tuple[Any, ...] | None = tuple(values)
        self._global: jax.Array | None = None
        if not self._components:
            raise InvalidValueError(f"{type(self).__name__} needs at least one component")
        self._layout: ReplicaLayout | None = None
        self._leaf: tuple[Any] | None = None
        self._padded: Padded | None = None
        self._span = span
        self._joins = joins

    @classmethod
    def from_global(cls, array: jax.Array, layout: ReplicaLayout) -> Any:
        """The value whose global face is `array`."""
        self = cls.__new__(cls)
        self._components, self._global, self._layout = None, array, layout
        self._leaf = self._padded = self._span = None
        self._joins = True
        return self

    @classmethod
    def from_leaf(cls, leaf: Any, layout: ReplicaLayout) -> Any:
        """The value that holds, as a pytree, something else in place of its global array.

        Functions over pytrees put whatever they return there: NumPy arrays, shapes, None.
        """
        if isinstance(leaf, jax.Array):
            return cls.from_global(leaf, layout)
        self = cls.__new__(cls)
        self._components, self._global, self._layout = cls._parts_of(leaf, layout), None, layout
        self._leaf, self._padded, self._span, self._joins = (leaf,), None, None, False
        return self

    @classmethod
    def _parts_of(cls, leaf: Any, layout: ReplicaLayout) -> tuple[Any, ...]:
        """The components of a value that holds something else than an array of JAX."""
        return (leaf,) * layout.count

    @property
    def span(self) -> Span | None:
        """The devices of all replicas, if other processes have some of them."""
        if self._span is None and self._global is not None:
            self._span = compat.span_of(self._global)
        return self._span

    def _like(self, values: Sequence[Any]) -> Any:
        """A value of the same kind for the same replicas."""
        return type(self)(values, self.span)

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, by replica."""
        if self._components is None:
            if self._padded is not None:
                self._components = self._padded.components()
                return self._components
            assert self._global is not None
            assert self._layout is not None
            self._components = tuple(self._split(self._global, self._layout))
        return self._components

    @property
    def array(self) -> jax.Array | None:
        """The global array over all replicas' devices, or None if there can be none.

        There is one if all components are arrays of one shape and dtype on different devices.
        """
        if self._global is None and self._joins:
            devices = _distinct_devices(self.values)
            if devices is not None:
                self._global = self._join(self.values, self._span or devices)
            elif self.is_traced and _alike(self.values):
                self._global = self._join_traced(self.values)
            if self._global is not None:
                self._layout = ReplicaLayout(self.count, self.values[0].ndim == 0)
        return self._global

    def array_as(self, layout: ReplicaLayout) -> jax.Array | None:
        """The global array if there is one, and if the components lie in it like this."""
        return self._global if self._layout == layout else None

    @property
    def is_traced(self) -> bool:
        """Whether components are values inside a JAX transformation."""
        if self._global is not None:
            return compat.is_tracer(self._global)
        if self._padded is not None:
            return compat.is_tracer(self._padded.array)
        return any(compat.is_tracer(x) for x in self.values)

    @property
    def is_one_leaf(self) -> bool:
        """Whether it has one leaf as a pytree, outside of replicas."""
        return self._leaf is not None or self.array is not None

    @property
    def _is_part(self) -> bool:
        """Whether there are only the components of this process, and others have more."""
        return self._global is None and len(self.values) < self.count

    @property
    def is_local(self) -> bool:
        """Whether the value is one that a compiled program holds a component of on each replica."""
        return False

    @property
    def layout(self) -> ReplicaLayout:
        """How the components lie in the global array; ask for `array` first."""
        assert self._layout is not None
        return self._layout

    def _split(self, array: jax.Array, layout: ReplicaLayout) -> Sequence[jax.Array]:
        raise NotImplementedError

    def _join(self, values: tuple[jax.Array, ...], devices: tuple[jax.Device, ...]) -> jax.Array:
        raise NotImplementedError

    def _join_traced(self, values: tuple[jax.Array, ...]) -> jax.Array:
        raise NotImplementedError

    # -- working on components -----------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many replicas the value is for."""
        if self._layout is not None:
            return self._layout.count
        if self._padded is not None:
            return len(self._padded.shapes)
        return len(self.values if self._span is None else self._span)

    def component(self, index: int) -> Any:
        """The component of one replica; replica 0's stands in where there is only one."""
        values = self.values
        return values[index] if index < len(values) else values[0]

    def _samples(self) -> Sequence[Any]:
        """One component per replica to learn shapes and dtypes from; costs no communication."""
        return self.values

    def apply(self, fn: Callable[[Any], Any]) -> Any:
        """The value with `fn` applied to each component, on the component's device."""
        return self.map_components(lambda x, _: fn(x), None)

    def first(self) -> Any:
        """Replica 0's component, wherever the code runs."""
        return self.component(0)

    def with_component(self, index: int, new: jax.Array) -> Any:
        """The value with one component replaced."""
        components = list(self.values)
        components[index] = new
        return self._like(components)

    def map_components(self, fn: Callable[[Any, Any], jax.Array], operand: Any) -> Any:
        """The value with each component replaced by ``fn(component, operand's component)``.

        Each component is computed, and stays, on its own device.
        """
        new = []
        for i, old in enumerate(self.values):
            device = device_of(old) if isinstance(old, jax.Array) else None
            with jax.default_device(device):
                result = fn(old, select_replica(i, operand))
            new.append(result if device is None else place(result, device))
        return self._like(new)


class ReplicaLayout(NamedTuple):
    """How the components of a value lie in its global array.

    Arrays are joined along their leading dimension; scalars are stacked. JAX compares layouts with each
    call of a function that takes values of replicas, which is quick for tuples.
    """

    count: int  # type: ignore[assignment]
    scalar: bool


def _alike(values: tuple[Any, ...]) -> bool:
    arrays = all(isinstance(v, jax.Array) for v in values)
    return arrays and len({(v.shape, v.dtype) for v in values}) == 1


def _distinct_devices(values: tuple[Any, ...]) -> tuple[jax.Device, ...] | None:
    if any(compat.is_tracer(v) for v in values) or not _alike(values):
        return None
    devices = tuple(device_of(v) for v in values)
    found = tuple(d for d in devices if d is not None)
    return found if len(set(found)) == len(values) else None


class PerReplica(ReplicaValues, ArrayOperators):
    """A value that may differ between replicas.

    Inside `Strategy.run` it stands for the replica's own component. Outside it is a container:
    look at the components with `Strategy.experimental_local_results`, or combine them with
    `Strategy.reduce` or `Strategy.gather`. As a pytree its leaf is one array over all devices: the
    components joined along their leading dimension (scalars are stacked), one part per device.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> value = strategy.experimental_distribute_values_from_function(
        ...     lambda context: jax.numpy.float32(context.replica_id_in_sync_group))
        >>> strategy.run(lambda x: x * 10, args=(value,))
        PerReplica:{
          0: <Array: shape=(), dtype=float32, numpy=0.0>,
          1: <Array: shape=(), dtype=float32, numpy=10.0>
        }
        >>> jax.tree.leaves(value)[0].shape
        (2,)
    """

    __slots__ = ()

    @staticmethod
    def from_padded(padded: Padded) -> PerReplica:
        """The value whose components, of different shapes, are in a padded array."""
        self = PerReplica.__new__(PerReplica)
        self._components = self._global = self._layout = self._leaf = None
        self._padded, self._span, self._joins = padded, compat.span_of(padded.array), False
        return self

    def of_arrays(self) -> PerReplica | None:
        """The value with arrays in place of Python numbers; None if it has other components."""
        if not all(isinstance(x, int | float | complex | np.generic) for x in self.values):
            return None
        if self._span is None:
            stacked = jnp.stack([jnp.asarray(x) for x in self.values])
            return cast(PerReplica, self.from_global(stacked, ReplicaLayout(self.count, True)))
        here = [d for d in self._span if d.process_index == jax.process_index()]
        arrays = [place(jnp.asarray(x), d) for x, d in zip(self.values, here, strict=True)]
        return PerReplica(arrays, self._span)

    @property
    def padded(self) -> Padded | None:
        """One array over all replicas' devices for components of different shapes.

        None if the components have one shape, if they are no arrays of one rank and dtype, or if other
        processes have some of them.
        """
        if self._padded is None and self._span is None and not self.is_local and self.array is None:
            if self.is_traced:
                self._padded = pad(self.values, None, ())
            else:
                devices = tuple(device_of(x) for x in self.values if isinstance(x, jax.Array))
                found = tuple(d for d in devices if d is not None)
                if len(set(found)) == self.count:
                    self._padded = pad(self.values, stacked_over(found), found)
        return self._padded

    def _split(self, array: jax.Array, layout: ReplicaLayout) -> Sequence[jax.Array]:
        if compat.is_tracer(array):
            rows = self.by_replica(array, layout)
            return [rows[i] for i in range(layout.count)]
        parts = compat.pieces(array)
        return [compat.uncommitted(p[0] if layout.scalar else p) for p in parts]

    @classmethod
    def _parts_of(cls, leaf: Any, layout: ReplicaLayout) -> tuple[Any, ...]:
        count, shape = layout.count, getattr(leaf, "shape", None)
        if not shape or shape[0] % count:
            return (leaf,) * count
        if isinstance(leaf, np.ndarray):
            return tuple(leaf) if layout.scalar else tuple(np.split(leaf, count))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            part = shape[1:] if layout.scalar else (shape[0] // count, *shape[1:])
            return (jax.ShapeDtypeStruct(part, leaf.dtype),) * count
        return (leaf,) * count

    @staticmethod
    def by_replica(array: jax.Array, layout: ReplicaLayout) -> jax.Array:
        """A global array with the replicas as a leading dimension of its own."""
        if layout.scalar:
            return array
        return array.reshape(layout.count, array.shape[0] // layout.count, *array.shape[1:])

    def _join(self, values: tuple[jax.Array, ...], devices: tuple[jax.Device, ...]) -> jax.Array:
        first = values[0]
        if first.ndim == 0:
            with jax.ensure_compile_time_eval():  # a program that captures the value may ask first
                rows = [place(v[None], v.device) for v in values]
            return compat.assemble((len(devices),), stacked_over(devices), rows)
        shape = (first.shape[0] * len(devices), *first.shape[1:])
        return compat.assemble(shape, stacked_over(devices), values)

    def _join_traced(self, values: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack(values) if values[0].ndim == 0 else jnp.concatenate(values)

    def _operand(self) -> jax.Array | None:
        context = active_replica()
        if context is None or self.count != context.num_replicas_in_sync:
            return None
        component: jax.Array = own_component(self, context)
        return component

    def _array(self) -> jax.Array:
        value = self._operand()
        if value is None:
            raise InvalidValueError(
                "A PerReplica value holds one value per replica and cannot be used as an array "
                "outside of a replica. Use it in a function given to strategy.run, or combine the "
                f"components with strategy.reduce or strategy.gather. Received: {shown(self)}"
            )
        return value


class Mirrored(ReplicaValues, ArrayOperators):
    """A value that is the same on all replicas, with one copy per device.

    It can be used as an array everywhere: on a replica it is the replica's copy, elsewhere the first
    one. As a pytree its leaf is one array replicated over the mesh.
    """

    __slots__ = ()

    @classmethod
    def of_global(cls, array: jax.Array, count: int) -> Mirrored:
        """The mirrored value whose copies are the pieces of one replicated array."""
        return cast(Mirrored, cls.from_global(array, ReplicaLayout(count, array.ndim == 0)))

    def _split(self, array: jax.Array, layout: ReplicaLayout) -> Sequence[jax.Array]:
        if compat.is_tracer(array):
            return [array]
        return [compat.uncommitted(piece) for piece in compat.pieces(array)]

    def _join(self, values: tuple[jax.Array, ...], devices: tuple[jax.Device, ...]) -> jax.Array:
        return compat.assemble(values[0].shape, replicated_over(devices), values)

    def _join_traced(self, values: tuple[jax.Array, ...]) -> jax.Array:
        return values[0]

    def with_component(self, index: int, new: jax.Array) -> Any:
        """The value with one copy replaced; in traced code there is only one."""
        if compat.is_tracer(new):
            return self.of_global(new, self.count)
        return super().with_component(index, new)

    def map_components(self, fn: Callable[[Any, Any], jax.Array], operand: Any) -> Any:
        """The value with `fn` applied to each copy; in traced code there is only one."""
        if self._global is not None and compat.is_tracer(self._global):
            return self.of_global(fn(self._global, select_replica(0, operand)), self.count)
        return super().map_components(fn, operand)

    def _operand(self) -> jax.Array | None:
        value: jax.Array = self.component(current_index())
        return value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each copy."""
        return tuple(self.values[0].shape)

    @property
    def dtype(self) -> Any:
        """The dtype of each copy."""
        return self.values[0].dtype

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value as a NumPy array."""
        return np.asarray(self.values[0])


def samples_of(value: ReplicaValues) -> Sequence[Any]:
    """One thing per replica that has the shape and dtype of its component."""
    return value._samples()


def own_component(value: ReplicaValues, context: ReplicaContext) -> Any:
    """The component of the replica that runs the code, of a value that it captured or was given."""
    if not is_compiled(context) or isinstance(value, Mirrored) or value.is_local:
        return value.component(index_of(context))
    if len({jnp.shape(x) for x in value.values}) > 1:
        raise CannotJoin("a value of theirs is captured: give it to strategy.run as an argument")
    # One program stands for all replicas, so which component it is depends on where it runs.
    rows = jnp.stack([jnp.asarray(x) for x in value.values])
    return rows[context.replica_id_in_sync_group]


def check_count(value: Any, replicas: int, what: str) -> None:
    """Refuse a per-replica value that was made for another number of replicas."""
    if isinstance(value, PerReplica) and value.count != replicas:
        raise InvalidValueError(
            f"{what} needs a value for each of its {replicas} replica(s). A value that another "
            "strategy made cannot be used here. "
            f"Received: a value for {value.count} replica(s), {shown(value)}"
        )


# -- pytrees ------------------------------------------------------------------------------------


_LOCAL = "local"  # one leaf: the component of the replica that flattened the value
_PARTS = "parts"  # one leaf per component
# Otherwise the leaf is the global array, and the auxiliary data is its layout.


def _flatten(value: ReplicaValues) -> tuple[tuple[Any, ...], Any]:
    context = active_replica()
    if context is not None and value.count == context.num_replicas_in_sync:
        return (own_component(value, context),), _LOCAL
    if value._leaf is not None:
        return value._leaf, value.layout
    array = value._global
    if array is None:
        array = value.array
    if array is not None:
        return (array,), value._layout
    return value.values, _PARTS


def _unflatten_as(cls: type[ReplicaValues]) -> Callable[[Any, Sequence[Any]], Any]:
    def unflatten(aux: Any, children: Sequence[Any]) -> Any:
        if aux == _LOCAL:
            return children[0]
        return cls(children) if aux == _PARTS else cls.from_leaf(children[0], aux)

    return unflatten


for _cls in (PerReplica, Mirrored):
    jax.tree_util.register_pytree_node(_cls, _flatten, _unflatten_as(_cls))


def select_replica(index: int, nest: Any) -> Any:
    """The nest that one replica sees: distributed values give their component, the rest stays."""

    def select(leaf: Any) -> Any:
        return leaf.component(index) if isinstance(leaf, ReplicaValues) else leaf

    return map_nest(select, nest)
