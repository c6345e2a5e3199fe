"""Distributed values inside an SPMD program.

In a compiled `Strategy.run` one traced function stands for all replicas, and a per-replica value is
one traced array that every replica computes for itself. Seen from a merge function it is still a
`PerReplica` value: its components are gathered from the other replicas on demand.

Where replicas have different shapes, the function is traced for each of them (`different_shapes`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.padding import CannotJoin, room_for
from phalanx.core.structure import map_nest
from phalanx.core.values import Mirrored, PerReplica, ReplicaLayout, select_replica
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS


class Shapes:
    """What shapes values have on all replicas, while programs of different shapes are being traced.

    The programs are traced one after the other, so what others have is guessed: what it was when they
    were traced last, or else what this one has. Comparing `asked` of all programs tells whether the
    guesses were right.

    Args:
        programs: the program of each replica.
        guesses: for each question the answer of each program, from the last time.
    """

    def __init__(self, programs: Sequence[int], guesses: Sequence[Sequence[Any]]) -> None:
        self._programs, self._guesses = programs, guesses
        self.asked: list[Any] = []
        self.plain: list[Any] = []
        """What merge functions returned that is no array."""

    def everywhere(self, x: Any) -> list[tuple[tuple[int, ...], Any]]:
        """The shape and dtype of a local array on each replica."""
        mine = tuple(x.shape), x.dtype
        place = len(self.asked)
        self.asked.append(mine)
        if place >= len(self._guesses):
            return [mine] * len(self._programs)
        return [self._guesses[place][program] for program in self._programs]


class _Current(threading.local):
    shapes: Shapes | None = None


_current = _Current()


@contextmanager
def different_shapes(shapes: Shapes) -> Iterator[None]:
    """Trace a program of which there are others, for replicas with other shapes."""
    outer, _current.shapes = _current.shapes, shapes
    try:
        yield
    finally:
        _current.shapes = outer


def shared_by_all(result: Any) -> Any:
    """What a merge function returns to all replicas: its one call counts, whichever replica made it.

    Where programs are traced for several shapes each calls its own, so all must do the same.
    """
    shapes = _current.shapes
    if shapes is None:
        return result

    def mark(x: Any) -> Any:
        if isinstance(x, Mirrored):
            return Mirrored.of_global(compat.mark_same_in_all_programs(x.component(0)), x.count)
        if isinstance(x, jax.Array | IndexedSlices):
            return jax.tree.map(compat.mark_same_in_all_programs, x)
        if not isinstance(x, PerReplica):
            shapes.plain.append(x)
        return x

    return map_nest(mark, result)


def _shapes_of(x: Any) -> list[tuple[int, ...]] | None:
    """The shapes that a local array has on the replicas; None if it has one shape on all."""
    if _current.shapes is None:
        return None
    found = [shape for shape, _ in _current.shapes.everywhere(x)]
    return found if any(shape != found[0] for shape in found) else None


class SpmdPerReplica(PerReplica):
    """A per-replica value of which this program sees the local component."""

    __slots__ = ("_local",)

    def __init__(self, local: Any, count: int) -> None:
        self._components = self._global = self._leaf = self._padded = self._span = None
        self._joins = True
        self._layout = ReplicaLayout(count, getattr(local, "ndim", 0) == 0)
        self._local = local

    @property
    def values(self) -> tuple[Any, ...]:
        """All components, gathered from the replicas."""
        if self._components is None:
            flat, structure = jax.tree.flatten(self._local)
            columns = [_gathered(x) for x in flat]
            self._components = tuple(
                jax.tree.unflatten(structure, [column[i] for column in columns])
                for i in range(self.count)
            )
        return self._components

    @property
    def array(self) -> None:
        """There is no array over all devices inside a program that runs on each of them."""
        return None

    @property
    def is_traced(self) -> bool:
        """False: the communication of the program, not plain arithmetic, combines components."""
        return False

    def _samples(self) -> Sequence[Any]:
        """The local component stands for all, unless there are programs for other shapes."""
        if _current.shapes is not None and isinstance(self._local, jax.Array):
            kinds = _current.shapes.everywhere(self._local)
            if any(kind != kinds[0] for kind in kinds):
                return [jax.ShapeDtypeStruct(*kind) for kind in kinds]
        return [self._local] * self.count

    @property
    def is_local(self) -> bool:
        """True."""
        return True

    @property
    def local(self) -> Any:
        """The component of the replica that runs the program."""
        return self._local

    def component(self, index: int) -> Any:
        """The local component; a program cannot see another one without communication."""
        del index
        return self._local

    def first(self) -> Any:
        """Replica 0's component, broadcast to all."""
        here = lax.axis_index(REPLICA_AXIS) == 0
        return jax.tree.map(lambda x: from_replica(x, here), self._local)

    def with_component(self, index: int, new: Any) -> SpmdPerReplica:
        """The value with the local component replaced."""
        del index
        return SpmdPerReplica(new, self.count)

    def map_components(self, fn: Callable[[Any, Any], Any], operand: Any) -> SpmdPerReplica:
        """The value with `fn` applied to the local component."""
        return SpmdPerReplica(fn(self._local, select_replica(0, operand)), self.count)

    def __repr__(self) -> str:
        return f"PerReplica(local={self._local!r})"

    __str__ = __repr__
    __hash__ = object.__hash__


jax.tree_util.register_pytree_node(
    SpmdPerReplica,
    lambda v: ((v._local,), None),
    lambda _, children: children[0],
)


def wrap_arguments(nest: Any, count: int, always: bool, shared: Sequence[Any] = ()) -> Any:
    """The arguments of a merge point: what a replica computed is per replica, constants are plain.

    So are `shared` arrays, which an earlier merge function returned to all replicas.
    """

    def wrap(x: Any) -> Any:
        if not always and any(x is s for s in shared):
            return x
        traced = any(compat.is_tracer(leaf) for leaf in jax.tree.leaves(x))
        numeric = isinstance(x, jax.Array | IndexedSlices)
        if not numeric or not (traced or always):
            return x
        return SpmdPerReplica(x if _current.shapes is None else jax.tree.map(_computed, x), count)

    return map_nest(wrap, nest)


def _computed(x: jax.Array) -> jax.Array:
    """The array itself, as a value that the program computes even if it is a constant of it.

    Such as a number of rows: programs for other shapes have another constant there, and can be joined
    if they use the same value, but not if they use different constants.
    """
    if compat.is_tracer(x) and x.ndim > 0:
        return x
    computed: jax.Array = lax.optimization_barrier(x)
    return computed


def from_replica(x: Any, here: Any) -> Any:
    """The local array of the one replica that is `here`, broadcast to all."""
    if compat.is_key_array(x):
        data = from_replica(jax.random.key_data(x), here)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    chosen = jnp.where(here, x, jnp.zeros_like(x))
    if chosen.dtype == jnp.bool_:
        return lax.psum(chosen.astype(jnp.int32), REPLICA_AXIS) > 0
    return lax.psum(chosen, REPLICA_AXIS)


def all_gather(x: jax.Array, axis: int) -> jax.Array:
    """Join local arrays over all replicas; along `axis` they may differ in length."""
    shapes = _shapes_of(x)
    if shapes is None:
        return lax.all_gather(x, REPLICA_AXIS, axis=axis, tiled=True)
    return jnp.concatenate(_parts(x, shapes), axis=axis)


def _gathered(x: jax.Array) -> Sequence[jax.Array]:
    """The local arrays of all replicas."""
    shapes = _shapes_of(x)
    if shapes is not None:
        return _parts(x, shapes)
    rows = lax.all_gather(x, REPLICA_AXIS)
    return [rows[i] for i in range(rows.shape[0])]


def _parts(x: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The local arrays of all replicas in their own shapes; they are sent in the largest."""
    room = room_for(shapes)
    if room is None:
        raise CannotJoin("they exchange arrays of different ranks")
    padded = jnp.pad(x, [(0, m - n) for n, m in zip(x.shape, room, strict=True)])
    rows = lax.all_gather(padded, REPLICA_AXIS)
    return [rows[i][tuple(slice(n) for n in shape)] for i, shape in enumerate(shapes)]
