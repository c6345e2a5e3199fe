"""Functions of whole arrays that are computed on slices: any transformation of optax, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec

from phalanx.core.slicing import Members, Slicing
from phalanx.runtime.placement import REPLICA_AXIS, replica_mesh
from phalanx.train.sliced_updates import Sliced, run_on_slices

SHAPES = [(5, 7), (3,), (4, 2, 2), ()]


def on_replicas(function: Callable[..., Any], args: Any, members: Members) -> tuple[Any, list[str]]:
    """What a function gives, with all arrays in slices, and what had to be gathered for it."""
    shapes = jax.eval_shape(function, *args)
    found: list[str] = []

    def is_divided(x: Any) -> bool:
        return jnp.ndim(x) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    def cut(x: Any) -> Any:
        if not is_divided(x):
            return x
        slicing = Slicing(tuple(x.shape), members.parts)
        return Sliced(slicing.cut(x, members.index()), slicing)

    def join(x: Any) -> Any:
        if not isinstance(x, Sliced):
            return x
        return x.slicing.join(members.gather(x.local).reshape(-1))

    def body(args: Any) -> Any:
        wanted = jax.tree.map(is_divided, shapes)
        result, found[:] = run_on_slices(function, jax.tree.map(cut, args), wanted, members)
        return jax.tree.map(join, result, is_leaf=lambda x: isinstance(x, Sliced))

    whole = PartitionSpec()
    mapped = jax.shard_map(
        body,
        mesh=replica_mesh(tuple(jax.devices()[: members.count])),
        in_specs=whole,
        out_specs=whole,
        check_vma=False,
    )
    return jax.jit(mapped)(args), found


def check(function: Callable[..., Any], args: Any, parts: int = 4) -> list[str]:
    got, gathered = on_replicas(function, args, Members(REPLICA_AXIS, 4, parts))
    want = jax.jit(function)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)  # noqa: PLW2901
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)
    return gathered


TRANSFORMS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "lamb": (lambda: optax.lamb(0.1), set()),
    "lars": (lambda: optax.lars(0.1), set()),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(0.1), 3), set()),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(0.1), 2), set()),
    "prodigy": (lambda: optax.contrib.prodigy(0.1), set()),
    "add_noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), set()),
    "adafactor": (
        lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
        {"reduce_sum", "broadcast_in_dim"},
    ),
    "muon": (lambda: optax.contrib.muon(0.1), {"reduce_sum", "scan"}),
    "centralize": (lambda: optax.chain(optax.centralize(), optax.sgd(0.1)), {"reduce_sum"}),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations_are_exact(name: str) -> None:
    make, gathered = TRANSFORMS[name]
    transform = make()
    rng = np.random.default_rng(0)
    params: Any = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in SHAPES]
    grads: Any = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in SHAPES]

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    _, state = jax.jit(update)(grads, transform.init(params), params)
    assert set(check(update, (grads, state, params), parts=2)) == gathered


def test_norms_need_one_sum() -> None:
    def clip(xs: list[jax.Array]) -> Any:
        norm = optax.tree.norm(xs)
        return [x / norm for x in xs]

    args = ([jnp.full(s, 2.0) for s in SHAPES],)
    members = Members(REPLICA_AXIS, 4, 4)
    jaxpr = str(jax.make_jaxpr(lambda args: on_replicas(clip, args, members)[0])(args))
    assert jaxpr.count("psum") == 1
    assert check(clip, args) == []


FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], set[str]]] = {
    "largest": (lambda x, y: (x - jnp.max(x), jnp.min(y) * y), set()),
    "truths": (lambda x, y: (x * jnp.all(x > y), y * jnp.any(y > 3)), set()),
    "dot": (lambda x, y: (x * jnp.vdot(x, y), jnp.ravel(y)), set()),
    "broadcast": (lambda x, y: (x + x[:, :1], y.T), {"slice", "transpose"}),
    "branches": (
        lambda x, y: jax.lax.cond(jnp.sum(x) > 0, lambda: (x, x * y), lambda: (x * jnp.sum(y), y)),
        set(),
    ),
    "constants": (lambda x, y: (jnp.zeros((3, 5)), x * 0 + jnp.arange(5.0)), set()),
    "loop": (lambda x, y: jax.lax.fori_loop(0, 2, lambda _, c: (c[1], c[0] * 2), (x, y)), {"scan"}),
    "barrier": (lambda x, y: jax.lax.optimization_barrier((x + 1, y)), set()),
    "reshape": (lambda x, y: (x.reshape(5, 3) * 2, y[None]), set()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_exact(name: str) -> None:
    function, gathered = FUNCTIONS[name]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 5)), jnp.float32)
    assert set(check(function, (x, 1 - x))) == gathered


@given(
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    parts=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=100)
def test_slices_have_every_element_once(
    shape: tuple[int, ...], parts: int, data: st.DataObject
) -> None:
    slicing = Slicing(shape, parts)
    whole = np.arange(slicing.size).reshape(shape) + 1
    flat = np.zeros(slicing.length * parts, int)
    flat[: slicing.size] = whole.reshape(-1)
    pieces = [flat[i * slicing.length :][: slicing.length] for i in range(parts)]
    assert len({len(piece) for piece in pieces}) == 1
    assert np.concatenate(pieces)[: slicing.size].reshape(shape).tolist() == whole.tolist()
    i = data.draw(st.integers(0, parts - 1))
    if parts == 3 and len(shape) < 2:  # few shapes, because each is compiled
        np.testing.assert_array_equal(slicing.cut(whole, i), pieces[i])
        np.testing.assert_array_equal(slicing.join(flat), whole)
