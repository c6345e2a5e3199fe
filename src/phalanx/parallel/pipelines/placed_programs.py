"""One computation in several places: each equation runs where its largest operand is.

An optimizer sees the parameters of all stages at once. Here its program is cut into one program per
stage and round: what needs a number of another stage, such as the norm of all gradients, is in a later
round. Only such numbers move.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from phalanx.execution.throttle import token
from phalanx.parallel.pipelines.halves import Inlined
from phalanx.parallel.pipelines.hosts import StageHosts
from phalanx.runtime import compat

__all__ = ["FixedResult", "PlacedProgram", "Round", "RoundRunner", "in_rounds"]


@dataclass(frozen=True)
class Round:
    """What one stage computes at a time.

    Args:
        place: the number of the stage.
        program: its jaxpr.
        reads: the numbers of the values that it reads.
        writes: the numbers of the values that it makes.
    """

    place: int
    program: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class FixedResult:
    """A result that is the same in every run."""

    value: Any


@dataclass(frozen=True)
class PlacedProgram:
    """A computation in rounds. Values have numbers; those of the arguments come first.

    Args:
        rounds: in the order in which they run.
        homes: the place of each value.
        results: the numbers of the results; a constant stands for itself.
        result_homes: where results are wanted.
    """

    rounds: tuple[Round, ...]
    homes: Mapping[int, int]
    results: tuple[int | FixedResult, ...]
    result_homes: tuple[int, ...]

    def moves(self) -> list[tuple[int, int, int]]:
        """The values that go from one place to another: their numbers, from where, and to where."""
        found = {
            (n, self.homes[n], r.place)
            for r in self.rounds
            for n in r.reads
            if self.homes[n] != r.place
        }
        return sorted(found)


class _Flat(Inlined):
    """Runs a jaxpr with all calls and choices taken apart."""

    def _cond(self, eqn: Any, operands: Sequence[Any], place: tuple[Any, ...]) -> Sequence[Any]:
        which, *given = operands
        cases = [self._inner(branch, given, place) for branch in eqn.params["branches"]]
        last = len(cases) - 1
        which = jax.lax.clamp(0, which.astype("int32"), last)
        found = []
        for outs in zip(*cases, strict=True):
            chosen = outs[-1]
            for number in reversed(range(last)):
                chosen = jax.lax.select_n(which == number, chosen, outs[number])
            found.append(chosen)
        return found


def in_rounds(
    function: Callable[..., Any],
    shapes: Sequence[Any],
    homes: Sequence[int],
    result_homes: Sequence[int],
) -> PlacedProgram:
    """Cut a function of arrays into rounds.

    Args:
        function: takes and returns arrays.
        shapes: of its arguments.
        homes: the places of its arguments.
        result_homes: where its results are wanted.
    """
    traced = jax.make_jaxpr(function)(*shapes)
    closed = jax.make_jaxpr(lambda *args: _Flat().run(traced.jaxpr, traced.consts, args, ()))(*shapes)
    jaxpr = closed.jaxpr
    home: dict[Any, int] = dict(zip(jaxpr.invars, homes, strict=True))
    level: dict[Any, int] = dict.fromkeys(jaxpr.invars, 0)
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    free: dict[Any, Any] = {}  # equations that no argument goes into, by what they make
    parts: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for eqn in jaxpr.eqns:
        known = [v for v in eqn.invars if not compat.is_literal(v) and v in home]
        if not known:
            free.update(dict.fromkeys(eqn.outvars, eqn))
            continue
        place = _place(known, home)
        when = max(level[v] + (home[v] != place) for v in known)
        parts[when, place].append(eqn)
        for var in eqn.outvars:
            home[var], level[var] = place, when
    wanted = _wanted_free(jaxpr.outvars, result_homes, home, free)
    return _cut(closed, parts, home, free, constants, wanted, tuple(result_homes))


def _place(known: Sequence[Any], home: Mapping[Any, int]) -> int:
    """Where most of what an equation reads is; the first place if it reads numbers only."""
    held: dict[int, int] = defaultdict(int)
    for var in known:
        held[home[var]] += prod(var.aval.shape) if var.aval.shape else 0
    most = max(held.values())
    return min(place for place, size in held.items() if size == most)


def _wanted_free(
    outvars: Sequence[Any], result_homes: Sequence[int], home: dict[Any, int], free: Mapping[Any, Any]
) -> dict[int, list[Any]]:
    """Results that no argument goes into: they are made where they are wanted."""
    found: dict[int, list[Any]] = defaultdict(list)
    for var, place in zip(outvars, result_homes, strict=True):
        if not compat.is_literal(var) and var in free and var not in home:
            found[place].append(var)
            home[var] = place
    return found


def _cut(
    closed: Any,
    parts: Mapping[tuple[int, int], list[Any]],
    home: Mapping[Any, int],
    free: Mapping[Any, Any],
    constants: Mapping[Any, Any],
    wanted: Mapping[int, list[Any]],
    result_homes: tuple[int, ...],
) -> PlacedProgram:
    jaxpr = closed.jaxpr
    numbers: dict[Any, int] = {var: i for i, var in enumerate(jaxpr.invars)}
    last = max((when for when, _ in parts), default=0)
    blocks = {key: list(eqns) for key, eqns in parts.items()}
    for place, _ in wanted.items():
        blocks.setdefault((last, place), [])
    read_later: set[Any] = {v for v in jaxpr.outvars if not compat.is_literal(v)}
    rounds: list[Round] = []
    plans = []
    for (when, place), eqns in sorted(blocks.items(), reverse=True, key=lambda item: item[0]):
        ends = wanted.get(place, []) if when == last else []
        made = dict.fromkeys(v for eqn in eqns for v in eqn.outvars)  # in the same order everywhere
        inner = [v for eqn in eqns for v in eqn.invars if not compat.is_literal(v)]
        more = _free_equations([*inner, *ends], free, made)
        every = [v for eqn in [*more, *eqns] for v in eqn.invars if not compat.is_literal(v)]
        given = dict.fromkeys(
            v for v in every if v in home and v not in made and v not in constants and v not in ends
        )
        outs = [v for v in dict.fromkeys([*made, *ends]) if v in read_later and home.get(v) == place]
        read_later |= set(given)
        plans.append((place, [*more, *eqns], list(given), outs))
    for place, eqns, given, outs in reversed(plans):
        if not outs:
            continue
        for var in outs:
            numbers.setdefault(var, len(numbers))
        part = jaxpr.replace(
            eqns=eqns,
            invars=given,
            outvars=outs,
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        reads = tuple(numbers[v] for v in given)
        rounds.append(Round(place, closed.replace(jaxpr=part), reads, tuple(numbers[v] for v in outs)))
    found = {numbers[v]: place for v, place in home.items() if v in numbers}
    results = tuple(FixedResult(v.val) if compat.is_literal(v) else numbers[v] for v in jaxpr.outvars)
    return PlacedProgram(tuple(rounds), found, results, result_homes)


def _free_equations(
    start: Sequence[Any], free: Mapping[Any, Any], made: Mapping[Any, None]
) -> list[Any]:
    """The equations without arguments that variables need, in order."""
    found: dict[int, Any] = {}

    def visit(var: Any) -> None:
        eqn = free.get(var)
        if eqn is None or var in made or id(eqn) in found:
            return
        for v in eqn.invars:
            if not compat.is_literal(v):
                visit(v)
        found[id(eqn)] = eqn

    for var in start:
        visit(var)
    return list(found.values())


class RoundRunner:
    """Runs a placed program.

    Args:
        placed: what to run.
        hosts: who runs which stage.
        move: brings a value to a place.
        start: runs a program.
        shardings: of results, by their numbers; others are as XLA lays them out.
        donated: the numbers of arguments whose memory results may take.
    """

    def __init__(
        self,
        placed: PlacedProgram,
        hosts: StageHosts,
        move: Callable[[Any, int], Any],
        start: Callable[..., Any],
        shardings: Mapping[int, Sharding],
        donated: Iterable[int] = (),
    ) -> None:
        self._placed, self._hosts, self._move, self._start = placed, hosts, move, start
        given = _donations(placed, set(donated))
        self._programs = [_jitted(r, shardings, given.get(i, ())) for i, r in enumerate(placed.rounds)]

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The results for some arguments. What is in other processes is a `jax.ShapeDtypeStruct`."""
        shapes = {i: jax.ShapeDtypeStruct(x.shape, x.dtype) for i, x in enumerate(args)}
        values: dict[int, Any] = dict(enumerate(args))
        copies: dict[tuple[int, int], Any] = {}
        here = self._hosts.is_here

        def at(number: int, place: int) -> Any:
            if self._placed.homes[number] == place:
                return values.get(number)
            if (number, place) not in copies:
                copies[number, place] = self._brought(values.get(number), shapes[number], number, place)
            return copies[number, place]

        for r, program in zip(self._placed.rounds, self._programs, strict=True):
            avals = [var.aval for var in r.program.jaxpr.outvars]
            made = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
            shapes.update(zip(r.writes, made, strict=True))
            given = [at(n, r.place) for n in r.reads]
            if here(r.place):
                values.update(zip(r.writes, self._start(program, *given), strict=True))
        found = []
        for n, place in zip(self._placed.results, self._placed.result_homes, strict=True):
            if isinstance(n, FixedResult):
                shape = jax.ShapeDtypeStruct(jnp.shape(n.value), jnp.result_type(n.value))
                found.append(self._move(n.value, place) if here(place) else shape)
            else:
                value = at(n, place)
                found.append(value if here(place) else shapes[n])
        return found

    def _brought(self, value: Any, shape: Any, number: int, place: int) -> Any:
        """A value at another place; None if that is in another process."""
        home, hosts = self._placed.homes[number], self._hosts
        numbers = number >> 16, number & 0xFFFF, place
        if hosts.is_here(home) and not hosts.is_here(place):
            hosts.send(value, place, "value", *numbers)
            return None
        if not hosts.is_here(place):
            return None
        if not hosts.is_here(home):
            value = hosts.receive(shape, home, "value", *numbers)
        return self._move(value, place)


def _donations(placed: PlacedProgram, donated: set[int]) -> dict[int, list[int]]:
    """Which operands each round may give away: nothing reads them later, and a result is like them."""
    last = {n: i for i, r in enumerate(placed.rounds) for n in r.reads}
    found: dict[int, list[int]] = {}
    for i, r in enumerate(placed.rounds):
        free = Counter(_kind(var) for var in r.program.jaxpr.outvars)
        for place, (n, var) in enumerate(zip(r.reads, r.program.jaxpr.invars, strict=True)):
            is_last = last[n] == i and n not in placed.results and placed.homes[n] == r.place
            if n in donated and is_last and free[_kind(var)]:
                free[_kind(var)] -= 1
                found.setdefault(i, []).append(place)
    return found


def _kind(var: Any) -> Any:
    return var.aval.shape, var.aval.dtype


def _jitted(r: Round, shardings: Mapping[int, Sharding], donated: Sequence[int]) -> Callable[..., Any]:
    def program(*args: Any) -> Any:
        outs = compat.eval_jaxpr(r.program, args)
        laid_out = [
            jax.lax.with_sharding_constraint(x, shardings[n]) if n in shardings else x
            for x, n in zip(outs, r.writes, strict=True)
        ]
        return laid_out, token(False)

    return jax.jit(program, donate_argnums=tuple(donated))
