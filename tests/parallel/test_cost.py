"""What collectives and changes of layout cost."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from tests.parallel.hlo import sent

from phalanx.parallel.cost import QUANTUM, Resharding, all_gather, all_reduce, quantised, reduce_scatter
from phalanx.parallel.hardware import profile
from phalanx.parallel.layout import NONE, PARTIAL, layouts, summed, to_spec
from phalanx.parallel.mesh import DeviceMesh, Link, mesh_of

CPU, A100 = profile("CPU"), profile("A100")
LINK = Link(1e-6, 1e-10)


def test_rings() -> None:
    assert all_gather(LINK, 4, 100.0) == (300.0, pytest.approx(3 * (1e-6 + 1e-8)))
    assert reduce_scatter(LINK, 4, 400.0) == (300.0, pytest.approx(3 * (1e-6 + 1e-8)))
    assert all_reduce([LINK], [4], 400.0) == (600.0, pytest.approx(6 * (1e-6 + 1e-8)))


def test_sums_over_two_axes_send_as_much_as_over_one_and_less_over_slow_links() -> None:
    slow = Link(1e-6, 1e-8)
    sent_, seconds = all_reduce([slow, LINK], [2, 4], 800.0)
    assert sent_ == all_reduce([LINK], [8], 800.0)[0]
    assert seconds == pytest.approx(6 * (1e-6 + 200 * 1e-10) + 2 * (1e-6 + 100 * 1e-8))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.randoms())
def test_quantised_costs_add_up_exactly_in_any_order(values: list[float], random: object) -> None:
    costs = quantised(np.asarray(values)).tolist()
    mixed = list(costs)
    random.shuffle(mixed)  # type: ignore[attr-defined]
    assert sum(costs) == sum(mixed)
    assert sum(costs) / QUANTUM == round(sum(costs) / QUANTUM)


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([2, 4, 6, 8]), min_size=0, max_size=3).map(tuple),
    st.sampled_from([(2,), (2, 2), (2, 4), (3, 2), (2, 2, 2)]),
    st.sampled_from([CPU, A100, A100.replace(all_to_all=False)]),
)
def test_changes_of_layout_are_shortest_paths(
    shape: tuple[int, ...], sizes: tuple[int, ...], hardware
) -> None:
    mesh = (
        mesh_of(hardware.topology(int(np.prod(sizes))), sizes)
        if hardware is CPU
        else DeviceMesh(("x", "y", "z")[: len(sizes)], sizes, (LINK,) * len(sizes))
    )
    ways = Resharding(shape, 4, mesh, hardware)
    seconds = ways.seconds
    assert (np.diagonal(seconds) == 0).all()
    slack = QUANTUM * 4
    for middle in range(len(ways.layouts)):
        through = seconds[:, middle, None] + seconds[None, middle, :]
        assert (seconds <= through + slack).all()
    for a, b in itertools.product(ways.layouts, repeat=2):
        cost = seconds[ways.number[a], ways.number[b]]
        gone = any(p == PARTIAL and q != PARTIAL for p, q in zip(b, a, strict=True))
        if not hardware.reduce_scatter:  # a sum is completed at once
            gone = a != b and PARTIAL in b
        assert np.isinf(cost) == gone  # what is complete never becomes a term of a sum
        if not gone:
            assert sum(c.seconds for c in ways.path(a, b)) == pytest.approx(cost, abs=1e-12)
    whole = tuple(NONE for _ in sizes)
    for layout in layouts(shape, mesh.sizes):
        free = sum(c.sent for c in ways.path(whole, layout))
        ordered = all(d == NONE or d not in layout[i + 1 :] for i, d in enumerate(layout))
        assert free == 0 or not ordered  # cutting costs nothing


def test_without_all_to_all_layouts_are_gathered() -> None:
    mesh = DeviceMesh(("x",), (4,), (LINK,))
    kinds = {
        flag: [
            c.kind for c in Resharding((8, 8), 4, mesh, A100.replace(all_to_all=flag)).path((0,), (1,))
        ]
        for flag in (True, False)
    }
    assert kinds == {True: ["all-to-all"], False: ["all-gather"]}


def test_sums_that_are_cut_afterwards() -> None:
    mesh = DeviceMesh(("x",), (4,), (LINK,))
    assert [c.kind for c in Resharding((8,), 4, mesh, A100).path((PARTIAL,), (0,))] == [
        "reduce-scatter"
    ]
    assert [c.kind for c in Resharding((8,), 4, mesh, CPU).path((PARTIAL,), (0,))] == ["all-reduce"]


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 4), (4, 2)])
def test_xla_communicates_what_is_predicted_for_every_change_of_layout(sizes: tuple[int, ...]) -> None:
    """One program with every change of layout of a matrix: kinds and bytes must be those predicted."""
    count, shape = int(np.prod(sizes)), (16, 32)
    mesh = mesh_of(CPU.topology(count), sizes)
    axis_types = (AxisType.Auto,) * len(sizes)
    devices = Mesh(np.asarray(jax.devices()[:count]).reshape(sizes), mesh.names, axis_types=axis_types)
    ways = Resharding(shape, 4, mesh, CPU)
    pairs = list(itertools.permutations(layouts(shape, sizes), 2))

    def sharding(layout: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(devices, to_spec(layout, mesh.names, 2))

    def change(*xs: jax.Array) -> list[jax.Array]:
        found = []
        for first, (start, end) in zip(xs, pairs, strict=True):
            x = first
            for layout, _ in ways.steps(start, end):
                x = jax.lax.with_sharding_constraint(x, sharding(layout))
            found.append(x)
        return found

    into, out = tuple(sharding(a) for a, _ in pairs), [sharding(b) for _, b in pairs]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32)] * len(pairs)
    compiled = jax.jit(change, in_shardings=into, out_shardings=out).lower(*args).compile()
    predicted: Counter[str] = Counter()
    for start, end in pairs:
        assert summed(start) == start
        for collective in ways.path(start, end):
            predicted[collective.kind] += round(collective.sent)
    assert sent(compiled, count) == predicted
