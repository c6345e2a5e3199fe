"""Writing a joint program: switches, meetings, and what is computed outside of switches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from phalanx.core.padding import CannotJoin
from phalanx.execution.joint.reading import NOTHING, Node, Reader, Traced, Value
from phalanx.execution.joint.rooms import Slot, cut, empty, fill, kind, room_for
from phalanx.execution.joint.sameness import HOST
from phalanx.execution.joint.scheduling import Column, JointSchedule, is_common

Structured = Callable[[Sequence[Any], list[Slot], Any], list[Slot]]
"""Writes control flow in which replicas meet: given the equation of each program, its operands,
and which program a replica runs."""


def join(
    programs: Sequence[Traced],
    index: Any,
    inputs: Sequence[Slot],
    structured: dict[str, Structured],
) -> list[Slot]:
    """Add the joint program of several to the one that is being traced.

    Args:
        programs: they have the same number of inputs and of outputs.
        index: which of them a replica runs.
        inputs: what goes in.
        structured: the writers of control flow, by the names of equations.
    """
    reader = Reader()
    schedule = JointSchedule([reader.read(traced, inputs) for traced in programs])
    return _Writer(schedule, reader, index, structured).write()


class _Writer:
    def __init__(
        self, schedule: JointSchedule, reader: Reader, index: Any, structured: dict[str, Structured]
    ) -> None:
        self._schedule, self._reader, self._index = schedule, reader, index
        self._structured = structured
        self._arrays: dict[int, Any] = {}  # of what is outside of switches, by number
        self._slots: dict[Column, Slot] = {}  # of what switches and meetings have given

    def write(self) -> list[Slot]:
        schedule = self._schedule
        for level in range(schedule.levels):
            self._switch(level)
            for nodes in schedule.meetings:
                if nodes[0].level == level:
                    self._meet(nodes)
            for node in schedule.effects:
                if node.level == level:
                    self._compute(node)
        return [self._slot(column) for column in schedule.outs]

    def _slot(self, column: Column) -> Slot:
        if not is_common(column):
            return self._slots[column]
        return Slot(self._array(column[0]), tuple(x.aval for x in column))

    # -- outside of switches ----------------------------------------------------------------------

    def _array(self, value: Value) -> Any:
        """A value that all programs have."""
        if value.known is not NOTHING:
            return value.known
        if value.number not in self._arrays:
            assert value.node is not None
            self._compute(value.node)
        return self._arrays[value.number]

    def _compute(self, node: Node) -> None:
        """Compute an equation and what it needs; without recursion, because chains are long."""
        todo = [node]
        while todo:
            last = todo[-1]
            missing = [
                x.node
                for x in last.ins
                if x.known is NOTHING and x.number not in self._arrays and x.node is not None
            ]
            if missing:
                todo += missing
                continue
            todo.pop()
            if not last.outs or any(x.number not in self._arrays for x in last.outs):
                results = last.compute([self._array(x) for x in last.ins])
                self._arrays |= {x.number: y for x, y in zip(last.outs, results, strict=True)}

    def _is_outside(self, value: Value) -> bool:
        if value.known is not NOTHING:
            return True
        if value.node is None:
            return False
        if value.node.place is not None:
            return value.slot is None
        return value.node.number in self._schedule.outside

    # -- switches ---------------------------------------------------------------------------------

    def _switch(self, level: int) -> None:
        """Compute what programs do not share, at one level."""
        schedule = self._schedule
        wanted = [column for column in schedule.wanted[level] if column not in self._slots]
        work = [[n for n in p.nodes if n.when == level] for p in schedule.programs]
        if not wanted and not any(work):
            return
        kept = _side_by_side([schedule.kept(i, level) for i in range(len(schedule.programs))])
        rooms = [room_for([x.aval for x in column if x is not None]) for column in (*wanted, *kept)]
        operands = _Operands()
        branches = []
        for i, nodes in enumerate(work):
            results = [column[i] for column in (*wanted, *kept)]
            branches.append(self._branch(nodes, list(zip(results, rooms, strict=True)), operands))
        arrays = lax.switch(self._index, branches, *operands.arrays)
        for column, x in zip(wanted, arrays, strict=False):
            self._slots[column] = Slot(x, tuple(v.aval for v in column))
        for values, x in zip(kept, arrays[len(wanted) :], strict=True):
            for v in values:
                if v is not None:
                    v.slot = Slot(x, (v.aval,))

    def _branch(
        self, nodes: list[Node], results: list[tuple[Value | None, Any]], operands: _Operands
    ) -> Callable[..., list[Any]]:
        """What one program does at one level."""
        made = {x for n in nodes for x in n.outs}
        constants: dict[Value, Any] = {}
        whole: dict[Value, int] = {}
        parts: dict[Value, int] = {}
        for x in [x for n in nodes for x in n.ins] + [x for x, _ in results if x is not None]:
            if x in made:
                continue
            if not self._is_outside(x):
                assert x.slot is not None
                parts[x] = operands.place_of(x.slot.array)
            elif isinstance(self._array(x), HOST):
                constants[x] = self._array(x)
            else:
                whole[x] = operands.place_of(self._array(x))

        def branch(*given: Any) -> list[Any]:
            env = dict(constants)
            env |= {x: given[i] for x, i in whole.items()}
            env |= {x: cut(given[i], x.aval) for x, i in parts.items()}
            for node in nodes:
                computed = node.compute([env[x] for x in node.ins])
                env |= dict(zip(node.outs, computed, strict=True))
            return [empty(room) if x is None else fill(env[x], room) for x, room in results]

        return branch

    # -- meetings ---------------------------------------------------------------------------------

    def _meet(self, nodes: tuple[Node, ...]) -> None:
        operands = [self._slot(column) for column in zip(*(n.ins for n in nodes), strict=True)]
        eqns = [n.eqn for n in nodes]
        does = [self._reader.keys.of_parameters(eqn) for eqn in eqns]
        if all(slot.is_even for slot in operands) and all(key == does[0] for key in does):
            results = nodes[0].compute([slot.array for slot in operands])
            avals = [(v.aval,) * len(nodes) for v in eqns[0].outvars]
            slots = [Slot(x, a) for x, a in zip(results, avals, strict=True)]
        elif nodes[0].name in self._structured:
            slots = self._structured[nodes[0].name](eqns, operands, self._index)
        else:
            brought = list(dict.fromkeys(_described(n) for n in nodes))
            raise CannotJoin(f"they would meet for {nodes[0].name} with {' and '.join(brought)}")
        columns = zip(*(n.outs for n in nodes), strict=True)
        for column, slot in zip(columns, slots + operands, strict=True):
            if is_common(column):
                self._arrays[column[0].number] = slot.array
                continue
            self._slots[column] = slot
            for x in column:
                x.slot = slot


class _Operands:
    """What goes into a switch: each array once."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._given: list[Any] = []  # kept, so that addresses stay theirs
        self._places: dict[int, int] = {}

    def place_of(self, x: Any) -> int:
        if id(x) not in self._places:
            self._places[id(x)] = len(self.arrays)
            self.arrays.append(jnp.asarray(x))
            self._given.append(x)
        return self._places[id(x)]


def _side_by_side(kept: Sequence[list[Value]]) -> list[tuple[Value | None, ...]]:
    """Which values of different programs share an array: those of one dtype, in their order."""
    by_dtype: list[dict[Any, list[Value]]] = []
    for values in kept:
        found: dict[Any, list[Value]] = {}
        for x in values:
            found.setdefault(x.aval.dtype, []).append(x)
        by_dtype.append(found)
    columns: list[tuple[Value | None, ...]] = []
    for dtype in dict.fromkeys(dtype for found in by_dtype for dtype in found):
        columns += itertools.zip_longest(*(found.get(dtype, []) for found in by_dtype))
    return columns


def _described(node: Node) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in (kind(x.aval) for x in node.ins))
