"""Collectives through the memory of the host: NumPy buffers, and connections between the members.

All functions of `OnHost` are called with the same parameters by all members. Arrays of JAX on CPU
devices are read where they are, and results become arrays of JAX without being copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.comm.arithmetic import Array, reduce_into
from phalanx.comm.channels import Channel, Notice, Transfer
from phalanx.comm.reductions import Reduction
from phalanx.core import compat, host_memory

Shape = tuple[int, ...]

_ALIGNMENT = 64  # where memory must begin so that CPU devices use it without copying
_PIECE = 256 << 10  # bytes that are reduced at once, while they are in the cache
_AHEAD = 4  # pieces that may have come from one member before those of the others have
_LARGEST_AT_ONCE = 1 << 20  # bytes that may come in for an array that is reduced in one exchange
_MORE_AT_ONCE = 192 << 10  # by how many bytes more than in two steps


class OnHost:
    """How one operation of a group moves its data.

    Args:
        channel: the connections of the members.
        ranks: the members, in the order of the group.
        notice: what all members are told first.
        seconds: how long to wait for them.
    """

    def __init__(
        self, channel: Channel, ranks: tuple[int, ...], notice: Notice, seconds: float
    ) -> None:
        self._channel, self._ranks, self._notice, self._seconds = channel, ranks, notice, seconds
        self._me = ranks.index(channel.rank)
        self._others = [r for r in ranks if r != channel.rank]
        self._has_begun = False

    def agree(self) -> list[Any]:
        """Meet the others; returns the value of each member."""
        transfer = self._transfer()
        transfer.run()
        return self._values(transfer)

    def reduce(self, x: Any, op: Reduction, place: int | None = None, out: Any = None) -> Any:
        """The reduction over all members; at one place only, where others get their own back."""
        data = _host(x)
        is_target = place in (None, self._me)
        result = _room(data.shape, data.dtype, out) if is_target else None
        self._reduce_flat(data.reshape(-1), op, place, None if result is None else result.reshape(-1))
        return _kept(x) if result is None else _given(x, result, out)

    def _reduce_flat(self, x: Array, op: Reduction, place: int | None, out: Array | None) -> None:
        count, received = len(self._ranks), x.nbytes * (len(self._ranks) - 1)
        if received <= _LARGEST_AT_ONCE and received * (count - 2) <= _MORE_AT_ONCE * count:
            self._reduce_at_once(x, op, place, out)
            return
        length = -(-x.size // count)
        bounds = [min(x.size, i * length) for i in range(count + 1)]
        blocks = [x[bounds[i] : bounds[i + 1]] for i in range(count)]
        if out is None:
            own, parts = np.empty_like(blocks[self._me]), None
        else:
            parts = [out[bounds[i] : bounds[i + 1]] for i in range(count)]
            own = parts[self._me]
        targets = self._others if place is None else [self._ranks[place]]
        reducer = _Reducer(self, self._transfer(), blocks, op, own)
        reducer.run([r for r in targets if r in self._others], parts)

    def _reduce_at_once(self, x: Array, op: Reduction, place: int | None, out: Array | None) -> None:
        """Everything goes to everyone, who all compute the same."""
        transfer = self._transfer()
        rows = {self._channel.rank: x}
        for rank in self._others:
            if place is None or rank == self._ranks[place]:
                transfer.send(rank, _bytes(x))
            if out is not None:
                rows[rank] = np.empty_like(x)
                transfer.expect(rank, _bytes(rows[rank]))
        transfer.run()
        if out is not None:
            reduce_into(op, [rows[r] for r in self._ranks], out)

    def reduce_scatter(self, xs: Any, op: Reduction, out: Any = None) -> Any:
        """The reduction over all members of the array that each has for this one.

        They have a list of arrays, or one that is cut along the first dimension.
        """
        blocks = _blocks(xs, len(self._ranks))
        mine = blocks[self._me]
        result = _room(mine.shape, mine.dtype, _apart(out, blocks))
        flat = [b.reshape(-1) for b in blocks]
        _Reducer(self, self._transfer(), flat, op, result.reshape(-1)).run([], None)
        return _given(_first(xs), result, out)

    def from_one(self, x: Any, place: int, out: Any = None) -> Any:
        """The array of one member."""
        source = self._ranks[place]
        transfer = self._transfer()
        if place == self._me:
            data = _host(x)
            for rank in self._others:
                transfer.send(rank, _bytes(data))
            transfer.run()
            return _kept(x) if out is None else out
        result = _room(x.shape, x.dtype, out)
        transfer.expect(source, _bytes(result))
        transfer.run()
        return _given(x, result, out)

    def gather(self, x: Any, place: int | None = None, outs: Sequence[Any] | None = None) -> Any:
        """The arrays of all members, whose shapes are their values; None where they are not wanted."""
        data = _host(x)
        transfer = self._transfer()
        targets = self._others if place is None else [self._ranks[place]]
        for rank in targets:
            if rank in self._others:
                transfer.send(rank, _bytes(data))
        if place not in (None, self._me):
            transfer.run()
            return None
        results: dict[int, Array] = {}
        wanted = dict(zip(self._ranks, outs or [None] * len(self._ranks), strict=True))

        def heard(rank: int) -> None:
            shape = tuple(transfer.notices[rank].value)
            results[rank] = _room(shape, data.dtype, _apart(wanted[rank], [data]))
            transfer.expect(rank, _bytes(results[rank]))

        transfer.run(heard)
        results[self._channel.rank] = own = _room(data.shape, data.dtype, wanted[self._channel.rank])
        np.copyto(own, data)
        return [_given(x, results[r], outs) for r in self._ranks]

    def gather_rows(self, x: Any, place: int | None = None, out: Any = None) -> Any:
        """The arrays of all members, of one shape, joined; None where they are not wanted."""
        data = _host(x)
        transfer = self._transfer()
        targets = self._others if place is None else [self._ranks[place]]
        for rank in targets:
            if rank in self._others:
                transfer.send(rank, _bytes(data))
        if place not in (None, self._me):
            transfer.run()
            return None
        rows = _room((len(self._ranks), *data.shape), data.dtype, _apart(out, [data]))
        for i, rank in enumerate(self._ranks):
            if rank in self._others:
                transfer.expect(rank, _bytes(rows[i]))
            else:
                np.copyto(rows[i], data)
        transfer.run()
        joined = (len(self._ranks) * data.shape[0], *data.shape[1:])
        return _given(x, rows.reshape(joined), out)

    def scatter(self, xs: Sequence[Any] | None, place: int, out: Any = None) -> Any:
        """This member's array of the list that one has, whose value is their dtype and shapes."""
        if xs is not None:
            return self._scatter_from_here(xs, out)
        transfer, source = self._transfer(), self._ranks[place]
        results: list[Array] = []

        def heard(rank: int) -> None:
            if rank == source:
                dtype, shapes = transfer.notices[rank].value
                results.append(_room(tuple(shapes[self._me]), jnp.dtype(dtype), out))
                transfer.expect(source, _bytes(results[0]))

        transfer.run(heard)
        return results[0]

    def _scatter_from_here(self, xs: Any, out: Any) -> Any:
        transfer, blocks = self._transfer(), _blocks(xs, len(self._ranks))
        for rank, block in zip(self._ranks, blocks, strict=True):
            if rank in self._others:
                transfer.send(rank, _bytes(block))
        transfer.run()
        return _given(_first(xs), _copy(blocks[self._me]), out)

    def scatter_rows(self, x: Any, place: int, out: Any = None) -> Any:
        """This member's part of the array that one has; all have one of the same shape."""
        if place == self._me:
            return self._scatter_from_here(x, out)
        transfer = self._transfer()
        shape = (x.shape[0] // len(self._ranks), *x.shape[1:])
        result = _room(shape, x.dtype, _apart(out, [x]))
        transfer.expect(self._ranks[place], _bytes(result))
        transfer.run()
        return _given(x, result, out)

    def exchange(self, xs: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """Array i goes to member i; the values are the shapes of what each member sends."""
        data = [_host(x) for x in xs]
        transfer = self._transfer()
        results: dict[int, Array] = {}
        wanted = dict(zip(self._ranks, outs or [None] * len(self._ranks), strict=True))
        for rank, block in zip(self._ranks, data, strict=True):
            if rank in self._others:
                transfer.send(rank, _bytes(block))

        def heard(rank: int) -> None:
            shape = tuple(transfer.notices[rank].value[self._me])
            results[rank] = _room(shape, data[0].dtype, _apart(wanted[rank], data))
            transfer.expect(rank, _bytes(results[rank]))

        transfer.run(heard)
        results[self._channel.rank] = _copy(data[self._me])
        return [_given(xs[0], results[r], outs) for r in self._ranks]

    def exchange_rows(
        self, x: Any, inputs: Sequence[int], check: Callable[[list[Any]], None], out: Any = None
    ) -> Any:
        """Parts of an array go to the members, and those that come are joined.

        Args:
            x: the array.
            inputs: how many rows go to each member.
            check: is given the values, of which the first of each is what that member sends, and raises
                if they do not fit together.
            out: where the result may be put.
        """
        data = _host(x)
        ends = accumulate(inputs)
        blocks = [data[end - n : end] for n, end in zip(inputs, ends, strict=True)]
        transfer = self._transfer()
        for rank, block in zip(self._ranks, blocks, strict=True):
            if rank in self._others:
                transfer.send(rank, _bytes(block))
        results: list[Array] = []

        def heard(_: int) -> None:
            if len(transfer.notices) < len(self._ranks):
                return
            values = self._values(transfer)
            check(values)
            counts = [sent[self._me] for sent, _ in values]
            rows = _room((sum(counts), *data.shape[1:]), data.dtype, _apart(out, [data]))
            results.append(rows)
            for rank, n, end in zip(self._ranks, counts, accumulate(counts), strict=True):
                if rank in self._others:
                    transfer.expect(rank, _bytes(rows[end - n : end]))
                else:
                    np.copyto(rows[end - n : end], blocks[self._me])

        transfer.run(heard)
        return _given(x, results[0], out)

    # -- inside ----------------------------------------------------------------------------------

    def _transfer(self) -> Transfer:
        if self._has_begun:
            return self._channel.more(self._seconds)
        self._has_begun = True
        return self._channel.begin(self._notice, self._seconds)

    def _values(self, transfer: Transfer) -> list[Any]:
        return [transfer.notices[r].value for r in self._ranks]


class _Reducer:
    """Reduces one block of an array, in pieces, while the pieces of the others come in.

    Args:
        host: whose operation it is.
        transfer: moves the pieces.
        blocks: what this member has for each, flat.
        op: the reduction.
        out: where this member's block goes, flat.
    """

    def __init__(
        self, host: OnHost, transfer: Transfer, blocks: Sequence[Array], op: Reduction, out: Array
    ) -> None:
        self._ranks, self._others, self._me = host._ranks, host._others, host._me
        self._transfer, self._blocks, self._op, self._out = transfer, blocks, op, out
        self._length = max(1, _PIECE // out.dtype.itemsize)
        self._count = -(-out.size // self._length)
        ahead = min(self._count, _AHEAD)
        self._scratch = {
            r: [np.empty(min(self._length, out.size), out.dtype) for _ in range(ahead)]
            for r in self._others
        }
        self._arrived = dict.fromkeys(self._others, 0)
        self._reduced = 0
        self._targets: Sequence[int] = ()
        self._parts: Sequence[Array] | None = None

    def run(self, targets: Sequence[int], parts: Sequence[Array] | None) -> None:
        """Reduce everything.

        Args:
            targets: who gets this member's block.
            parts: where the blocks of the others go; None if they do not come here.
        """
        self._targets, self._parts = targets, parts
        for i, rank in enumerate(self._ranks):
            if rank in self._others:
                self._transfer.send(rank, _bytes(self._blocks[i]))
        for rank in self._others:
            for piece in range(min(self._count, _AHEAD)):
                self._expect(rank, piece)
            if not self._count:
                self._expect_part(rank)
        self._transfer.run()

    def _expect(self, rank: int, piece: int) -> None:
        def arrived() -> None:
            self._arrived[rank] += 1
            self._reduce()

        size = self._stop(piece) - piece * self._length
        room = self._scratch[rank][piece % _AHEAD][:size]
        self._transfer.expect(rank, _bytes(room), arrived)
        if piece == self._count - 1:
            self._expect_part(rank)

    def _expect_part(self, rank: int) -> None:
        """What comes after all pieces: the block that another member has reduced."""
        if self._parts is not None:
            self._transfer.expect(rank, _bytes(self._parts[self._ranks.index(rank)]))

    def _stop(self, piece: int) -> int:
        return min(int(self._out.size), (piece + 1) * self._length)

    def _reduce(self) -> None:
        while self._reduced < min(self._arrived.values()):
            piece = self._reduced
            part = slice(piece * self._length, self._stop(piece))
            mine, out = self._blocks[self._me][part], self._out[part]
            rows = [
                mine if r not in self._scratch else self._scratch[r][piece % _AHEAD][: out.size]
                for r in self._ranks
            ]
            reduce_into(self._op, rows, out)
            self._reduced += 1
            for rank in self._targets:
                self._transfer.send(rank, _bytes(out))
            if piece + _AHEAD < self._count:
                for rank in self._others:
                    self._expect(rank, piece + _AHEAD)


# -- memory ------------------------------------------------------------------------------------------


def _host(x: Any) -> Array:
    """The bytes of an array where they are; a copy only if they are scattered or swapped."""
    data = np.asarray(x)
    if not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    whole: Array = np.ascontiguousarray(data).reshape(x.shape)
    return whole


def _blocks(xs: Any, count: int) -> list[Array]:
    """The arrays of a list, or so many parts of an array."""
    if isinstance(xs, Sequence):
        return [_host(x) for x in xs]
    return list(_host(xs).reshape((count, xs.shape[0] // count, *xs.shape[1:])))


def _first(xs: Any) -> Any:
    return xs[0] if isinstance(xs, Sequence) else xs


def _bytes(x: Array) -> memoryview:
    return x.reshape(-1).view(np.uint8).data


def _room(shape: Shape, dtype: Any, out: Any = None) -> Array:
    """Memory for a result: that of `out` if it fits, else new, as CPU devices want it."""
    result: Array
    if out is not None and out.dtype == dtype and out.size == math.prod(shape):
        result = out if out.shape == shape else out.reshape(shape)
        return result
    size = math.prod(shape) * np.dtype(dtype).itemsize
    host_memory.expect_buffer(size)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _copy(x: Array) -> Array:
    result = _room(x.shape, x.dtype)
    np.copyto(result, x)
    return result


def _apart(out: Any, inputs: Sequence[Any]) -> Any:
    """`out` unless it may share memory with what is still to be sent."""
    if out is not None and any(np.may_share_memory(out, np.asarray(x)) for x in inputs):
        return None
    return out


def _kept(x: Any) -> Any:
    """An array as a result of its own."""
    return _copy(x) if isinstance(x, np.ndarray) else x


def _given(x: Any, result: Array, out: Any) -> Any:
    """A result for the caller: an array of JAX if `x` is one, unless it is for a buffer."""
    if out is not None or isinstance(x, np.ndarray):
        return result
    return compat.put_on(result, min(x.devices(), key=lambda d: d.id))
