"""`set_algo_parameters`: MindSpore's names, checks and texts, and what each changes in a search."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from tests.parallel.test_options import recorded

from phalanx.parallel import (
    Plan,
    get_algo_parameters,
    mesh_of,
    profile,
    reset_algo_parameters,
    search,
    set_algo_parameters,
)


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    reset_algo_parameters()


@pytest.mark.parametrize("row", recorded("algo_default"), ids=lambda r: r["key"])
def test_defaults_and_reset(row: dict[str, Any]) -> None:
    key, value = row["key"], row["value"]
    assert get_algo_parameters(key) == pytest.approx(value)
    other = {False: True, 16: 1024}.get(value, 0.5)
    set_algo_parameters(**{key: other})
    assert get_algo_parameters(key) == other
    reset_algo_parameters()
    assert get_algo_parameters(key) == pytest.approx(value)


@pytest.mark.parametrize("row", recorded("algo_set"), ids=lambda r: str(r["kwargs"]))
def test_wrong_values_change_nothing(row: dict[str, Any]) -> None:
    with pytest.raises(getattr(builtins, row["error"])) as caught:
        set_algo_parameters(elementwise_op_strategy_follow=True, **row["kwargs"])
    assert str(caught.value) == row["msg"].partition("\n")[0]  # without the stack of C++
    assert get_algo_parameters("elementwise_op_strategy_follow") is False


def test_other_wrong_calls() -> None:
    with pytest.raises(ValueError, match="Get context keyword bogus is not recognized!"):
        get_algo_parameters("bogus")
    with pytest.raises(TypeError, match="too many positional arguments"):
        set_algo_parameters(True)


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def plan(loss: Any, args: Any, *sizes: int) -> Plan:
    hardware = profile("A100")
    topology = hardware.topology(prod(sizes))
    return search(loss, args, mesh_of(topology, sizes), hardware)


def cuts(found: Plan) -> dict[str, set[int]]:
    """By primitive, into how many parts the work of operators is divided."""
    parts: dict[str, set[int]] = {}
    sizes = dict(zip(found.mesh.names, found.mesh.sizes, strict=True))
    for operator in found.operators:
        entries = [e for spec in (*operator.operands, *operator.results) for e in spec if e is not None]
        axes = {axis for e in entries for axis in ((e,) if isinstance(e, str) else e)}
        parts.setdefault(operator.primitive, set()).add(prod(sizes[axis] for axis in axes))
    return parts


def small(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w))


def test_fully_use_devices() -> None:
    """Rows that can be halved only are not cut at all where only all devices will do."""
    args = array(3, 3), array(200_000_006, 3)
    before = plan(small, args, 2, 4)
    set_algo_parameters(fully_use_devices=True)
    after = plan(small, args, 2, 4)
    assert any(share == 2 for shares in cuts(before).values() for share in shares)
    assert {share for shares in cuts(after).values() for share in shares} <= {1, 8}
    assert after.cost >= before.cost
    assert any("fully_use_devices" in note for note in after.notes)


def test_slices_are_aligned() -> None:
    args = array(64, 192), array(64_064, 64)
    set_algo_parameters(tensor_slice_align_enable=True, tensor_slice_align_size=32)
    after = plan(small, args, 4)  # a quarter of no dim is a multiple of 32
    assert cuts(after)["dot_general"] == {1}
    set_algo_parameters(tensor_slice_align_size=16)
    assert cuts(plan(small, args, 4))["dot_general"] == {4}


def test_elementwise_operators_follow() -> None:
    """Numbers of 16 bits are sent before they become 32, unless the conversion must follow."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w: Any, x: Any) -> Any:
        wide = (x @ w).astype(jnp.float32)
        columns = jax.lax.with_sharding_constraint(wide * 2, jax.NamedSharding(mesh, P(None, "x")))
        return jnp.sum(jnp.sin(columns))

    args = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 64), (2**16, 512)))
    pins = {"w": P(), "x": P("x")}
    given, found = tuple(args), []
    for follows in (False, True):
        set_algo_parameters(elementwise_op_strategy_follow=follows)
        plan = search(loss, given, mesh, "A100", pins=pins)
        by_name = {o.primitive: tuple(o.results[0]) for o in plan.operators}
        found.append(by_name["dot_general"] == by_name["convert_element_type"])
    assert found == [False, True]
    assert plan.cost < 1  # which nothing has that is forbidden


def test_approximation_looks_at_fewer_strategies() -> None:
    args = array(64, 64), array(64, 64)
    exact = plan(small, args, 2, 4)
    assert exact.proven
    set_algo_parameters(enable_algo_approxi=True, algo_approxi_epsilon=0.5)
    rough = plan(small, args, 2, 4)
    assert not rough.proven
    assert rough.cost >= exact.cost
    set_algo_parameters(algo_approxi_epsilon=0.01)  # a hundred: all there are
    assert plan(small, args, 2, 4).cost == exact.cost
