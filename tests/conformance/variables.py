"""Translations of the cases about variables: synchronization x aggregation, scatter, reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import phalanx as px
from tests.conformance.harness import (
    case,
    cases,
    comps,
    differs,
    fresh,
    frid,
    mirrored,
    rc,
    records,
    rid,
    var,
)

S = px.VariableSynchronization
A = px.VariableAggregation

RECORDED = {r["case"] for r in records("variables")}


# -- families: the same thing for many combinations of synchronization and aggregation -----------

Member = Callable[[px.VariableSynchronization, px.VariableAggregation], Any]


def family(
    prefix: str, translation: Member, difference: Member | None = None, kind: Any = S.ON_WRITE
) -> None:
    """Register every recorded case ``prefix_SYNCHRONIZATION_AGGREGATION``.

    `difference`, if given, is for variables without aggregation, of one kind of synchronization.
    """
    for s in S:
        for a in A:
            name = f"{prefix}_{s.name}_{a.name}"
            if name not in RECORDED:
                continue
            if difference is not None and (s, a) == (kind, A.NONE):
                differs(name)(functools.partial(difference, s, a))
            else:
                case(name)(functools.partial(translation, s, a))


def created(s: Any, a: Any) -> Any:
    v = var(mirrored(2), 1.0, s, a)
    return {
        "class": type(v).__name__,
        "synchronization": v.synchronization,
        "aggregation": v.aggregation,
    }


def written_by_replicas(method: str, s: Any, a: Any) -> Any:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)
    strategy.run(lambda: getattr(v, method)(frid() + 1.0))
    return comps(v)


def written_by_compiled_steps(method: str, s: Any, a: Any) -> Any:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)

    @px.function
    def step() -> None:
        strategy.run(lambda: getattr(v, method)(frid() + 1.0))

    for _ in range(2):
        step()
    return comps(v)


def refused_from_replicas(method: str, s: Any, a: Any) -> None:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)
    with pytest.raises(px.errors.DivergenceError):
        strategy.run(lambda: getattr(v, method)(frid() + 1.0))
    assert [c.item() for c in comps(v)] == [10.0, 10.0]


def written_in_scope(method: str, s: Any, a: Any) -> Any:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)
    try:
        with strategy.scope():
            getattr(v, method)(4.0)
    except ValueError:
        # No half-done writes.
        assert [c.item() for c in comps(v)] == [10.0, 10.0]
        raise
    return comps(v)


def every_copy_written_in_scope(method: str, s: Any, a: Any) -> None:
    expected = {"assign": 4.0, "assign_add": 14.0, "assign_sub": 6.0}[method]
    assert [c.item() for c in written_in_scope(method, s, a)] == [expected] * 2


def python_constant_added(s: Any, a: Any) -> Any:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)
    strategy.run(lambda: v.assign_add(1.0))
    return comps(v)


def same_array_added(s: Any, a: Any) -> Any:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)
    c = jnp.array(1.0)
    strategy.run(lambda: v.assign_add(c))
    return comps(v)


def distinct_arrays_added(s: Any, a: Any) -> Any:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)
    c = jnp.array(1.0)
    strategy.run(lambda: v.assign_add(fresh(c)))
    return comps(v)


def python_zero_assigned(s: Any, a: Any, initial: float = 0.0) -> Any:
    strategy = mirrored(2)
    v = var(strategy, initial, s, a)
    strategy.run(lambda: v.assign(0))
    return comps(v)


def returned_by_assign_add(s: Any, a: Any) -> Any:
    strategy = mirrored(2)
    v = var(strategy, 10.0, s, a)
    return strategy.run(lambda: fresh(v.assign_add(frid() + 1.0)))


family("var_create", created)
for method in ("assign", "assign_add", "assign_sub"):
    family(
        f"var_replica_{method}",
        functools.partial(written_by_replicas, method),
        functools.partial(refused_from_replicas, method),
    )
    family(f"var_compiled_{method}", functools.partial(written_by_compiled_steps, method))
    family(
        f"var_cross_{method}",
        functools.partial(written_in_scope, method),
        functools.partial(every_copy_written_in_scope, method),
        S.ON_READ,
    )
family("var_replica_pyconst", python_constant_added)
family("var_replica_sametensor", same_array_added)
family("var_replica_distincttensor", distinct_arrays_added)
family("var_replica_assign_return", returned_by_assign_add)


@differs()
def var_replica_pyzero_ON_WRITE_MEAN() -> None:
    for initial in (0.0, 7.0):
        copies = python_zero_assigned(S.ON_WRITE, A.MEAN, initial)
        assert [c.item() for c in copies] == [0.0, 0.0]


# -- one by one -----------------------------------------------------------------------------------


@case()
def var_outside_scope_assign() -> Any:
    s = mirrored(2)
    v = var(s, 10.0, S.AUTO, A.NONE)
    v.assign(3.0)
    v.assign_add(1.0)
    return comps(v)


@case()
def var_assign_in_other_strategy_scope() -> Any:
    a, b = mirrored(2), mirrored(2)
    v = var(a, 1.0, S.AUTO, A.NONE)
    with b.scope():
        v.assign(2.0)


@case()
def var_read_value_in_other_strategy_scope() -> Any:
    a, b = mirrored(2), mirrored(2)
    v = var(a, 1.0, S.AUTO, A.NONE)
    with b.scope():
        return v.read_value()


@case()
def var_on_read_reads_ONLY_FIRST_REPLICA() -> Any:
    s = mirrored(2)
    v = var(s, 0.0, S.ON_READ, A.ONLY_FIRST_REPLICA)
    s.run(lambda: v.assign(frid() + 1.0))
    out = {"replica_read": s.run(lambda: fresh(v)), "default_ctx_numpy": v.numpy()}
    with s.scope():
        out["cross_read_value"] = v.read_value()
        out["cross_add"] = v + 0.0
        out["value()"] = v.value()
    return out


@case()
def var_on_read_initial_value_sum() -> Any:
    s = mirrored(2)
    v = var(s, 1.0, S.ON_READ, A.SUM)
    return {"copies": comps(v), "read": v.numpy()}


@case()
def var_int_sum_replica_assign_add() -> Any:
    s = mirrored(2)
    v = var(s, 10, S.ON_WRITE, A.SUM)
    s.run(lambda: v.assign_add(rid() + 1))
    return comps(v)


@case()
def var_component_names() -> Any:
    s = mirrored(3)
    with s.scope():
        v = px.Variable(1.0, name="w")
    return [c.name for c in v.values]


@case()
def var_arithmetic_cross_replica() -> Any:
    s = mirrored(2)
    v = var(s, 3.0, S.AUTO, A.NONE)
    with s.scope():
        m = px.Variable([[1.0, 2.0], [3.0, 4.0]])
    with s.scope():
        return [
            v + 1,
            1 - v,
            v * v,
            v / 2,
            v // 2,
            v % 2,
            v**2,
            -v,
            abs(-v),
            v > 2,
            m @ m,
            m[0],
        ]


@case()
def var_returned_from_run() -> Any:
    s = mirrored(2)
    v = var(s, 1.0, S.AUTO, A.SUM)
    return s.run(lambda: v) is v


@case()
def var_plain_variable_assign_in_run() -> Any:
    s = mirrored(2)
    v = px.Variable(10.0)
    s.run(lambda: v.assign_add(1.0))
    return v.numpy()


def slices_of_replica() -> px.IndexedSlices:
    """One row per replica: the value r + 1 at the index r."""
    return px.IndexedSlices(
        values=jnp.reshape(rid().astype(jnp.float32) + 1.0, (1,)), indices=jnp.reshape(rid(), (1,))
    )


@case()
def var_scatter_add_replica_mean() -> Any:
    s = mirrored(2)
    v = var(s, [0.0, 0.0, 0.0], S.ON_WRITE, A.MEAN)
    s.run(lambda: v.scatter_add(slices_of_replica()))
    return comps(v)


@case()
def var_scatter_update_sum() -> Any:
    s = mirrored(2)
    v = var(s, [0.0, 0.0], S.ON_WRITE, A.SUM)
    s.run(lambda: v.scatter_update(px.IndexedSlices(values=jnp.array([1.0]), indices=jnp.array([0]))))
    return comps(v)


@differs()
def var_scatter_update_none() -> None:
    s = mirrored(2)
    v = var(s, [0.0, 0.0], S.ON_WRITE, A.NONE)
    with pytest.raises(px.errors.DivergenceError):
        s.run(lambda: v.scatter_update(slices_of_replica()))
    assert [c.tolist() for c in comps(v)] == [[0.0, 0.0], [0.0, 0.0]]


@case()
def var_assign_shape_mismatch() -> Any:
    s = mirrored(2)
    v = var(s, 1.0, S.AUTO, A.NONE)
    with s.scope():
        v.assign([1.0, 2.0])


@differs()
def var_sync_on_read_context_in_replica() -> None:
    # TensorFlow's internal switch for aggregated reads changes nothing there; we have none.
    s = mirrored(2)
    v = var(s, 1.0, S.ON_READ, A.SUM)
    plain = s.run(lambda: v + 10.0)
    assert [x.item() for x in plain.values] == [11.0, 11.0]
    aggregated = s.run(lambda: rc().all_reduce("SUM", v) + 10.0)
    assert [x.item() for x in aggregated.values] == [12.0, 12.0]


# -- one expression each ---------------------------------------------------------------------------

cases(
    {
        "var_replica_pyzero_ON_WRITE_ONLY_FIRST_REPLICA": lambda: python_zero_assigned(
            S.ON_WRITE, A.ONLY_FIRST_REPLICA
        ),
        "var_mean_int_creation": lambda: type(var(mirrored(2), 1, S.AUTO, A.MEAN)).__name__,
        "var_mean_int_creation_on_read": lambda: type(var(mirrored(2), 1, S.ON_READ, A.MEAN)).__name__,
    }
)
