"""Cutting functions into stages: where one tensor alone goes on, the rest can be another stage.

A function is traced and its calls are taken apart. What depends on parameters and on the batch is
computed once, in one stage. What depends on one of them only (masks, casts of parameters) is computed
again wherever it is needed, so it does not stand in the way of a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.halves import Inlined
from phalanx.parallel.pipelines.stages import Stage
from phalanx.parallel.placing import names_of
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown

__all__ = ["CutFunction", "FlatFunction", "cut_function", "flattened"]


@dataclass(frozen=True)
class FlatFunction:
    """A traced function without calls.

    Args:
        closed: its jaxpr.
        parameters: the names of the parameters, whose leaves are the first inputs.
        arguments: for each other input, the number of the argument of the batch that it is a leaf of.
        cuts: the numbers of equations after which one tensor alone goes on.
        crossing: those tensors.
        mixed: the numbers of the equations that depend on parameters and on the batch.
    """

    closed: Any
    parameters: tuple[str, ...]
    arguments: tuple[int, ...]
    cuts: tuple[int, ...]
    crossing: tuple[Any, ...]
    mixed: frozenset[int]

    @property
    def equations(self) -> Sequence[Any]:
        """The equations."""
        found: Sequence[Any] = self.closed.jaxpr.eqns
        return found


def flattened(function: Callable[..., Any], params: Any, batch: Sequence[Any]) -> FlatFunction:
    """Trace a function of parameters and a batch, and find where it can be cut.

    Args:
        function: returns the loss.
        params: a nest of arrays, or of their shapes.
        batch: nests of arrays with the examples along the first dim, or of their shapes.
    """
    if not callable(function):
        raise InvalidTypeError(
            f"A function of parameters and a batch is cut. Received: {shown(function)}"
        )
    leaves, structure = jax.tree.flatten((params, tuple(batch)))
    shapes = [jax.ShapeDtypeStruct(np.shape(x), _dtype(x)) for x in leaves]

    def flat(*args: Any) -> Any:
        given, rest = jax.tree.unflatten(structure, args)
        return function(given, *rest)

    traced = jax.make_jaxpr(flat)(*shapes)
    if len(traced.jaxpr.outvars) != 1:
        raise InvalidValueError(
            "A function that is cut returns one number, the loss. "
            f"Received: {len(traced.jaxpr.outvars)} results"
        )
    closed = jax.make_jaxpr(lambda *args: Inlined().run(traced.jaxpr, traced.consts, args, ()))(*shapes)
    names = tuple(names_of(params))
    numbers = tuple(i for i, arg in enumerate(batch) for _ in jax.tree.leaves(arg))
    mixed, crossing = _crossings(closed.jaxpr, len(names))
    cuts = tuple(i for i in range(len(closed.jaxpr.eqns) - 1) if len(crossing.get(i, ())) == 1)
    return FlatFunction(
        closed, names, numbers, cuts, tuple(crossing[i][0] for i in cuts), frozenset(mixed)
    )


def _dtype(x: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(x.dtype if hasattr(x, "dtype") else np.result_type(x))


def _crossings(jaxpr: Any, parameters: int) -> tuple[set[int], dict[int, list[Any]]]:
    """The equations that depend on both, and what of their results is needed after each equation."""
    kinds: dict[Any, int] = dict.fromkeys(jaxpr.invars[:parameters], 1)
    kinds |= dict.fromkeys(jaxpr.invars[parameters:], 2)
    mixed: set[int] = set()
    last: dict[Any, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        known = [v for v in eqn.invars if not compat.is_literal(v)]
        kind = 0
        for var in known:
            kind |= kinds.get(var, 0)
            last[var] = i
        kinds.update(dict.fromkeys(eqn.outvars, kind))
        if kind == 3:
            mixed.add(i)
    last.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if not compat.is_literal(v)})
    crossing: dict[int, list[Any]] = {}
    alive: list[Any] = []
    for i, eqn in enumerate(jaxpr.eqns):
        if i in mixed:
            alive += [v for v in eqn.outvars if v in last]
        alive = [v for v in alive if last[v] > i]
        if i in mixed:  # elsewhere a cut would be the same as the one before
            crossing[i] = list(alive)
    return mixed, crossing


@dataclass(frozen=True)
class CutFunction:
    """A function in stages.

    Args:
        stages: of the pipeline. Their parameters are dictionaries by name.
        owners: for each parameter, the stages that use it, the first of which has it.
        structure: of the parameters of the function.
        boundaries: what goes from each stage to the next, as text.
    """

    stages: tuple[Stage, ...]
    owners: Mapping[str, tuple[int, ...]]
    structure: Any
    boundaries: tuple[str, ...]

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several stages use."""
        return {name: where for name, where in self.owners.items() if len(where) > 1}

    def split(self, params: Any) -> list[dict[str, Any]]:
        """The parameters of each stage."""
        found: list[dict[str, Any]] = [{} for _ in self.stages]
        for (name, where), leaf in zip(self.owners.items(), jax.tree.leaves(params), strict=True):
            found[where[0]][name] = leaf
        return found

    def joined(self, parts: Sequence[Mapping[str, Any]]) -> Any:
        """The parameters of the function, or their gradients, from those of the stages."""
        leaves = [parts[where[0]][name] for name, where in self.owners.items()]
        return jax.tree.unflatten(self.structure, leaves)


def cut_function(
    function: Callable[..., Any], params: Any, batch: Sequence[Any], cuts: Sequence[int]
) -> CutFunction:
    """A function in stages, cut after some of its equations.

    Args:
        function: of parameters and a batch; returns the loss.
        params: an example, or shapes.
        batch: an example of a micro batch, or shapes.
        cuts: numbers of equations, among `FlatFunction.cuts`, in ascending order.
    """
    flat = flattened(function, params, batch)
    wrong = [cut for cut in cuts if cut not in flat.cuts]
    if wrong or list(cuts) != sorted(set(cuts)):
        raise InvalidValueError(
            f"A function can be cut after the equations {_listed(flat.cuts)}, where one tensor goes "
            f"on. Received: cuts={tuple(cuts)}"
        )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), _dtype(x)), tuple(batch))
    maker = _StageMaker(function, jax.eval_shape(lambda x: x, params), shapes, tuple(cuts), flat)
    count = len(cuts) + 1
    parts = [maker.part(flat, i) for i in range(count)]
    owners = {
        name: tuple(i for i, part in enumerate(parts) if name in part.parameters) or (0,)
        for name in flat.parameters
    }
    stages = [Stage(maker.stage(i), tuple(sorted({0, *parts[i].arguments}))) for i in range(count)]
    crossing = dict(zip(flat.cuts, flat.crossing, strict=True))
    texts = tuple(str(crossing[cut].aval.str_short()) for cut in cuts)
    return CutFunction(tuple(stages), owners, jax.tree.structure(params), texts)


def _listed(cuts: Sequence[int]) -> str:
    return ", ".join(map(str, cuts)) if len(cuts) < 20 else f"{cuts[0]}, {cuts[1]}, …, {cuts[-1]}"


@dataclass(frozen=True)
class _Part:
    """The equations of one stage, and what they need."""

    equations: tuple[Any, ...]
    parameters: tuple[str, ...]
    arguments: tuple[int, ...]
    leaves: tuple[int, ...]
    given: Any
    result: Any


@dataclass
class _StageMaker:
    """Makes the functions of stages, which trace the whole function anew for other numbers of rows."""

    function: Callable[..., Any]
    params: Any
    batch: tuple[Any, ...]
    cuts: tuple[int, ...]
    example: FlatFunction

    def __post_init__(self) -> None:
        self._flat = {self._rows(self.batch): self.example}

    def _rows(self, batch: Sequence[Any]) -> int:
        return int(np.shape(jax.tree.leaves(batch)[0])[0])

    def flat(self, rows: int) -> FlatFunction:
        """The function for micro batches of so many rows."""
        if rows not in self._flat:
            batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), self.batch
            )
            found = flattened(self.function, self.params, batch)
            if found.cuts != self.example.cuts:
                raise InvalidValueError(
                    "The function is another program for other numbers of rows, so it cannot be cut at "
                    f"the same places. Received: micro batches of {rows} rows"
                )
            self._flat[rows] = found
        return self._flat[rows]

    def part(self, flat: FlatFunction, number: int) -> _Part:
        """The equations of a stage."""
        jaxpr = flat.closed.jaxpr
        bounds = [-1, *self.cuts, len(jaxpr.eqns)]
        first, end = bounds[number] + 1, bounds[number + 1] + 1
        crossing = dict(zip(flat.cuts, flat.crossing, strict=True))
        given = crossing[self.cuts[number - 1]] if number else None
        result = crossing[self.cuts[number]] if number < len(self.cuts) else jaxpr.outvars[0]
        wanted = {result: None}
        chosen = []
        for i in reversed(range(min(end, len(jaxpr.eqns)))):
            eqn = jaxpr.eqns[i]
            is_own = i not in flat.mixed or i >= first
            if is_own and any(v in wanted and v is not given for v in eqn.outvars):
                chosen.append(eqn)
                wanted.update({v: None for v in eqn.invars if not compat.is_literal(v)})
        inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        needed = sorted(inputs[v] for v in wanted if v in inputs)
        count = len(flat.parameters)
        names = tuple(flat.parameters[i] for i in needed if i < count)
        leaves = tuple(i - count for i in needed if i >= count)
        arguments = tuple(sorted({flat.arguments[i] for i in leaves}))
        return _Part(tuple(reversed(chosen)), names, arguments, leaves, given, result)

    def stage(self, number: int) -> Callable[..., Any]:
        """The function of one stage: of its parameters, its input, and its arguments of the batch."""
        takes = tuple(sorted({0, *self.part(self.example, number).arguments}))

        def stage(params: Mapping[str, Any], *given: Any) -> Any:
            x, batch = (given[0], given[1:]) if number else (None, given)
            flat = self.flat(self._rows(batch))
            part = self.part(flat, number)
            jaxpr = flat.closed.jaxpr
            known = dict(zip(jaxpr.invars, [None] * len(jaxpr.invars), strict=True))
            for name, var in zip(flat.parameters, jaxpr.invars, strict=False):
                known[var] = params.get(name)
            leaves = {n: jax.tree.leaves(arg) for n, arg in zip(takes, batch, strict=True)}
            offset = len(flat.parameters)
            seen: dict[int, int] = {}
            for i, argument in enumerate(flat.arguments):
                place = seen.get(argument, 0)
                seen[argument] = place + 1
                if argument in leaves:
                    known[jaxpr.invars[offset + i]] = leaves[argument][place]
            used = [v for v in jaxpr.invars if known[v] is not None]
            more = [] if part.given is None else [part.given]
            program = jaxpr.replace(
                eqns=list(part.equations),
                invars=[*used, *more],
                outvars=[part.result],
                debug_info=jaxpr.debug_info.with_unknown_names(),
            )
            values = [known[v] for v in used]
            inputs = values if part.given is None else [*values, x]
            return compat.eval_jaxpr(flat.closed.replace(jaxpr=program), inputs)[0]

        return stage
