"""Applying a plan: the same function, with a sharding constraint wherever the plan has a layout.

XLA then cuts the program as the plan says, and communicates what the plan predicts. The gradient
follows, because the constraints are differentiated too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidValueError
from phalanx.parallel.operators.local import computed_in_parts
from phalanx.parallel.placing import with_auto_axes
from phalanx.parallel.plan import OperatorPlan, Plan
from phalanx.parallel.reading import CALLS, REMAT, read
from phalanx.parallel.tracing import trace
from phalanx.runtime import compat, program_parts

__all__ = ["Interpreter", "apply", "with_branches_apart"]


def apply(
    function: Callable[..., Any],
    plan: Plan,
    mesh: Mesh | None = None,
    *,
    parameters: int | Sequence[int] = 0,
) -> Callable[..., Any]:
    """A function that computes what `function` does, laid out by a plan.

    Call it inside `jax.jit`, with arguments that have the plan's shardings or will get them. The
    program must be the one that the plan was made for.

    Args:
        function: what was given to `search`.
        plan: what it found.
        mesh: with the axes of the plan; `Plan.device_mesh` if none is given.
        parameters: as they were given to `search`.

    >>> import jax, jax.numpy as jnp
    >>> from phalanx.parallel import search
    >>> def loss(w, x):
    ...     return jnp.sum((x @ w) ** 2)
    >>> args = jnp.ones((8, 8)), jnp.ones((64, 8))
    >>> plan = search(loss, args, devices=1)
    >>> float(jax.jit(apply(loss, plan))(*args)) == float(loss(*args))
    True
    """
    used = plan.device_mesh() if mesh is None else with_auto_axes(mesh)

    def applied(*args: Any) -> Any:
        traced = trace(function, args, parameters)
        graph = read(traced.closed, traced.names, traced.results, traced.parameters)
        if graph.fingerprint() != plan.fingerprint:
            raise InvalidValueError(
                "The plan was made for another program, or for other shapes. Search again. "
                f"Received: the program {graph.fingerprint()}, a plan for {plan.fingerprint}."
            )
        keys = {node.place: node.key for node in graph.nodes if node.place}
        interpreter = Interpreter({o.key: o for o in plan.operators}, used, keys)
        leaves = jax.tree.leaves(args)
        tensors = {**plan.parameters, **plan.inputs}
        given = [
            interpreter.named(x, name, tensors[name].spec)
            for x, name in zip(leaves, traced.names, strict=True)
        ]
        outs = interpreter.run(traced.closed.jaxpr, traced.closed.consts, given, ())
        outs = [interpreter.routed(x, ("output", i), 0) for i, x in enumerate(outs)]
        structure = jax.tree.structure(jax.eval_shape(function, *args))
        return jax.tree.unflatten(structure, outs)

    return applied


class Interpreter:
    """Runs a jaxpr with the constraints of a plan.

    Args:
        operators: what the plan says of them, by their keys.
        mesh: the devices; None if there are no operators.
        keys: of the operators, by their places in the jaxpr.
    """

    def __init__(
        self, operators: Mapping[str, OperatorPlan], mesh: Mesh | None, keys: Mapping[Any, str]
    ) -> None:
        self.operators, self.mesh, self.keys = operators, mesh, keys

    def evaluate(self, jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of one equation."""
        found: Sequence[Any] = program_parts.eval_equation(jaxpr, eqn, operands)
        return found

    def constrained(self, x: Any, spec: PartitionSpec) -> Any:
        """A value in a layout."""
        if not getattr(x, "ndim", 0) or self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def named(self, x: Any, name: str, spec: PartitionSpec) -> Any:
        """A result in its layout, and in that of the copy that all of its readers use."""
        x = self.constrained(x, spec)
        copy = self.operators.get(f"{name}:copy")
        if copy is not None:
            for step in copy.routes[0]:
                x = self.constrained(x, step)
        return x

    def routed(self, x: Any, place: tuple[Any, ...], operand: int) -> Any:
        """An operand in the layout that its reader wants."""
        operator = self.operators.get(self.keys.get(place, ""))
        if operator is not None:
            for step in operator.routes[operand]:
                x = self.constrained(x, step)
        return x

    def result(self, x: Any, place: tuple[Any, ...], number: int = 0) -> Any:
        """A result in its layout."""
        key = self.keys.get(place, "")
        operator = self.operators.get(key)
        if operator is None:
            return x
        return self.named(x, f"{key}.{number}" if number else key, operator.results[number])

    def entering(self, values: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
        """What stands for some values in a part of the program that is traced by itself."""
        del given
        return values

    def leaving(self, results: list[Any], place: tuple[Any, ...]) -> list[Any]:
        """The results of such a part, in it."""
        del place
        return results

    def left(self, results: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        """The results of such a part, outside of it."""
        del place
        return results

    def run(
        self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[Any], place: tuple[Any, ...]
    ) -> list[Any]:
        """The results of a jaxpr."""
        known: dict[Any, Any] = {}
        known.update(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def value(atom: Any) -> Any:
            return atom.val if compat.is_literal(atom) else known[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            outs = self._equation(jaxpr, eqn, [value(atom) for atom in eqn.invars], (*place, i))
            known.update(zip(eqn.outvars, outs, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(
        self, jaxpr: Any, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]
    ) -> Sequence[Any]:
        name = eqn.primitive.name
        if name in REMAT:
            return self._remat(eqn, operands, place)
        if name in CALLS and not name.startswith("custom"):
            return self._inner(eqn.params[CALLS[name]], operands, place)
        if name == "scan":
            return self._scan(eqn, operands, place)
        if name == "while":
            return self._while(eqn, operands, place)
        if name == "cond":
            return self._cond(eqn, operands, place)
        # Functions with derivatives of their own stay whole: XLA spreads the layouts of what is around
        # them.
        if not name.startswith("custom"):
            operands = [self.routed(x, place, i) for i, x in enumerate(operands)]
        outs = self._in_parts(eqn, operands, place) or self.evaluate(jaxpr, eqn, operands)
        return [self.result(x, place, i) for i, x in enumerate(outs)]

    def _in_parts(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> list[Any] | None:
        """The results of an operator that each device computes by itself; None for all others."""
        operator = self.operators.get(self.keys.get(place, ""))
        if operator is None or self.mesh is None:
            return None
        return computed_in_parts(eqn, operands, self.mesh, operator.operands, operator.results)

    def _inner(self, inner: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> list[Any]:
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, place)

    def _remat(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        def block(*xs: Any) -> list[Any]:
            given = self.entering(xs, operands)
            return self.leaving(self._inner(eqn.params["jaxpr"], given, place), place)

        if eqn.params.get("differentiated"):  # it is in a gradient, and must be computed again there
            closed, _ = compat.jaxpr_and_result(block, *operands)
            jaxpr = closed.jaxpr.replace(
                constvars=[],
                invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars],
                debug_info=closed.jaxpr.debug_info.with_unknown_names(),
            )
            params = {**eqn.params, "jaxpr": jaxpr}
            results: Sequence[Any] = eqn.primitive.bind(*closed.consts, *operands, **params)
            return self.left(results, place)
        again = jax.checkpoint(
            block, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"]
        )
        found: Sequence[Any] = again(*operands)
        return self.left(found, place)

    def _scan(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        consts, carries = compat.scan_counts(eqn)
        first = consts + carries

        def body(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            carried = [self.result(x, (*place, "carry", i)) for i, x in enumerate(carry)]
            parts = [self.result(x, (*place, "unstack", i)) for i, x in enumerate(rows)]
            outs = self._inner(eqn.params["jaxpr"], [*operands[:consts], *carried, *parts], place)
            after = [self.routed(x, (*place, "carry", i), 1) for i, x in enumerate(outs[:carries])]
            stacked = [self.routed(x, (*place, "stack", i), 0) for i, x in enumerate(outs[carries:])]
            return after, stacked

        start = [self.routed(x, (*place, "carry", i), 0) for i, x in enumerate(operands[consts:first])]
        stacks = [self.routed(x, (*place, "unstack", i), 0) for i, x in enumerate(operands[first:])]
        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        last, ys = jax.lax.scan(body, start, stacks, **options)
        return [*last, *(self.result(y, (*place, "stack", i)) for i, y in enumerate(ys))]

    def _while(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        tests, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first = tests + consts

        def test(carry: Sequence[Any]) -> Any:
            inner = [*operands[:tests], *carry]
            return self._inner(eqn.params["cond_jaxpr"], inner, (*place, "test"))[0]

        def body(carry: Sequence[Any]) -> list[Any]:
            carried = [self.result(x, (*place, "carry", i)) for i, x in enumerate(carry)]
            inner = [*operands[tests:first], *carried]
            outs = self._inner(eqn.params["body_jaxpr"], inner, (*place, "body"))
            return [self.routed(x, (*place, "carry", i), 1) for i, x in enumerate(outs)]

        start = [self.routed(x, (*place, "carry", i), 0) for i, x in enumerate(operands[first:])]
        found: Sequence[Any] = jax.lax.while_loop(test, body, start)
        return found

    def _cond(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        def branch(number: int, inner: Any) -> Callable[..., list[Any]]:
            def run(*xs: Any) -> list[Any]:
                outs = self._inner(inner, xs, (*place, "branch", number))
                outs = [self.routed(x, (*place, "join", i), number) for i, x in enumerate(outs)]
                return [_apart(x) for x in outs] if is_laid_out else outs

            return run

        is_laid_out = any(map(_has_layouts, compat.sub_jaxprs(eqn)))
        branches = [branch(i, inner) for i, inner in enumerate(eqn.params["branches"])]
        outs = jax.lax.switch(operands[0], branches, *operands[1:])
        return [self.result(x, (*place, "join", i)) for i, x in enumerate(outs)]


def with_branches_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose branches may end in different layouts.

    >>> def either(x):
    ...     return jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    >>> import jax.numpy as jnp
    >>> float(with_branches_apart(either)(jnp.zeros(1))[0])
    1.0
    """

    def apart(*args: Any) -> Any:
        closed, results = compat.jaxpr_and_result(function, *args)
        leaves = jax.tree.leaves(args)
        if _has_laid_out_branches(closed.jaxpr):
            outs = Interpreter({}, None, {}).run(closed.jaxpr, closed.consts, leaves, ())
        else:
            outs = compat.eval_jaxpr(closed, leaves)
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    apart.__name__ = getattr(function, "__name__", "function")
    return apart


def _has_laid_out_branches(jaxpr: Any) -> bool:
    return any(
        any(map(_has_laid_out_branches, inner := compat.sub_jaxprs(eqn)))
        or (eqn.primitive.name == "cond" and any(map(_has_layouts, inner)))
        for eqn in jaxpr.eqns
    )


def _has_layouts(jaxpr: Any) -> bool:
    """Whether a program lays out anything by itself."""
    return any(
        eqn.primitive.name == "sharding_constraint" or any(map(_has_layouts, compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _apart(x: Any) -> Any:
    """The result of a branch. XLA refuses branches that end in different layouts."""
    is_plain = getattr(x, "ndim", 0) and not compat.is_key_array(x)
    return jax.lax.optimization_barrier(x) if is_plain else x
