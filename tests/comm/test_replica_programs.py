"""Random programs of collectives agree with NumPy, and their gradients with one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px

c = px.comm
Rows = Any
"""One array per rank, as rows; of NumPy or JAX."""

SUMS = ["all_reduce sum", "all_reduce avg", "all_reduce premul", "reduce", "reduce_scatter"]
MOVES = ["all_gather", "broadcast", "gather", "scatter", "all_to_all", "ring", "all_to_all list"]
ORDERED = ["all_reduce max", "all_reduce prod"]


def meant(name: str, rows: Rows, root: int, np_: Any) -> Rows:
    """What an operation does to the rows of the members, all of the same length; keeps the length."""
    count, length = rows.shape
    parts = rows.reshape(count, count, -1)
    total = rows.sum(0)
    same = lambda x: np_.stack([x] * count)  # noqa: E731
    at_root = np_.arange(count)[:, None] == root
    cut = lambda x: np_.concatenate([x] * count, axis=1)[:, :length]  # noqa: E731
    results = {
        "all_reduce sum": lambda: same(total),
        "all_reduce avg": lambda: same(total / count),
        "all_reduce premul": lambda: same(total * 0.5),
        "all_reduce max": lambda: same(rows.max(0)),
        "all_reduce prod": lambda: same(rows.prod(0)),
        "reduce": lambda: np_.where(at_root, same(total), rows),
        "reduce_scatter": lambda: cut(parts.sum(0)),
        "all_gather": lambda: same(np_.concatenate([rows, rows]).reshape(-1)[1 : length + 1]),
        "broadcast": lambda: same(rows[root]),
        "gather": lambda: np_.where(at_root, same(rows.reshape(-1)[-length:]), 0 * rows),
        "scatter": lambda: cut(parts[root]),
        "all_to_all": lambda: parts.transpose(1, 0, 2).reshape(count, -1),
        "all_to_all list": lambda: parts.transpose(1, 0, 2).reshape(count, -1),
        "ring": lambda: np_.roll(rows, 1, axis=0),
    }
    return results[name]()


def done(name: str, x: Any, root: int, group: Any, wait: bool) -> Any:
    """The same for one rank, by Phalanx, at once or to be waited for."""
    count, length = len(group), x.shape[0]
    first, _, op = name.partition(" ")
    place = group.ranks[root]
    cut = lambda v: jnp.concatenate([v] * count)[:length]  # noqa: E731
    if name == "ring":
        table = [group.ranks[(i + 1) % count] for i in range(count)]
        back = [group.ranks[i - 1] for i in range(count)]
        if count == 1:
            return lambda: x
        out, handle = c.irecv(x, back, group)
        c.isend(x, table, group)
    elif first == "all_reduce":
        reduction = c.premul_sum(0.5) if op == "premul" else op
        out, handle = c.all_reduce(x, reduction, group, wait)
    elif name in ("reduce", "broadcast"):
        out, handle = getattr(c, name)(x, place, group=group, async_op=wait)
    elif name == "all_to_all list":
        out, handle = c.all_to_all(list(jnp.reshape(x, (count, -1))), group, wait)
    elif name == "gather":
        out, handle = c.gather_into_tensor(x, place, group, wait)
    elif name == "scatter":
        out, handle = c.scatter_tensor(x, place, group, wait)
    elif name == "reduce_scatter":
        out, handle = c.reduce_scatter_tensor(x, "sum", group, wait)
    elif name == "all_to_all":
        out, handle = c.all_to_all_single(x, None, None, group, wait)
    else:
        out, handle = c.all_gather_into_tensor(x, group, wait)
    assert (handle is None) != (wait or name == "ring")
    after = {
        "all_to_all list": jnp.concatenate,
        "scatter": cut,
        "reduce_scatter": cut,
        "all_gather": lambda v: jnp.concatenate([v, v])[1 : length + 1],
        "gather": lambda v: v[-length:],
    }.get(name, lambda v: v)
    return lambda: after(out.value if handle is not None else out)


@st.composite
def programs(draw: Any, names: list[str]) -> tuple[int, tuple[int, ...], list[tuple[str, int, bool]]]:
    """A number of replicas, the members of a group in some order, and operations."""
    count = draw(st.integers(2, 4))
    ranks = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
    step = st.tuples(st.sampled_from(names), st.integers(0, len(ranks) - 1), st.booleans())
    return count, tuple(ranks), draw(st.lists(step, min_size=1, max_size=4))


LENGTH = 12


def model(program: Any, rows: Rows, np_: Any = np) -> list[Rows]:
    """What the members have after each operation, which works on what the one before gave."""
    _, ranks, steps = program
    found = [rows[np.asarray(ranks)]]
    for name, root, _ in steps:
        found.append(meant(name, found[-1], root, np_))
    return found[1:]


def replica(program: Any, x: Any) -> Any:
    """The same by one replica; those that wait are waited for when the next needs them."""
    _, ranks, steps = program
    group = c.Group(f"of {ranks}", ranks)
    found = []
    for name, root, wait in steps:
        found.append(done(name, x, root, group, wait))
        x = found[-1]()
    return [value() for value in found]


def run(program: Any, executor: str, fn: Any) -> list[Any]:
    count, ranks, _ = program
    strategy = px.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    rows = inputs(count)
    results: dict[int, Any] = {}

    def step(x: Any) -> Any:
        if executor == "compiled":
            return fn(x)
        rank = int(c.get_rank())
        if rank in ranks:  # nobody else calls
            results[rank] = fn(x)
        return None

    values = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(rows[context.replica_id_in_sync_group])
    )
    go = lambda v: strategy.run(step, args=(v,))  # noqa: E731
    if executor == "eager":
        go(values)
        return [results[r] for r in ranks]
    local = strategy.experimental_local_results(px.function(go)(values))
    return [local[r] for r in ranks]


def inputs(count: int) -> np.ndarray[Any, Any]:
    return ((np.arange(count * LENGTH).reshape(count, LENGTH) * 7) % 5 - 1).astype(np.float32) / 2


@pytest.mark.parametrize("executor", ["eager", "compiled"])
def test_programs_agree_with_numpy(executor: str) -> None:
    @settings(max_examples=12, deadline=None)
    @given(programs(SUMS + MOVES + ORDERED))
    def agree(program: Any) -> None:
        wanted = model(program, inputs(program[0]).astype(np.float64))
        found = run(program, executor, lambda x: replica(program, x))
        for place in range(len(program[1])):
            for i, value in enumerate(found[place]):
                scale = np.abs(wanted[i]).max() + 1
                error = 1e-5 * scale
                np.testing.assert_allclose(value, wanted[i][place], atol=error, err_msg=str(program))

    agree()


@pytest.mark.parametrize(
    ("executor", "count", "ranks"),
    [
        ("eager", 3, (2, 0)),
        ("compiled", 3, (0, 1, 2)),
        ("compiled", 3, (2, 0)),  # XLA cannot complete this to groups of one size
        ("compiled", 4, (3, 0, 2)),  # nor this
        ("compiled", 4, (3, 1)),
    ],
)
def test_gradients_agree_with_one_device(executor: str, count: int, ranks: tuple[int, ...]) -> None:
    root = len(ranks) - 1
    names = SUMS + MOVES + ORDERED[:1]
    weights = np.cos(np.arange(len(ranks) * LENGTH)).reshape(len(ranks), LENGTH).astype("f")
    places = [ranks.index(r) if r in ranks else 0 for r in range(count)]
    programs = [(count, ranks, [(name, root, name == "broadcast")]) for name in names]

    def losses_of_all(rows: Any) -> Any:
        return [jnp.sum(model(p, rows, jnp)[-1] ** 2 * weights) for p in programs]

    wanted = jax.jit(jax.jacrev(losses_of_all))(jnp.asarray(inputs(count)))

    def each(x: Any) -> Any:
        def total(xs: Any) -> Any:
            mine = jnp.asarray(weights)[jnp.asarray(places)[c.get_rank()]]
            inside = jnp.asarray([r in ranks for r in range(count)])[c.get_rank()]
            parts = [jnp.sum(replica(p, v)[-1] ** 2 * mine) for p, v in zip(programs, xs, strict=True)]
            return jnp.where(inside, sum(parts), 0.0)

        return jax.grad(total)([x] * len(names))

    found = run(programs[0], executor, each)
    for place, rank in enumerate(ranks):
        for name, mine, theirs in zip(names, found[place], wanted, strict=True):
            np.testing.assert_allclose(mine, theirs[rank], rtol=1e-5, atol=1e-5, err_msg=name)


def test_gradients_of_gradients() -> None:
    def energy(x: Any) -> Any:
        return jnp.sum(c.all_gather_into_tensor(x**2)[0] ** 2) + jnp.sum(c.all_reduce(x)[0] ** 3)

    twice = jax.grad(lambda x: jnp.sum(jax.grad(energy)(x) ** 2))
    for executor in ("eager", "compiled"):
        program = (2, (0, 1), [])
        found = run(program, executor, twice)
        x = jnp.asarray(inputs(2))

        def both(x: Any) -> Any:
            one = jnp.sum(jnp.reshape(x**2, -1) ** 2) + jnp.sum(x.sum(0) ** 3)
            return 2 * one  # each replica has this energy

        wanted = jax.grad(lambda x: jnp.sum(jax.grad(both)(x) ** 2))(x)
        np.testing.assert_allclose(np.stack(found), wanted, rtol=1e-5)
