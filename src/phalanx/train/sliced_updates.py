"""Updates on slices: a function of whole arrays, computed where each replica has slices of them.

The function is traced with whole shapes, and its program is run on slices, equation by equation.
Elementwise arithmetic needs no other slices. Sums over all elements of an array, as norms need them,
are local sums and one sum over the replicas. For everything else the array is gathered first. So the
result is that of the function, whatever it does; only how much is communicated depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.core.slicing import Members, Slicing
from phalanx.errors import UnsupportedError
from phalanx.runtime import compat, program_parts

_ELEMENTWISE = frozenset(
    # One name each, as the primitives of JAX are called.
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp
    conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor""".split()  # noqa: SIM905
)
_SAME_ELEMENTS = frozenset({"reshape", "squeeze", "expand_dims", "reshard", "sharding_constraint"})
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "remat": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


@dataclass(frozen=True)
class Sliced:
    """A replica's slice of an array."""

    local: jax.Array
    slicing: Slicing


@dataclass(frozen=True)
class _Term:
    """A replica's term of a scalar that is the sum of all terms."""

    local: jax.Array


@dataclass(frozen=True)
class _Filled:
    """An array of one number."""

    scalar: jax.Array
    shape: tuple[int, ...]


def run_on_slices(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    wanted: Any,
    members: Members,
    fetch: Callable[[Any, Sequence[Any]], Any] | None = None,
) -> tuple[Any, list[str]]:
    """What a function of whole arrays gives, computed on slices.

    Args:
        function: takes and returns nests of arrays.
        args: its arguments; `Sliced` values stand for arrays. Others are the same on all replicas.
        wanted: for each result, in a nest like that of the function, whether it is wanted in slices.
        members: the replicas.
        fetch: gives what the function requests (`program_parts.requested`), from a place and its
            operands, as they are.

    Returns:
        The results, `Sliced` where that is wanted, and the names of the operations for which arrays had
        to be gathered.
    """
    leaves, structure = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, Sliced))
    shapes = [
        jax.ShapeDtypeStruct(x.slicing.shape, x.local.dtype)
        if isinstance(x, Sliced)
        else compat.shape_of(jnp.asarray(x))
        for x in leaves
    ]
    closed, result = compat.jaxpr_and_result(function, *jax.tree.unflatten(structure, shapes))
    run = _Run(members, fetch)
    outs = run.program(closed, leaves)
    choices = jax.tree.leaves(wanted)
    finished = [
        run.sliced(x, tuple(v.aval.shape)) if is_sliced else run.whole(x)
        for x, v, is_sliced in zip(outs, closed.jaxpr.outvars, choices, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(result), finished), run.gathered


class _Run:
    """Runs a program on slices."""

    def __init__(
        self, members: Members, fetch: Callable[[Any, Sequence[Any]], Any] | None = None
    ) -> None:
        self._members, self._fetch = members, fetch
        self.gathered: list[str] = []

    # -- kinds of values -------------------------------------------------------------------------

    def whole(self, x: Any) -> Any:
        """A value as every replica has it."""
        if isinstance(x, Sliced):
            return x.slicing.join(self._members.gather(x.local).reshape(-1))
        if isinstance(x, _Term):
            return self._members.sum(x.local)
        if isinstance(x, _Filled):
            return jnp.full(x.shape, x.scalar)
        return x

    def sliced(self, x: Any, shape: tuple[int, ...]) -> Sliced:
        """A value in slices."""
        slicing = Slicing(shape, self._members.parts)
        if isinstance(x, Sliced):
            return Sliced(x.local, slicing)
        if isinstance(x, _Filled):
            return Sliced(jnp.full((slicing.length,), x.scalar), slicing)
        return Sliced(slicing.cut(self.whole(x), self._members.index()), slicing)

    def _term(self, x: Any) -> jax.Array:
        """A scalar as a term: one member has it, and the others have zero."""
        if isinstance(x, _Term):
            return x.local
        return jnp.where(self._members.index() == 0, x, jnp.zeros_like(x))

    # -- programs --------------------------------------------------------------------------------

    def program(self, closed: Any, inputs: Sequence[Any]) -> list[Any]:
        """The results of a program, given its inputs."""
        jaxpr, constants = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else known[atom]

        for eqn in jaxpr.eqns:
            outs = self._equation(jaxpr, eqn, [value(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, jaxpr: Any, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        special = (Sliced, _Term, _Filled)
        if name == program_parts.REQUEST and self._fetch is not None:
            given = [x if isinstance(x, Sliced) else self.whole(x) for x in operands]
            return [self._fetch(eqn.params["place"], given)]
        shape = tuple(eqn.outvars[0].aval.shape)
        if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape and shape:
            return [_Filled(self.whole(operands[0]), shape)]
        holds_request = self._fetch is not None and program_parts.holds_request(eqn)
        if holds_request and name != "cond" and name not in _CALLS:
            raise UnsupportedError(
                f"A step with a parallel optimizer differentiates a loss inside `{name}`. Parameters "
                "are in slices, gathered outside of loops only. Call value_and_grad outside, "
                "with micro_batches=… to add up gradients over pieces of a batch; or let the loop call "
                f"the whole step. Received: value_and_grad inside {name}"
            )
        if not holds_request and not any(isinstance(x, special) for x in operands):
            return program_parts.eval_equation(jaxpr, eqn, operands)
        if name in _CALLS:
            return self.program(eqn.params[_CALLS[name]], operands)
        if name == "cond":
            return self._cond(eqn, operands)
        if name in ("add", "add_any") and any(isinstance(x, _Term) for x in operands):
            return [_Term(self._term(operands[0]) + self._term(operands[1]))]
        operands = [self.whole(x) if isinstance(x, _Term) else x for x in operands]
        if name in _ELEMENTWISE:
            return [self._elementwise(jaxpr, eqn, operands)]
        if name == "optimization_barrier":
            return [self._barrier(x) for x in operands]
        if isinstance(operands[0], Sliced):
            found = self._structural(eqn, operands[0], operands[1:])
            if found is not None:
                return [found]
        if any(isinstance(x, Sliced) for x in operands):
            self.gathered.append(name)
        return program_parts.eval_equation(jaxpr, eqn, [self.whole(x) for x in operands])

    def _structural(self, eqn: Any, x: Sliced, others: Sequence[Any]) -> Any:
        """Another shape, or a scalar, of a slice; None if the array must be whole for it."""
        name, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape)
        adds_dims = name == "broadcast_in_dim" and math.prod(shape) == x.slicing.size
        if name in _SAME_ELEMENTS or adds_dims:
            return Sliced(x.local, x.slicing.reshaped(shape))
        if name == "dot_general" and isinstance(others[0], Sliced) and _is_dot(eqn):
            product = self._real(x, 0) * others[0].local
            return _Term(jnp.sum(product, dtype=eqn.outvars[0].aval.dtype))
        return None if shape or others else self._reduction(eqn, x)

    def _elementwise(self, jaxpr: Any, eqn: Any, operands: list[Any]) -> Any:
        """Elementwise arithmetic; scalars go with everything."""
        shape = tuple(eqn.outvars[0].aval.shape)
        shapes = [tuple(v.aval.shape) for v in eqn.invars]
        arrays = [x for x, each in zip(operands, shapes, strict=True) if each]
        if arrays and all(isinstance(x, _Filled) for x in arrays):
            scalars = [x.scalar if isinstance(x, _Filled) else x for x in operands]
            return _Filled(self._bind(eqn, scalars), shape)
        if not any(isinstance(x, Sliced) for x in arrays):
            whole = [self.whole(x) for x in operands]
            return program_parts.eval_equation(jaxpr, eqn, whole)[0]
        local = [
            self._stretched(x, each, shape).local if each else x
            for x, each in zip(operands, shapes, strict=True)
        ]
        return Sliced(self._bind(eqn, local), Slicing(shape, self._members.parts))

    def _stretched(self, x: Any, old: tuple[int, ...], new: tuple[int, ...]) -> Sliced:
        """An operand in slices, in the shape of the result: dims of length 1 may be longer there."""
        if old == new or isinstance(x, _Filled):
            return self.sliced(x, new)
        if isinstance(x, Sliced):
            self.gathered.append("broadcast_in_dim")
        return self.sliced(jnp.broadcast_to(self.whole(x), new), new)

    @staticmethod
    def _bind(eqn: Any, operands: list[Any]) -> Any:
        params = dict(eqn.params)
        if "sharding" in params:
            params["sharding"] = None
        return eqn.primitive.bind(*operands, **params)

    @staticmethod
    def _barrier(x: Any) -> Any:
        if isinstance(x, Sliced):
            return Sliced(lax.optimization_barrier(x.local), x.slicing)
        return x if isinstance(x, _Filled) else lax.optimization_barrier(x)

    def _real(self, x: Sliced, otherwise: Any) -> jax.Array:
        """A slice with something else in place of padding."""
        if not x.slicing.is_padded:
            return x.local
        other = jnp.asarray(otherwise, x.local.dtype)
        return jnp.where(x.slicing.is_real(self._members.index()), x.local, other)

    def _reduction(self, eqn: Any, x: Sliced) -> Any:
        """A reduction of an array to a scalar; None if it must be whole for it."""
        name = eqn.primitive.name
        if name == "reduce_sum":
            return _Term(jnp.sum(self._real(x, 0), dtype=eqn.outvars[0].aval.dtype))
        if name in ("reduce_and", "reduce_or") and x.local.dtype == jnp.bool_:
            is_any = name == "reduce_or"
            mine = (jnp.any if is_any else jnp.all)(self._real(x, not is_any))
            return self._members.extreme(mine.astype(jnp.int32), is_any).astype(jnp.bool_)
        if name in ("reduce_max", "reduce_min") and jnp.issubdtype(x.local.dtype, jnp.floating):
            largest = name == "reduce_max"
            mine = (jnp.max if largest else jnp.min)(self._real(x, -jnp.inf if largest else jnp.inf))
            return self._members.extreme(mine, largest)
        return None

    def _cond(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        """A choice that all replicas make alike; each result is in slices if a branch has it so."""
        index, *rest = [self.whole(x) if isinstance(x, _Term) else x for x in operands]
        arrays = [x.local if isinstance(x, Sliced) else self.whole(x) for x in rest]

        def given(values: Sequence[Any]) -> list[Any]:
            pairs = zip(rest, values, strict=True)
            return [Sliced(x, old.slicing) if isinstance(old, Sliced) else x for old, x in pairs]

        kinds = [[False] * len(eqn.outvars) for _ in eqn.params["branches"]]

        def trial(number: int, closed: Any) -> Callable[..., Any]:
            def run(*values: Any) -> None:
                outs = _Run(self._members, self._fetch).program(closed, given(values))
                kinds[number] = [isinstance(x, Sliced) for x in outs]

            return run

        for number, closed in enumerate(eqn.params["branches"]):
            jax.eval_shape(trial(number, closed), *arrays)
        choices = [any(column) for column in zip(*kinds, strict=True)]
        shapes = [tuple(v.aval.shape) for v in eqn.outvars]

        def branch(closed: Any) -> Callable[..., list[Any]]:
            def run(*values: Any) -> list[Any]:
                outs = self.program(closed, given(values))
                return [
                    self.sliced(x, shape).local if is_sliced else self.whole(x)
                    for x, shape, is_sliced in zip(outs, shapes, choices, strict=True)
                ]

            return run

        outs = lax.switch(index, [branch(closed) for closed in eqn.params["branches"]], *arrays)
        return [
            Sliced(x, Slicing(shape, self._members.parts)) if is_sliced else x
            for x, shape, is_sliced in zip(outs, shapes, choices, strict=True)
        ]


def _is_dot(eqn: Any) -> bool:
    """Whether it is the sum of the products of two vectors."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return not eqn.outvars[0].aval.shape and tuple(left) == tuple(right) == (0,)
