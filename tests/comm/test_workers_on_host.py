"""Operations through the memory of the host: right on all ranks, or one clear error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from phalanx.collectives import workers_on_host
from phalanx.collectives.channels import (
    DifferentError,
    InterruptedChannelError,
    LateError,
    LinkLostError,
)
from phalanx.collectives.reductions import premul_sum, reduce_into
from phalanx.collectives.table import Splits
from phalanx.collectives.workers_on_host import OnHost
from phalanx.core.reduction import ReduceOp
from tests.comm.connected_ranks import ConnectedRanks, connected_ranks

SUM = ReduceOp.SUM
Operate = Callable[[OnHost, int], Any]

# -- against NumPy ---------------------------------------------------------------------------------

DTYPES = ["float32", "float64", "int8", "uint16", "int64", "bool", "complex64", "float16", "bfloat16"]


def rows_of(draw: Any, count: int, length: int, dtype: str) -> list[Any]:
    seed = draw(st.integers(0, 2**32 - 1))
    numbers = np.random.default_rng(seed).integers(-3, 4, (count, length))
    if dtype in ("uint16", "bool"):
        numbers = abs(numbers)
    return list(numbers.astype(jnp.dtype(dtype)))


@st.composite
def reductions(draw: Any) -> tuple[list[Any], ReduceOp, Any, bool]:
    count = draw(st.integers(2, 4))
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.sampled_from([0, 1, 3, 1000, 70_001, 300_000]))
    ops = [ReduceOp.SUM, ReduceOp.PROD]
    if dtype != "bool":
        ops.append(ReduceOp.AVG)
    if dtype != "complex64":
        ops += [ReduceOp.MAX, ReduceOp.MIN]
    if dtype in ("int8", "uint16", "int64", "bool"):
        ops += [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    rows = rows_of(draw, count, length, dtype)
    order = tuple(draw(st.permutations(range(count))))
    return rows, draw(st.sampled_from(ops)), order, draw(st.booleans())


def model(rows: list[Any], op: ReduceOp) -> Any:
    """The numbers are small, so that everything but the last division is exact in 64 bits."""
    dtype = rows[0].dtype
    if dtype == np.bool_:
        whole = np.stack(rows).astype(int)
        odd = whole.sum(0) % 2 == 1
        everywhere = whole.all(0)
        somewhere = whole.any(0)
        by_name = {"BXOR": odd, "SUM": somewhere, "MAX": somewhere, "BOR": somewhere}
        return by_name.get(op.name, everywhere)
    if dtype.kind in "iu":
        whole = np.stack(rows).astype(np.int64)
    else:
        whole = np.stack(rows).astype(np.complex128 if dtype.kind == "c" else np.float64)
    if op is ReduceOp.AVG:
        total = whole.sum(0)
        if dtype.kind == "c":
            return ((total.real / len(rows)) + 1j * (total.imag / len(rows))).astype(dtype)
        mean = total // len(rows) if dtype.kind in "iu" else total / len(rows)
        return mean.astype(dtype)
    functions: dict[str, Any] = {
        "SUM": np.add,
        "PROD": np.multiply,
        "MAX": np.maximum,
        "MIN": np.minimum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }
    return functions[op.name].reduce(whole, axis=0).astype(dtype)


@given(reductions())
@settings(max_examples=80, deadline=None)
def test_reductions_are_numpys_and_the_same_bits_everywhere(case: Any) -> None:
    rows, op, order, in_place = case
    wanted = model(rows, op)
    with connected_ranks(len(rows)) as ranks:
        buffers = [r.copy() for r in rows]

        def work(rank: int) -> Any:
            operation = ranks.operation(rank, "all_reduce", order=order)
            out = buffers[rank] if in_place else None
            return operation.reduce([buffers[rank]], op, None, out)[0]

        results = ranks.run(work)
        parts = ranks.run(lambda r: ranks.operation(r, "at one").reduce([rows[r]], op, 1)[0])
    for rank, result in enumerate(results):
        assert result.dtype == rows[0].dtype
        assert result.tobytes() == results[0].tobytes()
        np.testing.assert_array_equal(result, wanted)
        assert (result is buffers[rank]) == in_place
        assert in_place or (buffers[rank] == rows[rank]).all()
        np.testing.assert_array_equal(parts[rank], wanted if rank == 1 else rows[rank])


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_everything_else_is_numpys(data: Any) -> None:
    """All other movements, of random shapes, one after another over the same connections."""
    count = data.draw(st.integers(2, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    dtype = data.draw(st.sampled_from(["float32", "int16", "bfloat16", "bool"]))
    place = data.draw(st.integers(0, count - 1))
    biggest = data.draw(st.sampled_from([3, 200, 40_000]))

    def array(*shape: int) -> Any:
        return rng.integers(0, 2, shape).astype(jnp.dtype(dtype))

    def lengths() -> list[int]:
        return [int(n) for n in rng.integers(0, biggest, count)]

    uneven = [array(n, 2) for n in lengths()]
    even = [array(count * 5, 3) for _ in range(count)]
    tables = [[array(n) for n in lengths()] for _ in range(count)]
    splits = [lengths() for _ in range(count)]
    wholes = [array(sum(s), 2) for s in splits]

    with connected_ranks(count) as ranks:

        def work(r: int) -> list[Any]:
            found: list[Any] = []

            def do(same: str, operate: Callable[[OnHost], Any], value: Any = None) -> None:
                found.append(operate(ranks.operation(r, same, value)))
                ranks.channels[r].finish()

            do("gather", lambda o: o.gather(uneven[r]), uneven[r].shape)
            do("to one", lambda o: o.gather(uneven[r], place), uneven[r].shape)
            do("rows", lambda o: o.gather(even[r], None, True))
            do("from one", lambda o: o.broadcast(even[r], place))
            do("scatter rows", lambda o: o.scatter(even[r], place))
            shapes = [x.shape for x in tables[r]]
            source = [dtype, shapes] if r == place else None
            do("scatter", lambda o: o.scatter(tables[r] if r == place else None, place), source)
            do("exchange", lambda o: o.exchange(tables[r]), shapes)
            do(
                "rows to all",
                lambda o: o.exchange(wholes[r], Splits(splits[r], None)),
                [splits[r], None],
            )
            do("scatter sum", lambda o: o.reduce_scatter(even[r], ReduceOp.MAX))
            do("meet", lambda o: o.agree(), r)
            return found

        results = ranks.run(work)
    parts = [np.split(w, np.cumsum(s)[:-1]) for w, s in zip(wholes, splits, strict=True)]
    for r, found in enumerate(results):
        wanted = [
            uneven,
            uneven if r == place else None,
            np.concatenate(even),
            even[place],
            even[place].reshape(count, 5, 3)[r],
            tables[place][r],
            [tables[i][r] for i in range(count)],
            np.concatenate([p[r] for p in parts]),
            np.stack(even).max(0).reshape(count, 5, 3)[r],
            list(range(count)),
        ]
        for mine, theirs in zip(found, wanted, strict=True):
            jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def test_narrow_numbers_are_rounded_once() -> None:
    rows = [np.float16([2048]), np.float16([1]), np.float16([1])]
    out = np.zeros(1, np.float16)
    reduce_into(SUM, rows, out)
    assert out == 2050  # one after another they would stay at 2048
    eighths = [np.array([0.0625 * n], ml_dtypes.float8_e4m3fn) for n in (16, 1, 1)]
    small = np.zeros(1, ml_dtypes.float8_e4m3fn)
    reduce_into(SUM, eighths, small)
    assert float(small[0]) == 1.125
    nibbles = [np.array([7, -3], ml_dtypes.int4), np.array([1, -3], ml_dtypes.int4)]
    four = np.zeros(2, ml_dtypes.int4)
    reduce_into(SUM, nibbles, four)
    assert four.astype(int).tolist() == [-8, -6]
    reduce_into(premul_sum(3), [np.int32([1]), np.int32([2])], whole := np.zeros(1, np.int32))
    assert whole.tolist() == [9]


@pytest.mark.parametrize("length", [100, 500_000])  # at once, and in pieces
def test_sums_are_made_in_the_order_of_the_group(length: int) -> None:
    rng = np.random.default_rng(0)
    rows = list((rng.standard_normal((3, length)) * 10.0 ** rng.integers(-3, 9)).astype(np.float32))
    order = (2, 0, 1)
    wanted = (rows[2] + rows[0]) + rows[1]
    assert (wanted != (rows[0] + rows[1]) + rows[2]).any()
    with connected_ranks(3) as ranks:
        work = lambda r: ranks.operation(r, "sum", order=order).reduce([rows[r]], SUM)[0]  # noqa: E731
        for result in ranks.run(work):
            assert result.tobytes() == wanted.tobytes()


def test_arrays_of_jax_are_not_copied_on_their_way_in_and_out() -> None:
    x = jnp.arange(1000, dtype=jnp.float32)
    assert workers_on_host._host(x).ctypes.data == x.unsafe_buffer_pointer()
    with connected_ranks(2) as ranks:
        (first,), _ = ranks.run(lambda r: ranks.operation(r, "sum").reduce([x], SUM))
    assert isinstance(first, jax.Array)
    assert first.unsafe_buffer_pointer() % 64 == 0
    room = workers_on_host._room((1000,), np.float32)
    assert workers_on_host.given(x, room, None).unsafe_buffer_pointer() == room.ctypes.data


def test_other_orders_of_bytes_and_scattered_arrays() -> None:
    swapped = np.arange(4, dtype=">f4")
    scattered = np.arange(8, dtype=np.float32)[::2] / 2
    with connected_ranks(2) as ranks:
        work = lambda r: ranks.operation(r, "sum").reduce([[swapped, scattered][r]], SUM)[0]  # noqa: E731
        for result in ranks.run(work):
            assert result.tolist() == [0, 2, 4, 6]


def test_much_data_in_both_directions_through_small_buffers() -> None:
    x = np.ones(1 << 20, np.float64)
    with connected_ranks(3, buffer=4096) as ranks:
        for (result,) in ranks.run(lambda r: ranks.operation(r, "sum").reduce([x * r], SUM)):
            assert (result == 3).all()
        values = ranks.run(lambda r: ranks.operation(r, "meet", ["long" * 20_000, r]).agree())
        assert [[v[1] for v in found] for found in values] == [[0, 1, 2]] * 3


# -- disagreement --------------------------------------------------------------------------------------


def summed(operation: OnHost, size: int, dtype: Any, op: ReduceOp) -> Any:
    return operation.reduce([np.ones(size, dtype)], op)


KNOWN: dict[str, tuple[str, Operate]] = {
    "sum": ("all_reduce(SUM, float32[9])", lambda o, r: summed(o, 9, np.float32, SUM)),
    "max": ("all_reduce(MAX, float32[9])", lambda o, r: summed(o, 9, np.float32, ReduceOp.MAX)),
    "shape": ("all_reduce(SUM, float32[8])", lambda o, r: summed(o, 8, np.float32, SUM)),
    "dtype": ("all_reduce(SUM, int32[9])", lambda o, r: summed(o, 9, np.int32, SUM)),
    "large": ("all_reduce(SUM, float32[n])", lambda o, r: summed(o, 1 << 20, np.float32, SUM)),
    "from 0": ("broadcast(from 0)", lambda o, r: o.broadcast(np.ones(9, np.float32), 0)),
    "from 1": ("broadcast(from 1)", lambda o, r: o.broadcast(np.ones(9, np.float32), 1)),
}


def known(ranks: ConnectedRanks, name: str, rank: int) -> Any:
    same, operate = KNOWN[name]
    result = operate(ranks.operation(rank, same), rank)
    ranks.channels[rank].finish()
    return result


@pytest.mark.parametrize("other", [n for n in KNOWN if n != "sum"])
@pytest.mark.parametrize("odd", [0, 2])
def test_known_operations_that_do_not_fit_are_found_at_every_call(other: str, odd: int) -> None:
    with connected_ranks(3) as ranks:
        for name in ("sum", other, "sum", other):
            assert not any(isinstance(x, Exception) for x in ranks.run(lambda r: known(ranks, name, r)))
        found = ranks.run(lambda r: known(ranks, other if r == odd else "sum", r))
        for error in found:
            assert isinstance(error, DifferentError)
            said = {r: n.same for r, n in error.notices.items()}
            assert said == {r: KNOWN[other if r == odd else "sum"][0] for r in range(3)}
        for error in ranks.run(lambda r: known(ranks, "sum", r)):  # and nothing can follow
            assert isinstance(error, InterruptedChannelError)


def test_known_operations_in_another_order() -> None:
    with connected_ranks(2) as ranks:
        for name in ("sum", "large"):
            ranks.run(lambda r: known(ranks, name, r))
        orders = [("sum", "large"), ("large", "sum")]
        found = ranks.run(lambda r: [known(ranks, name, r) for name in orders[r]])
        assert [type(e) for e in found] == [DifferentError] * 2


# -- ranks that are not there ------------------------------------------------------------------------

LARGE = np.ones((3, 1 << 18), np.float32)
EVERY: dict[str, Operate] = {
    "reduce": lambda o, r: o.reduce([LARGE], SUM),
    "reduce to one": lambda o, r: o.reduce([LARGE], SUM, 0),
    "small reduce": lambda o, r: o.reduce([LARGE[0, :9]], SUM),
    "reduce_scatter": lambda o, r: o.reduce_scatter(LARGE, SUM),
    "from_one": lambda o, r: o.broadcast(LARGE, 1),
    "to the one that dies": lambda o, r: o.gather(LARGE, 1),
    "gather": lambda o, r: o.gather(LARGE),
    "gather_rows": lambda o, r: o.gather(LARGE, None, True),
    "scatter": lambda o, r: o.scatter(list(LARGE) if r == 1 else None, 1),
    "scatter_rows": lambda o, r: o.scatter(LARGE, 1),
    "exchange": lambda o, r: o.exchange(list(LARGE)),
    "exchange_rows": lambda o, r: o.exchange(LARGE, Splits([1, 1, 1], None)),
    "agree": lambda o, r: o.agree(),
}
VALUES: dict[str, Any] = {
    "to the one that dies": LARGE.shape,
    "gather": LARGE.shape,
    "scatter": ["float32", [LARGE[0].shape] * 3],
    "exchange": [LARGE[0].shape] * 3,
    "exchange_rows": [[1, 1, 1], None],
}


@pytest.mark.parametrize("name", EVERY)
def test_a_rank_that_dies_before_it_comes(name: str) -> None:
    with connected_ranks(3) as ranks:
        ranks.die(1)
        operation = lambda r: EVERY[name](ranks.operation(r, name, VALUES.get(name)), r)  # noqa: E731
        first, _, third = ranks.run(lambda r: None if r == 1 else operation(r))
        for error in (first, third):
            assert isinstance(error, LinkLostError)
            assert error.rank == 1


@pytest.mark.parametrize("name", [n for n in EVERY if n not in ("small reduce", "agree")])
def test_a_rank_that_dies_in_the_middle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 dies when it has sent its notice and some of its data."""
    with connected_ranks(3, buffer=64 << 10) as ranks:
        operation = lambda r: EVERY[name](ranks.operation(r, name, VALUES.get(name)), r)  # noqa: E731
        from phalanx.collectives import channels

        step = channels.Transfer._step
        steps = iter(range(1 << 20))

        def dying(self: channels.Transfer) -> None:
            step(self)
            if self._channel.rank == 1 and next(steps) == 1:
                ranks.die(1)

        monkeypatch.setattr(channels.Transfer, "_step", dying)
        found = ranks.run(operation)
        assert isinstance(found[1], LinkLostError), found[1]
        for rank in (0, 2):
            if name.startswith("scatter") and not isinstance(found[rank], Exception):
                # It needs nothing else of rank 1 than its part, which may be there already.
                np.testing.assert_array_equal(np.ravel(found[rank]), LARGE[rank])
            else:
                assert isinstance(found[rank], LinkLostError), found[rank]


@pytest.mark.parametrize("name", EVERY)
def test_a_rank_that_never_comes_is_named(name: str) -> None:
    with connected_ranks(3) as ranks:

        def operation(r: int) -> Any:
            if r == 1:
                return None
            return EVERY[name](ranks.operation(r, name, VALUES.get(name), 0.3), r)

        first, _, third = ranks.run(operation)
        for error in (first, third):
            assert isinstance(error, LateError)
            assert error.ranks == [1]


def test_buffers_that_overlap_with_what_is_sent() -> None:
    """Results never overwrite what another rank has not got yet."""
    count, length = 3, 1 << 18
    given_ = [np.arange(count * length, dtype=np.float32) + r for r in range(count)]
    inputs = [length] * count
    with connected_ranks(count, buffer=4096) as ranks:
        buffers = [x.copy() for x in given_]

        def work(r: int) -> Any:
            operation = ranks.operation(r, "all_to_all", [inputs, None])
            return operation.exchange(buffers[r], Splits(inputs, None), buffers[r])

        for r, result in enumerate(ranks.run(work)):
            parts = [x[r * length : (r + 1) * length] for x in given_]
            np.testing.assert_array_equal(result, np.concatenate(parts))
        buffers = [x.copy() for x in given_]
        own = [b[:length] for b in buffers]
        work = lambda r: ranks.operation(r, "scatter").reduce_scatter(buffers[r], SUM, own[r])  # noqa: E731
        for r, result in enumerate(ranks.run(work)):
            np.testing.assert_array_equal(result, sum(given_)[r * length : (r + 1) * length])
