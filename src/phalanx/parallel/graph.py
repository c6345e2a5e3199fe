"""The cost graph of a program: its operators as nodes, its tensors as edges.

The graph is that of the forward program; the gradient is accounted for at the same nodes and edges.
Tensors with several uses get a node of their own, the copy that all of them read.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.parallel.operators.base import Keeps, Operator
from phalanx.parallel.operators.elementwise import standing_for

PARAMETER, INPUT, OUTPUT = "parameter", "input", "output"
COPIES = frozenset({"copy", "carry", "join"})
"""Kinds of nodes that stand for one tensor with several sources or uses."""


@dataclass(frozen=True)
class GraphNode:
    """An operator of the program, or a tensor that the search chooses a layout for.

    Args:
        key: its name, which stays the same as long as the program does.
        kind: ``operator``, or what the tensor is.
        operator: what is known of it.
        times: how often it runs in one step.
        active: whether a gradient flows through it.
        gradients: for how many operands a gradient is computed.
        again: whether the gradient computes it a second time instead of keeping its results.
        kept: the numbers of the results that stay in memory until the gradient needs them.
        kept_operands: the numbers of the operands that do, in the layout that this node reads them in.
        constraint: a sharding that the program itself asks for.
        place: where in the program it is: the numbers of equations, from the outermost to its own.
    """

    key: str
    kind: str
    operator: Operator
    times: float = 1.0
    active: bool = False
    gradients: int = 0
    again: bool = False
    kept: tuple[int, ...] = ()
    kept_operands: tuple[int, ...] = ()
    constraint: Any = None
    place: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Edge:
    """A tensor on its way from one node to another.

    Args:
        source: the number of the node that computes it.
        result: which of its results it is.
        target: the number of the node that uses it.
        operand: which of its operands it is.
        forward: how often its layout changes in one step.
        backward: how often that of its gradient changes.
        kept: how many of it stay in memory until the gradient needs them, if the layout changes on the
            way.
    """

    source: int
    result: int
    target: int
    operand: int
    forward: float
    backward: float
    kept: float = 0.0


@dataclass(frozen=True)
class Graph:
    """The cost graph of a program.

    Args:
        nodes: in the order of the program.
        edges: the tensors between them.
        notes: what the search could not see into.
        constants: the bytes of arrays that the program holds, which are whole on every device.
    """

    nodes: tuple[GraphNode, ...]
    edges: tuple[Edge, ...]
    notes: tuple[str, ...] = ()
    constants: float = 0.0

    def fingerprint(self) -> str:
        """A short text that is the same for the same program."""
        lines = [(n.key, n.kind, n.times, n.operator.operands, n.operator.results) for n in self.nodes]
        specs = [
            (str(s) for s in (*n.operator.operand_specs, *n.operator.result_specs)) for n in self.nodes
        ]
        edges = [(e.source, e.result, e.target, e.operand) for e in self.edges]
        text = repr((lines, [tuple(s) for s in specs], edges))
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def finished(
    nodes: Sequence[GraphNode],
    edges_: Sequence[Edge],
    remats: Sequence[int],
    notes: Sequence[str],
    constants: float,
    training: bool,
) -> Graph:
    """Give tensors with several uses a node of their own, and find what the gradient keeps.

    Args:
        nodes: in the order of the program.
        edges_: the tensors between them.
        remats: for each node, the region that is computed again for the gradient; 0 outside of them.
        notes: what the search could not see into.
        constants: the bytes of arrays in the program.
        training: whether the gradient is computed.
    """
    edges_ = _with_gradients(nodes, edges_)
    uses: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in edges_:
        uses[edge.source, edge.result].append(edge)
    copies = {at: len(found) > 1 and nodes[at[0]].kind not in COPIES for at, found in uses.items()}
    order: list[tuple[GraphNode, int]] = []
    place: dict[int, int] = {}
    copy_place: dict[tuple[int, int], int] = {}
    for number, node in enumerate(nodes):
        place[number] = len(order)
        order.append((node, remats[number]))
        for result, spec in enumerate(node.operator.result_specs):
            if copies.get((number, result)):
                copy_place[number, result] = len(order)
                operator = standing_for("copy", spec, 1)
                active = any(e.backward for e in uses[number, result])
                key = f"{node.key}.{result}" if result else node.key
                order.append(
                    (GraphNode(f"{key}:copy", "copy", operator, node.times, active), remats[number])
                )
    edges = []
    for at, found in uses.items():
        source, result = place[at[0]], at[1]
        if copies[at]:
            rounds = found[0].forward / (runs(remats[found[0].target]) if training else 1)
            forward = rounds * (runs(remats[at[0]]) if training else 1)
            backward = rounds if any(e.backward for e in found) else 0.0
            edges.append(Edge(source, result, copy_place[at], 0, forward, backward))
            source, result = copy_place[at], 0
        edges += [replace(e, source=source, result=result, target=place[e.target]) for e in found]
    edges.sort(key=lambda e: (e.target, e.operand, e.source, e.result))
    finished = [node for node, _ in order]
    if training:
        finished, edges = _keeping(finished, edges, [region for _, region in order])
    return Graph(tuple(finished), tuple(edges), tuple(notes), constants)


def _with_gradients(nodes: Sequence[GraphNode], edges: Sequence[Edge]) -> list[Edge]:
    """The edges, without gradients that no result asks for, because they stop on the way.

    The nodes stay as they are: XLA holds what they read about as long as if it were needed.
    """
    before: dict[int, list[int]] = defaultdict(list)
    for e in edges:
        if e.backward:
            before[e.target].append(e.source)
    todo = [i for i, node in enumerate(nodes) if node.kind == OUTPUT]
    reached = set(todo)
    while todo:
        found = [i for i in before[todo.pop()] if i not in reached]
        reached.update(found)
        todo += found
    return [e if e.target in reached else replace(e, backward=0.0) for e in edges]


def _keeping(
    nodes: list[GraphNode], edges: list[Edge], regions: Sequence[int]
) -> tuple[list[GraphNode], list[Edge]]:
    """Mark what stays in memory until the gradient needs it.

    A tensor with one use stays in the layout of that use. One with several stays as the copy that they
    read, and again wherever another layout is read. The bytes of inputs are counted already.
    """
    results: dict[int, set[int]] = defaultdict(set)
    operands: dict[int, set[int]] = defaultdict(set)
    active: Counter[int] = Counter(e.target for e in edges if e.backward)
    copied = {(e.source, e.result): e.target for e in edges if nodes[e.target].kind == "copy"}
    inputs = {i for i, node in enumerate(nodes) if node.kind in (PARAMETER, INPUT)}
    inputs |= {copy for (source, _), copy in copied.items() if source in inputs}
    marked = []
    for edge in edges:
        e = edge
        source, target = nodes[e.source], nodes[e.target]
        keeps = target.operator.keeps
        others = active[e.target] - (e.backward > 0)
        needed = (keeps is Keeps.OPERANDS and target.active) or (keeps is Keeps.OTHERS and others > 0)
        entering = regions[e.target] > 0 and regions[e.source] != regions[e.target]
        needed = (needed and not regions[e.target]) or (entering and e.source not in inputs)
        if needed and (source.kind in COPIES or e.source in inputs):
            if e.source not in inputs:
                results[e.source].add(e.result)
            if not entering:
                e = replace(e, kept=target.times)
        elif needed:
            operands[e.target].add(e.operand)
        marked.append(e)
    for i, node in enumerate(nodes):
        if node.operator.keeps is Keeps.RESULT and node.active and not regions[i]:
            results[copied.get((i, 0), i)].add(0)
    kept = [
        replace(node, kept=tuple(sorted(results[i])), kept_operands=tuple(sorted(operands[i])))
        if i in results or i in operands
        else node
        for i, node in enumerate(nodes)
    ]
    return kept, marked


def runs(region: int) -> int:
    """How often the forward program runs there in one training step."""
    return 2 if region else 1
