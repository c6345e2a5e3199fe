"""Programs as joining sees them: flat lists of equations, with values numbered across programs.

Values of different programs have the same number if they are certainly the same: computed by the same
equations from the same values. Calls are taken apart if replicas meet in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.execution.joint.rooms import Slot, kind
from phalanx.execution.joint.sameness import Keys
from phalanx.execution.variance import is_over_replicas
from phalanx.runtime import compat, program_parts

Traced = tuple[Any, Sequence[Any]]
"""A program: its jaxpr and its constants."""

MARKS = {compat.SAME_ON_ALL_REPLICAS, compat.SAME_IN_ALL_PROGRAMS}
"""Replicas do not meet there, but their programs must have the same value."""

NOTHING = object()


class Value:
    """A value of one program.

    Args:
        aval: its shape and dtype.
        number: the same for values of other programs that are the same.
    """

    __slots__ = ("again", "aval", "known", "level", "node", "number", "slot")

    def __init__(self, aval: Any, number: int) -> None:
        self.aval, self.number = aval, number
        self.level = 0
        self.again: Value | None = None
        """Stands for it from the meeting on that it went into."""
        self.node: Node | None = None
        """The equation that computes it."""
        self.known: Any = NOTHING
        """Its array in the joint program, if all programs have the same from the beginning."""
        self.slot: Slot | None = None
        """Where the joint program keeps it, if they have not."""


@dataclass(eq=False)
class Node:
    """An equation of one program."""

    jaxpr: Any
    eqn: Any
    ins: list[Value]
    outs: list[Value]
    number: int
    place: int | None = None
    """Its place among the meetings, if it is one."""
    has_effects: bool = False
    level: int = 0
    """It needs the results of meetings of all lower levels."""
    when: int | None = None
    """The level at which the switch computes it; None if it does not."""

    @property
    def name(self) -> str:
        """The name of its operation."""
        return str(self.eqn.primitive.name)

    def compute(self, operands: Sequence[Any]) -> list[Any]:
        """Add the equation to the program that is being traced."""
        return program_parts.eval_equation(self.jaxpr, self.eqn, operands)


@dataclass(eq=False)
class FlatProgram:
    """One program, flat."""

    nodes: list[Node] = field(default_factory=list)
    meetings: list[Node] = field(default_factory=list)
    outs: list[Value] = field(default_factory=list)


class Reader:
    """Reads programs that are to be joined."""

    def __init__(self) -> None:
        self.keys = Keys()
        self._numbers: dict[Any, int] = {}
        self._meeting: dict[int, bool] = {}

    def read(self, traced: Traced, inputs: Sequence[Slot]) -> FlatProgram:
        """One of the programs, flat."""
        jaxpr, constants = traced
        ins = []
        for i, (slot, var) in enumerate(zip(inputs, jaxpr.invars, strict=True)):
            value = Value(var.aval, self._number(("input", i, kind(var.aval))))
            if slot.is_even:
                value.known = slot.array
            else:
                value.slot = slot
            ins.append(value)
        program = FlatProgram()
        given = [self._constant(x) for x in constants]
        program.outs = _Walk(self, program).through(jaxpr, given, ins)
        return program

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _constant(self, x: Any, aval: Any = None) -> Value:
        """A constant, or a value of the program around."""
        aval = compat.shape_of(x) if aval is None else aval
        value = Value(aval, self._number(("constant", self.keys.of_constant(x, aval))))
        value.known = x
        return value

    def _meets(self, eqn: Any) -> bool:
        """Whether all replicas must reach an equation, or a mark in it, together."""
        if eqn.primitive.name in MARKS or (
            eqn.primitive.name != "axis_index" and is_over_replicas(eqn.params)
        ):
            return True
        return any(self._any_meets(sub) for sub in compat.sub_jaxprs(eqn))

    def _any_meets(self, jaxpr: Any) -> bool:
        found = self._meeting.get(id(jaxpr))
        if found is None:
            found = self._meeting[id(jaxpr)] = any(self._meets(eqn) for eqn in jaxpr.eqns)
        return found


class _Walk:
    """Goes through one program."""

    def __init__(self, reader: Reader, program: FlatProgram) -> None:
        self._reader, self._program = reader, program
        self._repeated: dict[Any, int] = {}

    def through(self, jaxpr: Any, constants: list[Value], ins: list[Value]) -> list[Value]:
        """The values that a jaxpr returns."""
        reader = self._reader
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, constants, strict=True))
        env |= dict(zip(jaxpr.invars, ins, strict=True))

        def read(atom: Any) -> Value:
            if compat.is_literal(atom):
                return reader._constant(atom.val, atom.aval)
            value = env[atom]
            while value.again is not None:
                value = value.again
            return value

        for eqn in jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            meets = reader._meets(eqn)
            # Functions with derivatives of their own are not read: differentiating needs their rules.
            if meets and eqn.primitive.name in program_parts.CALLS:
                inner = eqn.params[program_parts.CALLS[eqn.primitive.name]]
                held = [reader._constant(x) for x in getattr(inner, "consts", ())]
                outs = self.through(getattr(inner, "jaxpr", inner), held, given)
            elif meets and eqn.primitive.name not in MARKS:
                outs = self._meet(jaxpr, eqn, given)
            else:
                outs = self._compute(jaxpr, eqn, given)
            env |= dict(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _compute(self, jaxpr: Any, eqn: Any, given: list[Value]) -> list[Value]:
        avals = tuple(kind(v.aval) for v in eqn.outvars)
        key: Any = (
            self._reader.keys.of_parameters(eqn),
            tuple(x.number for x in given),
            avals,
        )
        if eqn.effects:  # happens as often as it is there
            self._repeated[key] = self._repeated.get(key, 0) + 1
            key = key, self._repeated[key]
        number = self._reader._number(key)
        outs = self._outs(eqn, number)
        self._add(Node(jaxpr, eqn, given, outs, number, has_effects=bool(eqn.effects)))
        return outs

    def _meet(self, jaxpr: Any, eqn: Any, given: list[Value]) -> list[Value]:
        place = len(self._program.meetings)
        number = self._reader._number(("meeting", place))
        outs = self._outs(eqn, number)
        # What goes into a collective is the same value in all programs, so what is computed of it
        # later may be common: x + ppermute(x), say.
        brought = [
            Value(x.aval, self._reader._number((number, "in", i, kind(x.aval))))
            for i, x in enumerate(given)
        ]
        for x, again in zip(given, brought, strict=True):
            if x.node is not None or x.slot is not None:
                x.again = again
        node = Node(jaxpr, eqn, given, [*outs, *brought], number, place)
        self._add(node)
        self._program.meetings.append(node)
        return outs

    def _outs(self, eqn: Any, number: int) -> list[Value]:
        return [
            Value(v.aval, self._reader._number((number, i, kind(v.aval))))
            for i, v in enumerate(eqn.outvars)
        ]

    def _add(self, node: Node) -> None:
        for x in node.outs:
            x.node = node
        self._program.nodes.append(node)
