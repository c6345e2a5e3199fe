"""Joining programs: what comes out is what each program alone gives, whatever lies in the padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec

from phalanx.core.padding import CannotJoin
from phalanx.execution.joint import Slot, join
from phalanx.execution.joint.reading import Reader
from phalanx.execution.joint.rooms import cut, empty, fill, room_for
from phalanx.execution.joint.sameness import Keys
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS, replica_mesh

COUNT = 3
SPLIT = PartitionSpec(REPLICA_AXIS)


def joined(
    step: Callable[..., Any],
    parts: Sequence[np.ndarray[Any, Any]],
    padding: float = np.nan,
    apart: bool = False,
) -> tuple[list[list[Any]], Any]:
    """The results of a step by replica, and the joint program; `parts` are the replicas' arrays.

    If `apart`, all replicas have programs of their own, even if they have the same shape.
    """
    room = tuple(max(sizes) for sizes in zip(*(p.shape for p in parts), strict=True))
    filled = np.full((len(parts), *room), padding, parts[0].dtype)
    for row, part in zip(filled, parts, strict=True):
        row[tuple(slice(n) for n in part.shape)] = part
    shapes = [p.shape for p in parts] if apart else list(dict.fromkeys(p.shape for p in parts))
    programs = list(range(len(parts))) if apart else [shapes.index(p.shape) for p in parts]
    avals: list[Any] = []

    def body(x: Any) -> Any:
        traced = [jax.make_jaxpr(step)(jax.ShapeDtypeStruct(s, x.dtype)) for s in shapes]
        index = jnp.asarray(programs)[lax.axis_index(REPLICA_AXIS)]
        slot = Slot(x[0], tuple(t.jaxpr.invars[0].aval for t in traced))
        outs = join([(t.jaxpr, t.consts) for t in traced], index, [slot])
        avals[:] = [[s.avals[p] for p in programs] for s in outs]
        return [jnp.asarray(s.array)[None] for s in outs]

    mesh = replica_mesh(tuple(jax.devices()[: len(parts)]))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    program = jax.make_jaxpr(mapped)(filled)
    outs = jax.jit(mapped)(filled)
    found = [
        [np.asarray(cut(out[i], a)) for out, kinds in zip(outs, avals, strict=True) for a in [kinds[i]]]
        for i in range(len(parts))
    ]
    return found, program


def alone(step: Callable[..., Any], parts: Sequence[np.ndarray[Any, Any]]) -> list[list[Any]]:
    """The results of a step on arrays of equal shapes, by replica: what they must be when joined."""
    mesh = replica_mesh(tuple(jax.devices()[: len(parts)]))

    def body(x: Any) -> Any:
        return [jnp.asarray(y)[None] for y in jax.tree.leaves(step(x[0]))]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False)
    outs = jax.jit(mapped)(np.stack(parts))
    return [[np.asarray(out[i]) for out in outs] for i in range(len(parts))]


def psum(x: Any) -> Any:
    return lax.psum(x, REPLICA_AXIS)


sizes = st.lists(st.integers(0, 4), min_size=COUNT, max_size=COUNT)


def rows(counts: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    whole = np.arange(1.0, 2 * sum(counts) + 1, dtype=np.float32).reshape(-1, 2)
    return np.split(whole, np.cumsum(counts)[:-1])


# -- random programs -------------------------------------------------------------------------------

LOCAL: dict[str, Callable[[Any], Any]] = {
    "sin": jnp.sin,
    "double": lambda x: x * 2.0,
    "center": lambda x: x - jnp.sum(x) / max(x.shape[0], 1),
    "cumsum": lambda x: jnp.cumsum(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=0),
    "jit": jax.jit(lambda x: x + 1.0),
    "relu": jax.nn.relu,
    "grad": jax.grad(lambda x: jnp.sum(jnp.tanh(x) ** 2)),
    "scan": lambda x: lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(2), x)[1],
    "id": lambda x: x + lax.axis_index(REPLICA_AXIS),
}
MEETING: dict[str, Callable[[Any], Any]] = {
    "normalize": lambda x: x / (1.0 + psum(jnp.sum(x * x))),
    "mean": lambda x: x - psum(jnp.sum(x, axis=0)) / jnp.maximum(psum(jnp.int32(x.shape[0])), 1),
    "jitted": lambda x: x + jax.jit(lambda y: psum(jnp.cos(y).sum()))(x),
    "scanned": lambda x: x + lax.scan(lambda c, _: (c / 2 + psum(x.sum()), 0), 0.0, length=2)[0],
    "remat": lambda x: x * jax.checkpoint(lambda y: jnp.tanh(psum(y.sum())))(x),
    "loop": lambda x: lax.fori_loop(0, 2, lambda _, c: c * 0.5 + psum(jnp.sum(c)), x),
    "ring": lambda x: x + lax.ppermute(x.sum(0), REPLICA_AXIS, [(0, 1), (1, 2), (2, 0)]),
    "gradient": lambda x: x + jax.grad(lambda w: psum(jnp.sum(x * w)))(jnp.float32(0.5)),
    "most": lambda x: x - lax.pmax(jnp.max(x, initial=0.0), REPLICA_AXIS),
}
programs = st.lists(st.sampled_from([*LOCAL, *MEETING]), max_size=5)


def step_of(names: Sequence[str]) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        means = []
        for name in names:
            x = (LOCAL | MEETING)[name](x)
            means.append(psum(jnp.sum(x)))
        return x, jnp.sum(x), means

    return step


@settings(max_examples=5)
@given(programs, sizes)
def test_padding_never_matters(names: list[str], counts: list[int]) -> None:
    """Whatever is in it: nothing of it comes out, in forward and backward computations."""
    step, parts = step_of(names), rows(counts)
    with_nan, program = joined(step, parts)
    with_ones, _ = joined(step, parts, padding=1.0)
    for a, b in zip(jax.tree.leaves(with_nan), jax.tree.leaves(with_ones), strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.isfinite(a).all()
    # One collective in the joint program for each one that the step has.
    text, single = str(program), str(jax.make_jaxpr(step, axis_env=[(REPLICA_AXIS, COUNT)])(parts[0]))
    for collective in ("psum[", "ppermute[", "pmax["):
        assert text.count(collective) == single.count(collective)


@settings(max_examples=4)
@given(programs, st.integers(0, 3))
def test_the_joint_program_of_equal_shapes_is_the_program(names: list[str], count: int) -> None:
    step, parts = step_of(names), rows([count] * COUNT)
    expected = alone(step, parts)
    got, program = joined(step, parts, apart=True)
    assert conditions(program.jaxpr) == 0  # all is common
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@settings(max_examples=3)
@given(
    st.lists(st.sampled_from(["sin", "double", "relu", "mean", "jitted", "remat"]), max_size=4), sizes
)
def test_rows_count_the_same_wherever_they_are(names: list[str], counts: list[int]) -> None:
    """Steps that treat rows alike give what one replica with all rows gives."""
    step, parts = step_of(names), rows(counts)
    got, _ = joined(step, parts)
    everything = np.concatenate(parts)
    nothing = np.zeros_like(everything[:0])
    expected, _ = joined(step, [everything, nothing, nothing])
    # Sums over replicas and over rows are rounded differently, and differences of large ones remain.
    np.testing.assert_allclose(
        np.concatenate([r[0] for r in got]), expected[0][0], rtol=1e-5, atol=1e-4
    )


# -- single cases ----------------------------------------------------------------------------------


def conditions(jaxpr: Any) -> int:
    own = sum(eqn.primitive.name == "cond" for eqn in jaxpr.eqns)
    return own + sum(conditions(sub) for eqn in jaxpr.eqns for sub in compat.sub_jaxprs(eqn))


def test_a_plain_step_has_one_switch_and_what_follows_the_sum_is_outside() -> None:
    def step(x: Any) -> Any:
        gradient = psum(jax.grad(lambda w: jnp.sum(jnp.tanh(x * w)))(jnp.ones(2)))
        return jnp.ones(2) - 0.1 * jnp.sqrt(gradient**2 + 1.0)

    found, program = joined(step, rows([3, 3, 1]))
    assert conditions(program.jaxpr) == 1
    assert str(program).count("sqrt") == 1
    np.testing.assert_array_equal(found[0][0], found[2][0])


def test_the_shape_itself_can_be_summed() -> None:
    found, _ = joined(lambda x: psum(jnp.asarray(x.shape[0])), rows([2, 0, 3]))
    assert [int(r[0]) for r in found] == [5, 5, 5]


def test_effects_happen_where_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    def step(x: Any) -> Any:
        jax.debug.print("rows {}", x.shape[0])
        return psum(jnp.sum(x))

    joined(step, rows([2, 1, 2]))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")[:-1]) == ["rows 1", "rows 2", "rows 2"]


def test_random_keys_are_kept_across_meetings() -> None:
    def bits(n: int) -> Any:
        return jax.vmap(lambda key: jax.random.bits(key) % 100)(jax.random.split(jax.random.key(n), n))

    def step(x: Any) -> Any:
        keys = jax.random.split(jax.random.key(x.shape[0]), x.shape[0])
        drawn = psum(jnp.sum(jax.vmap(jax.random.bits)(keys) % 100))
        return jax.vmap(lambda key, n: jax.random.bits(key) % 100 + n, (0, None))(keys, drawn)

    found, _ = joined(step, rows([2, 0, 3]))
    drawn = sum(int(bits(n).sum()) for n in (2, 0, 3))
    assert [r[0].tolist() for r in found] == [(bits(n) + drawn).tolist() for n in (2, 0, 3)]


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (psum, "meet for psum with"),
        (lambda x: psum(x.sum()) if x.shape[0] > 1 else x.sum(), "more often"),
        (lambda x: (psum if x.shape[0] > 1 else lambda y: lax.pmax(y, REPLICA_AXIS))(x.sum()), "pmax"),
        (lambda x: x if x.shape[0] > 1 else x.sum(), "different kinds"),
        (lambda x: x if x.shape[0] > 1 else x.astype(jnp.int32), "different kinds"),
        (lambda x: lax.scan(lambda c, r: (c + psum(r.sum()), 0), 0.0, x)[0], "different lengths"),
        (lambda x: compat.mark_same_in_all_programs(jnp.sum(x)), "depends on the shape"),
        (lambda x: compat.mark_same_on_all_replicas(jnp.sum(x), "writing v"), "writing v depends"),
        (jax.custom_jvp(lambda x: psum(x.sum())), "custom_jvp_call"),
    ],
)
def test_what_cannot_be_joined(step: Callable[..., Any], why: str) -> None:
    if isinstance(step, jax.custom_jvp):
        step.defjvp(lambda p, t: (step(*p), t[0].sum()))
    with pytest.raises(CannotJoin, match=why):
        joined(step, rows([2, 1, 2]))


# -- parts -----------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)


@settings(max_examples=15)
@given(st.lists(shapes, min_size=1, max_size=3))
def test_what_was_filled_in_can_be_cut_out(found: list[tuple[int, ...]]) -> None:
    room = room_for([jax.ShapeDtypeStruct(s, jnp.float32) for s in found])
    assert empty(room).shape == room.shape
    for shape in found:
        x = jnp.arange(float(np.prod(shape))).reshape(shape)
        filled = fill(x, room)
        assert filled.shape == room.shape
        np.testing.assert_array_equal(cut(filled, x), x)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda x: jnp.sin(x) + 1.0, lambda y: jnp.sin(y) + 1.0, True),
        (lambda x: x + 1.0, lambda x: x + 2.0, False),
        (lambda x: x + 0.0, lambda x: x + -0.0, False),
        (lambda x: x * jnp.arange(3.0), lambda x: x * jnp.arange(3.0), True),
        (jax.nn.relu, jax.nn.relu, True),
        (lambda x: lax.reduce_precision(x, 5, 10), lambda x: lax.reduce_precision(x, 8, 10), False),
        (jax.jit(jnp.sin), jax.jit(jnp.cos), False),
    ],
)
def test_sameness(one: Any, other: Any, same: bool) -> None:
    reader = Reader()
    aval = jax.ShapeDtypeStruct((3,), jnp.float32)
    array = jnp.zeros(3)
    numbers = []
    for fn in (one, other):
        closed = jax.make_jaxpr(fn)(aval)
        slot = Slot(array, (aval, aval))
        numbers.append(reader.read((closed.jaxpr, closed.consts), [slot]).outs[0].number)
    assert (numbers[0] == numbers[1]) is same


def test_constants_are_told_apart_by_what_they_are() -> None:
    keys = Keys()
    assert keys.of_constant(np.float32(1)) == keys.of_constant(jnp.float32(1))
    assert keys.of_constant(np.float32(1)) != keys.of_constant(np.int32(1))
    assert keys.of_constant(np.arange(99)) == keys.of_constant(np.arange(99))
    key = jax.random.key(0)
    assert keys.of_constant(key) == keys.of_constant(key) != keys.of_constant(jax.random.key(0))
