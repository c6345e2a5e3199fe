"""From a cost graph to the tables that the search minimises: seconds and bytes of every strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.parallel.algo_parameters import AlgoParameters
from phalanx.parallel.cost import TIE_PRICE, CollectiveOperation, Resharding, Table, quantised
from phalanx.parallel.graph import INPUT, PARAMETER, Edge, Graph, GraphNode
from phalanx.parallel.hardware import Hardware
from phalanx.parallel.layout import Layout, pieces, summed
from phalanx.parallel.mesh import DeviceMesh
from phalanx.parallel.operators.base import Spec, Strategies, strategies
from phalanx.parallel.search.problem import Problem

_NOT_FOLLOWING = 16.0
"""Seconds that no plan has to spare: what is forbidden, unless nothing else is possible."""


@dataclass(frozen=True)
class Accounting:
    """What a step costs besides its operators.

    Args:
        training: whether the gradient is computed, and parameters are updated.
        slots: the tensors that the optimizer keeps for each parameter; Adam keeps two.
        overlap: the part of the communication of the parameters' gradients that is hidden behind
            computation.
    """

    training: bool = True
    slots: float = 2.0
    overlap: float = 0.0

    @property
    def copies(self) -> float:
        """How often the bytes of a parameter are held: itself, its gradient, and the slots."""
        return 2.0 + self.slots if self.training else 1.0


class Tables:
    """The tables of one cost graph on one mesh.

    Args:
        graph: the program.
        mesh: the devices.
        hardware: what they can do.
        accounting: what else a step costs.
        pins: for nodes whose layout is given, the layout of their first result.
        algorithm: which strategies are looked at; all by default.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMesh,
        hardware: Hardware,
        accounting: Accounting,
        pins: Mapping[int, Layout],
        algorithm: AlgoParameters | None = None,
    ) -> None:
        self.graph, self.mesh, self.hardware, self.accounting = graph, mesh, hardware, accounting
        self.algorithm = algorithm or AlgoParameters()
        self._reshardings: dict[tuple[Any, float], Resharding] = {}
        self._unary: dict[Any, tuple[Table, Table, Table]] = {}
        self._numbers: dict[Any, np.ndarray[Any, Any]] = {}
        self._pairs: dict[Any, Table] = {}
        self.strategies: list[Strategies] = [strategies(n.operator, mesh.sizes) for n in graph.nodes]
        self.allowed: list[tuple[int, ...] | None] = [
            self._pinned(number, pins[number]) if number in pins else self._looked_at(number)
            for number in range(len(graph.nodes))
        ]
        self.problem = self._problem()

    def _pinned(self, number: int, layout: Layout) -> tuple[int, ...]:
        results = self.strategies[number].results
        if not results:
            return tuple(range(len(self.strategies[number])))
        return tuple(s for s, found in enumerate(results[0]) if summed(found) == layout)

    def _looked_at(self, number: int) -> tuple[int, ...] | None:
        """The strategies that the search may choose; None for all."""
        node, options = self.graph.nodes[number], self.strategies[number]
        if self.algorithm == AlgoParameters() or node.kind in (PARAMETER, INPUT) or node.operator.free:
            return None
        seconds = self.unary(node, options)[0]
        found = self.algorithm.allowed(node.operator, options, self.mesh.size, seconds)
        return None if len(found) == len(options) else found

    def _problem(self) -> Problem:
        costs, memory, edges = [], [], []
        for number, node in enumerate(self.graph.nodes):
            seconds, held, _ = self.unary(node, self.strategies[number])
            costs.append(self._take(seconds, number))
            memory.append(self._take(held, number))
        for e in self.graph.edges:
            table = self.pair(e)
            if table is not None:
                edges.append((e.source, e.target, self._restricted(table, e), self._copies(e)))
        return Problem(tuple(costs), tuple(memory), tuple(edges))

    def _take(self, table: Table, number: int, axis: int = 0) -> Table:
        allowed = self.allowed[number]
        if allowed is None:
            return table
        key = (id(table), allowed, axis)
        if key not in self._pairs:
            self._pairs[key] = np.take(table, allowed, axis=axis)
            self._pairs[key, "of"] = table  # keeps its id from being used again
        return self._pairs[key]

    def _restricted(self, table: Table, e: Edge) -> Table:
        return self._take(self._take(table, e.source), e.target, 1)

    def _copies(self, e: Edge) -> Table | None:
        held = self.pair_bytes(e)
        return None if held is None else self._restricted(held, e)

    def chosen(self, assignment: Sequence[int]) -> list[int]:
        """The strategy of each node, from the numbers that the search uses."""
        return [
            value if allowed is None else allowed[value]
            for value, allowed in zip(assignment, self.allowed, strict=True)
        ]

    def resharding(self, spec: Spec) -> Resharding:
        """The ways between all layouts of a tensor."""
        key = (spec.shape, spec.itemsize)
        if key not in self._reshardings:
            self._reshardings[key] = Resharding(spec.shape, spec.itemsize, self.mesh, self.hardware)
        return self._reshardings[key]

    def unary(self, node: GraphNode, options: Strategies) -> tuple[Table, Table, Table]:
        """For each strategy: its seconds with the price of ties, its bytes, its seconds alone."""
        key = (
            *(node.operator, node.kind, node.times, node.gradients, node.again, node.active),
            *(node.kept, node.kept_operands),
        )
        if key not in self._unary:
            seconds = self._seconds(node, options)
            held = self._held(node, options)
            self._unary[key] = quantised(seconds + TIE_PRICE * held), held, seconds
        return self._unary[key]

    def _seconds(self, node: GraphNode, options: Strategies) -> Table:
        operator = node.operator
        if node.kind == PARAMETER and self.accounting.training and operator.result_specs[0].is_floating:
            # The update reads all copies, and writes all but the gradient.
            held = self._bytes(operator.result_specs[0], options.results[0])
            return held * (2 * self.accounting.copies - 1) / self.hardware.device.bandwidth
        if operator.free:
            return np.zeros(len(options))
        results = sum(
            self._bytes(s, r) for s, r in zip(operator.result_specs, options.results, strict=True)
        )
        moved = np.zeros(len(options)) + results
        if not operator.fused:
            reads = zip(operator.operand_specs, options.operands, strict=True)
            moved = moved + sum(
                np.minimum(self._bytes(s, o), results) if operator.gathers else self._bytes(s, o)
                for s, o in reads
            )
        dtype = operator.operand_specs[0].dtype if operator.operand_specs else "float32"
        work = operator.flops / options.shares / self.hardware.device.rate(dtype)
        once = np.maximum(work, moved / self.hardware.device.bandwidth)
        runs = 1.0 + node.again
        if self.accounting.training and node.active:
            runs += node.gradients if operator.flops else 1.0
        return once * runs * node.times

    def _held(self, node: GraphNode, options: Strategies) -> Table:
        spec = node.operator.result_specs[0] if node.operator.result_specs else None
        if node.kind == PARAMETER and spec is not None:
            copies = self.accounting.copies if spec.is_floating else 1.0
            return self._bytes(spec, options.results[0]) * copies
        if node.kind == INPUT and spec is not None:
            return self._bytes(spec, options.results[0])
        held = np.zeros(len(options))
        for result in node.kept:
            held = (
                held
                + self._bytes(node.operator.result_specs[result], options.results[result]) * node.times
            )
        for operand in node.kept_operands:
            spec = node.operator.operand_specs[operand]
            held = held + self._bytes(spec, options.operands[operand]) * node.times
        return np.round(held)

    def _bytes(self, spec: Spec, found: Sequence[Layout]) -> Table:
        return spec.bytes / np.asarray([pieces(layout, self.mesh.sizes) for layout in found], float)

    def pair(self, e: Edge) -> Table | None:
        """The seconds of a tensor between each two strategies of its nodes; None on one device."""
        spec = self.graph.nodes[e.source].operator.result_specs[e.result]
        before, after = self.strategies[e.source], self.strategies[e.target]
        if not self.mesh.sizes:
            return None
        weight, follows = self._weight(e), self._follows(e)
        key = (id(before), e.result, id(after), e.operand, e.forward, weight, spec.itemsize, follows)
        if key not in self._pairs:
            ways = self.resharding(spec)
            out = self._index(ways, before.results[e.result])
            into = self._index(ways, after.operands[e.operand])
            more = self._extra(ways, before.results[e.result], before)
            table = e.forward * (ways.seconds[np.ix_(out, into)] + more[:, None])
            if weight:
                back = self._index(ways, after.gradients[e.operand])
                home = self._index(ways, before.results[e.result], whole=True)
                more = self._extra(ways, after.gradients[e.operand], after)
                table = table + weight * (ways.seconds[np.ix_(back, home)] + more[:, None]).T
                table = table + weight * self._counting(e)
            if follows:
                pairs = [
                    [0.0 if summed(a) == b else _NOT_FOLLOWING for b in after.operands[e.operand]]
                    for a in before.results[e.result]
                ]
                table = table + np.asarray(pairs)
            self._pairs[key] = quantised(table)
        return self._pairs[key]

    def _follows(self, e: Edge) -> bool:
        """Whether the target must be cut as the operand is made, because it is elementwise."""
        target = self.graph.nodes[e.target].operator
        if not self.algorithm.elementwise_op_strategy_follow or target.family != "elementwise":
            return False
        shape = target.result_specs[0].shape
        whole = [i for i, spec in enumerate(target.operand_specs) if spec.shape == shape]
        made = self.graph.nodes[e.source].kind not in (PARAMETER, INPUT)
        return made and whole[:1] == [e.operand]

    def pair_bytes(self, e: Edge) -> Table | None:
        """The bytes of a copy in another layout that the gradient needs, for each two strategies."""
        if not e.kept or not self.mesh.sizes or not self.accounting.training:
            return None
        spec = self.graph.nodes[e.source].operator.result_specs[e.result]
        before, after = self.strategies[e.source], self.strategies[e.target]
        key = ("bytes", id(before), e.result, id(after), e.operand, e.kept, spec.itemsize)
        if key not in self._pairs:
            ways = self.resharding(spec)
            out = self._index(ways, before.results[e.result], whole=True)
            into = self._index(ways, after.operands[e.operand])
            held = np.round(self._bytes(spec, after.operands[e.operand]) * e.kept)
            self._pairs[key] = np.where(out[:, None] == into[None, :], 0.0, held[None, :])
        return self._pairs[key]

    def _weight(self, e: Edge) -> float:
        """How much the communication of the gradient counts."""
        if not self.accounting.training:
            return 0.0
        hidden = self.accounting.overlap if self.graph.nodes[e.source].kind == PARAMETER else 0.0
        return e.backward * (1 - hidden)

    def _index(
        self, ways: Resharding, found: tuple[Layout, ...], whole: bool = False
    ) -> np.ndarray[Any, Any]:
        key = (id(ways), id(found), whole)
        if key not in self._numbers:
            layouts = map(summed, found) if whole else iter(found)
            self._numbers[key] = np.asarray([ways.number[layout] for layout in layouts])
        return self._numbers[key]

    def _counts(self, e: Edge, strategy: int) -> list[CollectiveOperation]:
        """What the gradient of a maximum communicates: how many elements are as large."""
        operator, options = self.graph.nodes[e.target].operator, self.strategies[e.target]
        if not operator.counts:
            return []
        layout, loops = options.results[0][strategy], options.loops[strategy]
        return self.resharding(operator.result_specs[0]).path(layout, summed(layout), loops)

    def _counting(self, e: Edge) -> Table:
        """The seconds of that, for each strategy of the target."""
        every = range(len(self.strategies[e.target]))
        return np.asarray([sum(c.seconds for c in self._counts(e, s)) for s in every])

    def _extra(self, ways: Resharding, found: tuple[Layout, ...], options: Strategies) -> Table:
        """What sums over axes of different loops cost more, for each strategy of an operator."""
        key = ("extra", id(ways), id(found))
        if key not in self._numbers:
            pairs = zip(found, options.loops, strict=True)
            self._numbers[key] = np.asarray([ways.extra(layout, loops) for layout, loops in pairs])
        return self._numbers[key]

    def collectives(
        self, e: Edge, source: int, target: int
    ) -> list[tuple[str, float, CollectiveOperation]]:
        """The collectives on an edge: the phase, how often each runs, and what it is."""
        if not self.mesh.sizes:
            return []
        ways = self.resharding(self.graph.nodes[e.source].operator.result_specs[e.result])
        out = self.strategies[e.source].results[e.result][source]
        into = self.strategies[e.target].operands[e.operand][target]
        loops = self.strategies[e.source].loops[source]
        found = [("forward", e.forward, c) for c in ways.path(out, into, loops)]
        if self.accounting.training and e.backward:
            back = self.strategies[e.target].gradients[e.operand][target]
            loops = self.strategies[e.target].loops[target]
            counts = self._counts(e, target)
            found += [("backward", e.backward, c) for c in counts]
            found += [("backward", e.backward, c) for c in ways.path(back, summed(out), loops)]
        return found
