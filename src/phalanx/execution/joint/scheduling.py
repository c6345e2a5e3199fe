"""When a joint program computes what.

Meetings of replicas have levels: what needs the results of no meeting is of level 0, what needs those
of level 0 is of level 1, and so on. At each level there is one switch, in which each replica computes
what only its own program says, and then the meetings of that level. What all programs say alike is
computed outside of switches, if something outside needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from phalanx.core.padding import CannotJoin
from phalanx.execution.joint.reading import MARKS, FlatProgram, Node, Value

Column = tuple[Value, ...]
"""A value of each program."""


def is_common(column: Column) -> bool:
    """Whether programs have the same value."""
    return all(x.number == column[0].number for x in column)


class JointSchedule:
    """The schedule of some programs: the levels of their equations, and what each level computes."""

    def __init__(self, programs: Sequence[FlatProgram]) -> None:
        self.programs = programs
        self.meetings = self._meetings()
        self.outs: list[Column] = list(zip(*(p.outs for p in programs), strict=True))
        self._check_results()
        self._check_marks()
        self._find_levels()
        met = [nodes[0].level for nodes in self.meetings]
        returned = [x.level for column in self.outs for x in column]
        self.levels = 1 + max([0, *met, *returned])
        self.outside: set[int] = set()
        """The numbers of the equations that are computed outside of switches."""
        self.wanted: list[list[Column]] = [[] for _ in range(self.levels)]
        """What each level must give to what is outside."""
        for nodes in self.meetings:
            for column in zip(*(n.ins for n in nodes), strict=True):
                self._want(column, nodes[0].level)
        for column in self.outs:
            self._want(column, max(x.level for x in column))
        for node in self.effects:
            self._take_outside([node])
        for i in range(len(programs)):
            self._schedule(i)

    def _meetings(self) -> list[tuple[Node, ...]]:
        """The meetings, each as the programs have it."""
        columns = [p.meetings for p in self.programs]
        for nodes in zip(*columns, strict=False):
            names = sorted({n.name for n in nodes})
            if len(names) > 1:
                raise CannotJoin(f"they would meet for different operations, {' and '.join(names)}")
        counts = sorted({len(column) for column in columns})
        if len(counts) > 1:
            raise CannotJoin(
                f"some would communicate more often than others: {counts[-1]} and {counts[0]} times"
            )
        return list(zip(*columns, strict=True))

    def _check_results(self) -> None:
        for column in self.outs:
            kinds = list(dict.fromkeys(f"{x.aval.dtype} of rank {x.aval.ndim}" for x in column))
            if len(kinds) > 1:
                raise CannotJoin(f"they return different kinds of arrays, {' and '.join(kinds)}")

    def _check_marks(self) -> None:
        numbers = [{n.number for n in p.nodes} for p in self.programs]
        self._common = set.intersection(*numbers)
        for node in chain.from_iterable(p.nodes for p in self.programs):
            if node.name in MARKS and node.number not in self._common:
                what = node.eqn.params.get("label", "what is merged or written")
                raise CannotJoin(f"{what} depends on the shape")

    @property
    def effects(self) -> list[Node]:
        """The equations that all programs have, and that do more than to compute."""
        return [n for n in self.programs[0].nodes if n.has_effects and n.number in self._common]

    # -- levels -----------------------------------------------------------------------------------

    def _find_levels(self) -> None:
        places = [iter(p.nodes) for p in self.programs]
        for nodes in self.meetings:
            for each in places:
                self._rise(each)
            level = max(n.level for n in nodes)
            for node in nodes:
                node.level = level
                for x in node.outs:
                    x.level = level + 1
        for each in places:
            self._rise(each)

    @staticmethod
    def _rise(nodes: Iterator[Node]) -> None:
        """Find levels up to the next meeting, whose results other programs decide on too."""
        for node in nodes:
            node.level = max((x.level for x in node.ins), default=0)
            if node.place is not None:
                return
            for x in node.outs:
                x.level = node.level

    # -- where and when ---------------------------------------------------------------------------

    def _want(self, column: Column, level: int) -> None:
        if is_common(column):
            node = column[0].node
            self._take_outside([] if node is None else [node])
        else:
            self.wanted[level].append(column)

    def _take_outside(self, todo: list[Node]) -> None:
        """Compute common values outside of switches, and all that they need."""
        while todo:
            node = todo.pop()
            if node.place is None and node.number not in self.outside:
                self.outside.add(node.number)
                todo += [x.node for x in node.ins if x.node is not None]

    def _schedule(self, i: int) -> None:
        """Compute the rest in switches: as late as possible, where the first is that needs it."""

        def need(value: Value, level: int) -> None:
            node = value.node
            if node is not None and node.place is None and node.number not in self.outside:
                node.when = level if node.when is None else min(node.when, level)

        for level, columns in enumerate(self.wanted):
            for column in columns:
                need(column[i], level)
        for node in reversed(self.programs[i].nodes):
            if node.has_effects and node.when is None and node.number not in self.outside:
                node.when = node.level
            if node.when is not None:
                for x in node.ins:
                    need(x, node.when)

    def kept(self, i: int, level: int) -> list[Value]:
        """What program `i` computes in the switch of a level and needs in later ones."""
        later: dict[Value, None] = {}

        def note(x: Value) -> None:
            if x.node is not None and x.node.when == level and x.slot is None:
                later[x] = None

        for node in self.programs[i].nodes:
            if node.when is not None and node.when > level:
                for x in node.ins:
                    note(x)
        for columns in self.wanted[level + 1 :]:
            for column in columns:
                note(column[i])
        return list(later)
