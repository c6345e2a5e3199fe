"""From what the search found to a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from phalanx.parallel.graph import INPUT, OUTPUT, PARAMETER, Edge
from phalanx.parallel.layout import Layout, cuts, pieces, summed, to_spec
from phalanx.parallel.plan import (
    Alternative,
    MemoryUse,
    OperatorPlan,
    Plan,
    PlannedCollective,
    RunnerUp,
    TensorPlan,
)
from phalanx.parallel.plan_text import spec_text
from phalanx.parallel.search.problem import Solution, Table
from phalanx.parallel.tables import Tables

ALTERNATIVES = 5
"""How many other layouts a plan remembers for each tensor."""


def build(
    tables: Tables,
    found: Solution,
    *,
    order: tuple[str, ...],
    mode: str,
    budget: float,
    pins: Mapping[str, PartitionSpec],
    marginals: Mapping[int, Table],
    others: Sequence[RunnerUp] = (),
    notes: Sequence[str] = (),
) -> Plan:
    """The plan of an assignment."""
    return _Builder(tables, found).plan(order, mode, budget, pins, marginals, others, notes)


def spec_of_layout(layout: Layout, names: tuple[str, ...], rank: int) -> PartitionSpec:
    """The `PartitionSpec` of a layout once sums are complete."""
    return to_spec(summed(layout), names, rank)


class _Builder:
    def __init__(self, tables: Tables, found: Solution) -> None:
        self.tables, self.found = tables, found
        self.graph, self.mesh = tables.graph, tables.mesh
        self.chosen = tables.chosen(found.values)
        self.into: dict[int, list[Edge]] = defaultdict(list)
        for e in self.graph.edges:
            self.into[e.target].append(e)

    def plan(
        self,
        order: tuple[str, ...],
        mode: str,
        budget: float,
        pins: Mapping[str, PartitionSpec],
        marginals: Mapping[int, Table],
        others: Sequence[RunnerUp],
        notes: Sequence[str],
    ) -> Plan:
        nodes = self.graph.nodes
        tensors = {
            kind: {
                n.key: self._tensor(i, marginals.get(i)) for i, n in enumerate(nodes) if n.kind == kind
            }
            for kind in (PARAMETER, INPUT, OUTPUT)
        }
        operators = tuple(
            self._operator(i) for i, n in enumerate(nodes) if n.kind not in (PARAMETER, INPUT)
        )
        compute = sum(
            float(self.tables.unary(n, self.tables.strategies[i])[2][self.chosen[i]])
            for i, n in enumerate(nodes)
        )
        overlap = self.tables.accounting.overlap
        parameters = {n.key for n in nodes if n.kind == PARAMETER}
        communication = sum(
            c.seconds
            * c.count
            * (1 - overlap if c.phase == "backward" and c.tensor in parameters else 1)
            for o in operators
            for c in o.collectives
        )
        return Plan(
            mesh=self.mesh,
            hardware=self.tables.hardware.name,
            parameters=tensors[PARAMETER],
            inputs=tensors[INPUT],
            outputs=tensors[OUTPUT],
            operators=operators,
            order=order,
            compute=float(compute),
            communication=float(communication),
            memory=self._memory(tensors),
            cost=self.found.cost,
            lower_bound=self.found.bound,
            budget=budget,
            mode=mode,
            fingerprint=self.graph.fingerprint(),
            pins=dict(pins),
            runner_up=self._runner_up(tensors, others),
            notes=(*self.graph.notes, *notes),
        )

    def _spec(self, layout: Layout, rank: int) -> PartitionSpec:
        return spec_of_layout(layout, self.mesh.names, rank)

    def _tensor(self, number: int, marginal: Table | None) -> TensorPlan:
        node = self.graph.nodes[number]
        spec = node.operator.result_specs[0]
        options = self.tables.strategies[number].results[0]
        chosen = options[self.chosen[number]]
        others: list[Alternative] = []
        if marginal is not None and self.tables.allowed[number] is None:
            best = sorted((float(c), i) for i, c in enumerate(marginal) if i != self.chosen[number])
            rank = len(spec.shape)
            others = [Alternative(self._spec(options[i], rank), c) for c, i in best[:ALTERNATIVES]]
        return TensorPlan(
            node.key,
            spec.shape,
            spec.dtype,
            self._spec(chosen, len(spec.shape)),
            spec.bytes / pieces(chosen, self.mesh.sizes),
            tuple(others),
        )

    def _operator(self, number: int) -> OperatorPlan:
        node, options = self.graph.nodes[number], self.tables.strategies[number]
        value = self.chosen[number]
        operator = node.operator
        ranks = [len(s.shape) for s in operator.operand_specs]
        operands = [found[value] for found in options.operands]
        _, _, seconds = self.tables.unary(node, options)
        return OperatorPlan(
            node.key,
            operator.name,
            tuple(cuts(x, self.mesh.sizes, rank) for x, rank in zip(operands, ranks, strict=True)),
            tuple(self._spec(x, rank) for x, rank in zip(operands, ranks, strict=True)),
            tuple(
                self._spec(found[value], len(spec.shape))
                for found, spec in zip(options.results, operator.result_specs, strict=True)
            ),
            self._routes(number),
            float(seconds[value]),
            tuple(c for e in self.into[number] for c in self._collectives(e)),
        )

    def _routes(self, number: int) -> tuple[tuple[PartitionSpec, ...], ...]:
        """The layouts that each operand goes through."""
        node = self.graph.nodes[number]
        routes: list[tuple[PartitionSpec, ...]] = [()] * len(node.operator.operand_specs)
        for e in self.into[number]:
            out = self.tables.strategies[e.source].results[e.result][self.chosen[e.source]]
            into = self.tables.strategies[number].operands[e.operand][self.chosen[number]]
            if summed(out) == into:
                continue
            spec = self.graph.nodes[e.source].operator.result_specs[e.result]
            found = [summed(x) for x, _ in self.tables.resharding(spec).steps(out, into)]
            found = [x for i, x in enumerate(found) if x != (summed(out) if i == 0 else found[i - 1])]
            routes[e.operand] = tuple(self._spec(x, len(spec.shape)) for x in found)
        return tuple(routes)

    def _collectives(self, e: Edge) -> list[PlannedCollective]:
        found = self.tables.collectives(e, self.chosen[e.source], self.chosen[e.target])
        key = self.graph.nodes[e.source].key.removesuffix(":copy")
        return [
            PlannedCollective(
                c.kind, tuple(self.mesh.names[a] for a in c.axes), phase, count, c.sent, c.seconds, key
            )
            for phase, count, c in found
        ]

    def _memory(self, tensors: Mapping[str, Mapping[str, Any]]) -> MemoryUse:
        parameters = sum(t.bytes for t in tensors[PARAMETER].values())
        inputs = sum(t.bytes for t in tensors[INPUT].values())
        held = sum(
            float(m[v])
            for n, m, v in zip(
                self.graph.nodes, self.tables.problem.memory, self.found.values, strict=True
            )
            if n.kind == PARAMETER
        )
        kept = self.found.bytes - held - inputs
        return MemoryUse(parameters, held - parameters, inputs, kept, self.graph.constants)

    def _runner_up(
        self, tensors: Mapping[str, Mapping[str, TensorPlan]], others: Sequence[RunnerUp]
    ) -> RunnerUp | None:
        """The cheapest plan on another mesh, or with another layout of a parameter or an input."""
        known = list(others)
        for kind in (PARAMETER, INPUT):
            for t in tensors[kind].values():
                known += [
                    RunnerUp(f"{t.name} as {spec_text(a.spec)}", a.cost) for a in t.alternatives[:1]
                ]
        return min(known, key=lambda r: r.cost, default=None)
