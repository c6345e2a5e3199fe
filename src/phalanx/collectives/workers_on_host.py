"""Collectives through the memory of the host: NumPy buffers, and connections between the members.

All functions of `OnHost` are called with the same parameters by all members. Arrays of JAX on CPU
devices are read where they are, and results become arrays of JAX without being copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.collectives.channels import Channel, Notice, Transfer
from phalanx.collectives.packing import TOGETHER, reduce_packed
from phalanx.collectives.reductions import Array, Reduction, reduce_into
from phalanx.collectives.table import Splits, check_splits, parts_of, rows_of
from phalanx.errors import CollectiveMismatchError
from phalanx.runtime import compat, host_memory

Shape = tuple[int, ...]

_PIECE = 256 << 10  # bytes that are reduced at once, while they are in the cache
_AHEAD = 4  # pieces that may have come from one member before those of the others have
_LARGEST_AT_ONCE = 1 << 20  # bytes that may come in for an array that is reduced in one exchange
_MORE_AT_ONCE = 192 << 10  # by how many bytes more than in two steps


class OnHost:
    """How one operation of a group moves its data.

    `mismatch` is the error for members that cannot do together what they were called for.
    """

    def __init__(
        self,
        channel: Channel,
        ranks: tuple[int, ...],
        notice: Notice,
        seconds: float,
        mismatch: Callable[[str], Exception] = CollectiveMismatchError,
    ) -> None:
        self._channel, self._ranks, self._notice, self._seconds = channel, ranks, notice, seconds
        self._mismatch = mismatch
        self._me = ranks.index(channel.rank)
        self._others = [r for r in ranks if r != channel.rank]
        self._has_begun = False

    def agree(self) -> list[Any]:
        """Meet the others; returns the value of each member."""
        transfer = self._transfer()
        transfer.run()
        return self._values(transfer)

    def barrier(self) -> None:
        """See `Backend`."""
        self.agree()

    def reduce(
        self, xs: Sequence[Any], op: Reduction, root: int | None = None, out: Any = None
    ) -> list[Any]:
        """See `Backend`; the arrays of one dtype travel together."""
        if len(xs) == 1:
            return [self._reduce_one(xs[0], op, root, out)]
        if not xs:
            self.agree()
        reduced = reduce_packed(
            [_host(x) for x in xs],
            TOGETHER,
            np.concatenate,
            lambda flat: self._reduce_one(flat, op, root),
        )
        return [given(x, _copy(part), None) for x, part in zip(xs, reduced, strict=True)]

    def _reduce_one(self, x: Any, op: Reduction, place: int | None, out: Any = None) -> Any:
        data = _host(x)
        is_target = place in (None, self._me)
        result = _room(data.shape, data.dtype, out) if is_target else None
        self._reduce_flat(data.reshape(-1), op, place, None if result is None else result.reshape(-1))
        return _kept(x) if result is None else given(x, result, out)

    def _reduce_flat(self, x: Array, op: Reduction, place: int | None, out: Array | None) -> None:
        count = len(self._ranks)
        if is_at_once(x.nbytes, count):
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
        """See `Backend`."""
        blocks = _blocks(xs, len(self._ranks))
        mine = blocks[self._me]
        result = _room(mine.shape, mine.dtype, _apart(out, blocks))
        flat = [b.reshape(-1) for b in blocks]
        _Reducer(self, self._transfer(), flat, op, result.reshape(-1)).run([], None)
        return given(_first(xs), result, out)

    def broadcast(self, x: Any, root: int, out: Any = None) -> Any:
        """See `Backend`."""
        source = self._ranks[root]
        transfer = self._transfer()
        if root == self._me:
            data = _host(x)
            for rank in self._others:
                transfer.send(rank, _bytes(data))
            transfer.run()
            return _kept(x) if out is None else out
        result = _room(x.shape, x.dtype, out)
        transfer.expect(source, _bytes(result))
        transfer.run()
        return given(x, result, out)

    def gather(self, x: Any, root: int | None = None, joined: bool = False, out: Any = None) -> Any:
        """See `Backend`. In a list the shapes may differ, which all members are told."""
        data = _host(x)
        transfer = self._transfer()
        targets = self._others if root is None else [self._ranks[root]]
        for rank in targets:
            if rank in self._others:
                transfer.send(rank, _bytes(data))
        whole = (len(self._ranks) * data.shape[0], *data.shape[1:]) if joined else ()
        if root not in (None, self._me):
            transfer.run()
            return given(x, np.zeros(whole, data.dtype), out) if joined else None
        if not joined:
            return self._receive_list(x, [data], data, transfer, tuple, out)
        rows = _room((len(self._ranks), *data.shape), data.dtype, _apart(out, [data]))
        for i, rank in enumerate(self._ranks):
            if rank in self._others:
                transfer.expect(rank, _bytes(rows[i]))
            else:
                np.copyto(rows[i], data)
        transfer.run()
        return given(x, rows.reshape(whole), out)

    def _receive_list(
        self,
        x: Any,
        sent: Sequence[Array],
        own: Array,
        transfer: Transfer,
        shape: Callable[[Any], Sequence[int]],
        outs: Any,
    ) -> list[Any]:
        """The arrays of all members; `own` is this one's, and `shape` finds theirs in what is told."""
        results: dict[int, Array] = {}
        wanted = dict(zip(self._ranks, outs or [None] * len(self._ranks), strict=True))

        def heard(rank: int) -> None:
            told = tuple(shape(transfer.notices[rank].value))
            results[rank] = _room(told, own.dtype, _apart(wanted[rank], sent))
            transfer.expect(rank, _bytes(results[rank]))

        transfer.run(heard)
        me = self._channel.rank
        results[me] = _room(own.shape, own.dtype, wanted[me])
        np.copyto(results[me], own)
        return [given(x, results[r], outs) for r in self._ranks]

    def scatter(self, xs: Any, root: int, out: Any = None) -> Any:
        """See `Backend`. The source of a list tells all members its dtype and its shapes."""
        if root == self._me:
            blocks = _blocks(xs, len(self._ranks))
            self._send_blocks(blocks).run()
            return given(_first(xs), _copy(blocks[self._me]), out)
        transfer, source = self._transfer(), self._ranks[root]
        if xs is not None:
            shape = (xs.shape[0] // len(self._ranks), *xs.shape[1:])
            result = _room(shape, xs.dtype, _apart(out, [xs]))
            transfer.expect(source, _bytes(result))
            transfer.run()
            return given(xs, result, out)
        results: list[Array] = []

        def heard(rank: int) -> None:
            if rank == source:
                dtype, shapes = transfer.notices[rank].value
                results.append(_room(tuple(shapes[self._me]), jnp.dtype(dtype), out))
                transfer.expect(source, _bytes(results[0]))

        transfer.run(heard)
        return results[0]

    def exchange(self, xs: Any, splits: Splits | None = None, out: Any = None) -> Any:
        """See `Backend`. All members are told the shapes, or the splits, of what each sends."""
        if splits is not None:
            return self._exchange_rows(xs, splits, out)
        data = [_host(x) for x in xs]
        me = self._me
        return self._receive_list(
            xs[0], data, data[me], self._send_blocks(data), lambda told: told[me], out
        )

    def _exchange_rows(self, x: Any, splits: Splits, out: Any) -> Any:
        data = _host(x)
        blocks = parts_of(data, splits.inputs)
        transfer = self._send_blocks(blocks)
        results: list[Array] = []

        def heard(_: int) -> None:
            if len(transfer.notices) < len(self._ranks):
                return
            values = self._values(transfer)
            check_splits(values, self._ranks, self._mismatch)
            counts = [sent[self._me] for sent, _ in values]
            rows = _room((sum(counts), *data.shape[1:]), data.dtype, _apart(out, [data]))
            results.append(rows)
            for rank, part in zip(self._ranks, parts_of(rows, counts), strict=True):
                if rank in self._others:
                    transfer.expect(rank, _bytes(part))
                else:
                    np.copyto(part, blocks[self._me])

        transfer.run(heard)
        return given(x, results[0], out)

    def _send_blocks(self, blocks: Sequence[Array]) -> Transfer:
        transfer = self._transfer()
        for rank, block in zip(self._ranks, blocks, strict=True):
            if rank in self._others:
                transfer.send(rank, _bytes(block))
        return transfer

    # -- inside ----------------------------------------------------------------------------------

    def _transfer(self) -> Transfer:
        if self._has_begun:
            return self._channel.more(self._seconds)
        self._has_begun = True
        return self._channel.begin(self._notice, self._seconds)

    def _values(self, transfer: Transfer) -> list[Any]:
        return [transfer.notices[r].value for r in self._ranks]


def is_at_once(nbytes: int, count: int) -> bool:
    """Whether an array is reduced in one exchange between so many members."""
    received = nbytes * (count - 1)
    return received <= _LARGEST_AT_ONCE and received * (count - 2) <= _MORE_AT_ONCE * count


class _Reducer:
    """Reduces one block of an array, in pieces, while the pieces of the others come in.

    `blocks` are what this member has for each, and `out` is where its own block goes; both are flat.
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

        `targets` get this member's block; `parts` are where those of the others go, if they come here.
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
    return list(rows_of(_host(xs), count))


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
    return host_memory.aligned_empty(shape, dtype)


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


def given(x: Any, result: Array, out: Any) -> Any:
    """A result for the caller: an array of JAX if `x` is one, unless it is for a buffer."""
    if out is not None or isinstance(x, np.ndarray):
        return result
    return compat.put_on(result, min(x.devices(), key=lambda d: d.id))
