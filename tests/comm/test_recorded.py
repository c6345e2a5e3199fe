"""The results that torch.distributed and MindSpore gave in two processes, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import phalanx as px

DATA = Path(__file__).parent / "data"
ALL_REDUCE = json.loads((DATA / "all_reduce.json").read_text())
TORCH = json.loads((DATA / "torch.json").read_text())

# What the recorded programs gave to all_reduce on their two ranks.
BOOLS = [[[True, False], [True, False]], [[True, False], [False, True]]]


def given(rank: int, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bool":
        return np.array(BOOLS[rank])
    return (np.array([[1, 2], [3, 4]]) * (rank + 1)).astype(jnp.dtype(dtype))


def reduced(cases: list[tuple[str, str]], inputs: dict[str, list[Any]]) -> list[Any]:
    """Run all cases in a worker: the result, its dtype, or the name of the error."""
    px.comm.init()
    results: list[Any] = []
    for op, dtype in cases:
        x = inputs[dtype][px.comm.get_rank()]
        before = x.copy()
        try:
            out, handle = px.comm.all_reduce(x, op)
        except TypeError as error:
            results.append(f"TypeError: {error}")
            continue
        assert handle is None
        assert (x == before).all()
        assert out.dtype == x.dtype
        plain = out if dtype[:4] in ("bool", "comp") else out.astype(np.float64)
        results.append(plain.tolist())
    return results


def expected(op: str, dtype: str) -> Any:
    """What the reduction means, by NumPy."""
    rows = [given(r, dtype) for r in (0, 1)]
    if dtype == "bool":
        a, b = rows
        meaning = {"SUM": a | b, "MAX": a | b, "BOR": a | b, "BXOR": a ^ b}
        return meaning.get(op, a & b).tolist()
    wide = [x.astype(np.complex128 if "complex" in dtype else np.float64) for x in rows]
    if op in ("BAND", "BOR", "BXOR"):
        a, b = (x.astype(np.int64) for x in wide)
        return {"BAND": a & b, "BOR": a | b, "BXOR": a ^ b}[op].tolist()
    if op == "AVG" and "int" in dtype:
        return ((wide[0] + wide[1]) // 2).tolist()
    functions = {"SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum}
    result = (wide[0] + wide[1]) / 2 if op == "AVG" else functions[op](*wide)
    return result.tolist()


def test_all_reduce_of_every_dtype(pair: px.testing.MultiProcess) -> None:
    cases = sorted({(row["op"], row["dtype"]) for row in ALL_REDUCE})
    cases += [("SUM", d) for d in ("uint16", "uint32", "uint64", "complex128")]
    inputs = {dtype: [given(r, dtype) for r in (0, 1)] for _, dtype in cases}
    first, second = pair.run(reduced, cases, inputs, timeout=120)
    assert first == second
    ours = dict(zip(cases, first, strict=True))
    for row in ALL_REDUCE:
        mine = ours[row["op"], row["dtype"]]
        if "result" in row:
            assert mine == row["result"], row
    # What is mathematics works, whoever refuses it; what is not is a TypeError that names what is.
    undefined = set()
    for (op, dtype), mine in ours.items():
        if isinstance(mine, str):
            undefined.add((op, dtype))
            assert "is defined for arrays of these kinds" in mine
        else:
            assert mine == expected(op, dtype), (op, dtype)
    floats = ["bfloat16", "complex64", "float16", "float32", "float64", "float8_e4m3fn"]
    assert undefined == {(op, d) for op in ("BAND", "BOR", "BXOR") for d in floats} | {
        ("MAX", "complex64"),
        ("MIN", "complex64"),
        ("AVG", "bool"),
    }
    refused = {(r["op"], r["dtype"]) for r in ALL_REDUCE if "refused" in r}
    assert {("SUM", "int16"), ("PROD", "complex64"), ("AVG", "int32"), ("SUM", "float8_e4m3fn")} <= (
        refused - undefined
    )


def programs() -> dict[str, Any]:
    """The recorded programs, in the convention of torch: into buffers."""
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    base = np.array([[1, 2], [3, 4]], np.float32) * (rank + 1)
    found: dict[str, Any] = {}

    def note(name: str, *values: Any) -> None:
        found[name] = [v.tolist() for v in values] if len(values) > 1 else values[0].tolist()

    def zeros(*shape: int) -> np.ndarray[Any, Any]:
        return np.zeros(shape, np.float32)

    buffers = [zeros(2, 2), zeros(2, 2)]
    assert c.all_gather_(buffers, base) is None
    note("all_gather", *buffers)
    out = zeros(4, 2)
    c.all_gather_into_tensor_(out, base)
    note("all_gather_into_tensor concat", out)
    handle = c.all_gather_([b[:] for b in buffers], base, async_op=True)
    assert handle is not None
    assert handle.wait()
    note("all_gather(async) list", *buffers)
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
        out = zeros(2)
        c.reduce_scatter_tensor_(out, np.arange(4, dtype=np.float32) + rank, op)
        note(f"reduce_scatter_tensor {op}", out)
    out = zeros(rank + 1)
    c.reduce_scatter_(out, [np.full(i + 1, rank + 1, np.float32) for i in range(2)])
    note("reduce_scatter list uneven", out)
    for name, src in (("broadcast src0", 0), ("broadcast src1", 1)):
        out = base.copy()
        c.broadcast_(out, src)
        note(name, out)
    buffers = [zeros(2, 2), zeros(2, 2)]
    c.gather_(base, buffers if rank == 0 else None)
    if rank == 0:
        note("gather dst0", *buffers)
    out = zeros(2)
    c.scatter_(out, [np.full(2, 5, np.float32), np.full(2, 6, np.float32)] if rank == 0 else None)
    note("scatter src0", out)
    data = np.arange(2, dtype=np.float32) + 10 * rank
    outs = [zeros(1), zeros(1)]
    c.all_to_all_(outs, [data[:1], data[1:]])
    note("all_to_all", *outs)
    out = zeros(2)
    c.all_to_all_single_(out, data)
    note("all_to_all_single even", out)
    data = np.arange(3, dtype=np.float32) + 10 * rank
    out = zeros([2, 4][rank])
    c.all_to_all_single_(out, data, [rank + 1] * 2, [1, 2])
    note("all_to_all_single uneven", out)
    out = zeros([0, 6][rank])
    c.all_to_all_single_(out, data, [3 * rank] * 2, [0, 3])
    note("all_to_all_single with zero splits", out)
    whole = np.arange(2) + 10 * rank
    out_int = np.zeros(2, np.int64)
    c.all_to_all_single_(out_int, whole)
    note("all_to_all_single int64", out_int)
    messages = [c.P2POp(c.isend, base, 1 - rank), c.P2POp("irecv_", zeros(2, 2), 1 - rank)]
    for handle in c.batch_isend_irecv(messages):
        handle.wait()
    note("batch_isend_irecv", messages[1].tensor)
    items: list[Any] = [{"a": 1}, 2] if rank == 0 else [None, None]
    c.broadcast_object_list(items)
    found["broadcast_object_list"] = str(items)
    found["gather_object"] = c.gather_object(rank)
    found["scatter_object_list"] = [c.scatter_object_list(["x", "y"] if rank == 0 else None)]
    found["all_gather_object"] = str(c.all_gather_object({"r": rank}))
    if rank == 0:
        c.send(np.float32([2]), 1, tag=2)
        c.send(np.float32([1]), 1, tag=1)
    else:
        note("tags out of order", *(c.recv(zeros(1), 0, tag=t) for t in (1, 2)))
    # torch leaves parts of the sum in the buffers of the other ranks; here they stay as they are.
    for name, dst, op in (("reduce dst0 (non-dst content)", 0, "sum"), ("reduce AVG", 0, "avg")):
        out = base.copy()
        c.reduce_(out, dst, op)
        assert rank == dst or (out == base).all()
        if rank == dst:
            note(name, out)
    return found


def test_the_programs_that_torch_ran(pair: px.testing.MultiProcess) -> None:
    for rank, found in enumerate(pair.run(programs, timeout=120)):
        assert len(found) >= 21
        for name, value in found.items():
            assert value == TORCH[name][rank], name
