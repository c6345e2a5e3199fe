"""The table of collectives: a new operation is one row of it, for all ways to communicate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.collectives.table import OPERATIONS, Backend, Operation, Request, Takes


def gathered(backend: Backend, request: Request) -> Any:
    return backend.gather(request.x[None], None, True, None)


def prefix(request: Request, rows: Any) -> Any:
    return jnp.cumsum(jnp.asarray(rows), axis=0)[request.me]


PREFIX_SUM = Operation("prefix_sum", Takes.ARRAY, gathered, finish=prefix)
"""The sum over all ranks up to this one."""


@pytest.fixture
def row() -> Iterator[None]:
    OPERATIONS[PREFIX_SUM.name] = PREFIX_SUM
    yield
    del OPERATIONS[PREFIX_SUM.name]


def prefix_sum(x: Any) -> Any:
    from phalanx.collectives.perform import perform

    return perform("prefix_sum", None, False, x)[0]


@pytest.mark.usefixtures("row")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_new_row_works_between_replicas(compiled: bool) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(4)])

    def run() -> Any:
        step = lambda: prefix_sum(jnp.float32(2.0) + px.comm.get_rank())  # noqa: E731
        return strategy.experimental_local_results(strategy.run(step))

    found = (px.function(run) if compiled else run)()
    assert [float(x) for x in found] == [2.0, 5.0, 9.0, 14.0]


def on_a_worker() -> float:
    from phalanx.collectives import table

    px.comm.init()
    table.OPERATIONS[PREFIX_SUM.name] = PREFIX_SUM
    return float(prefix_sum(np.float32(2.0 + px.comm.get_rank())))


@pytest.mark.parametrize("route", ["host", "devices"])
def test_a_new_row_works_between_workers(route: str) -> None:
    with px.testing.MultiProcess(2, preload=["phalanx"], env={"PHALANX_COMM_ROUTE": route}) as cluster:
        assert cluster.run(on_a_worker) == [2.0, 5.0]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_row_has_its_functions(name: str) -> None:
    assert callable(getattr(px.comm, name))
    if OPERATIONS[name].takes is not Takes.NOTHING and name != "gather_into_tensor":
        assert callable(getattr(px.comm, f"{name}_"))


def test_what_ranks_must_agree_on() -> None:
    x = jnp.ones((4, 3))
    ranks = (0, 1)
    assert Request.of("reduce", ranks, x, "max", 1).same == "to 1, MAX, float32[4,3]"
    request = Request.of("all_gather", ranks, x)
    assert (request.same, request.told) == ("float32", [4, 3])
    request = Request.of("all_to_all_single", ranks, x, splits=([1, 3], None))
    assert request.same == "float32 with the trailing shape [3]"
    assert request.told == [[1, 3], None]
    request = Request.of("scatter", ranks, [x, x], root=0)
    assert (request.same, request.told) == ("from 0", ["float32", [[4, 3], [4, 3]]])
    assert Request.of("scatter", ranks, None, root=0).told is None
    with pytest.raises(px.errors.InvalidTypeError, match="array of numbers"):
        Request.of("broadcast", ranks, jax.random.key(0), root=0)
