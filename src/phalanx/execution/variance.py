"""Which values of a program are certainly the same on all replicas.

A mirrored variable without an aggregation may only be written with values that agree. In a compiled
program that is a property of the program: per-replica inputs and the replica id differ, sums over
replicas agree, and everything computed from values that agree agrees. Marks
(`compat.mark_same_on_all_replicas`) say where it matters. The analysis is conservative: what it
cannot see through counts as differing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx.errors import InvalidValueError
from phalanx.execution.reasons import Reason, cannot_join
from phalanx.runtime import compat
from phalanx.runtime.placement import REPLICA_AXIS

_AGREEING = {"psum", "pmax", "pmin", "all_gather", "psum_invariant", "all_gather_invariant"}
_COLLECTIVES = _AGREEING | {"psum_scatter", "reduce_scatter", "all_to_all", "ppermute"}
_HAZARD = "hazard: "
_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


def differing_marks(jaxpr: Any) -> tuple[list[str], list[str]]:
    """The labels of the marks that replicas may reach with different values, and other hazards.

    A hazard is a collective inside a branch or loop that replicas may not all take: some would
    wait forever.
    """
    found: list[str] = []
    _outside(jaxpr, found)
    hazards = [label.removeprefix(_HAZARD) for label in found if label.startswith(_HAZARD)]
    marks = [label for label in found if not label.startswith(_HAZARD)]
    return list(dict.fromkeys(marks)), list(dict.fromkeys(hazards))


def _outside(jaxpr: Any, found: list[str]) -> None:
    """Look for compiled runs in a program, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            specs = eqn.params["in_specs"]
            differing = [any(part is not None for part in spec) for spec in specs]
            _walk(eqn.params["jaxpr"], differing, found)
        else:
            for sub in compat.sub_jaxprs(eqn):
                _outside(sub, found)


def _walk(jaxpr: Any, inputs: Sequence[bool], found: list[str]) -> list[bool]:
    """Whether each output of a jaxpr may differ, given whether each input may."""
    differs: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(atom: Any) -> bool:
        return False if compat.is_literal(atom) else differs.get(atom, False)

    for eqn in jaxpr.eqns:
        given = [of(x) for x in eqn.invars]
        for var, out in zip(eqn.outvars, _equation(eqn, given, found), strict=True):
            differs[var] = out
    return [of(x) for x in jaxpr.outvars]


def _equation(eqn: Any, given: list[bool], found: list[str]) -> list[bool]:
    name = eqn.primitive.name
    count = len(eqn.outvars)
    if name == compat.SAME_ON_ALL_REPLICAS:
        if given[0]:
            found.append(eqn.params["label"])
        return [False]
    if name == compat.AGREED_BY_ALL_REPLICAS:
        return [False]
    if name == "axis_index":
        return [True]
    if name in _COLLECTIVES and is_over_replicas(eqn.params):
        # Exchanges, and those of some replicas alone, give what differs even of what agrees.
        agrees = name in _AGREEING and eqn.params.get("axis_index_groups") is None
        return [not agrees] * count
    subs = compat.sub_jaxprs(eqn)
    if name in _CALLS and len(subs) >= 1 and len(subs[0].invars) == len(given):
        return _walk(subs[0], given, found)
    if name == "scan":
        return _scan(eqn, subs[0], given, found)
    if name == "cond":
        branches = [_walk(sub, given[1:], found) for sub in subs]
        if given[0] and any(_communicates(sub) for sub in subs):
            found.append(f"{_HAZARD}lax.cond or lax.switch")
        return [given[0] or any(column) for column in zip(*branches, strict=True)]
    if name == "while":
        return _while(eqn, given, found)
    for sub in subs:  # something new: assume the worst
        _walk(sub, [True] * len(sub.invars), found)
    return [any(given) or bool(subs)] * count


def _scan(eqn: Any, body: Any, given: list[bool], found: list[str]) -> list[bool]:
    consts, carry = compat.scan_counts(eqn)
    state = given[consts : consts + carry]
    while True:
        inputs = given[:consts] + state + given[consts + carry :]
        trial: list[str] = []
        outputs = _walk(body, inputs, trial)
        grown = [a or b for a, b in zip(state, outputs[:carry], strict=True)]
        if grown == state:
            found += trial
            return state + outputs[carry:]
        state = grown


def _while(eqn: Any, given: list[bool], found: list[str]) -> list[bool]:
    """A loop that replicas may leave at different times is a hazard, and all that it gives differs."""
    first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
    known, constants = given[:first], given[first : first + second]
    state = given[first + second :]
    while True:
        trial: list[str] = []
        outputs = _walk(body, constants + state, trial)
        grown = [a or b for a, b in zip(state, outputs, strict=True)]
        if grown == state:
            break
        state = grown
    differs = any(_walk(condition, known + state, trial))
    found += trial
    if differs and (_communicates(condition) or _communicates(body)):
        found.append(f"{_HAZARD}lax.while_loop")
    return [True] * len(state) if differs else state


def _communicates(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _COLLECTIVES and is_over_replicas(eqn.params):
            return True
        if any(_communicates(sub) for sub in compat.sub_jaxprs(eqn)):
            return True
    return False


def is_over_replicas(params: dict[str, Any]) -> bool:
    """Whether an equation with these parameters communicates between replicas, or asks for one."""
    axes = params.get("axes", params.get("axis_name", ()))
    names = axes if isinstance(axes, tuple | list) else (axes,)
    return REPLICA_AXIS in names


def why_eager(jaxpr: Any, name: str, is_uneven: bool) -> Reason | None:
    """Why a program cannot run on replicas that may differ; None if it can.

    Args:
        jaxpr: the program.
        name: of the function that it was traced from.
        is_uneven: whether replicas hold arrays of different shapes.
    """
    marks, hazards = differing_marks(jaxpr)
    if hazards and is_uneven:
        return cannot_join(f"they communicate inside {hazards[0]} that may differ between them")
    if hazards:
        raise InvalidValueError(
            f"{name} communicates inside {hazards[0]} whose condition may differ between replicas, so "
            "some would wait for others forever. Communicate outside of it, or make the condition the "
            "same on all replicas, as with all_reduce."
        )
    if marks:
        return Reason(
            f"replicas may write different values: {', '.join(marks)}",
            "Give the variable an aggregation, or all_reduce the value first",
        )
    return None
