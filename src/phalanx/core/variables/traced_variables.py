"""Variables in traced programs.

While a program is being traced, variables must not touch their real values: reading gives a traced
value, and writing changes what the next read in the same program gives. A `VariableTrace` keeps track
of that, and of which variables were used, so that the finished program can take them as inputs and
return them.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax

from phalanx.errors import ContextError, InvalidValueError
from phalanx.runtime import compat, program_parts

T = TypeVar("T")

UNKNOWN = object()
"""What a variable holds in a program after an update whose result is only known elsewhere."""


class VariableTrace:
    """What variables hold during the tracing of one program.

    Args:
        held: the traced value of each variable that existed when tracing began.
    """

    def __init__(self, held: Mapping[Any, Any]) -> None:
        self._held = dict(held)
        self._trace = compat.current_trace()
        self.read: dict[Any, None] = {}
        self.written: dict[Any, Any] = {}
        self.made: list[Any] = []
        """The variables that the program has made."""
        self.device: Any = None
        """Where the program should run, if a strategy with a single replica asked for a device."""
        self.after_runs: list[Callable[[int], None]] = []
        """What to call on the host after each run of the program, with the number of its steps."""
        self.rewrites: dict[Any, Callable[[Any, Sequence[Any]], Any]] = {}
        """What strategies make of the traced program before it is compiled; see `rewrite_program`."""
        self.compiler_options: dict[str, Any] = {}
        """What the compiler is told; see `compile_with`."""
        self.spans_workers = False
        """Whether replicas of other processes take part in it."""
        self.seconds: float | None = None
        """How long one of its collectives may take at most, if one of them says so."""
        self.runs: Counter[str] = Counter()
        """How often it runs each step on replicas."""
        self.loops = False
        """Whether it has loops over px.range."""
        self.left_early = False
        """Whether one of its loops was left before the end of its body."""
        self.changes: list[tuple[Any, Any]] = []
        """Variables of other processes, and what the program does to them."""
        self.asked: list[Any] = []
        """What the program asks other processes for: a table for rows of it, or a variable and what
        the program has done to it so far."""
        self._rows: list[tuple[Any, Any, Any]] = []  # tables, indices, and the rows there
        self._spread: tuple[tuple[Any, ...], str] | None = None  # its devices, and who wants them

    @property
    def is_spread(self) -> bool:
        """Whether the program runs on several devices."""
        return self._spread is not None and len(self._spread[0]) > 1

    def spread_over(self, devices: tuple[Any, ...], what: str) -> None:
        """Note that the program runs on these devices; one program cannot run on two lists of them."""
        if self._spread is None:
            self._spread = devices, what
        elif self._spread[0] != devices:
            raise InvalidValueError(
                "A compiled function is one program, which runs on one list of devices. Compile what "
                "belongs to other devices as a function of its own, and call both. "
                f"Received: {self._spread[1]} and {what}"
            )

    def held(self, variable: Any) -> Any:
        """What a variable holds at this point of the program."""
        if variable in self.written:
            return self.written[variable]
        if variable not in self._held:  # made while tracing, or unknown: a constant of the program
            return variable._value if variable.home is None else variable.present()
        self.read[variable] = None
        return self._held[variable]

    def known(self) -> list[Any]:
        """The variables that existed when tracing began, in the order of their creation."""
        return list(self._held)

    def set(self, variable: Any, value: Any) -> None:
        """Write a variable."""
        self._check_level(variable)
        self.written[variable] = value
        _forget_staged_code()

    def record(self, variable: Any, change: Any, after: Callable[[Any], Any]) -> None:
        """Change a variable of another process.

        Args:
            variable: the variable.
            change: what is to be done.
            after: what it holds afterwards for this program, given what it holds now.
        """
        self._check_level(variable)
        self.changes.append((variable, change))
        self.written[variable] = after(self.held(variable))
        _forget_staged_code()

    def can_ask_for(self, indices: Any) -> bool:
        """Whether the program can ask for rows: not in code that JAX stages on its own."""
        outside = not compat.is_tracer(indices) or compat.belongs_to(indices, self._trace)
        return outside and not compat.staging_since(self._trace)

    def rows(self, table: Any, indices: Any) -> Any:
        """Rows of a table of another process, before what the program does to it."""
        for known, before, rows in self._rows:
            if known is table and before is indices:
                return rows
        self.asked.append(table)
        place = len(self.asked) - 1
        shape = (*indices.shape, *table.shape[1:])
        rows = program_parts.requested([indices], place, shape, table.dtype)
        self._rows.append((table, indices, rows))
        return rows

    def preview(self, variable: Any) -> Any:
        """What a variable of another process holds after updates whose result is only known there."""
        if not self.can_ask_for(None):
            raise ContextError(
                f"Variable {variable.name!r} was read inside a function that JAX stages on its own, "
                "after apply_gradients had changed it. Read it outside of that function, and with "
                "one replica."
            )
        changes = [change for each, change in self.changes if each is variable]
        operands = [x for change in changes for x in jax.tree.leaves(change.operand)]
        self.asked.append((variable, changes))
        place = len(self.asked) - 1
        value = program_parts.requested(operands, place, variable.shape, variable.dtype)
        self.written[variable] = value
        return value

    def check_read(self) -> None:
        """Before a read: code that JAX stages on its own must not be found in its caches later.

        JAX caches the bodies of jax.jit, lax.scan and the like by function, and takes it that what they
        capture never changes. A variable may hold something else when the same body comes again.
        """
        if not _current.apart and compat.staging_since(self._trace):
            raise _CapturedInStagedCode

    def _check_level(self, variable: Any) -> None:
        if compat.staging_since(self._trace):
            raise ContextError(
                f"Variable {variable.name!r} was written inside lax.scan, lax.cond, jax.jit or another "
                "function that JAX stages on its own. Return the new value from that function and "
                "assign it outside."
            )


class GradientTap(Protocol):
    """Tells a derivative with respect to a variable of another process."""

    def whole(self, value: Any) -> Any:
        """The value itself, at which the derivative is taken."""

    def rows(self, rows: Any, indices: Any) -> Any:
        """The same for rows; an index that the variable does not have has no derivative."""


class Substitution(VariableTrace):
    """Some variables replaced by values that are being differentiated.

    Args:
        held: the replacements.
        parent: the program around the differentiation, if there is one.
        taps: what tells the derivatives with respect to variables of other processes. Their values are
            not replaced, because perhaps only some rows are read.
        keeps_writes: whether writes stay in `written`, because JAX stages the code that writes.
    """

    def __init__(
        self,
        held: Mapping[Any, Any],
        parent: VariableTrace | None,
        taps: Mapping[Any, GradientTap] | None = None,
        keeps_writes: bool = False,
    ) -> None:
        super().__init__(held)
        self.parent = parent
        self.has_written = False
        self._keeps_writes = keeps_writes
        self.device = None if parent is None else parent.device
        self.taps = dict(taps or {})

    def held(self, variable: Any) -> Any:
        """The replacement, until the variable is written; else what it holds anyway."""
        if variable in self.written:
            return self.written[variable]
        if variable in self._held:
            return self._held[variable]
        if variable in self.taps:
            # Code that JAX stages on its own may be the first to read it, but not the last.
            with compat.under_trace(self._trace), recording(self.parent):
                self._held[variable] = self.taps[variable].whole(variable.whole())
            return self._held[variable]
        if self.parent is not None:
            return self.parent.held(variable)
        with recording(None):
            return variable._held()

    def tapped_rows(self, table: Any, rows: Any, indices: Any) -> Any:
        """Rows of a table, at which the derivative is taken."""
        if table in self.taps:
            return self.taps[table].rows(rows, indices)
        for part, first in table.parts:
            if part in self.taps:
                rows = self.taps[part].rows(rows, indices - first)
        return rows

    def known(self) -> list[Any]:
        """What the program around it knows."""
        return [] if self.parent is None else self.parent.known()

    def set(self, variable: Any, value: Any) -> None:
        """Write through, or keep it; later reads see what was written."""
        if self._keeps_writes:
            self._check_level(variable)
            self.written[variable] = jax.tree.map(jax.lax.stop_gradient, value)
            _forget_staged_code()
            return
        if self.parent is not None:
            self.parent.set(variable, value)
        else:
            with recording(None):
                variable._set_now(value)
        self.forget(variable)
        self.has_written = True
        _forget_staged_code()

    def write_kept(self, values: Sequence[Any]) -> None:
        """Write through what was kept, now that its values are known outside of staged code."""
        variables, self._keeps_writes = list(self.written), False
        self.written.clear()
        for variable, value in zip(variables, values, strict=True):
            self.set(variable, value)

    def record(self, variable: Any, change: Any, after: Callable[[Any], Any]) -> None:
        """Change it where it is; later reads see it."""
        if self.parent is not None:
            self.parent.record(variable, change, after)
        else:
            with recording(None):
                variable.record_now(change)
        self.forget(variable)
        self.has_written = True
        _forget_staged_code()

    def forget(self, variable: Any) -> None:
        """Read what a variable holds from now on, not what replaced it."""
        self._held.pop(variable, None)
        self.taps.pop(variable, None)


class LoopsElsewhere(Exception):
    """A loop that is to stay a loop uses variables of other processes: each round must ask for them."""


class _CapturedInStagedCode(BaseException):
    """A variable was read in code that JAX stages on its own; trace again with its caches set apart."""


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[VariableTrace | None] = []
        self.apart = False


_current = _Current()
_cache_key = jax.make_user_context()
_fresh = itertools.count(1)


def tracing(trace: Callable[[], T], repeatable: Callable[[], bool] = lambda: True) -> T:
    """Call a function that traces with a trace.

    If code that JAX stages on its own reads a variable, the function is called once more, with JAX's
    caches set apart. It must not have had an effect by then, which `repeatable` tells.
    """
    if _current.apart or enclosing():
        return trace()
    try:
        return trace()
    except _CapturedInStagedCode:
        if not repeatable():
            raise ContextError(
                "A function that JAX stages on its own (jax.jit, lax.scan, …) read a variable after "
                "another one had been written. Give the value to that function as an argument, or "
                "run the whole step in px.function."
            ) from None
    _current.apart = True
    try:
        with _cache_key(next(_fresh)):
            return trace()
    finally:
        _current.apart = False


def _forget_staged_code() -> None:
    """Variables hold something else from now on: staged bodies must not be reused."""
    if _current.apart:
        _cache_key(next(_fresh)).__enter__()  # what was before comes back when `tracing` ends


def current() -> VariableTrace | None:
    """The trace of the program that this thread is tracing, if any."""
    return _current.stack[-1] if _current.stack else None


def program() -> VariableTrace | None:
    """The program that this thread is tracing; differentiating eagerly is not tracing."""
    found = current()
    while isinstance(found, Substitution):
        found = found.parent
    return found


def in_program() -> bool:
    """Whether this thread is tracing a program."""
    return program() is not None


def enclosing() -> list[VariableTrace]:
    """The traces of the programs that this thread is tracing, the innermost last."""
    return [x for x in _current.stack if x is not None]


def rewrite_program(key: Any, rewrite: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Change the program that is being traced before it is compiled; do nothing if none is.

    Args:
        key: of which the first one counts.
        rewrite: takes the closed jaxpr and the shardings of its inputs, as far as they are known, and
            returns another jaxpr.
    """
    traced = next((x for x in enclosing() if not isinstance(x, Substitution)), None)
    if traced is not None:
        traced.rewrites.setdefault(key, rewrite)


def compile_with(options: Mapping[str, Any] | None) -> None:
    """Give options to the compiler of the program that is being traced; do nothing if none is."""
    traced = next((x for x in enclosing() if not isinstance(x, Substitution)), None)
    if traced is not None and options:
        traced.compiler_options.update(options)


def after_each_run(fn: Callable[[int], None]) -> None:
    """Call a function after each run of the program that is being traced; else now, for one step."""
    programs = enclosing()
    traced = next((x for x in programs if not isinstance(x, Substitution)), None)
    if traced is not None:
        traced.after_runs.append(fn)
    else:
        fn(1)


def written_together(variable: Any) -> None:
    """Tell this replica that all have written a variable, which one of their threads did."""
    for x in enclosing():
        if isinstance(x, Substitution):
            x.forget(variable)


class recording:  # noqa: N801 - reads as a statement
    """Trace with a trace, or without one, for the duration of a ``with`` block."""

    __slots__ = ("_depth", "_trace")

    def __init__(self, trace: VariableTrace | None) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        self._depth = len(_current.stack)
        _current.stack.append(self._trace)
        _forget_staged_code()

    def __exit__(self, *error: object) -> None:
        del _current.stack[self._depth :]
        _forget_staged_code()


def depth() -> tuple[int, bool]:
    """Where this thread is with its traces, for `back_to`."""
    return len(_current.stack), _current.apart


def back_to(depth: tuple[int, bool]) -> None:
    """Take away the traces that this thread has got since then."""
    del _current.stack[depth[0] :]
    _current.apart = depth[1]


def check_known(variable: Any, arrays: Iterable[Any]) -> None:
    """Require that an eager step writes values that are known, and not those of a staged function."""
    if compat.is_staging() or any(map(compat.is_tracer, arrays)):
        raise ContextError(
            f"Variable {variable.name!r} was written while JAX staged a function (jax.jit, lax.scan, "
            "…), where values are not known yet. Return the new value from that function and "
            "assign it outside, or use px.function in place of jax.jit."
        )
