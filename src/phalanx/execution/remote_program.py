"""Programs that use variables of other processes.

What such a program reads are inputs: all of them are asked for at once, before it runs. Updates are
results: what is to be done to which variable. Rows of large tables are asked for by their indices. The
program itself computes these, so it is cut in two: the first part computes indices, the second runs
with the rows. Where indices depend on other rows there are more parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx.core.indexed_slices import IndexedSlices
from phalanx.core.shard_slices import Shard, ShardSlices
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.recorded_updates import (
    Change,
    Home,
    Pending,
    TableRead,
    check_indices,
    read,
)
from phalanx.core.variables.variable import Variable
from phalanx.errors import StrategyMismatchError
from phalanx.execution.program import CHANGED, Program, Result, Stacked, references, wrapper
from phalanx.execution.running import as_array
from phalanx.execution.throttle import THROTTLE, token
from phalanx.runtime import compat, program_parts
from phalanx.runtime.formatting import shown


def is_remote(closed: Any, variables: Sequence[Variable], used: traced_variables.VariableTrace) -> bool:
    """Whether a program needs other processes."""
    if used.changes or used.asked:
        return True
    if all(v.home is None for v in used.read):
        return False
    needed = compat.without_unused(closed)[1]
    return any(n and v.home is not None for v, n in zip(variables, needed, strict=False))


class RemoteProgram(Program):
    """A traced function that uses variables of other processes, and perhaps others."""

    can_loop = False
    can_run_again = True

    def __init__(
        self,
        closed: Any,
        variables: list[Variable],
        used: traced_variables.VariableTrace,
        result: Result,
        name: str,
    ) -> None:
        self.jaxpr = closed.jaxpr
        self.name = name
        self._result = result
        closed, requests = program_parts.with_requests(closed)
        layout = _Layout(variables, len(closed.jaxpr.invars) - len(variables) - len(requests))
        body = len(closed.jaxpr.outvars) - sum(count for _, count in requests)
        ends = list(itertools.accumulate((count for _, count in requests), initial=body))
        operands = [list(range(*span)) for span in itertools.pairwise(ends)]
        # What the function returns must be arrays of JAX; operands need not.
        self._main = _Part(closed, range(body), layout, used.is_spread, len(result.arrays))
        self._stages = [
            (asks, _Part(closed, [i for k in asks for i in operands[k]], layout, used.is_spread))
            for asks in _levels(closed, operands, layout)
        ]

        new = [v for v in used.written if v.home is None]
        for variable in new:
            variable._wrap = wrapper(variable)
        needed: list[Any] = []

        def kept(some: Sequence[Any]) -> list[int]:
            needed.extend(some)
            return list(range(len(needed) - len(some), len(needed)))

        asked = [used.asked[place] for place, _ in requests]
        places = kept([_target(x) for x in asked])
        self._requests = [
            _Request(i, tuple(map(_kind_of, x[1])) if isinstance(x, tuple) else None)
            for i, x in zip(places, asked, strict=True)
        ]
        self._assigned = kept(new)
        changed = kept([v for v, _ in used.changes])
        self._changes = [
            (i, _kind_of(change)) for i, (_, change) in zip(changed, used.changes, strict=True)
        ]
        parts = [*(part for _, part in self._stages), self._main]
        remote = sorted({i for part in parts for i in part.remote})
        self._wholes = kept([variables[i] for i in remote])
        for part in parts:
            part.wholes = [remote.index(i) for i in part.remote]
            part.locals = kept([variables[i] for i in part.here])
        self._needed = [*references(needed), *result.variables]
        self._home = _only_home([v for v in needed if v.home is not None])
        self._device = used.device
        self._checked: set[int] = set()  # requests whose indices are constants that exist
        self._after_runs = list(used.after_runs)

    @property
    def leaves_nothing(self) -> bool:
        """Whether an interrupt of a run leaves this thread as it was, without further care."""
        return self._is_here and not self._assigned

    def run(self, variables: list[Any], arrays: list[Any], then: Callable[[], None]) -> Any:
        """Ask for what the program reads, run it, and record what it does to variables.

        Args:
            variables: what `variables` returned.
            arrays: the arguments.
            then: called if the step happens, in the same moment.
        """
        if self._assigned and transactions.current() is None:
            outputs = transactions.atomically(self._run_placed, variables, arrays, then)
        else:
            outputs = self._run_placed(variables, arrays, then)
        for after in self._after_runs:
            after(1)
        return self._result.rebuild(outputs)

    def run_again(self, arrays: list[Any], then: Callable[[], None] | None) -> Any:
        """As `run`, if that leaves nothing to be cared for."""
        variables = self.variables() if self.leaves_nothing else None
        return CHANGED if variables is None else self.run(variables, arrays, then or _nothing)

    def run_loop(
        self, variables: list[Variable], columns: list[list[Any]], then: Callable[[], None]
    ) -> Stacked:
        """Not possible: each step must see what other processes have done."""
        raise NotImplementedError

    def _run_placed(
        self, variables: list[Any], arrays: list[Any], then: Callable[[], None]
    ) -> list[jax.Array]:
        if self._is_here:
            return self._run_parts(variables, arrays, then)
        with jax.default_device(self._device):
            return self._run_parts(variables, arrays, then)

    def _run_parts(
        self, variables: list[Any], arrays: list[Any], then: Callable[[], None]
    ) -> list[jax.Array]:
        rows: list[Any] = [None] * len(self._requests)
        values: list[Any] = []
        missing = [TableRead(variables[i]) for i in self._wholes]
        if missing and (not self._stages or self._stages[0][1].wholes):
            values, missing = read(self._home, missing), []
        for asks, stage in self._stages:
            fixed = stage.fixed()
            operands = iter(fixed or stage.run(variables, arrays, rows, values))
            reads: list[TableRead] = []
            of_rows: list[int] = []
            for k in asks:
                request = self._requests[k]
                target = variables[request.target]
                if request.changes is not None:
                    rows[k] = _after(target.pending(), request.changes, operands).whole()
                    continue
                indices = np.asarray(next(operands))
                if k not in self._checked:
                    check_indices(target, indices)
                    if fixed:
                        self._checked.add(k)
                reads.append(TableRead(target, indices))
                of_rows.append(k)
            answers = read(self._home, [*reads, *missing])  # what the rest needs comes along
            if missing:
                values, missing = answers[len(reads) :], []
            for k, answer in zip(of_rows, answers, strict=False):
                rows[k] = answer
        outputs = self._main.run(variables, arrays, rows, values)
        return self._record(variables, outputs, then)

    def _record(self, variables: list[Any], outputs: list[Any], then: Callable[[], None]) -> list[Any]:
        """Note what the program does to variables; returns its results."""
        step = transactions.current()
        rest = iter(outputs[len(self._result.arrays) :])
        for i in self._assigned:
            assert step is not None
            step.set(variables[i], variables[i]._wrap(next(rest)))
        changed: dict[Any, Pending] = {}
        for i, kind in self._changes:
            variable = variables[i]
            before = changed.get(variable) or variable.pending()
            changed[variable] = _after(before, (kind,), rest)
        if step is None:
            if changed:
                self._home.commit(changed)
            then()
        else:
            for variable, pending in changed.items():
                step.set(variable, pending)
            step.when_committed(then)
        return outputs[: len(self._result.arrays)]

    def lower(self, variables: list[Any], arrays: list[Any]) -> Any:
        """The lowered program: its last part, which runs with the rows."""
        return self._main.lower(variables, arrays)


def _nothing() -> None:
    pass


class _Kind(NamedTuple):
    """A change without its operand."""

    method: str
    is_sparse: bool
    optimizer: int
    shard: Shard | None  # of a table that the operand is for


class _Request(NamedTuple):
    """What a program asks for: rows, or what a variable would hold after changes."""

    target: int
    changes: tuple[_Kind, ...] | None


def _only_home(variables: Sequence[Variable]) -> Home:
    """Where the variables of a program are. Updates count as a whole, which two homes cannot do."""
    first = variables[0]
    for other in variables:
        if other.home is not first.home:
            raise StrategyMismatchError(
                "A compiled function uses the variables of one px.ParameterServerStrategy, because its "
                "updates count as a whole. Use one function for each strategy, or give values to it as "
                f"arguments. Received: {shown(first.name)} of {first.distribute_strategy!r} and "
                f"{shown(other.name)} of {other.distribute_strategy!r}"
            )
    assert first.home is not None
    return first.home


def _target(asked: Any) -> Any:
    return asked[0] if isinstance(asked, tuple) else asked


def _kind_of(change: Change) -> _Kind:
    operand = change.operand
    shard = operand.shard if isinstance(operand, ShardSlices) else None
    return _Kind(change.method, isinstance(operand, IndexedSlices), change.optimizer, shard)


def _after(pending: Pending, kinds: Sequence[_Kind], operands: Iterator[Any]) -> Pending:
    """What was done to a variable, after changes whose operands a program has computed."""
    for method, is_sparse, optimizer, shard in kinds:
        operand = next(operands)
        if shard is not None:
            operand = ShardSlices(operand, next(operands), shard)
        elif is_sparse:
            operand = IndexedSlices(operand, next(operands))
        pending = pending.plus(Change(method, operand, optimizer))
    return pending


class _Layout:
    """Which inputs of a program are what: variables, then arguments, then rows."""

    def __init__(self, variables: Sequence[Variable], arguments: int) -> None:
        self.variables = variables
        self.first_argument = len(variables)
        self.first_row = len(variables) + arguments


class _Part:
    """A part of a program: what computes some of its results.

    Args:
        closed: the program.
        outputs: which of its results.
        layout: of its inputs.
        is_spread: whether it runs on several devices.
        computed: how many of the results must be computed, also if they are inputs or constants.

    Attributes:
        wholes: which of the values that the program reads from elsewhere it needs.
        locals: where the other variables are that it reads, among those of the program.
    """

    def __init__(
        self,
        closed: Any,
        outputs: Sequence[int],
        layout: _Layout,
        is_spread: bool,
        computed: int = 0,
    ) -> None:
        part, needed = program_parts.needed_for(closed, outputs)
        inputs = [i for i in needed if i < layout.first_argument]
        self.remote = [i for i in inputs if layout.variables[i].home is not None]
        self.here = [i for i in inputs if layout.variables[i].home is None]
        arguments = [i for i in needed if layout.first_argument <= i < layout.first_row]
        rows = [i for i in needed if i >= layout.first_row]
        self._arguments = [i - layout.first_argument for i in arguments]
        self._rows = [i - layout.first_row for i in rows]
        self._is_spread = is_spread
        self._shapes = [x.aval for x in part.jaxpr.invars]
        self._order = order = {i: k for k, i in enumerate(needed)}
        groups = (self.remote, self.here, arguments, rows)
        self.wholes: list[int] = []
        self.locals: list[int] = []

        def program(*given: list[Any]) -> Any:
            ordered: list[Any] = [None] * len(order)
            for group, values in zip(groups, given, strict=True):
                for i, x in zip(group, values, strict=True):
                    ordered[order[i]] = x
            results = compat.eval_jaxpr(part, ordered)
            once = [results[i] for i in first.values()]
            return (once, token(False)) if is_spread else once

        # A result that is needed several times, as by all shards of a variable, is computed and
        # handed over once. One that is an input or a constant, such as indices, is handed over as is.
        jaxpr = part.jaxpr
        where = {i: (g, k) for g, group in enumerate(groups) for k, i in enumerate(group)}
        known: dict[int, tuple[int, int]] = {}
        self._constants: list[Any] = []
        if not is_spread:
            known = {id(x): where[i] for x, i in zip(jaxpr.invars, needed, strict=True)}
            self._constants = [_frozen(x) for x in part.consts]
            known |= {id(x): (_CONSTANTS, k) for k, x in enumerate(jaxpr.constvars)}
        first: dict[int, int] = {}
        self._results: list[tuple[int, int]] = []  # where each of them is found
        for i, x in enumerate(jaxpr.outvars):
            if i >= computed and id(x) in known:
                self._results.append(known[id(x)])
            else:
                first.setdefault(id(x), i)
                self._results.append((_COMPUTED, list(first).index(id(x))))
        self._computes = bool(first)
        self._is_whole = self._results == [(_COMPUTED, k) for k in range(len(first))]
        self._code = jax.jit(program)
        self._groups = groups
        self._has_effects = bool(part.effects)
        self._is_fixed = not needed and not self._has_effects and not is_spread
        self._fixed: list[Any] = []

    def run(
        self,
        variables: list[Any],
        arrays: list[Any],
        rows: list[Any],
        values: list[Any],
    ) -> list[Any]:
        """Run it.

        Args:
            variables: of the program.
            arrays: the arguments.
            rows: those that were asked for.
            values: what the program reads of variables elsewhere.
        """
        wholes = [values[i] for i in self.wholes]
        here = [_present(variables[i]) for i in self.locals] if self.locals else []
        arguments = [arrays[i] for i in self._arguments]
        given = wholes, here, arguments, [rows[i] for i in self._rows]
        outputs: list[Any] = []
        if self._is_spread:
            outputs = THROTTLE.dispatch(self._code, *given)
        elif self._computes or self._has_effects:
            outputs = self._code(*given)
        if self._is_whole:
            return outputs
        found = *given, self._constants, outputs
        return [_kept(found[group][k]) for group, k in self._results]

    def fixed(self) -> list[Any]:
        """Its results if they are always the same, such as indices that were constants; [] if not."""
        if self._is_fixed and not self._fixed:
            self._fixed = [np.asarray(x) for x in self.run([], [], [], [])]
        return self._fixed

    def lower(self, variables: list[Any], arrays: list[Any]) -> Any:
        """The lowered part."""
        shapes = [
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (self._shapes[self._order[i]] for i in g)]
            for g in self._groups
        ]
        return self._code.lower(*shapes)


def _kept(x: Any) -> Any:
    """An array that stays as it is, also if it was given by the user and is written to later."""
    return x.copy() if isinstance(x, np.ndarray) and x.flags.writeable else x


def _frozen(x: Any) -> Any:
    """A constant as the program knows it, whatever is written to the user's array later."""
    return np.ndarray(x.shape, x.dtype, x.tobytes()) if isinstance(x, np.ndarray) else x


_CONSTANTS, _COMPUTED = 4, 5  # among what a part has, after what it was given


def _levels(closed: Any, operands: list[list[int]], layout: _Layout) -> list[list[int]]:
    """The requests, in the order in which they can be made, as many as possible at a time."""
    levels: list[list[int]] = []
    level: list[int] = []
    for k, results in enumerate(operands):
        needed = program_parts.needed_for(closed, results)[1]
        before = [level[i - layout.first_row] for i in needed if i >= layout.first_row]
        level.append(1 + max(before, default=-1))
        if level[-1] == len(levels):
            levels.append([])
        levels[level[-1]].append(k)
    return levels


def _present(variable: Variable) -> Any:
    with traced_variables.recording(None):
        return as_array(variable._held())
