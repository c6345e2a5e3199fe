"""Calls that are made again are prepared: they give what the first call gave, and fail as it would."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.collectives import groups, prepared_calls
from phalanx.collectives.reductions import as_reduction, check_dtype

ROUNDS = 5
DTYPES = (np.float32, np.float64, np.float16, jnp.bfloat16, np.int32, np.uint8, np.bool_, np.complex64)
SHAPES = ((), (0,), (5,), (3, 4), (2, 1, 3))
OPS = (px.ReduceOp.SUM, "max", "mean", "prod", "bor")
FORMS = ("numpy", "jax", "in place")
DEADLINE = 30.0


@pytest.fixture(scope="module")
def trio() -> Iterator[px.testing.MultiProcess]:
    with px.testing.MultiProcess(workers=3, preload=["phalanx", __name__]) as cluster:
        yield cluster


class Ways:
    """Counts the calls that are prepared, and those among them that go on in the general way."""

    def __enter__(self) -> Ways:
        self.prepared = self.gone_on = 0
        kind = prepared_calls.PreparedCall
        self._plain = plain_swap, plain_go_on = kind._swap, kind._go_on

        def swap(call: Any, data: Any) -> bool:
            self.prepared += 1
            return plain_swap(call, data)

        def go_on(call: Any, *args: Any) -> Any:
            self.gone_on += 1
            return plain_go_on(call, *args)

        kind._swap, kind._go_on = swap, go_on  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        kind = prepared_calls.PreparedCall
        kind._swap, kind._go_on = self._plain  # type: ignore[method-assign]


def bits(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    data = np.asarray(x)
    return data.dtype.name, data.shape, data.tobytes()


def is_defined(op: Any, dtype: Any) -> bool:
    try:
        check_dtype(as_reduction(op), np.dtype(dtype))
    except px.errors.InvalidTypeError:
        return False
    return True


# -- results -------------------------------------------------------------------------------------------


def reduced(x: Any, op: Any, group: Any, form: str) -> Any:
    if form != "in place":
        return px.comm.all_reduce(x, op, group)[0]
    buffer = x.copy()
    assert px.comm.all_reduce_(buffer, op, group) is None
    return buffer


def all_kinds(members: list[int]) -> tuple[list[str], int, int]:
    """Where calls after the first differ from it; how many there were, and how many prepared."""
    px.comm.init()
    group, rank = px.comm.new_group(members), px.comm.get_rank()
    wrong, calls = [], 0
    if rank not in members:
        assert px.comm.all_reduce(np.ones(2), group=group) == (None, None)
        return [], 1, 1
    with jax.enable_x64(True), Ways() as ways:
        for dtype, shape, op, form in itertools.product(DTYPES, SHAPES, OPS, FORMS):
            if not is_defined(op, dtype):
                continue
            values = np.random.default_rng(rank).uniform(0, 3, shape).astype(dtype)
            x: Any = jnp.asarray(values) if form == "jax" else values
            given = bits(x)
            results = [reduced(x, op, group, form) for _ in range(ROUNDS)]
            calls += ROUNDS
            case = f"{np.dtype(dtype).name}{shape} {op} {form}"
            kinds = {type(r) for r in results}
            if kinds != {type(x)} or len({bits(r) for r in results}) > 1 or bits(x) != given:
                wrong.append(f"{case}: {results} for {x}")
            if form == "numpy" and any(np.shares_memory(results[-1], r) for r in results[:-1]):
                wrong.append(f"{case}: results share memory")
    return wrong[:10], calls, ways.prepared


@pytest.mark.parametrize("members", [[0, 1], [2, 0, 1]], ids=str)
def test_results_are_those_of_the_first_call(trio: px.testing.MultiProcess, members: list[int]) -> None:
    for wrong, calls, prepared in trio.run(all_kinds, members):
        assert wrong == []
        assert prepared >= 0.6 * calls


def odd_arrays() -> list[Any]:
    """Arrays that are not in one piece, of another byte order, of other kinds; and what is told."""
    px.comm.init()
    rank, found = px.comm.get_rank(), []
    table = np.arange(12, dtype=np.float32).reshape(3, 4) + rank
    variable = px.Variable(np.float32([1.0, 2.0]))
    for _ in range(3):
        for x in (table.T, table[:, 1], table.astype(">f4"), 1.5, np.float32(2.0), variable):
            found.append(np.asarray(px.comm.all_reduce(x)[0]).tolist())
        columns = table.copy()
        px.comm.all_reduce_(columns[:, 1])
        found.append(columns.tolist())
        for factor in (2, 2.0):
            found.append(px.comm.all_reduce(table[0], px.comm.premul_sum(factor))[0].tolist())
        px.comm.barrier()
    return found


def test_odd_arrays_are_those_of_the_first_call(trio: px.testing.MultiProcess) -> None:
    for found in trio.run(odd_arrays):
        once = len(found) // 3
        assert found[:once] == found[once : 2 * once] == found[2 * once :]
        assert found[1] == [3.0 * i + 3 for i in (1, 5, 9)]


def at_lines_of_their_own() -> tuple[list[float], int]:
    """Ranks whose calls are at different lines, some in a loop and some not."""
    px.comm.init()
    rank, results = px.comm.get_rank(), []
    x = np.float32([rank])
    with Ways() as ways:
        for i in range(8):
            if rank == 0:
                result, _ = px.comm.all_reduce(x + i)
            elif rank == 1 and i % 2:
                result, handle = px.comm.all_reduce(x + i)
                assert handle is None
            else:
                (result,) = px.comm.all_reduce(x + i)[0]
            results.append(result.item())
    return results, ways.prepared


def test_ranks_may_call_at_different_lines(trio: px.testing.MultiProcess) -> None:
    for results, prepared in trio.run(at_lines_of_their_own):
        assert results == [3.0 + 3 * i for i in range(8)]
        assert prepared >= 4


def in_small_pieces() -> tuple[list[bool], int]:
    """Connections that hold little, so that nothing is sent or received at once."""
    px.comm.init()
    px.comm.barrier()
    for link in groups.world().channels[0, 1, 2].links.values():
        link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    x = np.arange(8000, dtype=np.float32)
    with Ways() as ways:
        results = [bool(np.all(px.comm.all_reduce(x + i)[0] == 3 * (x + i))) for i in range(10)]
    return results, ways.gone_on


def test_what_comes_in_pieces_goes_on_in_the_general_way() -> None:
    with px.testing.MultiProcess(workers=3, preload=["phalanx", __name__]) as cluster:
        for results, gone_on in cluster.run(in_small_pieces):
            assert results == [True] * 10
            assert gone_on > 0


# -- what goes wrong -----------------------------------------------------------------------------------


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE
    moment = threading.Event()
    while not condition():
        assert time.monotonic() < end
        moment.wait(0.005)


def waiting_for_the_late() -> tuple[float, int, list[str]]:
    """Rank 0 waits in a prepared call, which is shown, and says so to the one it waits for."""
    px.comm.init()
    rank, shown = px.comm.get_rank(), []
    waits = groups.world().status.peer_waits

    def tell() -> None:
        # Rank 2 may come a moment later, too.
        wait_until(lambda: waits and any(w.ranks() == [1] for w in waits.values()))
        shown.extend(f"{w.what} {w.ranks()}" for w in waits.values())
        px.comm.send(np.float32([1.0]), 1)

    result = 0.0
    with Ways() as ways:
        for i in range(4):
            teller = threading.Thread(target=tell)
            if i == 3 and rank == 0:
                teller.start()
            if i == 3 and rank == 1:
                px.comm.recv(np.zeros(1, np.float32), 0)
            result = px.comm.all_reduce(np.float32([rank + i]))[0].item()
            if teller.ident:
                teller.join(DEADLINE)
    return result, ways.gone_on, shown


def test_a_late_member_is_shown_and_waited_for(trio: px.testing.MultiProcess) -> None:
    found = trio.run(waiting_for_the_late)
    assert [result for result, _, _ in found] == [12.0] * 3
    assert found[0][1] >= 1
    assert found[0][2][0].startswith("all_reduce(SUM, float32[1])")
    assert found[0][2][0].endswith("[1]")


def prepared_then(what: str) -> tuple[str, str]:
    px.comm.init()
    rank, x = px.comm.get_rank(), np.ones(4, np.float32)
    calls = {"sum": lambda: px.comm.all_reduce(x), "max": lambda: px.comm.all_reduce(x, "max")}
    try:  # the others may not have come to the end of the last call yet when one is killed
        for _ in range(3):
            for call in calls.values():
                call()
        if what == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for name in ("sum", "max") if rank == 1 else ("max", "sum"):
            calls[name]()
    except px.PhalanxError as error:
        return type(error).__name__, str(error) + "".join(getattr(error, "__notes__", []))
    return "", ""


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("order", "CollectiveMismatchError", ["all_reduce(SUM", "all_reduce(MAX", "rank 1"]),
        ("killed", "WorkerLostError", ["worker 1 ", "SIGKILL", "In all_reduce, launched at"]),
    ],
    ids=["order", "killed"],
)
def test_prepared_calls_fail_as_others_do(what: str, kind: str, words: list[str]) -> None:
    with px.testing.MultiProcess(workers=3, preload=["phalanx", __name__]) as cluster:
        results = cluster.start(prepared_then, what).results(timeout=60.0)
    told = [r.value for r in results if what != "killed" or r.worker != 1]
    assert {found for found, _ in told} == {kind}
    for _, text in told:
        assert "test_prepared_calls.py" in text
        assert all(word in text for word in words), text


def from_several_places() -> tuple[list[float], list[float]]:
    """Calls that wait while others are under way; both kinds in the same order on all ranks."""
    px.comm.init()
    x, sums, later = np.float32([px.comm.get_rank()]), [], []
    for i in range(20):
        handle = px.comm.all_reduce(x + i, async_op=True)[1] if i % 3 == 0 else None
        sums.append(px.comm.all_reduce(x * i)[0].item())
        if handle is not None:
            later.append(handle.result().item())
    return sums, later


def test_prepared_calls_keep_the_order(trio: px.testing.MultiProcess) -> None:
    for sums, later in trio.run(from_several_places):
        assert sums == [3.0 * i for i in range(20)]
        assert later == [3.0 + 3 * i for i in range(0, 20, 3)]


def many_signatures() -> tuple[bool, int]:
    px.comm.init()
    sizes = list(range(1, prepared_calls._MOST + 20))
    right = all(np.all(px.comm.all_reduce(np.ones(n, np.int8))[0] == 3) for n in sizes)
    return right, len(groups.world().prepared)


def test_few_signatures_are_kept(trio: px.testing.MultiProcess) -> None:
    for right, kept in trio.run(many_signatures):
        assert right
        assert 0 < kept <= prepared_calls._MOST
