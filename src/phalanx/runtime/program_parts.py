"""Programs in parts: some results of a program alone, and programs that ask for something midway."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.runtime import compat

REQUEST = "request_from_elsewhere"
"""The name of the primitive that stands for what is requested."""

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
}
"""Equations that do what is in one of their parameters, and which parameter that is."""


def needed_for(closed: Any, outputs: Sequence[int]) -> tuple[Any, list[int]]:
    """The part of a closed jaxpr that computes some of its results, and which inputs it needs."""
    wanted = [i in set(outputs) for i in range(len(closed.jaxpr.outvars))]
    part, needed = compat.without_unused(closed, wanted)
    return part, [i for i, is_needed in enumerate(needed) if is_needed]


def requested(operands: Sequence[Any], place: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Stands in a program for what must be fetched, given operands, before the rest of it runs.

    `place` tells requests apart, and can be hashed. See `with_requests`.
    """
    arrays = [jnp.asarray(x) for x in operands]
    return _request().bind(*arrays, place=place, shape=tuple(shape), dtype=jnp.dtype(dtype))


@functools.cache
def _request() -> Any:
    request = compat.primitive(REQUEST)
    request.def_abstract_eval(
        lambda x, *_, place, shape, dtype: x.update(shape=shape, dtype=dtype, weak_type=False)
    )
    return request


def holds_request(eqn: Any) -> bool:
    """Whether something is requested in a program within an equation, such as the body of a loop."""
    return any(
        inner.primitive.name == REQUEST or holds_request(inner)
        for part in compat.sub_jaxprs(eqn)
        for inner in getattr(part, "jaxpr", part).eqns
    )


def with_requests(closed: Any) -> tuple[Any, list[tuple[int, int]]]:
    """A closed jaxpr in which what is requested are further inputs, and the operands further results.

    Returns it, and the place and the number of operands of each request.
    """
    jaxpr = closed.jaxpr
    requests = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == REQUEST]
    if requests:
        jaxpr = jaxpr.replace(
            eqns=[eqn for eqn in jaxpr.eqns if eqn.primitive.name != REQUEST],
            invars=[*jaxpr.invars, *(eqn.outvars[0] for eqn in requests)],
            outvars=[*jaxpr.outvars, *(x for eqn in requests for x in eqn.invars)],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
    return closed.replace(jaxpr=jaxpr), [(e.params["place"], len(e.invars)) for e in requests]


def eval_equation(jaxpr: Any, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr, perhaps with other operands than the constants in it."""
    pairs = list(zip(eqn.invars, operands, strict=True))
    if any(compat.is_literal(v) and x is not v.val for v, x in pairs):
        with eqn.ctx.manager:
            out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]
    given = {v: x for v, x in pairs if not compat.is_literal(v)}
    alone = jaxpr.replace(constvars=[], invars=list(given), outvars=eqn.outvars, eqns=[eqn])
    return list(jax.core.eval_jaxpr(alone, (), *given.values()))
