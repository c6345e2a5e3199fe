"""Changes of layout without all-to-all, in programs whose layouts the user gives.

XLA moves a cut from one dim of a tensor to another by an all-to-all. A constraint in between, without
that cut, makes it gather the tensor and take a part of it, as MindSpore does unless `enable_alltoall`
is set. So layouts are followed through the program: those of its arguments and of its constraints, and
what the rules of operators make of them. The same is done where one axis cuts the operands of an
operator along different loops, which XLA cannot leave as they are either.
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
from phalanx.parallel.reading import CALLS
from phalanx.runtime import compat

__all__ = ["ready_for", "without_all_to_all"]

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


def ready_for(x: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """An array of an eager step, gathered as far as it would need an all-to-all to get a layout."""
    present = getattr(compat.primal_value(x), "sharding", None)
    if not isinstance(present, NamedSharding) or present.mesh.shape != mesh.shape:
        return x
    interpreter = _Gathering(mesh)
    interpreter.note(x, interpreter.layout(present.spec, x.shape))
    return interpreter.ready(x, interpreter.layout(spec, x.shape))


class _Gathering(Interpreter):
    """Runs a program, and gathers where a cut would move."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__({}, mesh, {})
        self._devices = mesh
        self._names, self._sizes = tuple(mesh.shape), tuple(mesh.shape.values())
        self._layouts: dict[
            int, tuple[Any, Layout]
        ] = {}  # with the value, so that its id stays its own
        self._leaving: dict[tuple[Any, ...], list[Layout | None]] = {}

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
        """The results of one equation, of which nothing is moved from one dim to another."""
        if eqn.primitive.name in CALLS:  # a function with derivatives of its own
            return self._whole_call(jaxpr, eqn, operands)
        if eqn.primitive.name != _CONSTRAINT:
            given, layouts = self._agreeing(eqn, operands)
            results = super().evaluate(jaxpr, eqn, given)
            return [self._kept(x, layout) for x, layout in zip(results, layouts, strict=True)]
        sharding, (x,) = eqn.params["sharding"], operands
        wanted = None
        if isinstance(sharding, NamedSharding) and set(sharding.mesh.shape) == set(self._names):
            wanted = self.layout(sharding.spec, tuple(x.shape))
        results = super().evaluate(jaxpr, eqn, [self.ready(x, wanted)])
        self.note(results[0], wanted)
        return results

    def _whole_call(self, jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of a call that stays as it is, in the layouts that its operators would give."""
        layouts: list[Layout | None] = []

        def note(*xs: Any) -> None:
            inner = eqn.params[CALLS[eqn.primitive.name]]
            layouts[:] = [self._known(x) for x in self._inner(inner, self.entering(xs, operands), ())]

        jax.eval_shape(note, *operands)
        results = super().evaluate(jaxpr, eqn, operands)
        return [self._kept(x, layout) for x, layout in zip(results, layouts, strict=True)]

    def ready(self, x: Any, wanted: Layout | None) -> Any:
        """A value that needs no all-to-all to get a layout."""
        have = self._known(x)
        if have is not None and wanted is not None:
            differ = [a != b for a, b in zip(have, wanted, strict=True)]
            if any(d and b >= 0 for d, b in zip(differ, wanted, strict=True)):
                left = [d and a >= 0 for d, a in zip(differ, have, strict=True)]
                x = self._gathered(x, have, left)  # also for an axis that another one replaces
        return x

    # -- parts that are traced by themselves ----------------------------------------------------------

    def entering(self, values: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
        """Values that are laid out as those for which they stand."""
        return [self._kept(x, self._known(y)) for x, y in zip(values, given, strict=True)]

    def leaving(self, results: list[Any], place: tuple[Any, ...]) -> list[Any]:
        """The results, of which the layouts are remembered."""
        self._leaving[place] = [self._known(x) for x in results]
        return results

    def left(self, results: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        """The results, in these layouts."""
        for x, layout in zip(results, self._leaving.pop(place), strict=True):
            self.note(x, layout)
        return results

    def _carried(
        self, start: Sequence[Any], round_: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> list[Layout | None]:
        """The layout of each value that a loop carries, in all rounds: that which it begins with.

        What is whole at first, such as zeros to which a loop adds, gets the layout that it has after a
        round.

        Args:
            start: what the loop begins with.
            round_: from what a round begins with to what it ends with.
        """
        layouts = [self._known(x) for x in start]
        for _ in range(3):  # one layout may follow from another one
            after: list[Layout | None] = []

            def one(*xs: Any, before: list[Any] = layouts, after: list[Any] = after) -> None:
                carry = [self._kept(x, layout) for x, layout in zip(xs, before, strict=True)]
                after[:] = [self._known(x) for x in round_(carry)]

            jax.eval_shape(one, *start)
            found = [b if a is None else a for a, b in zip(layouts, after, strict=True)]
            if found == layouts:
                break
            layouts = found
        return layouts

    def _begun(self, start: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
        """Values in the layouts in which a loop carries them."""
        pairs = zip(start, layouts, strict=True)
        return [self._kept(self.ready(x, layout), layout) for x, layout in pairs]

    def _scan(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        consts, carries = compat.scan_counts(eqn)
        first = consts + carries
        # Rounds take one row each, so rows are not cut.
        stacks = [self._whole_rows(x) for x in operands[first:]]
        below = [_of_rows(self._known(x), -1) for x in stacks]
        made: list[Layout | None] = []

        def outs(carry: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
            parts = [self._kept(x, layout) for x, layout in zip(rows, below, strict=True)]
            found = self._inner(eqn.params["jaxpr"], [*operands[:consts], *carry, *parts], place)
            made[:] = [_of_rows(self._known(x), 1) for x in found[carries:]]
            return found

        def tried(carry: Sequence[Any]) -> list[Any]:
            return outs(carry, [x[0] for x in stacks])[:carries]

        layouts = self._carried(operands[consts:first], tried)

        def body(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            found = outs([self._kept(x, a) for x, a in zip(carry, layouts, strict=True)], rows)
            return self._begun(found[:carries], layouts), found[carries:]

        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        start = self._begun(operands[consts:first], layouts)
        last, ys = jax.lax.scan(body, start, stacks, **options)
        return [self._kept(x, a) for x, a in zip([*last, *ys], [*layouts, *made], strict=True)]

    def _whole_rows(self, x: Any) -> Any:
        have = self._known(x)
        if have is None or not any(dim == 0 for dim in have):
            return x
        x = self._gathered(x, have, [dim == 0 for dim in have])
        self.note(x, tuple(NONE if dim == 0 else dim for dim in have))
        return x

    def _while(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        tests, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        first = tests + consts

        def after(carry: Sequence[Any]) -> list[Any]:
            inner = [*operands[tests:first], *carry]
            return self._inner(eqn.params["body_jaxpr"], inner, (*place, "body"))

        layouts = self._carried(operands[first:], after)

        def carried(carry: Sequence[Any]) -> list[Any]:
            return [self._kept(x, layout) for x, layout in zip(carry, layouts, strict=True)]

        def test(carry: Sequence[Any]) -> Any:
            inner = [*operands[:tests], *carried(carry)]
            return self._inner(eqn.params["cond_jaxpr"], inner, (*place, "test"))[0]

        start = self._begun(operands[first:], layouts)
        found = jax.lax.while_loop(
            test, lambda carry: self._begun(after(carried(carry)), layouts), start
        )
        return carried(found)

    def _cond(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        layouts: list[Layout | None] = [None] * len(eqn.outvars)

        def branch(number: int, inner: Any) -> Callable[..., list[Any]]:
            def run(*xs: Any) -> list[Any]:
                given = self.entering(xs, operands[1:])
                return self._inner(inner, given, (*place, "branch", number))

            return run

        branches = [branch(i, inner) for i, inner in enumerate(eqn.params["branches"])]

        def note(*xs: Any) -> None:
            for run in branches:
                found = [self._known(x) for x in run(*xs)]
                layouts[:] = [b if a is None else a for a, b in zip(layouts, found, strict=True)]

        jax.eval_shape(note, *operands[1:])
        ended = [lambda *xs, run=run: self._begun(run(*xs), layouts) for run in branches]
        outs = jax.lax.switch(operands[0], ended, *operands[1:])
        return [self._kept(x, layout) for x, layout in zip(outs, layouts, strict=True)]

    # -- operators ----------------------------------------------------------------------------------

    def _kept(self, x: Any, layout: Layout | None) -> Any:
        """A result in the layout that follows from those of the operands, which XLA must not change."""
        if layout is None or not x.ndim:
            return x
        spec = to_spec(layout, self._names, x.ndim)
        x = jax.lax.with_sharding_constraint(x, NamedSharding(self._devices, spec))
        self.note(x, layout)
        return x

    def _gathered(self, x: Any, have: Layout, moved: Sequence[bool]) -> Any:
        """A value without the cuts of some axes."""
        if not any(moved):
            return x
        kept = tuple(NONE if m else a for m, a in zip(moved, have, strict=True))
        between = NamedSharding(self._devices, to_spec(kept, self._names, x.ndim))
        return jax.lax.with_sharding_constraint(x, between)

    def _agreeing(self, eqn: Any, operands: Sequence[Any]) -> tuple[Sequence[Any], list[Layout | None]]:
        """Operands of which each axis cuts one loop at most, and the layouts of the results."""
        nothing: list[Layout | None] = [None] * len(eqn.outvars)
        if not any(self._known(x) for x in operands):
            return operands, nothing
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
            return operands, nothing
        loops = [NONE] * len(self._names)
        given = list(operands)
        pairs = zip(operands, operator.operands, operator.operand_specs, strict=True)
        # The largest operand stays as it is.
        for i, (x, dims, _) in sorted(enumerate(pairs), key=lambda pair: -pair[1][2].bytes):
            have = self._known(x) or (NONE,) * len(loops)
            cut = [dims[dim] if dim >= 0 else NONE for dim in have]
            moved = [
                dim >= 0
                and (loop not in (NONE, mine) if mine != NONE else operator.family == "scatter")
                for dim, loop, mine in zip(have, loops, cut, strict=True)
            ]
            given[i] = self._gathered(x, have, moved)
            loops = [mine if loop == NONE else loop for loop, mine in zip(loops, cut, strict=True)]
        if all(loop == NONE for loop in loops):
            return given, nothing
        layouts: list[Layout | None] = [
            tuple(dims.index(loop) if loop != NONE and loop in dims else NONE for loop in loops)
            for dims in operator.results
        ]
        return given, layouts


def _of_rows(layout: Layout | None, more: int) -> Layout | None:
    """The layout of a row of a tensor, or of the tensor that has it as a row."""
    return None if layout is None else tuple(dim if dim == NONE else dim + more for dim in layout)
