"""Collectives between the devices of workers, as programs of XLA; nothing goes through the host.

The members first compare their notices, as `host.OnHost` does, over connections that carry nothing
else. A group of one needs neither, and may be given traced arrays. Arrays of different shapes are
flattened, padded, moved and cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.collectives.groups import Group
from phalanx.collectives.packing import TOGETHER, reduce_packed
from phalanx.collectives.reductions import PremulSum, Reduction, combine, divided, premultiplied
from phalanx.collectives.table import Splits, check_splits, join_rows, like, parts_of, rows_of
from phalanx.core.reduction import ReduceOp
from phalanx.errors import CollectiveMismatchError

Shape = tuple[int, ...]


class OnDevices:
    """How one operation of a group moves its data.

    `meet` meets the other members, and returns what each has told. `mismatch` is the error for members
    that cannot do together what they were called for.
    """

    def __init__(
        self,
        group: Group,
        me: int,
        meet: Callable[[], list[Any]],
        mismatch: Callable[[str], Exception] = CollectiveMismatchError,
    ) -> None:
        self._group, self._me, self._meet, self._mismatch = group, me, meet, mismatch
        self._told: list[Any] | None = None

    def agree(self) -> list[Any]:
        """Meet the others; returns what each member has told."""
        if self._told is None:
            self._told = self._meet()
        return self._told

    def barrier(self) -> None:
        """See `Backend`."""
        self.agree()

    def reduce(
        self, xs: Sequence[Any], op: Reduction, root: int | None = None, out: Any = None
    ) -> list[Any]:
        """See `Backend`; the arrays of one dtype travel together."""
        reduced = reduce_packed(xs, TOGETHER, _concatenated, lambda x: self._run(_reduce, x, op))
        self.agree()
        is_here = root in (None, self._me)
        return [like(x, part if is_here else x) for x, part in zip(xs, reduced, strict=True)]

    def reduce_scatter(self, xs: Any, op: Reduction, out: Any = None) -> Any:
        """See `Backend`."""
        if not isinstance(xs, Sequence):
            return like(xs, self._run(_reduce_scatter, rows_of(xs, len(self._group)), op))
        part = self._run(_reduce_scatter, _padded_rows(xs), op)
        return like(xs[0], _cut(part, [xs[self._me].shape])[0])

    def broadcast(self, x: Any, root: int, out: Any = None) -> Any:
        """See `Backend`."""
        return like(x, self._run(_broadcast, x, root))

    def gather(self, x: Any, root: int | None = None, joined: bool = False, out: Any = None) -> Any:
        """See `Backend`."""
        is_here = root in (None, self._me)
        if joined:
            whole = join_rows(self._run(_gather, x))
            return like(x, whole if is_here else whole * 0)
        shapes = [tuple(shape) for shape in self.agree()]
        if len(set(shapes)) == 1:
            parts = list(self._run(_gather, x))
        else:
            rows = self._run(_gather, _padded_rows([x], max(map(math.prod, shapes)))[0])
            parts = [_cut(row, [shape])[0] for row, shape in zip(rows, shapes, strict=True)]
        return [like(x, p) for p in parts] if is_here else None

    def scatter(self, xs: Any, root: int, out: Any = None) -> Any:
        """See `Backend`."""
        if xs is not None and not isinstance(xs, Sequence):
            return like(xs, self._run(_exchange, rows_of(xs, len(self._group)))[root])
        dtype, shapes = self.agree()[root]
        most = max(map(math.prod, shapes))
        nothing = np.zeros((len(shapes), most), jnp.dtype(dtype))
        rows = nothing if xs is None else _padded_rows(xs, most)
        part = _cut(self._run(_exchange, rows)[root], [tuple(shapes[self._me])])[0]
        return part if xs is None else like(xs[0], part)

    def exchange(self, xs: Any, splits: Splits | None = None, out: Any = None) -> Any:
        """See `Backend`."""
        told = self.agree()
        if splits is None:
            return [like(xs[0], p) for p in self._exchanged(xs, told)]
        check_splits(told, self._group.ranks, self._mismatch)
        rest = list(xs.shape[1:])
        shapes = [[[n, *rest] for n in sent] for sent, _ in told]
        parts = self._exchanged(parts_of(xs, splits.inputs), shapes)
        whole = [p.reshape((p.shape[0], *rest)) for p in parts]
        with jax.enable_x64(True):
            library: Any = np if isinstance(xs, np.ndarray) else jnp
            return like(xs, library.concatenate(whole))

    def _exchanged(self, xs: Sequence[Any], shapes: Sequence[Sequence[Any]]) -> list[Any]:
        """Send array i to member i; `shapes` has, for each member, the shapes of what it sends."""
        most = max(math.prod(s) for sent in shapes for s in sent)
        rows = self._run(_exchange, _padded_rows(xs, most))
        return [_cut(rows[i], [tuple(sent[self._me])])[0] for i, sent in enumerate(shapes)]

    def _run(self, body: Body, x: Any, *parameters: Any) -> Any:
        self.agree()
        return run(body, self._group.devices, x, *parameters)


def _concatenated(xs: Sequence[Any]) -> Any:
    """Arrays of one dtype as one flat array."""
    if all(isinstance(x, np.ndarray) for x in xs):
        return np.concatenate([x.reshape(-1) for x in xs])
    with jax.enable_x64(True):
        return jnp.concatenate([jnp.ravel(x) for x in xs])


def _cut(flat: Any, shapes: Sequence[Shape]) -> list[Any]:
    """The arrays that stand one after another in a flat array; what follows them is padding."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = parts_of(flat, sizes)
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _padded_rows(xs: Sequence[Any], length: int | None = None) -> Any:
    """Arrays as rows of one length, flat and padded with zeros."""
    most = max(x.size for x in xs) if length is None else length
    with jax.enable_x64(True):
        library: Any = np if all(isinstance(x, np.ndarray) for x in xs) else jnp
        flat = [library.reshape(x, (-1,)) for x in xs]
        return library.stack([library.pad(f, (0, most - f.shape[0])) for f in flat])


AXIS = "rank"
Devices = tuple[jax.Device, ...]
Body = Callable[..., jax.Array]


def run(body: Body, devices: Devices, x: Any, *parameters: Any) -> Any:
    """Run a program with this worker's array, together with the other workers; waits for the result.

    A NumPy array gives a NumPy array.

    `devices` has one device of each worker, in the order of ranks. `body` is what each of them does
    with its array and the parameters.
    """
    if len(devices) == 1:
        return _alone(body, x, *parameters)
    here = next(d for d in devices if d.process_index == jax.process_index())
    with jax.enable_x64(True):  # NumPy's 64-bit numbers keep their width
        block = jax.device_put(x[None], here)
        sharding = NamedSharding(_mesh(devices), PartitionSpec(AXIS))
        shape = (len(devices), *block.shape[1:])
        whole = jax.make_array_from_single_device_arrays(shape, sharding, [block])
        result = _program(body, devices, *parameters)(whole)
        mine = result.addressable_data(0)
        return np.asarray(mine)[0] if isinstance(x, np.ndarray) else mine[0].block_until_ready()


def _alone(body: Body, x: Any, *parameters: Any) -> Any:
    """What a group of one computes; traced arrays are welcome."""
    with jax.enable_x64(True):
        if body is _reduce or body is _reduce_scatter:
            return combine(parameters[0], jnp.asarray(x if body is _reduce_scatter else x[None]))
        return x[None] if body is _gather else x


@functools.cache
def _mesh(devices: Devices) -> Mesh:
    return Mesh(list(devices), (AXIS,))


@functools.cache
def _program(body: Body, devices: Devices, *parameters: Any) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            lambda x: body(x[0], *parameters)[None],
            mesh=_mesh(devices),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )


def _reduce(x: jax.Array, op: Reduction) -> jax.Array:
    if isinstance(op, PremulSum):
        return lax.psum(premultiplied(op, x), AXIS)
    if x.dtype == jnp.bool_ or op not in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX, ReduceOp.MIN):
        return combine(op, _gather(x))
    if op in (ReduceOp.MAX, ReduceOp.MIN):
        return lax.pmax(x, AXIS) if op is ReduceOp.MAX else lax.pmin(x, AXIS)
    total = lax.psum(x, AXIS)
    return total if op is ReduceOp.SUM else divided(total, lax.axis_size(AXIS))


def _gather(x: jax.Array) -> jax.Array:
    return _from_bits(lax.all_gather(_bits(x), AXIS), x.dtype)


def _exchange(x: jax.Array) -> jax.Array:
    """Row i goes to rank i; row i of the result came from rank i."""
    return _from_bits(lax.all_to_all(_bits(x), AXIS, 0, 0, tiled=True), x.dtype)


def _reduce_scatter(x: jax.Array, op: Reduction) -> jax.Array:
    if x.dtype != jnp.bool_ and (isinstance(op, PremulSum) or op in (ReduceOp.SUM, ReduceOp.MEAN)):
        factor = premultiplied(op, x) if isinstance(op, PremulSum) else x
        total = lax.psum_scatter(factor, AXIS, scatter_dimension=0)
        return divided(total, lax.axis_size(AXIS)) if op is ReduceOp.MEAN else total
    return combine(op, _exchange(x))


def _broadcast(x: jax.Array, source: int) -> jax.Array:
    bits = _bits(x)
    mine = jnp.where(lax.axis_index(AXIS) == source, bits, jnp.zeros_like(bits))
    return _from_bits(lax.psum(mine, AXIS), x.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """An array as unsigned integers, which travel as they are; complex ones as pairs."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    if x.dtype.name in ("int2", "int4", "uint2", "uint4"):
        return x.astype(jnp.int8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        half = jnp.float32 if dtype == jnp.complex64 else jnp.float64
        parts = lax.bitcast_convert_type(bits, half)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype == jnp.bool_ or dtype.name in ("int2", "int4", "uint2", "uint4"):
        return bits.astype(dtype)
    return lax.bitcast_convert_type(bits, dtype)
