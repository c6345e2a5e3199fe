"""Reading programs into cost graphs.

Calls are taken apart. The body of a loop is in the graph once, with the number of its rounds, and what
it carries has one layout in all rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.parallel.graph import INPUT, OUTPUT, PARAMETER, Edge, Graph, GraphNode, finished, runs
from phalanx.parallel.layout import NONE
from phalanx.parallel.operators import OPAQUE, describe
from phalanx.parallel.operators.base import Equation, Operator, Spec, free_dims, spec_of
from phalanx.parallel.operators.elementwise import standing_for
from phalanx.runtime import compat, program_parts


@dataclass(frozen=True)
class Ref:
    """A tensor of the program that is being read: a result of a node, and how often it exists."""

    node: int
    result: int
    times: float
    active: bool


def read(
    closed: Any,
    names: Sequence[str],
    results: Sequence[str],
    parameters: frozenset[int],
    training: bool = True,
) -> Graph:
    """The cost graph of a traced program.

    Args:
        closed: what `jax.make_jaxpr` returns.
        names: the names of its inputs.
        results: the names of its outputs.
        parameters: which of the inputs are trained.
        training: whether its gradient is computed too.
    """
    reader = ProgramReader(training)
    jaxpr = closed.jaxpr
    refs: list[Ref | None] = []
    for i, (var, name) in enumerate(zip(jaxpr.invars, names, strict=True)):
        kind = PARAMETER if i in parameters else INPUT
        spec = spec_of(var.aval)
        active = training and kind == PARAMETER and spec.is_floating
        refs.append(reader.stand_in(kind, name, spec, [], ProgramScope(place=("input", i)), active))
    outs = reader.walk(jaxpr, [None] * len(jaxpr.constvars), refs, ProgramScope())
    for i, (var, name, ref) in enumerate(zip(jaxpr.outvars, results, outs, strict=True)):
        active = ref is not None and ref.active
        reader.stand_in(
            OUTPUT, name, spec_of(var.aval), [ref], ProgramScope(place=("output", i)), active
        )
    constants = sum(float(getattr(x, "nbytes", 0)) for x in closed.consts)
    return finished(reader.nodes, reader.edges, reader.remats, reader.notes, constants, training)


@dataclass(frozen=True)
class ProgramScope:
    """Where in the program the reader is."""

    path: str = ""
    times: float = 1.0
    remat: int = 0
    place: tuple[Any, ...] = ()

    def at(self, *place: Any) -> ProgramScope:
        """The same, further inside the program."""
        return replace(self, place=(*self.place, *place))

    def inside(self, name: str) -> ProgramScope:
        """The same, under another name."""
        return replace(self, path="/".join(part for part in (self.path, name) if part))


CALLS: Mapping[str, str] = {
    **program_parts.CALLS,
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
REMAT = frozenset({"remat", "remat2", "checkpoint"})


@dataclass
class ProgramReader:
    """Reads programs; the nodes and edges that it has found so far."""

    training: bool
    nodes: list[GraphNode] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    remats: list[int] = field(default_factory=list)
    """For each node, the number of the region that is computed again; 0 outside of them."""
    seen: Counter[str] = field(default_factory=Counter)
    regions: int = 0

    def add(self, node: GraphNode, sources: Sequence[Ref | None], remat: int = 0) -> int:
        """A new node, with edges from what it uses; its number."""
        count = self.seen[node.key]
        self.seen[node.key] += 1
        if count:
            node = replace(node, key=f"{node.key}_{count}")
        self.nodes.append(node)
        self.remats.append(remat)
        number = len(self.nodes) - 1
        for operand, ref in enumerate(sources):
            self.connect(ref, number, operand)
        return number

    def connect(
        self, ref: Ref | None, target: int, operand: int, backward: float | None = None
    ) -> None:
        """An edge from a tensor to its reader. Constants need none: each device cuts its own."""
        if ref is None:
            return
        node = self.nodes[target]
        times = node.times if backward is None else backward
        gradient = times if node.active and ref.active else 0.0
        again = runs(self.remats[target]) if self.training else 1
        self.edges.append(Edge(ref.node, ref.result, target, operand, ref.times * again, gradient))

    def stand_in(
        self,
        kind: str,
        name: str,
        spec: Spec,
        sources: Sequence[Ref | None],
        scope: ProgramScope,
        active: bool,
    ) -> Ref:
        """A node that stands for a tensor."""
        operator = standing_for(kind, spec, len(sources))
        node = GraphNode(name, kind, operator, scope.times, active, place=scope.place)
        number = self.add(node, sources, scope.remat)
        return Ref(number, 0, scope.times, active)

    def walk(
        self,
        jaxpr: Any,
        constants: Sequence[Ref | None],
        inputs: Sequence[Ref | None],
        scope: ProgramScope,
    ) -> list[Ref | None]:
        """Read the equations of a jaxpr; the tensors that it returns."""
        known: dict[Any, Ref | None] = {}
        known.update(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def ref(atom: Any) -> Ref | None:
            return None if compat.is_literal(atom) else known[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            here = scope.inside(str(eqn.source_info.name_stack)).at(i)
            outs = self.equation(eqn, [ref(atom) for atom in eqn.invars], here)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [ref(atom) for atom in jaxpr.outvars]

    def equation(
        self, eqn: Any, operands: Sequence[Ref | None], scope: ProgramScope
    ) -> list[Ref | None]:
        """Read one equation; its results."""
        name = eqn.primitive.name
        if name in CALLS and CALLS[name] in eqn.params:
            return self._call(eqn, operands, scope)
        if name in ("optimization_barrier", "reshard"):  # which change nothing
            return list(operands)
        if name == "scan":
            return self._scan(eqn, operands, scope)
        if name == "while":
            return self._while(eqn, operands, scope)
        if name == "cond":
            return self._cond(eqn, operands, scope)
        described = Equation(
            name,
            eqn.params,
            tuple(spec_of(atom.aval) for atom in eqn.invars),
            tuple(spec_of(var.aval) for var in eqn.outvars),
        )
        operator = describe(described)
        key = scope.inside(name).path
        specs = (*operator.operand_specs, *operator.result_specs)
        if operator.family == OPAQUE and (eqn.effects or any(s.shape for s in specs)):
            effects = " It has effects." if eqn.effects else ""
            self.notes.append(
                f"{key} is opaque: all of its tensors are whole on every device.{effects}"
            )
        return self._operator(key, operator, operands, scope, eqn.params.get("sharding"))

    def _operator(
        self,
        key: str,
        operator: Operator,
        operands: Sequence[Ref | None],
        scope: ProgramScope,
        constraint: Any = None,
    ) -> list[Ref | None]:
        gradients = sum(r is not None and r.active for r in operands)
        active = gradients > 0 and operator.name != "stop_gradient"
        again = self.training and scope.remat > 0
        constraint = constraint if operator.name == "sharding_constraint" else None
        node = GraphNode(
            key,
            "operator",
            operator,
            scope.times,
            active,
            gradients if active else 0,
            again,
            constraint=constraint,
            place=scope.place,
        )
        number = self.add(node, operands, scope.remat)
        return [
            Ref(number, i, scope.times, active and spec.is_floating)
            for i, spec in enumerate(operator.result_specs)
        ]

    def _call(self, eqn: Any, operands: Sequence[Ref | None], scope: ProgramScope) -> list[Ref | None]:
        name = eqn.primitive.name
        inner = eqn.params[CALLS[name]]
        if name in REMAT:
            self.regions += 1
            scope = replace(scope, remat=self.regions)
        elif name in ("jit", "pjit"):
            scope = scope.inside(eqn.params.get("name") or "")
        return self._inline(inner, operands, scope)

    def _inline(
        self, inner: Any, operands: Sequence[Ref | None], scope: ProgramScope
    ) -> list[Ref | None]:
        jaxpr = getattr(inner, "jaxpr", inner)
        return self.walk(jaxpr, [None] * len(jaxpr.constvars), operands, scope)

    def _scan(self, eqn: Any, operands: Sequence[Ref | None], scope: ProgramScope) -> list[Ref | None]:
        consts, carries = compat.scan_counts(eqn)
        body = replace(scope.inside("scan"), times=scope.times * eqn.params["length"])
        specs = [spec_of(atom.aval) for atom in eqn.invars]
        active = any(r is not None and r.active for r in operands)
        first = consts + carries
        carried = self._carried(operands[consts:first], specs[consts:first], active, body)
        rows = [
            self._between("unstack", ref, spec, scope, body.at("unstack", i))
            for i, (ref, spec) in enumerate(zip(operands[first:], specs[first:], strict=True))
        ]
        outs = self._inline(eqn.params["jaxpr"], [*operands[:consts], *carried, *rows], body)
        self._close(carried, outs[:carries])
        stacks = [
            self._between("stack", ref, spec_of(var.aval), scope, body.at("stack", i))
            for i, (ref, var) in enumerate(zip(outs[carries:], eqn.outvars[carries:], strict=True))
        ]
        return [*(replace(ref, times=scope.times) for ref in carried), *stacks]

    def _carried(
        self, refs: Sequence[Ref | None], specs: Sequence[Spec], active: bool, body: ProgramScope
    ) -> list[Ref]:
        """The tensors that a loop carries: from outside at first, then from the end of each round."""
        path = body.inside("carry").path
        return [
            self.stand_in(
                "carry", path, spec, [ref, None], body.at("carry", i), active and spec.is_floating
            )
            for i, (ref, spec) in enumerate(zip(refs, specs, strict=True))
        ]

    def _close(self, carried: Sequence[Ref], outs: Sequence[Ref | None]) -> None:
        for carry, out in zip(carried, outs, strict=True):
            self.connect(out, carry.node, 1)

    def _between(
        self, name: str, ref: Ref | None, spec: Spec, scope: ProgramScope, body: ProgramScope
    ) -> Ref | None:
        """A row of a tensor for each round, or the tensor of all rows, never cut along the rounds."""
        if ref is None:
            return None
        row = spec.shape[1:]
        loops, dims = free_dims(row)
        ends = ((NONE, *dims), spec), (dims, Spec(row, spec.dtype, spec.itemsize))
        before, after = ends if name == "unstack" else ends[::-1]
        operator = Operator(
            name,
            "dim map",
            loops,
            (before[0],),
            (after[0],),
            (before[1],),
            (after[1],),
            fused=True,
            free=name == "stack",
        )
        key = body.inside(name).path
        node = GraphNode(
            key, "operator", operator, body.times, ref.active, int(ref.active), place=body.place
        )
        number = self.add(node, [], body.remat)
        self.connect(ref, number, 0, scope.times if name == "unstack" else body.times)
        return Ref(number, 0, body.times if name == "unstack" else scope.times, ref.active)

    def _while(self, eqn: Any, operands: Sequence[Ref | None], scope: ProgramScope) -> list[Ref | None]:
        tests, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        scope = scope.inside("while")
        first = tests + consts
        specs = [spec_of(atom.aval) for atom in eqn.invars[first:]]
        # JAX computes no gradients through such loops.
        still = [ref and replace(ref, active=False) for ref in operands]
        self.notes.append(f"{scope.path} runs an unknown number of rounds; its cost is that of one.")
        carried = self._carried(still[first:], specs, False, scope)
        self._inline(eqn.params["cond_jaxpr"], [*still[:tests], *carried], scope.at("test"))
        outs = self._inline(eqn.params["body_jaxpr"], [*still[tests:first], *carried], scope.at("body"))
        self._close(carried, outs)
        return list(carried)

    def _cond(self, eqn: Any, operands: Sequence[Ref | None], scope: ProgramScope) -> list[Ref | None]:
        branches = eqn.params["branches"]
        part = replace(scope.inside("cond"), times=scope.times / len(branches))
        outs = [
            self._inline(branch, operands[1:], part.inside(f"branch{i}").at("branch", i))
            for i, branch in enumerate(branches)
        ]
        joined: list[Ref | None] = []
        for i, (var, *refs) in enumerate(zip(eqn.outvars, *outs, strict=True)):
            active = any(r is not None and r.active for r in refs)
            key, here = part.inside("join").path, part.at("join", i)
            ref = self.stand_in("join", key, spec_of(var.aval), refs, here, active)
            joined.append(replace(ref, times=scope.times))
        return joined
