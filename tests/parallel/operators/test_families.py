"""Cost honesty: XLA communicates for each operator and strategy what its rule predicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from tests.parallel.hlo import sent

from phalanx.parallel.cost import Resharding
from phalanx.parallel.hardware import profile
from phalanx.parallel.layout import summed, to_spec
from phalanx.parallel.mesh import mesh_of
from phalanx.parallel.operators import OPAQUE, RULES, describe
from phalanx.parallel.operators.base import Equation, Operator, Strategies, spec_of, strategies
from phalanx.runtime import compat

CPU = profile("CPU")


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def rows(table: jax.Array, places: jax.Array) -> jax.Array:
    return table.at[places[..., 0]].get(mode="promise_in_bounds")


def convolved(x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


CASES: dict[str, tuple[str, Callable[..., Any], list[Any]]] = {
    # name: the primitive, a function that has it, its arguments
    "matrix product": ("dot_general", jnp.matmul, [f32(16, 32), f32(32, 64)]),
    "batched product": (
        "dot_general",
        partial(jnp.einsum, "bmk,bkn->bmn"),
        [f32(8, 16, 32), f32(8, 32, 16)],
    ),
    "convolution": ("conv_general_dilated", convolved, [f32(8, 6, 6, 16), f32(3, 3, 16, 32)]),
    "depthwise": (
        "conv_general_dilated",
        partial(convolved, groups=16),
        [f32(8, 6, 6, 16), f32(3, 3, 1, 16)],
    ),
    "sum": ("add", lax.add, [f32(16, 32), f32(16, 32)]),
    "repeated": ("mul", lax.mul, [f32(16, 32), f32(1, 32)]),
    "exponential": ("exp", lax.exp, [f32(16, 32)]),
    "choice": ("select_n", lambda a, b: lax.select(a > 0, a, b), [f32(16, 32), f32(16, 32)]),
    "transpose": ("transpose", lambda a: a.transpose(1, 0, 2), [f32(8, 16, 32)]),
    "repetition": ("broadcast_in_dim", lambda a: lax.broadcast_in_dim(a, (16, 32), (1,)), [f32(32)]),
    "merge": ("reshape", lambda a: a.reshape(8 * 16, 32), [f32(8, 16, 32)]),
    "regrouping": ("reshape", lambda a: a.reshape(16, 2), [f32(4, 8)]),
    "split": ("reshape", lambda a: a.reshape(8, 8, 4), [f32(8, 32)]),
    "slice": ("slice", lambda a: a[:, 4:20], [f32(16, 32)]),
    "pad": ("pad", lambda a: lax.pad(a, 0.0, ((0, 0, 0), (1, 1, 0))), [f32(16, 32)]),
    "concatenation": (
        "concatenate",
        lambda a, b: lax.concatenate([a, b], 0),
        [f32(16, 32), f32(8, 32)],
    ),
    "reversal": ("rev", lambda a: lax.rev(a, (0,)), [f32(16, 32)]),
    "two contracted dims": (
        "dot_general",
        partial(jnp.einsum, "bhd,hdm->bm"),
        [f32(8, 16, 8), f32(16, 8, 32)],
    ),
    "sum of two dims": ("reduce_sum", lambda a: a.sum((0, 1)), [f32(8, 16, 32)]),
    "two repeated dims": ("mul", lax.mul, [f32(8, 16, 32), f32(1, 1, 32)]),
    "count": ("iota", lambda: lax.iota(jnp.int32, 64), []),
    "row sums": ("reduce_sum", lambda a: a.sum(1), [f32(16, 32)]),
    "column maxima": ("reduce_max", lambda a: a.max(0), [f32(16, 32)]),
    "place of maximum": ("argmax", lambda a: lax.argmax(a, 1, jnp.int32), [f32(16, 32)]),
    "running sum": ("cumsum", lambda a: lax.cumsum(a, 1), [f32(16, 32)]),
    "sort": ("sort", lambda a: lax.sort(a, dimension=1), [f32(16, 32)]),
    "pooling": (
        "reduce_window_max",
        lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        [f32(8, 6, 6, 16)],
    ),
    "embedding": ("gather", rows, [f32(64, 32), i32(16, 8, 1)]),
    "embedding of a row": ("gather", rows, [f32(64, 32), i32(32, 1)]),
    "one of a row": (
        "gather",
        lambda t, i: jnp.take_along_axis(t, i[..., 0], 1),
        [f32(16, 32), i32(16, 1, 1)],
    ),
    "scatter": (
        "scatter-add",
        lambda t, i, u: t.at[i[..., 0]].add(u, mode="promise_in_bounds"),
        [f32(64, 32), i32(16, 1), f32(16, 32)],
    ),
    "dynamic slice": ("dynamic_slice", lambda a: lax.dynamic_slice(a, (0, 3), (16, 8)), [f32(16, 32)]),
    "dynamic update": (
        "dynamic_update_slice",
        lambda a, b: lax.dynamic_update_slice(a, b, (0, 3)),
        [f32(16, 32), f32(16, 8)],
    ),
    "cholesky": ("cholesky", partial(lax.linalg.cholesky, symmetrize_input=False), [f32(8, 4, 4)]),
}

SIZES = [(4,), (2, 4)]


def equations(jaxpr: Any) -> list[Any]:
    """All equations, those of calls included."""
    found = []
    for eqn in jaxpr.eqns:
        inner = [] if eqn.primitive.name in RULES else compat.sub_jaxprs(eqn)
        found += [e for sub in inner for e in equations(sub)] if inner else [eqn]
    return found


def operator_of(primitive: str, function: Callable[..., Any], args: list[Any]) -> Operator:
    found = [
        e for e in equations(jax.make_jaxpr(function)(*args).jaxpr) if e.primitive.name == primitive
    ]
    (eqn,) = found[-1:]
    operands = tuple(spec_of(atom.aval) for atom in eqn.invars)
    results = tuple(spec_of(var.aval) for var in eqn.outvars)
    return describe(Equation(primitive, eqn.params, operands, results))


class Program:
    """One operator, in every strategy, as one program."""

    def __init__(self, name: str, sizes: tuple[int, ...]) -> None:
        primitive, self.function, self.args = CASES[name]
        self.operator = operator_of(primitive, self.function, self.args)
        self.count = int(np.prod(sizes))
        self.mesh = mesh_of(CPU.topology(self.count), sizes)
        self.options: Strategies = strategies(self.operator, sizes)
        devices = np.asarray(jax.devices()[: self.count]).reshape(sizes)
        self.devices = Mesh(devices, self.mesh.names, axis_types=(AxisType.Auto,) * len(sizes))

    def sharding(self, layout: tuple[int, ...], rank: int) -> NamedSharding:
        return NamedSharding(self.devices, to_spec(summed(layout), self.mesh.names, rank))

    def operands(self, strategy: int) -> list[NamedSharding]:
        # The arguments are the first operands; functions may add constants.
        first = [self.matching(i) for i in range(len(self.args))]
        return [
            self.sharding(self.options.operands[i][strategy], len(arg.shape))
            for i, arg in zip(first, self.args, strict=True)
        ]

    def matching(self, argument: int) -> int:
        """The operand that an argument is."""
        shape = self.args[argument].shape
        same = [i for i, s in enumerate(self.operator.operand_specs) if s.shape == shape]
        if self.operator.name == "select_n":
            return argument + 1  # the first operand is the choice, which is computed
        return argument if argument in same else same[0]

    def result(self, strategy: int) -> NamedSharding:
        rank = len(self.operator.result_specs[0].shape)
        return self.sharding(self.options.results[0][strategy], rank)

    def predicted(self, layouts: tuple[tuple[int, ...], ...], spec: Any) -> Counter[str]:
        ways = Resharding(spec.shape, spec.itemsize, self.mesh, CPU)
        found: Counter[str] = Counter()
        for layout, loops in zip(layouts, self.options.loops, strict=True):
            for collective in ways.path(layout, summed(layout), loops):
                found[collective.kind] += round(collective.sent)
        return found


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_forward(name: str, sizes: tuple[int, ...]) -> None:
    p = Program(name, sizes)
    every = range(len(p.options))
    assert len(p.options) > 1

    def all_of_them(argss: list[list[jax.Array]]) -> list[jax.Array]:
        return [p.function(*args) for args in argss]

    compiled = (
        jax.jit(
            all_of_them,
            in_shardings=([p.operands(s) for s in every],),
            out_shardings=[p.result(s) for s in every],
        )
        .lower([p.args for _ in every])
        .compile()
    )
    predicted = p.predicted(p.options.results[0], p.operator.result_specs[0])
    assert sent(compiled, p.count) == predicted


CONSTANT = ("count", "place of maximum")
DIFFERENTIABLE = [
    (name, sizes)
    for name in CASES
    for sizes in SIZES
    # If an axis does nothing, XLA shares the gradient of a depthwise kernel out along it, too.
    if name not in CONSTANT and (name, sizes) != ("depthwise", (2, 4))
]


@pytest.mark.parametrize(("name", "sizes"), DIFFERENTIABLE, ids=str)
def test_gradients(name: str, sizes: tuple[int, ...]) -> None:
    """A gradient of an operand that lacks a cut loop is a sum over the devices along it."""
    p = Program(name, sizes)
    every = range(len(p.options))
    wanted = [i for i, arg in enumerate(p.args) if arg.dtype == jnp.float32]
    result = p.operator.result_specs[0]

    def gradient(number: int, args: list[jax.Array], weights: jax.Array) -> jax.Array:
        def weighted(x: jax.Array) -> jax.Array:
            return p.function(*args[:number], x, *args[number + 1 :])

        return jax.vjp(weighted, args[number])[1](weights)[0]

    def all_of_them(argss: Any, weights: Any) -> Any:
        return [[gradient(i, args, w) for i in wanted] for args, w in zip(argss, weights, strict=True)]

    gradients = [p.options.gradients[p.matching(i)] for i in wanted]
    outs = [
        [p.sharding(g[s], len(p.args[i].shape)) for g, i in zip(gradients, wanted, strict=True)]
        for s in every
    ]
    into = ([p.operands(s) for s in every], [p.result(s) for s in every])
    args = ([p.args for _ in every], [f32(*result.shape) for _ in every])
    compiled = jax.jit(all_of_them, in_shardings=into, out_shardings=outs).lower(*args).compile()
    predicted: Counter[str] = Counter()
    for g, i in zip(gradients, wanted, strict=True):
        predicted += p.predicted(g, p.operator.operand_specs[p.matching(i)])
    if p.operator.counts:  # the maximum itself, and how many elements are as large
        predicted += p.predicted(p.options.results[0], result)
        predicted += p.predicted(p.options.results[0], result)
    assert sent(compiled, p.count) == predicted


def test_families_are_all_there() -> None:
    families = {operator_of(*case).family for case in CASES.values()}
    assert families == {
        *("contraction", "convolution", "elementwise", "dim map", "reduction", "gather", "scatter"),
        "batched",
    }
    assert {case[0] for case in CASES.values()} <= set(RULES)


@pytest.mark.parametrize(
    ("primitive", "function", "args"),
    [
        (
            "pure_callback",
            lambda a: jax.pure_callback(np.sin, f32(16, 32), a),
            [f32(16, 32)],
        ),
    ],
)
def test_opaque_operators_stay_whole(primitive: str, function: Any, args: list[Any]) -> None:
    operator = operator_of(primitive, function, args)
    assert operator.family == OPAQUE
    assert len(strategies(operator, (2, 4))) == 1


def test_scatter_cuts_the_table_and_whole_rows() -> None:
    operator = operator_of(
        "scatter-add", lambda t, i, u: t.at[i].add(u), [f32(64, 32), i32(16), f32(16, 32)]
    )
    assert operator.family == "scatter"
    assert operator.results == (operator.operands[0],)
    assert set(operator.loops) == {64, 32}
