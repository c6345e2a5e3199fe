"""Plans as text: tables, differences, explanations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

from phalanx.errors import NotFoundError
from phalanx.runtime.formatting import bytes_text

if TYPE_CHECKING:
    from phalanx.parallel.plan import Plan, PlannedCollective, TensorPlan
    from phalanx.parallel.plan_parts import PlannedPipeline


def seconds_text(seconds: float) -> str:
    """A time with a fitting unit.

    >>> seconds_text(0.00123)
    '1.23 ms'
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def spec_text(spec: PartitionSpec) -> str:
    """A layout, short: the axes of each dim.

    >>> spec_text(PartitionSpec("x", None, ("y", "z")))
    '(x, -, y·z)'
    """
    if not any(spec):
        return "whole"
    parts = ["-" if e is None else e if isinstance(e, str) else "·".join(e) for e in spec]
    return f"({', '.join(parts)})"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def proof_text(plan: Plan) -> str:
    """Whether a plan is the cheapest one, or how much cheaper another one might be."""
    return "optimal" if plan.proven else f"not proven, another plan may be up to {plan.gap:.1%} cheaper"


def table(plan: Plan) -> str:
    """A plan as a table."""
    how = proof_text(plan)
    memory = plan.memory
    times = {
        "computation": plan.compute,
        "communication": plan.communication,
        "lower bound": plan.lower_bound,
    }
    parts = {
        "parameters": memory.parameters,
        "gradients and optimizer": memory.training,
        "inputs": memory.inputs,
        "kept for gradients": memory.kept,
        "constants": memory.constants,
    }
    held = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    step = seconds_text(plan.cost)
    lines = [
        f"Plan for {plan.mesh} of {plan.hardware}: {step} per step, {how} ({plan.mode})",
        "  " + ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in times.items()),
        f"  memory {bytes_text(memory.total)} per device: {held}",
    ]
    if plan.runner_up is not None:
        lines.append(
            f"  next best: {plan.runner_up.difference}, {seconds_text(plan.runner_up.cost)} per step"
        )
    for title, tensors in (
        ("Parameters", plan.parameters),
        ("Inputs", plan.inputs),
        ("Outputs", plan.outputs),
    ):
        if tensors:
            lines += ["", title, *_tensor_rows(tensors)]
    busy = [o for o in plan.operators if o.collectives]
    if busy:
        rows = [[f"  {o.key}", _collective_text(o.collectives)] for o in busy]
        lines += ["", "Communication", *columns(rows)]
    if plan.pipeline is not None:
        lines = [*pipeline_rows(plan.pipeline), "", f"Within a stage: {lines[0]}", *lines[1:]]
    lines += ["", *plan.notes] if plan.notes else []
    return "\n".join(lines)


def pipeline_rows(pipeline: PlannedPipeline) -> list[str]:
    """The stages of a plan, and what else was tried."""
    p = pipeline
    chunks = f" of {p.chunks} chunks" if p.chunks > 1 else ""
    step = f"{seconds_text(p.seconds)} per step, bubble {p.bubble:.1%}"
    lines = [
        f"Pipeline of {p.stages} stages{chunks}, {p.schedule}, {p.micro_batches} micro batches: {step}"
    ]
    rows = [
        [
            f"  {i}",
            f"equations {part.first} to {part.end - 1}",
            seconds_text(part.seconds),
            f"{len(part.parameters)} parameters",
            f"hands over {part.result}" if part.result else "",
        ]
        for i, part in enumerate(p.parts)
    ]
    held = ", ".join(bytes_text(size) for size in p.memory)
    lines += [*columns(rows), f"  memory per device of each stage: {held}"]
    tried = [f"{other.difference} {seconds_text(other.cost)}" for other in p.others]
    return [*lines, f"  next best: {'; '.join(tried)}"] if tried else lines


def _tensor_rows(tensors: Mapping[str, TensorPlan]) -> list[str]:
    return columns(
        [
            [
                f"  {t.name}",
                f"{t.dtype}[{','.join(map(str, t.shape))}]",
                spec_text(t.spec),
                bytes_text(t.bytes),
            ]
            for t in tensors.values()
        ]
    )


def _collective_text(collectives: Iterable[PlannedCollective]) -> str:
    sums: dict[tuple[str, str, tuple[str, ...]], float] = defaultdict(float)
    for c in collectives:
        sums[c.phase, c.kind, c.axes] += c.count * c.sent
    return ", ".join(
        f"{phase} {kind} along {'·'.join(axes)} {bytes_text(sent)}"
        for (phase, kind, axes), sent in sums.items()
    )


def differences(one: Plan, other: Plan) -> list[str]:
    """What differs between two plans, one line each."""
    lines = []
    if (one.mesh.names, one.mesh.sizes) != (other.mesh.names, other.mesh.sizes):
        lines.append(f"mesh: {one.mesh} -> {other.mesh}")
    if one.fingerprint != other.fingerprint:
        lines.append(f"program: {one.fingerprint} -> {other.fingerprint}")
    before, after = one.layouts(), other.layouts()
    for name in [*before, *(n for n in after if n not in before)]:
        old, new = before.get(name), after.get(name)
        if old != new:
            texts = ["missing" if spec is None else spec_text(spec) for spec in (old, new)]
            lines.append(f"{name}: {texts[0]} -> {texts[1]}")
    for name, a, b in (
        ("computation", one.compute, other.compute),
        ("communication", one.communication, other.communication),
    ):
        if a != b:
            lines.append(f"{name}: {seconds_text(a)} -> {seconds_text(b)}")
    if one.memory != other.memory:
        lines.append(f"memory: {bytes_text(one.memory.total)} -> {bytes_text(other.memory.total)}")
    return lines


def explanation(plan: Plan, name: str) -> str:
    """Why a tensor or an operator is laid out as it is."""
    tensors = {**plan.parameters, **plan.inputs, **plan.outputs}
    if name in tensors:
        return _tensor_explanation(plan, tensors[name])
    for operator in plan.operators:
        if operator.key == name:
            results = ", ".join(spec_text(s) for s in operator.results)
            operands = ", ".join(spec_text(s) for s in operator.operands)
            lines = [f"{name} ({operator.primitive}) reads {operands or 'nothing'} and gives {results}"]
            lines.append(f"  computation {seconds_text(operator.seconds)}")
            lines += [f"  {_collective_text([c])}, of {c.tensor}" for c in operator.collectives]
            return "\n".join(lines)
    raise NotFoundError(
        f"The plan has no such tensor or operator. It has {', '.join(list(tensors)[:20])} and others. "
        f"Received: {name!r}."
    )


def _tensor_explanation(plan: Plan, tensor: TensorPlan) -> str:
    what = f"{tensor.name} {tensor.dtype}{list(tensor.shape)}"
    lines = [f"{what} is {spec_text(tensor.spec)}: {bytes_text(tensor.bytes)} on each device"]
    if tensor.name in plan.pins:
        lines.append("  this layout was given")
    used = [c for c in plan.collectives if c.tensor == tensor.name]
    lines += [f"  {_collective_text([c])}" for c in used] or ["  it is never communicated"]
    for other in tensor.alternatives:
        more = other.cost - plan.cost
        lines.append(
            f"  {spec_text(other.spec)}: the best plan costs {seconds_text(other.cost)}, "
            f"{seconds_text(more)} more ({more / plan.cost if plan.cost else 0:.1%})"
        )
    return "\n".join(lines)
