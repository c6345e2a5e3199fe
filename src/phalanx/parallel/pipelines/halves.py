"""Programs in two halves: what some results need, and all else.

A loop (`scan`) that computes both the gradient of its input and those of its weights is cut into two.
The first does what the gradient of the input needs, and hands over to the second what that reads of it,
round by round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx.parallel.applying import Interpreter
from phalanx.runtime import compat, program_parts

__all__ = ["Inlined", "in_halves"]


class Inlined(Interpreter):
    """Runs a jaxpr with all calls taken apart, also those that are computed again."""

    def __init__(self) -> None:
        super().__init__({}, None, {})

    def _remat(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        return self._inner(eqn.params["jaxpr"], operands, place)


def in_halves(
    function: Callable[..., Any], shapes: Sequence[Any], count: int
) -> tuple[Any, Any, list[int]]:
    """A program in two: what its first `count` results need, and all else.

    Returns the first half, which also returns what the second needs of it; the second; and the
    numbers of the arguments that the second needs besides.
    """
    traced = jax.make_jaxpr(function)(*shapes)
    closed = jax.make_jaxpr(lambda *args: Inlined().run(traced.jaxpr, traced.consts, args, ()))(*shapes)
    loops = _loops(closed.jaxpr, count)
    if loops:
        apart = closed
        closed = jax.make_jaxpr(
            lambda *args: _TwoLoops(loops).run(apart.jaxpr, apart.consts, args, ())
        )(*shapes)
    jaxpr = closed.jaxpr
    first, _ = _needed(jaxpr.eqns, jaxpr.outvars[:count])
    rest = [eqn for i, eqn in enumerate(jaxpr.eqns) if i not in first]
    chosen, wanted = _needed(rest, jaxpr.outvars[count:])
    second = [eqn for i, eqn in enumerate(rest) if i in chosen]
    made = {var for eqn in second for var in eqn.outvars}
    from_first = {var for i in first for var in jaxpr.eqns[i].outvars}
    outer = [var for var in wanted if var not in made]
    left = [var for var in outer if var in from_first]
    numbers = [i for i, var in enumerate(jaxpr.invars) if var in wanted]
    names = jaxpr.debug_info.with_unknown_names()
    one = jaxpr.replace(
        eqns=[jaxpr.eqns[i] for i in sorted(first)],
        outvars=[*jaxpr.outvars[:count], *left],
        debug_info=names,
    )
    two = jaxpr.replace(
        eqns=second,
        invars=[*(jaxpr.invars[i] for i in numbers), *left],
        outvars=jaxpr.outvars[count:],
        debug_info=names,
    )
    return closed.replace(jaxpr=one), closed.replace(jaxpr=two), numbers


def _needed(eqns: Sequence[Any], results: Sequence[Any]) -> tuple[set[int], dict[Any, None]]:
    """The numbers of the equations that results need, and all variables that are read on the way."""
    wanted = {var: None for var in results if not compat.is_literal(var)}
    chosen: set[int] = set()
    for i in reversed(range(len(eqns))):
        if any(var in wanted for var in eqns[i].outvars):
            chosen.add(i)
            wanted.update({v: None for v in eqns[i].invars if not compat.is_literal(v)})
    return chosen, wanted


# -- loops -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Loop:
    """A loop in two.

    Args:
        first: the numbers of the equations of its body that the first loop does.
        results: the numbers of the results of the first loop.
        inputs: the numbers of the inputs of the body that the first loop reads.
        left: what the second loop reads of the first, round by round.
        second: the numbers of the equations that the second loop does.
    """

    first: tuple[int, ...]
    results: frozenset[int]
    inputs: frozenset[int]
    left: tuple[Any, ...]
    second: tuple[int, ...]


def _loops(jaxpr: Any, count: int) -> dict[int, _Loop]:
    """The loops that the first results need in part, by the numbers of their equations."""
    wanted = {var for var in jaxpr.outvars[:count] if not compat.is_literal(var)}
    found: dict[int, _Loop] = {}
    for i in reversed(range(len(jaxpr.eqns))):
        eqn = jaxpr.eqns[i]
        needed = [n for n, var in enumerate(eqn.outvars) if var in wanted]
        if not needed:
            continue
        read = eqn.invars
        if eqn.primitive.name == "scan":
            loop = _loop(eqn, needed)
            if loop.second and len(loop.results) < len(eqn.outvars):
                found[i] = loop
                read = [eqn.invars[n] for n in loop.inputs]
        wanted.update(v for v in read if not compat.is_literal(v))
    return found


def _loop(eqn: Any, needed: Sequence[int]) -> _Loop:
    consts, carries = compat.scan_counts(eqn)
    body = eqn.params["jaxpr"].jaxpr
    carried = body.invars[consts : consts + carries]
    results = set(needed)
    while True:  # what is carried needs what it is computed from in the round before
        first, read = _needed(body.eqns, [body.outvars[n] for n in sorted(results)])
        more = {n for n, var in enumerate(carried) if var in read} - results
        if not more:
            break
        results |= more
    others = [n for n in range(len(body.outvars)) if n not in results]
    rest = [i for i in range(len(body.eqns)) if i not in first]
    chosen, later = _needed([body.eqns[i] for i in rest], [body.outvars[n] for n in others])
    made = {var for i in first for var in body.eqns[i].outvars}
    made |= {carried[n] for n in results if n < carries}
    # The inits of what the first loop carries are read by it, also if its body does not read them.
    inputs = {n for n, var in enumerate(body.invars) if var in read}
    inputs |= {consts + n for n in results if n < carries}
    left = tuple(var for var in later if var in made)
    return _Loop(
        tuple(sorted(first)),
        frozenset(results),
        frozenset(inputs),
        left,
        tuple(rest[i] for i in sorted(chosen)),
    )


class _TwoLoops(Interpreter):
    """Runs a jaxpr with some of its loops in two."""

    def __init__(self, loops: dict[int, _Loop]) -> None:
        super().__init__({}, None, {})
        self._loops = loops

    def _scan(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        loop = self._loops.get(place[0]) if len(place) == 1 else None
        if loop is None:
            return super()._scan(eqn, operands, place)
        consts, carries = compat.scan_counts(eqn)
        closed = eqn.params["jaxpr"]
        body, begin = closed.jaxpr, consts + carries
        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        fixed = [*zip(body.constvars, closed.consts, strict=True)]
        fixed += zip(body.invars[:consts], operands[:consts], strict=True)
        rows = dict(zip(body.invars[begin:], operands[begin:], strict=True))

        def run(
            numbers: Sequence[int], results: Sequence[int], given: dict[Any, Any], also: Sequence[Any]
        ) -> tuple[list[Any], dict[Any, Any]]:
            """A loop of some equations: results with their numbers, and more values by variable."""
            own = [n for n in results if n < carries]
            out = [body.outvars[n] for n in results if n >= carries]

            def step(carry: Any, xs: Any) -> Any:
                known = dict([*fixed, *zip(given, xs, strict=True)])
                known.update(zip((body.invars[consts + n] for n in own), carry, strict=True))
                read = _evaluated(body, numbers, known)
                ys = [read(v) for v in out], [read(v) for v in also]
                return [read(body.outvars[n]) for n in own], ys

            start = [operands[consts + n] for n in own]
            last, (ys, more) = jax.lax.scan(step, start, list(given.values()), **options)
            stacked = [n for n in results if n >= carries]
            found = [*zip(own, last, strict=True), *zip(stacked, ys, strict=True)]
            return found, dict(zip(also, more, strict=True))

        mine = sorted(loop.results)
        others = [n for n in range(len(body.outvars)) if n not in loop.results]
        found, left = run(loop.first, mine, _read(body, loop.first, mine, rows), loop.left)
        later = {**_read(body, loop.second, others, rows), **left}
        found_later, _ = run(loop.second, others, later, ())
        by_number = dict([*found, *found_later])
        return [by_number[n] for n in range(len(body.outvars))]


def _read(
    body: Any, numbers: Sequence[int], results: Sequence[int], rows: dict[Any, Any]
) -> dict[Any, Any]:
    """The rows that some equations and results of a body read."""
    read = [v for i in numbers for v in body.eqns[i].invars] + [body.outvars[n] for n in results]
    return {v: rows[v] for v in read if not compat.is_literal(v) and v in rows}


def _evaluated(body: Any, numbers: Sequence[int], known: dict[Any, Any]) -> Callable[[Any], Any]:
    def value(atom: Any) -> Any:
        return atom.val if compat.is_literal(atom) else known[atom]

    for i in numbers:
        eqn = body.eqns[i]
        outs = program_parts.eval_equation(body, eqn, [value(v) for v in eqn.invars])
        known.update(zip(eqn.outvars, outs, strict=True))
    return value
