"""What torch.distributed or MindSpore refuse or get wrong: each line of the guide's table."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import phalanx as px
from tests.comm.test_eager_replicas import ranks

c = px.comm
GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "comm.md"
CHECKS: dict[str, Callable[[int], None]] = {}
MISMATCHES: dict[str, Callable[[int], Any]] = {}


def line(text: str) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    def add(check: Callable[[int], None]) -> Callable[[int], None]:
        CHECKS[text] = check
        return check

    return add


def total(x: Any, op: Any = "sum") -> Any:
    out, _ = c.all_reduce(np.asarray(x), op)
    assert out.dtype == np.asarray(x).dtype
    return out.astype(complex if out.dtype.kind == "c" else float).tolist()


@line("reductions of `int16`")
def _(rank: int) -> None:
    assert total(np.array([300, rank], np.int16)) == [600, 1]


@line("reductions of 8-bit floating point numbers")
def _(rank: int) -> None:
    assert total(np.array([1.5, rank], ml_dtypes.float8_e4m3fn)) == [3.0, 1.0]


@line("sums of `float64`, `uint8` and `bool`")
def _(rank: int) -> None:
    assert total(np.array([1e-200])) == [2e-200]
    assert total(np.array([100 + rank], np.uint8)) == [201]
    assert total(np.array([rank == 0, False])) == [1, 0]


@line("the mean of whole numbers")
def _(rank: int) -> None:
    assert total(np.array([3 * rank, -3 * rank]), "avg") == [1, -2]


@line("the product of complex numbers")
def _(rank: int) -> None:
    assert total(np.array([1j], np.complex64), "prod") == [-1]


@line("`PREMUL_SUM`")
def _(rank: int) -> None:
    assert total(np.array([2.0 + rank]), c.premul_sum(0.5)) == [2.5]


@line("`gather` of complex numbers")
def _(rank: int) -> None:
    out, _ = c.gather(np.array([1j * rank], np.complex64))
    assert rank or [o.tolist() for o in out] == [[0], [1j]]


@line("`all_gather` of arrays of different shapes")
def _(rank: int) -> None:
    out, _ = c.all_gather(np.arange(rank + 1))
    assert [o.tolist() for o in out] == [[0], [0, 1]]


@line("`all_to_all` of lists of different shapes")
def _(rank: int) -> None:
    out, _ = c.all_to_all([np.full(1, rank), np.full(2, rank)])
    assert [o.tolist() for o in out] == [[0] * (rank + 1), [1] * (rank + 1)]


@line("`all_gather_into_tensor` into rows")
def _(rank: int) -> None:
    out = np.zeros((2, 3))
    c.all_gather_into_tensor_(out, np.full(3, rank + 1.0))
    assert out.tolist() == [[1.0] * 3, [2.0] * 3]


@line("`all_to_all_single` of a length that the ranks do not divide")
def _(rank: int) -> None:
    with pytest.raises(ValueError, match="divisible by the 2 ranks"):
        c.all_to_all_single(np.ones(3))


@line("`all_to_all_single_with_output_shape` without sizes of the input")
def _(rank: int) -> None:
    out, _ = c.all_to_all_single_with_output_shape((4,), np.arange(4) + 10 * rank)
    assert out.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]


@line("the buffers of the other ranks after `reduce`")
def _(rank: int) -> None:
    x = np.array([1.0, 2.0]) * (rank + 1)
    c.reduce_(x, 0)
    assert x.tolist() == [[3.0, 6.0], [2.0, 4.0]][rank]


@line("a message to a rank that does not exist")
def _(rank: int) -> None:
    with pytest.raises(ValueError, match=r"one of the ranks \[0, 1\].*Received: 7"):
        c.send(np.ones(1), 7)


@line("tags of messages")
def _(rank: int) -> None:
    handles = c.batch_isend_irecv(
        [c.P2POp("isend", np.full(1, t), 1 - rank, tag=t) for t in (1, 2)]
        + [c.P2POp("irecv", np.zeros(1, int), 1 - rank, tag=t) for t in (2, 1)]
    )
    assert [h.result().tolist() for h in handles[2:]] == [[2], [1]]


@line("an empty list of messages")
def _(rank: int) -> None:
    with pytest.raises(ValueError, match="at least one P2POp"):
        c.batch_isend_irecv([])


@line("whether an operation has completed")
def _(rank: int) -> None:
    _, handle = c.all_reduce(np.ones(1), async_op=True)
    assert handle is not None
    handle.wait()
    assert handle.is_completed()


@line("the order of ranks in a group")
def _(rank: int) -> None:
    out, _ = c.all_gather(np.array(rank), c.Group("turned", (1, 0)))
    assert [int(o) for o in out] == [1, 0]


@line("a group that was destroyed")
def _(rank: int) -> None:
    group = c.create_group(f"gone {rank}", [rank])
    c.destroy_group(group)
    with pytest.raises(px.errors.NotFoundError, match="no such group"):
        c.all_reduce(np.ones(1), "sum", group)


@line("ranks as a tuple")
def _(rank: int) -> None:
    assert c.create_group(f"tuple {rank}", (rank,)).ranks == (rank,)


MISMATCHES["shapes that differ between ranks"] = lambda rank: c.all_reduce(np.ones(2 + rank))
MISMATCHES["dtypes that differ between ranks"] = lambda rank: c.all_reduce(
    np.ones(2, ["f4", "f2"][rank])
)
MISMATCHES["operations in another order"] = lambda rank: (
    c.all_reduce(np.ones(2), ["sum", "max"][rank]),
    c.all_reduce(np.ones(2), ["max", "sum"][rank]),
)


def everything(rank: int) -> list[str]:
    for check in CHECKS.values():
        check(rank)
    return list(CHECKS)


def test_between_replicas() -> None:
    assert ranks(2, everything) == [list(CHECKS)] * 2
    for call in MISMATCHES.values():
        with pytest.raises(px.errors.CollectiveMismatchError):
            ranks(2, call)


def in_workers() -> list[str]:
    px.comm.init()
    return everything(px.comm.get_rank())


def test_between_workers(pair: px.testing.MultiProcess) -> None:
    assert pair.run(in_workers, timeout=60) == [list(CHECKS)] * 2


def disagree(name: str) -> str:
    px.comm.init()
    try:
        MISMATCHES[name](px.comm.get_rank())
    except px.errors.CollectiveMismatchError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", MISMATCHES)
def test_workers_that_disagree(name: str) -> None:
    with px.testing.MultiProcess(workers=2, preload=["phalanx"]) as cluster:
        first, second = cluster.run(disagree, name, timeout=60)
    assert first == second
    assert first != "no error"


def test_the_guide_has_these_lines() -> None:
    text = GUIDE.read_text().split("## What torch and MindSpore do not do")[1].split("\n## ")[0]
    found = [m.group(1).strip() for m in re.finditer(r"^\| ([^|]+) \|", text, re.MULTILINE)]
    assert sorted(found) == sorted([*CHECKS, *MISMATCHES])
