"""Loops and conditions in which replicas meet: the joint program has one, with all meetings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from phalanx.core.padding import CannotJoin
from phalanx.execution.joint import writing
from phalanx.execution.joint.reading import Traced
from phalanx.execution.joint.rooms import Slot, fill, room_for
from phalanx.runtime import compat


def join(programs: Sequence[Traced], index: Any, inputs: Sequence[Slot]) -> list[Slot]:
    """Add the joint program of several to the one that is being traced; see `writing.join`."""
    return writing.join(programs, index, inputs, _STRUCTURED)


def _scan(eqns: Sequence[Any], operands: list[Slot], index: Any) -> list[Slot]:
    counts = {compat.scan_counts(e) for e in eqns}
    lengths = sorted({e.params["length"] for e in eqns})
    if len(counts) > 1 or len(lengths) > 1:
        raise CannotJoin(f"they would communicate in loops of different lengths, {lengths}")
    ((consts, carried),) = counts
    given, init = operands[:consts], operands[consts : consts + carried]
    rows = operands[consts + carried :]
    if any(len({len(a.shape) for a in s.avals}) > 1 for s in rows):
        raise CannotJoin("they would communicate in loops over arrays of different ranks")
    programs = [_inside(e.params["jaxpr"]) for e in eqns]

    def body(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
        state = [Slot(x, s.avals) for x, s in zip(carry, init, strict=True)]
        mine = [Slot(x, tuple(map(_row, s.avals))) for x, s in zip(row, rows, strict=True)]
        outs = join(programs, index, [*given, *state, *mine])
        return _arrays(outs[:carried], carry), [s.array for s in outs[carried:]]

    carry, columns = lax.scan(
        body,
        [jnp.asarray(s.array) for s in init],
        [s.array for s in rows],
        lengths[0],
        eqns[0].params["reverse"],
        eqns[0].params["unroll"],
    )
    return _slots([*carry, *columns], eqns)


def _cond(eqns: Sequence[Any], operands: list[Slot], index: Any) -> list[Slot]:
    counts = {len(e.params["branches"]) for e in eqns}
    if len(counts) > 1:
        raise CannotJoin("they would communicate in different branches")
    rooms = [room_for(avals) for avals in _results(eqns)]

    def branch(i: int) -> Callable[..., list[Any]]:
        programs = [_inside(e.params["branches"][i]) for e in eqns]

        def run(*arrays: Any) -> list[Any]:
            inputs = [Slot(x, s.avals) for x, s in zip(arrays, operands[1:], strict=True)]
            return _arrays(join(programs, index, inputs), rooms)

        return run

    arrays = lax.switch(
        operands[0].array,
        [branch(i) for i in range(counts.pop())],
        *(jnp.asarray(s.array) for s in operands[1:]),
    )
    return _slots(arrays, eqns)


def _while(eqns: Sequence[Any], operands: list[Slot], index: Any) -> list[Slot]:
    counts = {(e.params["cond_nconsts"], e.params["body_nconsts"]) for e in eqns}
    if len(counts) > 1:
        raise CannotJoin("they would communicate in different loops")
    ((before, inside),) = counts
    init = operands[before + inside :]
    conditions = [_inside(e.params["cond_jaxpr"]) for e in eqns]
    bodies = [_inside(e.params["body_jaxpr"]) for e in eqns]

    def slots(carry: Sequence[Any]) -> list[Slot]:
        return [Slot(x, s.avals) for x, s in zip(carry, init, strict=True)]

    def condition(carry: Sequence[Any]) -> Any:
        return join(conditions, index, [*operands[:before], *slots(carry)])[0].array

    def body(carry: Sequence[Any]) -> Sequence[Any]:
        given = operands[before : before + inside]
        return _arrays(join(bodies, index, [*given, *slots(carry)]), carry)

    return _slots(lax.while_loop(condition, body, [jnp.asarray(s.array) for s in init]), eqns)


_STRUCTURED: dict[str, writing.Structured] = {"scan": _scan, "cond": _cond, "while": _while}


def _inside(closed: Any) -> Traced:
    return closed.jaxpr, closed.consts


def _row(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)


def _arrays(slots: Sequence[Slot], rooms: Sequence[Any]) -> list[Any]:
    """Arrays of one shape and dtype, whichever way the joint program came by them."""
    return [fill(jnp.asarray(s.array), room) for s, room in zip(slots, rooms, strict=True)]


def _results(eqns: Sequence[Any]) -> list[tuple[Any, ...]]:
    columns = zip(*(e.outvars for e in eqns), strict=True)
    return [tuple(v.aval for v in column) for column in columns]


def _slots(arrays: Sequence[Any], eqns: Sequence[Any]) -> list[Slot]:
    return [Slot(x, avals) for x, avals in zip(arrays, _results(eqns), strict=True)]
