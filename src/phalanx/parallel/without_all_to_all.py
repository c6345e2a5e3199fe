"""Changes of layout without all-to-all, in programs whose layouts the user gives.

XLA moves a cut from one dim of a tensor to another by an all-to-all. A constraint in between, without
that cut, makes it gather the tensor and take a part of it, as MindSpore does unless `enable_alltoall`
is set. So layouts are followed through the program: those of its arguments and of its constraints, and
what the rules of operators make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidValueError
from phalanx.parallel.applying import Interpreter
from phalanx.parallel.layout import NONE, Layout, from_spec, to_spec
from phalanx.parallel.operators import describe
from phalanx.parallel.operators.base import Equation, spec_of
from phalanx.runtime import compat

__all__ = ["without_all_to_all"]

_CONSTRAINT = "sharding_constraint"


def without_all_to_all(
    function: Callable[..., Any], mesh: Mesh, specs: Sequence[PartitionSpec]
) -> Callable[..., Any]:
    """A function whose constraints never move a cut from one dim to another at once.

    Args:
        function: takes and returns nests of arrays.
        mesh: the devices.
        specs: the layout of each leaf of its arguments.
    """

    def gathered(*args: Any) -> Any:
        closed, results = compat.jaxpr_and_result(function, *args)
        leaves = jax.tree.leaves(args)
        interpreter = _Gathering(mesh)
        for x, spec in zip(leaves, specs, strict=True):
            interpreter.note(x, interpreter.layout(spec, x.shape))
        outs = interpreter.run(closed.jaxpr, closed.consts, leaves, ())
        return jax.tree.unflatten(jax.tree.structure(results), outs)

    gathered.__name__ = getattr(function, "__name__", "function")
    return gathered


class _Gathering(Interpreter):
    """Runs a program, and gathers where a cut would move."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__({}, mesh, {})
        self._devices = mesh
        self._names, self._sizes = tuple(mesh.shape), tuple(mesh.shape.values())
        self._layouts: dict[
            int, tuple[Any, Layout]
        ] = {}  # with the value, so that its id stays its own

    def layout(self, spec: PartitionSpec, shape: tuple[int, ...]) -> Layout | None:
        """The layout of a spec; None if it is of a kind that is not followed."""
        try:
            return from_spec(spec, self._names, shape, self._sizes)
        except InvalidValueError:
            return None

    def note(self, x: Any, layout: Layout | None) -> None:
        """Remember the layout of a value."""
        if layout is not None:
            self._layouts[id(x)] = x, layout

    def _known(self, x: Any) -> Layout | None:
        found = self._layouts.get(id(x))
        return None if found is None else found[1]

    def evaluate(self, jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of one equation; a constraint gathers first what would move."""
        if eqn.primitive.name != _CONSTRAINT:
            results = super().evaluate(jaxpr, eqn, operands)
            for x, layout in zip(results, self._spread(eqn, operands), strict=True):
                self.note(x, layout)
            return results
        sharding, (x,) = eqn.params["sharding"], operands
        wanted = None
        if isinstance(sharding, NamedSharding) and set(sharding.mesh.shape) == set(self._names):
            wanted = self.layout(sharding.spec, tuple(x.shape))
        have = self._known(x)
        if have is not None and wanted is not None:
            moved = [a >= 0 and b >= 0 and a != b for a, b in zip(have, wanted, strict=True)]
            if any(moved):
                kept = tuple(NONE if m else a for m, a in zip(moved, have, strict=True))
                between = NamedSharding(self._devices, to_spec(kept, self._names, x.ndim))
                x = jax.lax.with_sharding_constraint(x, between)
        results = super().evaluate(jaxpr, eqn, [x])
        self.note(results[0], wanted)
        return results

    def _spread(self, eqn: Any, operands: Sequence[Any]) -> list[Layout | None]:
        """The layouts of results: a loop is cut as the operands are that it runs over."""
        nothing: list[Layout | None] = [None] * len(eqn.outvars)
        if not any(self._known(x) for x in operands):
            return nothing
        try:
            operator = describe(
                Equation(
                    eqn.primitive.name,
                    eqn.params,
                    tuple(spec_of(atom.aval) for atom in eqn.invars),
                    tuple(spec_of(var.aval) for var in eqn.outvars),
                )
            )
        except (AttributeError, TypeError):  # values that are no arrays
            return nothing
        loops = [NONE] * len(self._names)
        for x, dims in zip(operands, operator.operands, strict=True):
            for axis, dim in enumerate(self._known(x) or ()):
                if dim >= 0 and loops[axis] == NONE:
                    loops[axis] = dims[dim]
        return [
            tuple(dims.index(loop) if loop != NONE and loop in dims else NONE for loop in loops)
            for dims in operator.results
        ]
