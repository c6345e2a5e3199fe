"""The search on programs: exact, recognisable, honest about what it cannot do."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec as P
from tests.parallel.gpt import arguments, array, loss_of
from tests.parallel.search.problems import every

import phalanx as px
from phalanx.parallel import Device, DeviceMesh, Link, Plan, Topology, mesh_of, profile, search
from phalanx.parallel.reading import read
from phalanx.parallel.search import elimination
from phalanx.parallel.search.elimination import solve
from phalanx.parallel.search.memory import Smallest, solve_within
from phalanx.parallel.tables import Accounting, Tables
from phalanx.parallel.tracing import trace

A100, CPU = profile("A100"), profile("CPU")
SLOW = A100.replace(device=Device({"float32": 1e12}, 1e11, 80e9), reduce_scatter=False)
"""Devices that compute slowly enough for a small model to be worth sharing out."""


def flat(*sizes: int, alpha: float = 1e-7, beta: float = 1e-10) -> DeviceMesh:
    """A mesh with equal links."""
    link = Link(alpha, beta)
    return mesh_of(Topology(1, prod(sizes), link, link), sizes)


def mlp(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def mlp_arguments(batch: int, width: int) -> Any:
    return (
        {"up": array(width, 4 * width), "down": array(4 * width, width)},
        array(batch, width),
        array(batch, width),
    )


def embedded(table: Any, words: Any) -> Any:
    return jnp.sum(table[words] ** 2)


SMALL = {
    "product": (lambda w, x: jnp.sum(x @ w), (array(8, 8), array(8, 8))),
    "two products": (lambda w, x: jnp.sum(x @ w @ w), (array(8, 8), array(8, 8))),
    "residual": (lambda w, x: jnp.sum(x + jnp.tanh(x @ w)), (array(8, 8), array(8, 8))),
    "bias": (lambda b, x: jnp.max(x + b, 1), (array(8), array(8, 8))),
    "embedding": (embedded, (array(16, 8), array(8, dtype=jnp.int32))),
    "split": (lambda w, x: (x @ w).reshape(8, 2, 4).sum(2), (array(8, 8), array(8, 8))),
    "loop": (
        lambda w, x: jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, 3)[0],
        (array(8, 8), array(8, 8)),
    ),
    "remat": (
        lambda w, x: jax.checkpoint(lambda a: jnp.sin(a @ w))(x).sum(),
        (array(8, 8), array(8, 8)),
    ),
}


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_no_plan_of_a_small_program_is_better(name: str, sizes: tuple[int, ...]) -> None:
    """Every assignment of every small program, within every budget."""
    check_all_plans(*SMALL[name], sizes)


OPERATIONS: list[Any] = [
    lambda a, b: a @ b,
    lambda a, b: a + b,
    lambda a, b: a * jnp.tanh(b),
    lambda a, b: a.T @ b,
    lambda a, b: a - a.max(1, keepdims=True),
    lambda a, b: jax.lax.stop_gradient(a) * b.sum(0),
    lambda a, b: a.reshape(4, 2, 8).sum(1).repeat(2, 0) + b,
]


@pytest.mark.soak
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 3), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([(2,), (4,), (2, 2)]),
    st.booleans(),
)
def test_no_plan_of_a_random_program_is_better(
    lines: list[Any], sizes: tuple[int, ...], sums: bool
) -> None:
    """Each line is computed from two earlier values."""

    def program(w: Any, x: Any) -> Any:
        values = [w, x]
        for operation, left, right in lines:
            values.append(operation(values[left % len(values)], values[right % len(values)]))
        return jnp.mean(values[-1]) if sums else values[-1]

    check_all_plans(program, (array(8, 8), array(8, 8)), sizes)


def check_all_plans(function: Any, args: Any, sizes: tuple[int, ...]) -> None:
    """No assignment is cheaper than the one that the search finds, within any budget."""
    traced = trace(function, args, 0)
    graph = read(traced.closed, traced.names, traced.results, traced.parameters)
    mesh = flat(*sizes)
    problem = Tables(graph, mesh, A100, Accounting(), {}).problem
    if prod(problem.sizes) > 10**6:
        # The first values of each variable are a problem of the same kind.
        limit = next(n for n in (3, 2, 1) if prod(min(s, n) for s in problem.sizes) <= 10**6)
        keep = [np.arange(min(n, limit)) for n in problem.sizes]
        problem = type(problem)(
            tuple(c[k] for c, k in zip(problem.costs, keep, strict=True)),
            tuple(m[k] for m, k in zip(problem.memory, keep, strict=True)),
            tuple(
                (a, b, t[np.ix_(keep[a], keep[b])], None if m is None else m[np.ix_(keep[a], keep[b])])
                for a, b, t, m in problem.edges
            ),
        )
    costs, held = every(problem)
    assert len(costs) <= 10**6
    found = solve(problem)
    assert found.cost == costs.min()
    assert found.proven
    for part in (0.0, 0.2, 0.6):
        budget = float(np.quantile(held, part))
        within = solve_within(problem, budget)
        assert not isinstance(within, Smallest)
        assert within.cost == costs[held <= budget].min()
        assert within.bytes <= budget


# -- structure -------------------------------------------------------------------------------------


def axes_of(spec: P, dim: int) -> set[str]:
    entry = tuple(spec)[dim] if dim < len(tuple(spec)) else None
    return set() if entry is None else {entry} if isinstance(entry, str) else set(entry)


BLOCKS = [1, 2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 4))]


@pytest.mark.parametrize("blocks", BLOCKS)
def test_large_batches_and_small_weights_are_data_parallel(blocks: int) -> None:
    args = arguments(blocks=blocks, width=64, vocabulary=128, batch=512, length=64)
    plan = search(loss_of(8), args, flat(2, 4), SLOW)
    assert plan.proven
    products = [o for o in plan.operators if o.primitive == "dot_general"]
    for o in products:  # all cut along the batch by both axes, weights whole
        assert axes_of(o.results[0], 0) == {"x", "y"}
    weights = set(plan.parameters)
    large = [c for c in plan.collectives if c.sent > 10_000]
    assert large
    assert {c.kind for c in large} == {"all-reduce"}
    assert {c.tensor for c in large} <= weights  # nothing but gradients of weights


@pytest.mark.parametrize("blocks", BLOCKS)
def test_small_batches_and_large_weights_are_cut_as_by_megatron(blocks: int) -> None:
    args = arguments(blocks=blocks, width=1024, vocabulary=64, batch=2, length=32)
    plan = search(loss_of(8), args, flat(4), SLOW)
    for i in range(blocks):
        block = {
            n.rsplit("/", 1)[1]: t.spec
            for n, t in plan.parameters.items()
            if n.startswith(f"blocks/{i}/")
        }
        for name in ("query", "key", "value", "up"):
            assert axes_of(block[name], 1) == {"x"}, name  # by columns
        for name in ("out", "down"):
            assert axes_of(block[name], 0) == {"x"}, name  # by rows
        assert axes_of(block["up_bias"], 0) == {"x"}
    heads = [o for o in plan.operators if o.key.endswith("bhts/dot_general")]
    assert all(axes_of(o.results[0], 1) == {"x"} for o in heads)  # each device has some of the heads
    weights = {
        n
        for n, t in plan.parameters.items()
        if len(t.shape) > 1 and "embedding" not in n and n != "head"
    }
    assert not [c for c in plan.collectives if c.tensor in weights]  # weights never move


@pytest.mark.parametrize("blocks", [1, *BLOCKS[2:]])
def test_large_vocabularies_are_cut(blocks: int) -> None:
    args = arguments(blocks=blocks, width=64, vocabulary=2**17, batch=8, length=32)
    plan = search(loss_of(8), args, flat(4), SLOW)
    assert axes_of(plan.parameters["embedding"].spec, 0) | axes_of(plan.parameters["embedding"].spec, 1)
    assert axes_of(plan.parameters["head"].spec, 1) == {"x"}
    (logits,) = [o for o in plan.operators if o.primitive == "reduce_max" and "log_softmax" in o.key]
    assert logits.strategy == ((1, 1, 4),)
    assert not [c for c in plan.collectives if c.tensor in ("embedding", "head")]


def test_long_sequences_of_one_example_are_cut() -> None:
    """With one head and one example, each device has some queries, and gathers keys and values."""
    args = arguments(blocks=1, width=64, vocabulary=64, batch=1, length=1024)
    plan = search(loss_of(1), args, flat(4), SLOW)
    assert axes_of(plan.inputs["targets"].spec, 1) == {"x"}
    (scores,) = [o for o in plan.operators if o.key.endswith("bhts/dot_general")]
    assert scores.strategy == ((1, 4, 1, 1), (1, 1, 1, 1))
    forward = [c for c in plan.collectives if c.phase == "forward" and c.sent > 1000]
    assert [c.kind for c in forward] == ["all-gather", "all-gather"]


def test_hosts_and_devices_are_told_apart() -> None:
    """The gradients of weights cross the slow links, the activations do not."""
    topology = Topology(2, 4, Link(1e-7, 1e-12), Link(1e-7, 1e-10))
    args = arguments(blocks=1, width=256, vocabulary=64, batch=16, length=64)
    plan = search(loss_of(8), args, mesh_of(topology, (2, 4)), A100)
    slow = sum(c.sent * c.count for c in plan.collectives if "x" in c.axes)
    fast = sum(c.sent * c.count for c in plan.collectives if c.axes == ("y",))
    assert slow < fast
    turned = search(loss_of(8), args, mesh_of(Topology(2, 4, *[Link(1e-7, 1e-11)] * 2), (2, 4)), A100)
    assert sum(c.sent * c.count for c in turned.collectives if "x" in c.axes) >= slow


# -- meshes, modes, limits -------------------------------------------------------------------------


def test_all_meshes_are_tried() -> None:
    args = mlp_arguments(64, 64)
    whole = search(mlp, args, 8, A100)
    each = [search(mlp, args, mesh, A100) for mesh in (flat(8), flat(2, 4), flat(2, 2, 2))]
    assert whole.proven
    assert whole.runner_up is not None
    assert whole.runner_up.cost >= whole.cost
    links = A100.topology(8)
    same = [search(mlp, args, mesh_of(links, m.mesh.sizes), A100).cost for m in each]
    assert whole.cost == min(same)


def test_six_devices_need_no_power_of_two() -> None:
    plan = search(mlp, mlp_arguments(96, 48), 6, A100.replace(devices_per_host=None))
    assert plan.mesh.size == 6
    assert plan.proven


def test_relabelled_axes_cost_the_same() -> None:
    args = mlp_arguments(64, 32)
    assert search(mlp, args, flat(2, 4), A100).cost == search(mlp, args, flat(4, 2), A100).cost


def test_free_links_make_more_devices_never_slower() -> None:
    args = mlp_arguments(64, 64)
    costs = [search(mlp, args, flat(n, alpha=0, beta=0), A100).compute for n in (1, 2, 4, 8)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_real_meshes_keep_their_names() -> None:
    devices = np.asarray(jax.devices()[:8]).reshape(2, 1, 4)
    mesh = Mesh(devices, ("data", "none", "model"), axis_types=(AxisType.Auto,) * 3)
    plan = search(mlp, mlp_arguments(1024, 512), mesh)
    assert plan.mesh.names == ("data", "model")
    assert plan.hardware == "CPU"
    assert plan.shardings(mesh).inputs["x"].mesh == mesh


def test_modes_are_never_better_than_exact() -> None:
    args = arguments(blocks=1, width=64, batch=64)
    pins = {"tokens": P("x")}
    exact = search(loss_of(8), args, flat(2, 4), A100, pins=pins)
    assert search(loss_of(8), args, flat(2, 4), A100, pins=pins, mode="dynamic_programming") == exact
    for mode in ("recursive_programming", "sharding_propagation"):
        plan = search(loss_of(8), args, flat(2, 4), A100, pins=pins, mode=mode)
        assert plan.cost >= exact.cost == plan.lower_bound
        assert plan.inputs["tokens"].spec == P("x")
        assert plan.mode == mode
    with pytest.raises(px.errors.InvalidValueError, match="no operator that is configured"):
        search(loss_of(8), args, flat(2), A100, mode="sharding_propagation")
    with pytest.raises(px.errors.InvalidValueError, match="Received: mode='best'"):
        search(loss_of(8), args, flat(2), A100, mode="best")


def test_a_time_limit_of_nothing_still_gives_a_plan() -> None:
    args = arguments(blocks=1, width=64, batch=64)
    plan = search(loss_of(8), args, flat(2, 2, 2), A100, time_limit=0)
    best = search(loss_of(8), args, flat(2, 2, 2), A100)
    assert plan.lower_bound <= best.cost <= plan.cost
    assert best.proven
    cut = search(loss_of(8), args, 8, A100, time_limit=0)
    assert cut.notes == ("The time was over before 2 meshes could be tried.",)
    assert cut.mesh.sizes == (8,)


def test_searches_are_the_same_every_time() -> None:
    args = arguments(blocks=2, width=64, batch=64)
    first, again = (search(loss_of(8), args, flat(2, 4), A100) for _ in range(2))
    assert first == again
    assert first.digest() == again.digest()


def test_a_jaxpr_is_a_program() -> None:
    closed = jax.make_jaxpr(lambda x, w: jnp.sum(x @ w))(np.ones((64, 8), "f"), np.ones((8, 8), "f"))
    plan = search(closed, devices=flat(4), hardware=A100, parameters=1)
    assert list(plan.parameters) == ["arg1"]
    assert list(plan.inputs) == ["arg0"]


def test_overlap_and_slots() -> None:
    args = mlp_arguments(4096, 64)
    plain = search(mlp, args, flat(4), CPU)
    hidden = search(mlp, args, flat(4), CPU, overlap=1.0)
    assert hidden.communication < plain.communication
    light = search(mlp, args, flat(4), CPU, slots=0)
    assert light.memory.training < plain.memory.training
    still = search(mlp, args, flat(4), CPU, training=False)
    assert still.memory.training == 0 == still.memory.kept
    assert {c.phase for c in still.collectives} <= {"forward"}


def test_equal_blocks_of_a_program_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = elimination.joined
    monkeypatch.setattr(elimination, "joined", lambda *args: made.append(1) or real(*args))
    counts = []
    for blocks in (4, 12):
        traced = trace(loss_of(8), arguments(blocks=blocks), 0)
        graph = read(traced.closed, traced.names, traced.results, traced.parameters)
        problem = Tables(graph, flat(2, 4), A100, Accounting(), {}).problem
        made.clear()
        assert solve(problem).proven
        counts.append((len(problem.sizes), len(made)))
    (small, few), (large, many) = counts
    assert many - few < (large - small) / 10


# -- memory ----------------------------------------------------------------------------------------


def test_budgets_are_kept_and_cost_time() -> None:
    args = mlp_arguments(64, 256)
    mesh = flat(2, 4)
    free = search(mlp, args, mesh, CPU)
    budget = free.memory.total * 0.97
    tight = search(mlp, args, mesh, CPU, memory=budget)
    assert tight.memory.total <= budget
    assert tight.cost > free.cost
    assert tight.proven
    assert tight.budget == budget


def test_gathered_copies_that_the_gradient_needs_are_held() -> None:
    """A parameter that is stored in pieces and used as a whole is there twice."""
    args = mlp_arguments(64, 64)
    rows = {"x": P("x"), "dot_general": P("x"), "dot_general_1": P("x"), "up": P()}
    whole = search(mlp, args, flat(4), SLOW, pins={**rows, "down": P()})
    pieces = search(mlp, args, flat(4), SLOW, pins={**rows, "down": P("x")})
    assert pieces.memory.kept - whole.memory.kept == 64 * 256 * 4
    assert {c.kind for c in pieces.collectives if c.tensor == "down" and c.phase == "forward"} == {
        "all-gather"
    }
    assert not [c for c in whole.collectives if c.tensor == "down" and c.phase == "forward"]


def test_what_fits_nowhere_is_told_with_the_tensors() -> None:
    args = mlp_arguments(64, 256)
    with pytest.raises(px.errors.ResourceExhaustedError) as caught:
        search(mlp, args, 8, A100, memory=1e5)
    text = str(caught.value)
    assert "The smallest one needs" in text
    assert "the cheapest one" in text
    assert "up float32[256,1024]" in text or "down float32[1024,256]" in text
    assert text.endswith("Received: memory=100000.")
    with pytest.raises(px.errors.ResourceExhaustedError, match="The smallest one needs"):
        search(mlp, args, flat(8), A100, memory=1e5, mode="recursive_programming")


def test_searches_that_do_not_look_at_memory_keep_budgets_too() -> None:
    args = mlp_arguments(2048, 64)
    greedy = search(mlp, args, flat(4), A100, mode="recursive_programming")
    least = search(mlp, args, flat(4), A100, memory=greedy.memory.total - 1)
    assert least.memory.total < greedy.memory.total
    with pytest.raises(px.errors.ResourceExhaustedError, match="does not look at memory"):
        search(
            mlp,
            args,
            flat(4),
            A100,
            mode="recursive_programming",
            memory=greedy.memory.total - 1,
        )


# -- pins ------------------------------------------------------------------------------------------


def test_pins_hold() -> None:
    args = mlp_arguments(64, 64)
    plan = search(mlp, args, flat(2, 2), A100, pins={"up": P("x", "y"), "x": (None, "x")})
    assert plan.parameters["up"].spec == P("x", "y")
    assert plan.inputs["x"].spec == P(None, "x")
    assert plan.pins == {"up": P("x", "y"), "x": P(None, "x")}
    pinned = search(mlp, args, flat(2, 2), A100, pins={"dot_general": P("y")})
    (product,) = [o for o in pinned.operators if o.key == "dot_general"]
    assert product.results == (P("y"),)


@pytest.mark.parametrize(
    ("pins", "error", "words"),
    [
        ({"u": P("x")}, px.errors.NotFoundError, "Did you mean"),
        ({"up": P("w")}, px.errors.InvalidValueError, "The mesh has the axes"),
        ({"up": "x"}, px.errors.InvalidTypeError, "Received: 'x' for 'up'"),
        ([1], px.errors.InvalidTypeError, "layouts by name"),
        ({"y": P(None, None, "x")}, px.errors.InvalidValueError, "dims"),
    ],
)
def test_bad_pins(pins: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        search(mlp, mlp_arguments(64, 64), flat(2, 2), A100, pins=pins)


def test_constraints_in_the_program_are_pins() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))

    def loss(w: Any, x: Any) -> Any:
        h = jax.lax.with_sharding_constraint(x @ w, jax.sharding.NamedSharding(mesh, P(None, "x")))
        return jnp.sum(h**2)

    plan = search(loss, (array(64, 64), array(4096, 64)), mesh, A100)
    (kept,) = [o for o in plan.operators if o.primitive == "sharding_constraint"]
    assert kept.results == (P(None, "x"),)


def test_old_plans_are_kept_where_they_fit() -> None:
    args = mlp_arguments(64, 64)
    odd = search(mlp, args, flat(2, 2), A100, pins={"up": P("x", "y")})
    again = search(mlp, args, odd.mesh, A100, pins=odd)
    assert again.parameters["up"].spec == P("x", "y")
    assert again.notes == ()
    other = search(mlp, mlp_arguments(64, 6), odd.mesh, A100, pins=odd)
    assert "another program" in other.notes[0]
    with pytest.raises(px.errors.InvalidValueError, match=r"Pass devices=plan\.mesh"):
        search(mlp, args, flat(4), A100, pins=odd)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: search(3, ()), px.errors.InvalidTypeError, "Received: 3"),
        (
            lambda: search(mlp, mlp_arguments(8, 8), 0),
            px.errors.InvalidValueError,
            "at least one|At least one",
        ),
        (
            lambda: search(mlp, mlp_arguments(8, 8), 2, "B9"),
            px.errors.NotFoundError,
            "There are profiles",
        ),
        (lambda: search(mlp, mlp_arguments(8, 8), 2, 3), px.errors.InvalidTypeError, "Received: 3"),
        (
            lambda: search(mlp, mlp_arguments(8, 8), 2, A100, memory="1GB"),
            px.errors.InvalidValueError,
            "memory is a number of bytes",
        ),
        (
            lambda: search(mlp, mlp_arguments(8, 8), 2, A100, time_limit=-1),
            px.errors.InvalidValueError,
            "time_limit is a number of seconds",
        ),
        (
            lambda: search(mlp, mlp_arguments(8, 8), 2, A100, slots=-1),
            px.errors.InvalidValueError,
            "slots must be a finite number from 0",
        ),
        (
            lambda: search(mlp, mlp_arguments(8, 8), 2, A100, overlap=2.0),
            px.errors.InvalidValueError,
            "overlap must be a finite number from 0 to 1",
        ),
        (
            lambda: search(mlp, mlp_arguments(8, 8), "two", A100),  # type: ignore[arg-type]
            px.errors.InvalidTypeError,
            "devices is a number, a mesh",
        ),
        (
            lambda: search(mlp, mlp_arguments(8, 8), ["CPU:0"], A100),  # type: ignore[list-item]
            px.errors.InvalidTypeError,
            "Devices are those of jax.devices()",
        ),
        (
            lambda: search(mlp, mlp_arguments(8, 8), 2, parameters=7),
            px.errors.InvalidValueError,
            "arguments",
        ),
    ],
)
def test_bad_calls(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_unknown_sizes_are_refused() -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    args = array(8, 8), jax.ShapeDtypeStruct((batch, 8), jnp.float32)
    with pytest.raises(px.errors.InvalidValueError, match="the sizes of all dims"):
        search(lambda w, x: jnp.sum(x @ w), args, 2, A100)


def test_opaque_operators_are_noted_and_searched_around() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.pure_callback(np.sin, array(64, 64), x @ w))

    plan: Plan = search(loss, (array(64, 64), array(64, 64)), flat(4), A100, training=False)
    (call,) = [o for o in plan.operators if o.primitive == "pure_callback"]
    assert call.operands == (P(),)
    assert "opaque" in plan.notes[0]


def test_effects_are_noted() -> None:
    def loss(w: Any, x: Any) -> Any:
        jax.debug.print("{}", w[0, 0])
        return jnp.sum(x @ w)

    plan = search(loss, (array(64, 64), array(64, 64)), flat(4), A100)
    assert any(note.endswith("It has effects.") for note in plan.notes)
