"""How functions become programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.core.padding import CannotJoin
from phalanx.core.variables import traced_variables
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import live_variables
from phalanx.errors import ContextError
from phalanx.execution.call_arguments import Call
from phalanx.execution.program import Program, Result, as_held, shape_of
from phalanx.execution.remote_program import RemoteProgram, is_remote
from phalanx.execution.running import as_array
from phalanx.execution.staging import explained
from phalanx.runtime import activity, compat


def trace_program(
    fn: Callable[..., Any], call: Call, name: str
) -> Program | RemoteProgram | list[Variable]:
    """Trace a function; gives the variables that it made, if it made any.

    They cannot be inputs of the program that makes them, so it must be traced again. Code
    that runs the program must hold what `variables` returns.
    """
    variables = live_variables()
    box: dict[str, Any] = {}

    def staged(values: list[Any], arrays: list[Any]) -> Any:
        held = {v: as_held(v, x) for v, x in zip(variables, values, strict=True)}
        used = traced_variables.VariableTrace(held)
        args, kwargs = call.rebuild(arrays)
        if "used" in box:  # this is the second try, and what the first one has made is there
            used.made += box["used"].made
        box["used"] = used
        with traced_variables.recording(used):
            result = Result(fn(*args, **kwargs))
        if used.left_early:
            raise ContextError(
                f"{name} left a loop over px.range before its end, by break, return or an "
                "exception that it caught. Such a loop is traced once and runs to its end: choose "
                "what a round does with jnp.where, or loop over Python's range."
            )
        box["result"] = result
        written = [as_array(x) for v, x in used.written.items() if v.home is None]
        return result.arrays, written, [change.operand for _, change in used.changes]

    shapes = [shape_of(v) for v in variables]
    arguments = [compat.shape_of(x) for x in call.arrays]
    with activity.phase("trace"), explained():
        try:
            closed, _ = traced_variables.tracing(
                lambda: compat.jaxpr_and_result(staged, shapes, arguments)
            )
        except CannotJoin:
            if box["used"].made:
                return list(box["used"].made)
            raise
    used: traced_variables.VariableTrace = box["used"]
    if used.loops and any(compat.is_tracer(x) for x in closed.consts):
        raise ContextError(
            f"{name} uses a value after a loop over px.range that its body has computed. "
            "Only variables leave such a loop: assign the value to a px.Variable in the body and "
            "read it afterwards, or use px.train.loop, which returns all results."
        )
    if used.made:
        return used.made
    if used.rewrites:
        values = [None if v.home is not None else as_array(v._held()) for v in variables]
        shardings = [getattr(x, "sharding", None) for x in [*values, *call.arrays]]
        with activity.phase("trace"):
            for rewrite in used.rewrites.values():
                closed = rewrite(closed, shardings)
    kind = RemoteProgram if is_remote(closed, variables, used) else Program
    return kind(closed, variables, used, box["result"], name)
