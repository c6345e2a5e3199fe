"""Random programs mean the same under both executors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx import VariableAggregation as A, VariableSynchronization as S

STRATEGIES = {
    "mirrored_2": lambda: px.MirroredStrategy(["CPU:0", "CPU:1"]),
    "mirrored_3": lambda: px.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
    "one_device_reduction": lambda: px.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=px.ReductionToOneDevice()
    ),
    "central": lambda: px.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    "one": lambda: px.OneDeviceStrategy("CPU:1"),
}
KINDS: dict[str, dict[str, Any]] = {
    "sum": {"aggregation": A.SUM},
    "mean": {"aggregation": A.MEAN},
    "first": {"aggregation": A.ONLY_FIRST_REPLICA},
    "read_sum": {"aggregation": A.SUM, "synchronization": S.ON_READ},
    "read_mean": {"aggregation": A.MEAN, "synchronization": S.ON_READ},
    "none": {},
}


@dataclass(frozen=True)
class Expr:
    """An expression over the input, the replica id, variables and collectives."""

    op: str
    args: tuple[Any, ...] = ()

    def __call__(self, x: jax.Array, variables: dict[str, px.Variable]) -> jax.Array:
        context = px.get_replica_context()
        assert context is not None
        values = [a(x, variables) if isinstance(a, Expr) else a for a in self.args]
        match self.op:
            case "x":
                return x
            case "id":
                return jnp.full(2, context.replica_id_in_sync_group, jnp.float32)
            case "const":
                return jnp.full(2, values[0], jnp.float32)
            case "read":
                return variables[values[0]] + 0.0
            case "add":
                return values[0] + values[1]
            case "mul":
                return values[0] * values[1] * 0.5
            case "tanh":
                return jnp.tanh(values[0])
            case "sum" | "mean":
                return context.all_reduce(self.op, values[0])
            case "gather":
                return context.all_gather(values[0], axis=0).reshape(-1, 2).max(axis=0)
            case "merge":
                return context.merge_call(_halved_sum, args=(values[0],))
            case "grad":
                weight = values[0]
                return jax.grad(lambda y: jnp.sum(weight * context.all_reduce("sum", y**2)))(x)
        raise AssertionError(self.op)


def _halved_sum(strategy: px.Strategy, value: Any) -> Any:
    return strategy.reduce("sum", value, axis=None) * 0.5


leaf = st.one_of(
    st.just(Expr("x")),
    st.just(Expr("id")),
    # Never zero, nor a sum of zero: that may be reduced if it is known, which is so in eager code only.
    st.integers(-3, 3).map(lambda n: Expr("const", (n + 0.2,))),
    st.sampled_from(sorted(KINDS)).map(lambda name: Expr("read", (name,))),
)


def _grow(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    unary = st.sampled_from(["tanh", "sum", "mean", "gather", "merge", "grad"])
    return st.one_of(
        st.tuples(st.sampled_from(["add", "mul"]), inner, inner).map(lambda t: Expr(t[0], t[1:])),
        st.tuples(unary, inner).map(lambda t: Expr(t[0], t[1:])),
    )


expressions = st.recursive(leaf, _grow, max_leaves=4)
methods = st.sampled_from(["assign", "assign_add", "assign_sub"])
writes = st.one_of(
    st.tuples(st.sampled_from(sorted(set(KINDS) - {"none"})), methods, expressions),
    # Without an aggregation replicas must agree, so what is written is a sum over them.
    st.tuples(st.just("none"), methods, expressions.map(lambda e: Expr("mean", (e,)))),
)
programs = st.tuples(st.lists(writes, min_size=1, max_size=4), st.lists(expressions, max_size=2))


def outcome(name: str, program: Any, compiled: bool) -> list[Any]:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        variables = {
            kind: px.Variable(jnp.array([0.5, -1.0]) * (i + 1), **options)
            for i, (kind, options) in enumerate(KINDS.items())
        }
    statements, results = program

    def step(x: jax.Array) -> Any:
        for kind, method, expression in statements:
            getattr(variables[kind], method)(jnp.tanh(expression(x, variables)))
        return [e(x, variables) for e in results]

    def run(x: Any) -> Any:
        per_replica = strategy.run(step, args=(x,))
        return per_replica, strategy.reduce("mean", per_replica, axis=0)

    call = px.function(run) if compiled else run
    collected: list[Any] = []
    for i in range(2):
        x = strategy.experimental_distribute_values_from_function(
            lambda c, i=i: jnp.array([0.3, -0.7]) * (1 + i + c.replica_id_in_sync_group)
        )
        per_replica, reduced = call(x)
        collected += [
            np.asarray(v) for r in per_replica for v in strategy.experimental_local_results(r)
        ]
        collected += [np.asarray(r) for r in reduced]
    return collected + [c.numpy() for v in variables.values() for c in v.values]


def attempt(name: str, program: Any, compiled: bool) -> Any:
    try:
        return outcome(name, program, compiled)
    except px.PhalanxError as error:
        return type(error)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(STRATEGIES)), programs)
def test_compiled_equals_eager(name: str, program: Any) -> None:
    eager, compiled = attempt(name, program, False), attempt(name, program, True)
    if not isinstance(eager, list) or not isinstance(compiled, list):
        assert eager == compiled  # both refused, for the same reason
        return
    assert len(eager) == len(compiled)
    for a, b in zip(eager, compiled, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
