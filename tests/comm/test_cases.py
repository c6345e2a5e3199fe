"""Every operation, dtype and group of the cases: as torch and MindSpore give it, and as NumPy says.

Where they refuse what is mathematics, or torch leaves a buffer in pieces, NumPy is the reference alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.comm import cases as cs, test_recorded as recorded

DATA = Path(__file__).parent / "data"
TORCH = json.loads((DATA / "torch_cases.json").read_text())["cases"]
MINDSPORE = json.loads((DATA / "mindspore_cases.json").read_text())["cases"]


def run_case(case: cs.Case, x: Any, me: Any, splits: Any = (None, None)) -> Any:
    """One case, by the functions that leave their input alone."""
    c, count = px.comm, len(case.ranks)
    group = c.Group(f"of {case.ranks}", case.ranks)
    name = case.name.removesuffix(" uneven").removesuffix(" zero")
    if case.op:
        rooted = (case.root,) if name == "reduce" else ()
        return getattr(c, name)(x, *rooted, case.op, group)[0]
    if name in ("broadcast", "gather", "scatter"):
        return getattr(c, name)(x, case.root, group)[0]
    if name == "all_to_all_single":
        return c.all_to_all_single(x, *splits, group)[0]
    if name == "ring":
        table = jnp.asarray(case.ranks) if isinstance(x, jax.Array) else case.ranks
        c.isend(x, table[(me + 1) % count], group)
        return c.recv(x, table[(me - 1) % count], group)
    return getattr(c, name)(x, group)[0]


def run_all(chosen: list[cs.Case], rank: int) -> dict[str, Any]:
    """All cases of a rank that knows its number, with NumPy's arrays."""
    found: dict[str, Any] = {}
    for case in chosen:
        if rank not in case.ranks:
            assert px.comm.all_reduce(np.ones(1), "sum", px.comm.Group("x", case.ranks)) == (None, None)
            continue
        x = cs.given(case, rank)
        if case.name == "scatter" and rank != case.root:
            x = None
        splits = (None, None)
        if case.name.startswith("all_to_all_single"):
            splits = (cs.came(case, rank), cs.splits(case, rank))
        try:
            out = run_case(case, x, case.ranks.index(rank), splits)
        except TypeError as error:
            named = "is defined for arrays of these kinds" in str(error)
            found[case.key] = "undefined" if named else str(error)
            continue
        for part in out if isinstance(out, list) else [out]:
            assert part is None or part.dtype == cs.dtype_of(case.dtype), case.key
        found[case.key] = cs.plain(out)
    return found


def undefined(case: cs.Case) -> bool:
    """What is not mathematics."""
    if case.op in ("BAND", "BOR", "BXOR"):
        return "float" in case.dtype or "complex" in case.dtype
    return (case.op in ("MIN", "MAX") and "complex" in case.dtype) or (
        case.op == "AVG" and case.dtype == "bool"
    )


def close(a: Any, b: Any, dtype: str) -> bool:
    """Whether results are the same, but for the last bit of a quotient."""
    narrow = {"float16": 1e-3, "bfloat16": 1e-2, "float8_e4m3fn": 0.1}
    if a is None or b is None:
        return a is b
    x, y = (np.asarray(jax.tree.leaves(v), float) for v in (a, b))
    return x.shape == y.shape and np.allclose(x, y, rtol=narrow.get(dtype, 1e-6), atol=0)


def check(world: int, found: list[dict[str, Any]], chosen: list[cs.Case]) -> None:
    torch = {key: results for count, key, results in TORCH if count == world}
    mindspore = {key: results for count, key, results in MINDSPORE if count == world}
    compared = 0
    for case in chosen:
        for rank in case.ranks:
            mine = found[rank][case.key]
            if undefined(case):
                assert mine == "undefined", case.key
                assert isinstance(torch[case.key][rank], str)
                continue
            assert close(mine, cs.plain(cs.expected(case, rank)), case.dtype), (case.key, rank, mine)
            theirs = torch[case.key][rank]
            in_pieces = case.name == "reduce" and rank != case.root
            if not isinstance(theirs, str) and not in_pieces:
                assert close(mine, theirs, case.dtype), (case.key, rank, mine, theirs)
                compared += 1
            if case.key in mindspore:
                assert close(mine, mindspore[case.key][rank], case.dtype), (case.key, rank, mine)
    assert compared > 200
    assert len({c.key for c in chosen} & set(mindspore)) > 40


@pytest.mark.parametrize("world", [2, 3])
def test_eager_replicas(world: int) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(world)])
    chosen = cs.cases(world)
    results: dict[int, Any] = {}

    def step() -> None:
        rank = int(px.comm.get_rank())
        results[rank] = run_all(chosen, rank)

    strategy.run(step)
    check(world, [results[r] for r in range(world)], chosen)


@pytest.mark.parametrize("world", [2, 3])
def test_compiled_replicas(world: int) -> None:
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(world)])
    chosen = [c for c in cs.cases(world) if c.name not in cs.UNEVEN and not undefined(c)]

    def step() -> list[Any]:
        rank = px.comm.get_rank()
        results = []
        for case in chosen:
            rows = [cs.given(case, r if r in case.ranks else case.ranks[0]) for r in range(world)]
            table = jax.tree.map(lambda *xs: jnp.asarray(np.stack(xs)), *rows)
            places = [case.ranks.index(r) if r in case.ranks else 0 for r in range(world)]
            mine = jax.tree.map(lambda t: t[rank], table)
            results.append(run_case(case, mine, jnp.asarray(places)[rank]))
        return results

    with jax.enable_x64(True):
        outputs = px.function(lambda: strategy.run(step))()
        found: list[dict[str, Any]] = [{} for _ in range(world)]
        for rank, local in enumerate(strategy.experimental_local_results(outputs)):
            for case, out in zip(chosen, local, strict=True):
                parts = [np.asarray(p) for p in out] if isinstance(out, list) else np.asarray(out)
                assert jax.tree.leaves(parts)[0].dtype == cs.dtype_of(case.dtype), case.key
                is_root = case.name != "gather" or rank == case.root  # all get the list
                found[rank][case.key] = cs.plain(parts if is_root else None)
    check(world, found, chosen)


def in_workers(world: int) -> dict[str, Any]:
    px.comm.init()
    return run_all(cs.cases(world), px.comm.get_rank())


def test_two_workers(pair: px.testing.MultiProcess) -> None:
    check(2, pair.run(in_workers, 2, timeout=120), cs.cases(2))


def test_three_workers(trio: px.testing.MultiProcess) -> None:
    check(3, trio.run(in_workers, 3, timeout=120), cs.cases(3))


@pytest.mark.parametrize("executor", ["eager", "compiled"])
def test_what_both_libraries_recorded_for_all_reduce(executor: str) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = [r for r in recorded.ALL_REDUCE if "result" in r]
    assert {r["library"].split()[0] for r in rows} == {"torch", "MindSpore"}
    assert len(rows) > 80

    def step() -> list[Any]:
        rank, results = px.comm.get_rank(), []
        for row in rows:
            both = np.stack([recorded.given(r, row["dtype"]) for r in (0, 1)])
            x = both[int(rank)] if executor == "eager" else jnp.asarray(both)[rank]
            results.append(px.comm.all_reduce(x, row["op"])[0])
        return results

    with jax.enable_x64(True):
        run = lambda: strategy.run(step)  # noqa: E731
        outputs = (px.function(run) if executor == "compiled" else run)()
        for local in strategy.experimental_local_results(outputs):
            for row, out in zip(rows, local, strict=True):
                assert np.dtype(out.dtype) == cs.dtype_of(row["dtype"])
                mine = np.asarray(out)
                plain = mine if mine.dtype.kind in "bc" else mine.astype(np.float64)
                assert plain.tolist() == row["result"], row
