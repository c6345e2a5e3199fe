"""Random programs of collectives on real workers, against a model in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import phalanx as px

SIZE = 4
REDUCTIONS = {"sum": np.add, "max": np.maximum, "prod": np.multiply}


class Step(NamedTuple):
    """One call that all members of a group make."""

    op: str
    members: tuple[int, ...]
    form: str
    reduction: str
    place: int
    lengths: tuple[tuple[int, ...], ...]
    dtype: str


@st.composite
def steps(draw: Any) -> Step:
    members = tuple(draw(st.permutations(range(SIZE))))[: draw(st.integers(2, SIZE))]
    longest = draw(st.sampled_from([2, 9, 5000, 150_000]))
    lengths = st.tuples(*[st.integers(0, longest)] * len(members))
    return Step(
        draw(st.sampled_from(sorted(MODELS))),
        members,
        draw(st.sampled_from(["sync", "async", "in place", "async in place", "jax"])),
        draw(st.sampled_from(sorted(REDUCTIONS))),
        draw(st.integers(0, len(members) - 1)),
        tuple(draw(lengths) for _ in members),
        draw(st.sampled_from(["int32", "float32"])),
    )


def operand(step: Step, number: int, rank: int) -> Any:
    """What a member gives; small whole numbers, so that all results are exact."""
    me, count = step.members.index(rank), len(step.members)

    def array(length: int, salt: int = 0) -> Any:
        return ((np.arange(length) + 3 * rank + number + salt) % 5).astype(step.dtype)

    if step.op == "all_gather":
        return array(step.lengths[0][me])
    if step.op in ("all_to_all", "scatter", "reduce_scatter"):
        row = step.lengths[me] if step.op == "all_to_all" else step.lengths[0]
        return [array(n, i) for i, n in enumerate(row)]
    if step.op == "all_to_all_single":
        return array(sum(step.lengths[me]))
    return array(count * step.lengths[0][0])


def reduced(step: Step, xs: list[Any]) -> Any:
    return REDUCTIONS[step.reduction].reduce(np.stack(xs), axis=0, dtype=step.dtype)


def parts_for(step: Step, xs: list[Any], me: int) -> list[Any]:
    return [np.split(x, np.cumsum(n)[:-1])[me] for x, n in zip(xs, step.lengths, strict=True)]


MODELS: dict[str, Any] = {
    "all_reduce": lambda s, xs, me: reduced(s, xs),
    "reduce": lambda s, xs, me: reduced(s, xs) if me == s.place else xs[me],
    "broadcast": lambda s, xs, me: xs[s.place],
    "all_gather": lambda s, xs, me: xs,
    "all_gather_into_tensor": lambda s, xs, me: np.concatenate(xs),
    "scatter": lambda s, xs, me: xs[s.place][me],
    "reduce_scatter": lambda s, xs, me: reduced(s, [x[me] for x in xs]),
    "reduce_scatter_tensor": lambda s, xs, me: np.split(reduced(s, xs), len(xs))[me],
    "all_to_all": lambda s, xs, me: [x[me] for x in xs],
    "all_to_all_single": lambda s, xs, me: np.concatenate(parts_for(s, xs, me)),
}


def model(program: list[Step], rank: int) -> list[Any]:
    results = []
    for i, step in enumerate(program):
        if rank in step.members:
            xs = [operand(step, i, r) for r in step.members]
            results.append(MODELS[step.op](step, xs, step.members.index(rank)))
    return results


def play(program: list[Step]) -> list[Any]:
    """Runs in a worker."""
    px.comm.init()
    c, rank = px.comm, px.comm.get_rank()
    results: list[Any] = []
    for i, step in enumerate(program):
        if rank not in step.members:
            continue
        group = c.create_group("-".join(map(str, step.members)), step.members)
        me, peer = step.members.index(rank), step.members[step.place]
        x: Any = operand(step, i, rank)
        if step.op == "scatter" and rank != peer:
            x = None
        if step.form == "jax":
            import jax

            x = jax.tree.map(jax.numpy.asarray, x)
        arguments: list[Any] = []
        if step.op in ("reduce", "broadcast", "scatter"):
            arguments.append(peer)
        if "reduce" in step.op:
            arguments.append(step.reduction)
        if step.op == "all_to_all_single":
            arguments += [None, step.lengths[me]]
        later = "async" in step.form
        if "in place" not in step.form:
            results.append(getattr(c, step.op)(x, *arguments, group, later)[0])
            continue
        buffers = room(step, i, me)
        if step.op in ("all_reduce", "reduce", "broadcast"):
            buffers = x
            handle = getattr(c, f"{step.op}_")(x, *arguments, group, later)
        else:
            if step.op == "all_to_all_single":
                arguments[0] = [len(p) for p in parts_for(step, operands(step, i), me)]
            handle = getattr(c, f"{step.op}_")(buffers, x, *arguments, group, later)
        results.append((handle, buffers))
    return [finished(r) for r in results]


def operands(step: Step, number: int) -> list[Any]:
    return [operand(step, number, r) for r in step.members]


def room(step: Step, number: int, me: int) -> Any:
    """Buffers for a result, full of something else."""
    result = MODELS[step.op](step, operands(step, number), me)
    if isinstance(result, list):
        return [np.full_like(r, 77) for r in result]
    return np.full_like(result, 77)


def finished(result: Any) -> Any:
    if isinstance(result, tuple):
        handle, result = result
        if handle is not None:
            handle.wait(60)
    value = getattr(result, "value", result)
    return [np.asarray(v) for v in value] if isinstance(value, list) else np.asarray(value)


@pytest.fixture(scope="module")
def four() -> Iterator[px.testing.MultiProcess]:
    with px.testing.MultiProcess(workers=SIZE, preload=["phalanx"]) as cluster:
        yield cluster


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=st.lists(steps(), min_size=10, max_size=25))
def test_random_programs(four: px.testing.MultiProcess, program: list[Step]) -> None:
    for rank, found in enumerate(four.run(play, program, timeout=60)):
        wanted = model(program, rank)
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            if isinstance(theirs, list):
                assert [m.tolist() for m in mine] == [t.tolist() for t in theirs]
            else:
                np.testing.assert_array_equal(mine, theirs)
                assert mine.dtype == theirs.dtype
