"""`semi_auto_parallel` without `enable_alltoall`: no program has an all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from tests.parallel.hlo import sent
from tests.parallel.models import check_close

from phalanx.parallel import Layout, parallelize, shard, value_and_grad

LAYOUT = Layout((2, 2), ("a", "b"))


def array(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32) / 3


def added(params: Any, x: Any) -> Any:
    """Two terms that are cut along different dims by the same axis."""
    return jnp.sum((x @ params["w"] + params["c"]) ** 2)


def embedded(params: Any, words: Any) -> Any:
    return jnp.sum(jnp.tanh(params["table"][words] @ params["w"]) ** 2)


def attended(params: Any, x: Any) -> Any:
    q, k, v = ((x @ params[name]).reshape(4, 8, 4, 2) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    mixed = jnp.einsum("bhts,bshd->bthd", scores, v).reshape(4, 8, 8)
    return jnp.sum((mixed @ params["o"]) ** 2)


def two_layers(params: Any, x: Any) -> Any:
    return jnp.sum((jnp.tanh(x @ params["u"]) @ params["d"]) ** 2)


def stacked(params: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["w"])[0] ** 2)


def carried(params: Any, x: Any) -> Any:
    """A loop whose rounds would move the cuts of what they carry, and of what they return."""

    def body(c: Any, w: Any) -> Any:
        h = jnp.tanh(c @ w)
        return h + c * params["s"], h.T

    last, rows = jax.lax.scan(body, x, params["w"])
    return jnp.sum(last**2) + jnp.sum(jnp.sin(rows))


def repeated(params: Any, x: Any) -> Any:
    def body(_: int, c: Any) -> Any:
        return jnp.tanh(c @ params["w"]) + c.T

    return jnp.sum(jax.lax.fori_loop(0, 3, body, x) ** 2)


def in_blocks(params: Any, x: Any) -> Any:
    """Blocks that are computed again for the gradient."""
    return jnp.sum(jax.checkpoint(lambda c, w: jnp.tanh(c @ w) + c.T)(x, params["w"]) ** 2)


SQUARES = {name: array(8, 8) for name in "qkvo"}
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, Any], dict[str, Any], tuple[str, ...]]] = {
    # name: the loss, its arguments, the layouts of the parameters, and the axes that cut the batch
    "terms": (
        added,
        ({"w": array(8, 8), "c": array(16, 8)}, array(16, 8)),
        {"w": P(None, "a"), "c": P("a")},
        ("None", "None"),
    ),
    "embedding": (
        embedded,
        ({"table": array(16, 8), "w": array(8, 8)}, np.arange(32, dtype=np.int32).reshape(8, 4) % 16),
        {"table": P("a", "b"), "w": P("a", "b")},
        ("b", "a"),
    ),
    "attention": (
        attended,
        (SQUARES, array(4, 8, 8)),
        {"q": P("b"), "k": P("b"), "v": P("b"), "o": P(None, "b")},
        ("a", "b", "None"),
    ),
    "layers": (
        two_layers,
        ({"u": array(8, 8), "d": array(8, 8)}, array(16, 8)),
        {"u": P("b", "a"), "d": P("b", "a")},
        ("b", "a"),
    ),
    "loop": (
        stacked,
        ({"w": array(3, 8, 8)}, array(16, 8)),
        {"w": P(None, "a", "b")},
        ("a", "b"),
    ),
    "carried": (
        carried,
        ({"w": array(3, 8, 8), "s": array(8, 8)}, array(8, 8)),
        {"w": P(None, "a"), "s": P(None, "a")},
        ("a", "None"),
    ),
    "repeated": (repeated, ({"w": array(8, 8)}, array(8, 8)), {"w": P("a")}, ("a", "None")),
    "blocks": (in_blocks, ({"w": array(8, 8)}, array(8, 8)), {"w": P("a")}, ("a", "None")),
}
SLOW = ("attention", "layers", "loop", "repeated", "blocks")


def check(loss: Any, args: Any, plan: Any, batch: tuple[str, ...]) -> None:
    step = value_and_grad(loss)
    program = parallelize(
        step,
        args,
        mesh=LAYOUT.mesh(),
        parallel_mode="semi_auto_parallel",
        parameter_plan=plan,
        dataset_strategy=(LAYOUT(*batch),),
    )
    assert "all-to-all" not in sent(program.lower(*args).compile(), 4)
    check_close(program(*args), step(*args))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.soak] if n in SLOW else []) for n in PROGRAMS]
)
def test_layouts_that_conflict_are_gathered(name: str) -> None:
    check(*PROGRAMS[name])


@pytest.mark.soak
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layouts_of_an_mlp(data: st.DataObject) -> None:
    cuts = st.permutations(["a", "b", None, None]).map(lambda axes: P(*axes[:2]))
    plan = {name: data.draw(cuts) for name in "ud"}
    batch = [str(axis) for axis in data.draw(cuts)]
    loss, args, _, _ = PROGRAMS["layers"]
    check(loss, args, plan, tuple([*batch, "None", "None"][:2]))


@pytest.mark.soak
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_layouts_of_a_loop(data: st.DataObject) -> None:
    cuts = st.permutations(["a", "b", None, None])
    w, s, x = (data.draw(cuts)[:2] for _ in range(3))
    plan = {"w": P(None, *w), "s": P(*s)}
    check(carried, PROGRAMS["carried"][1], plan, tuple(str(axis) for axis in x))


def test_layouts_are_followed_through_functions_with_derivatives_of_their_own() -> None:
    line = Layout((4,), ("a",))

    def moved(params: Any, x: Any) -> Any:
        return shard(jnp.sin, (line("None", "a"),))(jax.nn.relu(x @ params["w"]))

    args = {"w": array(8, 8)}, array(16, 8)
    program = parallelize(
        moved,
        args,
        mesh=line.mesh(),
        parallel_mode="semi_auto_parallel",
        dataset_strategy=(line("a", "None"),),
    )
    assert "all-to-all" not in sent(program.lower(*args).compile(), 4)
    check_close(program(*args), moved(*args))


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("enabled", [False, True])
def test_branches_may_end_in_different_layouts(mode: str, enabled: bool) -> None:
    """XLA refuses branches whose results are laid out in different ways."""

    def either(params: Any, x: Any) -> Any:
        def branch(number: int, *axes: str) -> Any:
            lay_out = shard(jnp.copy, (LAYOUT(*axes),))
            return lambda c: lay_out(c @ params["w"][number])

        return jnp.sum(jax.lax.cond(jnp.sum(x) > 0, branch(0, "a", "b"), branch(1, "b", "a"), x) ** 2)

    args = {"w": array(2, 8, 8)}, array(16, 8)
    step = value_and_grad(either)
    program = parallelize(step, args, mesh=LAYOUT.mesh(), parallel_mode=mode, enable_alltoall=enabled)
    check_close(program(*args), step(*args))
