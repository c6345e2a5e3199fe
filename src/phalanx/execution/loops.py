"""`px.range`: loops in compiled functions that stay loops.

A Python loop in a function that is traced is unrolled: fifty steps are fifty copies of the step, and
take minutes to compile. ``for i in px.range(50)`` traces its body once and runs it in a `lax.scan`.

Python does not give the body as a function. So the trace of the body begins when the loop asks for
its first number and ends when it asks for the second: another thread is inside JAX's tracing
meanwhile, and the thread of the function borrows its trace. What the body writes to variables is what
the loop carries from one round to the next.
"""

from __future__ import annotations

import builtins
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core import context as ctx, input_requests
from phalanx.core.variables import traced_variables
from phalanx.errors import InvalidTypeError
from phalanx.execution.program import Result, Stacked, as_held
from phalanx.execution.running import as_array
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import start
from phalanx.runtime.placement import without_mesh

__all__ = ["Range"]


class Range:
    """Numbers to loop over, as `range` has them; in a compiled function the loop is not unrolled.

    Variables carry what the body computes: other names that it assigns must not be used after the loop.
    The body is traced once, with a traced number, and must not leave the loop by ``break`` or
    ``return``. Outside compiled functions, and inside the function that runs on replicas, it is
    Python's `range`.

    Args:
        args: the stop, or the start, the stop and perhaps the step, as whole numbers.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
        >>> @px.function
        ... def epoch(x):
        ...     for _ in px.range(1000):
        ...         strategy.run(lambda x: w.assign_add(x), args=(x,))
        >>> epoch(jnp.float32(0.5))
        >>> float(w)
        1000.0
    """

    def __init__(self, *args: int) -> None:
        try:
            self._numbers = builtins.range(*args)
        except TypeError:
            raise InvalidTypeError(
                "px.range takes one to three whole numbers that are known when the function is traced, "
                f"as range does. Received: {shown(args)}"
            ) from None

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return f"px.{self._numbers!r}"

    def __iter__(self) -> Iterator[Any]:
        outer = traced_variables.current()
        compiled = (
            outer is not None and type(outer) is traced_variables.VariableTrace and compat.is_staging()
        )
        if not compiled or len(self._numbers) < 2 or ctx.active_replica() is not None:
            return iter(self._numbers)
        assert outer is not None
        return _traced(outer, self._numbers)


def traced_steps(step: Callable[[], Any], count: int) -> Stacked:
    """Add a loop to the program that is being traced, and keep what each of its rounds returns.

    There may be fewer rounds if iterators end: then the function runs as Python.

    Args:
        step: the body.
        count: how often to run it, at least twice.

    Returns:
        The arrays of all rounds, stacked, and what makes the result of a round of its arrays.
    """
    outer = traced_variables.program()
    assert outer is not None
    collected = _Collected()
    for _ in _traced(outer, builtins.range(count), collected):
        collected.result = Result(step())
    assert collected.result is not None
    return collected.stacked, collected.result.rebuild


class _Collected:
    """What the rounds of a loop return."""

    def __init__(self) -> None:
        self.result: Result | None = None
        self.stacked: list[Any] = []

    @property
    def arrays(self) -> list[Any]:
        return [] if self.result is None else self.result.arrays


def _traced(
    outer: traced_variables.VariableTrace, numbers: builtins.range, collected: _Collected | None = None
) -> Iterator[Any]:
    """Trace the body of a loop once, and add the loop to the program."""
    outer.loops = True
    variables = [v for v in outer.known() if outer.written.get(v) is not traced_variables.UNKNOWN]
    before = [without_mesh(as_array(outer.held(v))) for v in variables]
    body = _Body([compat.shape_of(x) for x in before])
    ended = False
    try:
        with compat.under_trace(body.trace):
            held = {v: as_held(v, x) for v, x in zip(variables, body.arrays, strict=True)}
            used = traced_variables.VariableTrace(held)
            round_ = _round(numbers, body.index)
            with (
                traced_variables.recording(used),
                input_requests.looping(len(numbers), round_, collected is not None),
            ):
                yield body.index
            ended = True
            if used.changes or used.asked:
                raise traced_variables.LoopsElsewhere
            outputs = [as_array(x) for x in used.written.values()]
            results = collected.arrays if collected is not None else []
        closed = body.end([*outputs, *results])
    finally:
        body.leave()
        if not ended:
            outer.left_early = True  # what the body did is lost; an error here would go unheard
    if any(each.made for each in traced_variables.enclosing()):
        if collected is not None:
            shapes = [(len(numbers), *x.shape) for x in results]
            collected.stacked = [jnp.zeros(s, x.dtype) for s, x in zip(shapes, results, strict=True)]
        return  # the program will be traced again, with the new variables as inputs
    position = {v: i for i, v in enumerate(variables)}
    written = [position[v] for v in used.written]
    after, stacked = _scan(closed, before, written, numbers)
    if collected is not None:
        collected.stacked = stacked
    for v, x in zip(used.written, after, strict=True):
        outer.set(v, as_held(v, x))
    _join(outer, used, len(numbers))


def _round(numbers: builtins.range, number: Any) -> Any:
    """Which round of a loop it is."""
    return (number - numbers.start) // numbers.step


def _scan(
    closed: Any, before: Sequence[Any], written: Sequence[int], numbers: builtins.range
) -> tuple[list[Any], list[Any]]:
    """Run a body once for each number.

    It gives the new values of some of its inputs, and then its results; those are stacked.
    """
    pruned, needed = compat.without_unused(closed)

    def round_(carry: list[Any], number: Any) -> tuple[list[Any], list[Any]]:
        inputs = [number, *before]
        for i, x in zip(written, carry, strict=True):
            inputs[1 + i] = x
        given = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
        outputs = compat.eval_jaxpr(pruned, given)
        return outputs[: len(written)], outputs[len(written) :]

    sequence = jnp.arange(numbers.start, numbers.stop, numbers.step, dtype=jnp.int32)
    after, stacked = jax.lax.scan(round_, [before[i] for i in written], sequence)
    return after, stacked


def _join(
    outer: traced_variables.VariableTrace, used: traced_variables.VariableTrace, count: int
) -> None:
    """What was learnt of the body is true of the program around it."""
    outer.device = used.device if used.device is not None else outer.device
    outer.spans_workers |= used.spans_workers
    outer.after_runs += [functools.partial(_many, fn, count) for fn in used.after_runs]


def _many(fn: Callable[[int], None], count: int, steps: int) -> None:
    fn(steps * count)


class _Abandoned(BaseException):
    """The body was left before its end."""


class _Body:
    """The trace of a body that begins and ends in different calls.

    Args:
        shapes: what goes in, besides the number of the round.

    Attributes:
        trace: the trace; see `compat.under_trace`.
        index: the number of the round, traced.
        arrays: what goes in, traced.
    """

    def __init__(self, shapes: Sequence[Any]) -> None:
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        state = compat.ThreadState()
        thread = threading.Thread(
            target=self._run, args=(state, list(shapes)), name="phalanx-loop", daemon=True
        )
        start(thread)
        self.trace, self.index, self.arrays = self._hear()

    def _run(self, state: compat.ThreadState, shapes: list[Any]) -> None:
        try:
            state.apply()
            number = jax.ShapeDtypeStruct((), jnp.int32)
            self._told.put(compat.jaxpr_and_result(self._staged, number, shapes)[0])
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the function
            self._told.put(error)

    def _staged(self, index: Any, arrays: list[Any]) -> list[Any]:
        self._told.put((compat.current_trace(), index, arrays))
        outputs = self._outputs.get()
        if outputs is None:
            raise _Abandoned
        return outputs

    def _hear(self) -> Any:
        told = self._told.get()
        if isinstance(told, BaseException):
            raise told
        return told

    def end(self, outputs: list[Any]) -> Any:
        """The body has computed these; returns it as a closed jaxpr."""
        self._outputs.put(outputs)
        return self._hear()

    def leave(self) -> None:
        """Let the thread end, if it has not."""
        self._outputs.put(None)
