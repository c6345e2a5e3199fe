"""The best stages for a function: how many, cut where, and in which schedule.

Within a stage the plan search says what each equation costs on the stage's devices. A dynamic program
then finds, for each bound on the slowest stage, the cut whose transfers cost least; the schedule itself
says how long the step takes with those stages, and what they hold.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb, prod
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.errors import InvalidValueError, ResourceExhaustedError
from phalanx.parallel.hardware import Hardware
from phalanx.parallel.pipelines.cutting import FlatFunction, flattened
from phalanx.parallel.pipelines.every_cut import CutCosts, fastest_cuts
from phalanx.parallel.pipelines.named_schedules import schedule
from phalanx.parallel.pipelines.schedule import ActionCosts, PipelineSchedule
from phalanx.parallel.plan import Plan, RunnerUp
from phalanx.parallel.plan_parts import PlannedPipeline, PlannedStage
from phalanx.parallel.reading import read
from phalanx.parallel.searching import search, searched_hardware
from phalanx.parallel.tracing import trace
from phalanx.runtime import compat
from phalanx.runtime.formatting import bytes_text

__all__ = ["PipelineCandidate", "StageCosts", "best_cuts", "search_pipeline"]

_UNBOUNDED = 1e18
"""Bytes; whether stages fit is checked by stage, not for the whole program."""
_MOST_CUTS = 300_000
_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble_v")


@dataclass(frozen=True)
class StageCosts:
    """What parts of a function cost.

    Args:
        cuts: the equations after which it can be cut.
        seconds: of each equation, its gradient included, for one micro batch.
        shares: of those seconds, by equation, that the forward computation, the gradient of the input
            and the gradient of the weights take; equal thirds if there are none.
        kept: the bytes of each equation that stay for its gradient.
        parameters: the bytes that training holds for the parameters that each equation is first to use.
        transfers: the seconds that it takes to hand over the tensor at each cut.
    """

    cuts: tuple[int, ...]
    seconds: tuple[float, ...]
    kept: tuple[float, ...]
    parameters: tuple[float, ...]
    transfers: tuple[float, ...]
    shares: tuple[tuple[float, float, float], ...] = ()

    def actions(self, chosen: Sequence[int]) -> ActionCosts:
        """What the actions of each part of a cut cost."""
        places = {cut: i for i, cut in enumerate(self.cuts)}
        transfer = max((self.transfers[places[cut]] for cut in chosen), default=0.0)
        forward, input, weight = (self.parts(chosen, kind) for kind in self.kinds())
        return ActionCosts(forward, input, weight, transfer)

    def kinds(self) -> list[list[float]]:
        """The seconds of all equations' forward computations, gradients of inputs, and of weights."""
        shares = self.shares or ((1 / 3,) * 3,) * len(self.seconds)
        rows = list(zip(self.seconds, shares, strict=True))
        return [[seconds * share[kind] for seconds, share in rows] for kind in range(3)]

    def parts(self, chosen: Sequence[int], values: Sequence[float]) -> list[float]:
        """The sums of values of equations over each part of a cut."""
        bounds = [0, *(cut + 1 for cut in chosen), len(values)]
        return [sum(values[a:b]) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class PipelineCandidate:
    """A way to cut a function, and what it costs."""

    schedule: PipelineSchedule
    cuts: tuple[int, ...]
    seconds: float
    memory: tuple[float, ...]
    parts: tuple[float, ...]


def candidate(costs: StageCosts, made: PipelineSchedule, cuts: Sequence[int]) -> PipelineCandidate:
    """What a cut costs in a schedule, by the schedule's own latency and what it holds."""
    parts = costs.parts(cuts, costs.seconds)
    seconds = made.latency(costs.actions(cuts))
    kept, held = costs.parts(cuts, costs.kept), costs.parts(cuts, costs.parameters)
    memory = []
    for stage, positions in enumerate(made.homes):
        live = made.peak_live[stage] / len(positions)
        memory.append(sum(held[p] + live * kept[p] for p in positions))
    return PipelineCandidate(made, tuple(cuts), seconds, tuple(memory), tuple(parts))


def best_cuts(
    costs: StageCosts, made: PipelineSchedule, budget: float, most: int = _MOST_CUTS
) -> PipelineCandidate | None:
    """The fastest cut for a schedule that fits into memory; None if there is none.

    Args:
        costs: what parts cost.
        made: the schedule.
        budget: the bytes that each device may hold.
        most: if there are no more cuts than that, all are tried, and the result is the best one. Else
            the dynamic program proposes some, and each is improved by moving one cut at a time.
    """
    if comb(len(costs.cuts), made.positions - 1) <= most:
        forward, input, weight = costs.kinds()
        known = CutCosts(
            costs.cuts, forward, input, weight, costs.transfers, costs.kept, costs.parameters
        )
        every = fastest_cuts(known, made, budget * (1 + 1e-12))
        return min((candidate(costs, made, cuts) for cuts in every), key=_rank, default=None)
    start = [candidate(costs, made, cuts) for cuts in _promising(costs, made, budget)]
    start = sorted((c for c in start if max(c.memory) <= budget), key=_rank)[:4]
    return min((_improved(costs, c, budget) for c in start), key=_rank, default=None)


def _rank(c: PipelineCandidate) -> tuple[float, tuple[int, ...]]:
    return c.seconds, c.cuts


def _improved(costs: StageCosts, best: PipelineCandidate, budget: float) -> PipelineCandidate:
    """Move one cut at a time to a place near by, while that is faster."""
    places = {cut: i for i, cut in enumerate(costs.cuts)}
    while True:
        moved = set()
        for cut in best.cuts:
            for step in (-3, -2, -1, 1, 2, 3):
                place = places[cut] + step
                if 0 <= place < len(costs.cuts) and costs.cuts[place] not in best.cuts:
                    moved.add(tuple(sorted({*best.cuts, costs.cuts[place]} - {cut})))
        around = [candidate(costs, best.schedule, cuts) for cuts in sorted(moved)]
        found = min((c for c in around if max(c.memory) <= budget), key=_rank, default=best)
        if found.seconds >= best.seconds:
            return best
        best = found


def _promising(costs: StageCosts, made: PipelineSchedule, budget: float) -> Iterator[tuple[int, ...]]:
    """For each bound on the slowest part, the cut within it whose transfers cost least."""
    ends = [*(cut + 1 for cut in costs.cuts), len(costs.seconds)]
    sums = [0.0, *itertools.accumulate(costs.seconds)]
    kept = [0.0, *itertools.accumulate(costs.kept)]
    held = [0.0, *itertools.accumulate(costs.parameters)]
    share = [made.peak_live[stage] / made.chunks for stage in made.placement]
    starts = [0, *ends[:-1]]
    lengths = sorted({sums[b] - sums[a] for a in starts for b in ends if a < b})
    least = sums[-1] / made.positions
    seen: set[tuple[int, ...]] = set()

    def fits(part: int, a: int, b: int) -> bool:
        return held[b] - held[a] + share[part] * (kept[b] - kept[a]) <= budget

    def is_short(bound: float, a: int, b: int) -> bool:
        return sums[b] - sums[a] <= bound

    for bound in (x for x in lengths if x >= least * (1 - 1e-9)):
        cuts = _within(
            made.positions,
            ends,
            costs.transfers,
            functools.partial(is_short, bound),
            fits,
        )
        if cuts is not None and cuts not in seen:
            seen.add(cuts)
            yield cuts


def _within(
    count: int,
    ends: Sequence[int],
    transfers: Sequence[float],
    is_short: Callable[[int, int], bool],
    fits: Callable[[int, int, int], bool],
) -> tuple[int, ...] | None:
    """The cut into so many parts, all short enough, whose transfers cost least."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for part in range(count):
        is_last = part == count - 1
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (cost, cuts) in best.items():
            for i, end in enumerate(ends):
                if end <= start or is_last != (i == len(ends) - 1):
                    continue
                if not is_short(start, end):
                    break
                if not fits(part, start, end):
                    continue
                more = (cost, cuts) if is_last else (cost + transfers[i], (*cuts, end - 1))
                if end not in found or more < found[end]:
                    found[end] = more
        best = found
    return best[ends[-1]][1] if ends[-1] in best else None


def search_pipeline(
    function: Callable[..., Any],
    params: Any,
    batch: Sequence[Any],
    devices: int,
    hardware: Hardware | str | None = None,
    *,
    micro_batches: int = 8,
    stages: int | Sequence[int] | None = None,
    schedules: Sequence[str] = _SCHEDULES,
    chunks: int | None = None,
    memory: float | None = None,
    slots: float = 2.0,
    time_limit: float | None = None,
) -> Plan:
    """The fastest pipeline for a function: its stages, their cuts, its schedule, and the plan inside.

    Args:
        function: of parameters and a batch; returns the mean loss of the batch.
        params: a nest of arrays, or of their shapes.
        batch: the arguments of the whole batch, with the examples along the first dim.
        devices: how many there are for all stages.
        hardware: what they can do; see `search`.
        micro_batches: into how many a batch is cut.
        stages: the numbers of stages to try; by default all that divide the devices.
        schedules: to try.
        chunks: of each stage; by default as few as the schedule needs.
        memory: the bytes that each device may hold; by default what the hardware has.
        slots: how many tensors the optimizer keeps for each parameter.
        time_limit: the seconds that the search within stages may take, for each number of stages.

    Returns:
        The plan of one stage's devices, with `Plan.pipeline`: cuts, schedule, and what stages cost.

    >>> import jax, jax.numpy as jnp
    >>> def loss(params, x):
    ...     for w in params:
    ...         x = jnp.tanh(x @ w)
    ...     return jnp.mean(x)
    >>> params = [jax.ShapeDtypeStruct((512, 512), "float32")] * 4
    >>> x = jax.ShapeDtypeStruct((4096, 512), "float32")
    >>> plan = search_pipeline(loss, params, (x,), 2, "A100", stages=2, schedules=["1f1b"])
    >>> plan.pipeline.stages, plan.pipeline.schedule, [len(s.parameters) for s in plan.pipeline.parts]
    (2, '1f1b', [2, 2])
    """
    chosen = searched_hardware(hardware)
    budget = chosen.device.memory if memory is None else float(memory)
    counts = [n for n in range(1, devices + 1) if devices % n == 0]
    if stages is not None:
        counts = [stages] if isinstance(stages, int) else list(stages)
    wrong = [n for n in counts if n < 1 or devices % n]
    if wrong or not counts:
        raise InvalidValueError(
            f"The number of stages must divide the {devices} devices. Received: stages={stages}"
        )
    micro = _micro(batch, micro_batches)
    flat = flattened(function, params, micro)

    def program(params: Any, *batch: Any) -> Any:
        return compat.eval_jaxpr(flat.closed, jax.tree.leaves((params, batch)))[0]

    found: list[tuple[PipelineCandidate, Plan, StageCosts]] = []
    for count in counts:
        inner = search(
            program,
            (params, *micro),
            devices // count,
            chosen,
            slots=slots,
            memory=_UNBOUNDED,
            time_limit=time_limit,
        )
        costs = stage_costs(flat, inner, chosen, slots)
        for name in schedules if count > 1 else ("1f1b",):
            made = _schedule(name, count, micro_batches, chunks if count > 1 else 1)
            if made is None or made.positions > len(costs.cuts) + 1:
                continue
            best = best_cuts(costs, made, budget)
            if best is not None:
                found.append((best, inner, costs))
    if not found:
        raise ResourceExhaustedError(
            f"No pipeline of {', '.join(map(str, counts))} stages fits: there are {len(flat.cuts)} "
            f"places to cut, and each device may hold {bytes_text(budget)}. Use more devices or micro "
            f"batches, or jax.checkpoint. Received: memory={budget:.0f}"
        )
    found.sort(key=lambda f: (f[0].seconds, f[0].schedule.stages, f[0].cuts))
    return _plan(found, flat)


def _micro(batch: Sequence[Any], micro_batches: int) -> tuple[Any, ...]:
    def rows(x: Any) -> Any:
        count = -(-x.shape[0] // micro_batches)
        return jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype)

    return tuple(jax.tree.map(rows, arg) for arg in batch)


def _schedule(
    name: str, stages: int, micro_batches: int, chunks: int | None
) -> PipelineSchedule | None:
    try:
        return schedule(name, stages, micro_batches, chunks)
    except InvalidValueError:
        return None


def stage_costs(flat: FlatFunction, plan: Plan, hardware: Hardware, slots: float) -> StageCosts:
    """What the equations of a function cost on the devices of one stage, by a plan for them."""
    traced = trace(flat.closed, (), range(len(flat.parameters)))
    graph = read(traced.closed, traced.names, traced.results, traced.parameters)
    count = len(flat.equations)
    places = {
        node.key: node.place[0] for node in graph.nodes if node.place and type(node.place[0]) is int
    }
    nodes = {node.key: node for node in graph.nodes}
    kinds = _operand_kinds(flat)
    spent, out = [[0.0, 0.0, 0.0] for _ in range(count)], [0.0] * count
    for operator in plan.operators:
        key = operator.key.removesuffix(":copy")
        number = places.get(operator.key, places.get(key))
        if number is None:
            continue
        node = nodes.get(operator.key, nodes.get(key))
        again = node is not None and node.again
        of_input, of_weights = kinds[number] if node is None or node.gradients else (0, 0)
        parts = 1 + again + of_input + of_weights
        mine = spent[number]
        mine[0] += operator.seconds / parts
        mine[1] += operator.seconds * (of_input + again) / parts
        mine[2] += operator.seconds * of_weights / parts
        for c in operator.collectives:
            is_weights = c.tensor in plan.parameters
            mine[0 if c.phase == "forward" else 2 if is_weights else 1] += c.count * c.seconds
    for i in flat.mixed:
        out[i] = sum(_bytes(v.aval) for v in flat.equations[i].outvars)
    scale = plan.memory.kept / sum(out) if sum(out) else 0.0
    parameters = [0.0] * count
    readers = _first_readers(flat)
    tensors = list(plan.parameters.values())
    for i, tensor in enumerate(tensors):
        parameters[readers.get(i, 0)] += tensor.bytes * (2 + slots)
    link = hardware.inner
    crossing = [_bytes(v.aval) for v in flat.crossing]
    return StageCosts(
        flat.cuts,
        tuple(sum(mine) for mine in spent),
        tuple(x * scale for x in out),
        tuple(parameters),
        tuple(link.alpha + link.beta * size for size in crossing),
        tuple(_shares(mine) for mine in spent),
    )


def _shares(spent: Sequence[float]) -> tuple[float, float, float]:
    whole = sum(spent) or 1.0
    return spent[0] / whole, spent[1] / whole, spent[2] / whole


def _operand_kinds(flat: FlatFunction) -> list[tuple[int, int]]:
    """For each equation, how many gradients of inputs and of weights it has.

    What depends on parameters alone has the gradient of a weight, what depends on them and on the
    batch that of an input, and what depends on the batch alone has none.
    """
    jaxpr, count = flat.closed.jaxpr, len(flat.parameters)
    own = set(jaxpr.invars[:count])
    mixed: set[Any] = set()
    found = []
    for i, eqn in enumerate(jaxpr.eqns):
        known = [v for v in eqn.invars if not compat.is_literal(v)]
        real = [v for v in known if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
        found.append((sum(v in mixed for v in real), sum(v in own for v in real)))
        if i in flat.mixed:
            mixed.update(eqn.outvars)
        elif any(v in own for v in known):
            own.update(eqn.outvars)
    return found


def _bytes(aval: Any) -> float:
    return float(prod(aval.shape) * aval.dtype.itemsize)


def _first_readers(flat: FlatFunction) -> dict[int, int]:
    """For each parameter, the first equation that depends on it and on the batch."""
    jaxpr = flat.closed.jaxpr
    sources: dict[Any, set[int]] = {v: {i} for i, v in enumerate(jaxpr.invars[: len(flat.parameters)])}
    found: dict[int, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        known = [v for v in eqn.invars if not compat.is_literal(v)]
        names = {name for v in known for name in sources.get(v, ())}
        if i in flat.mixed:
            for name in names:
                found.setdefault(name, i)
        else:
            sources.update(dict.fromkeys(eqn.outvars, names))
    return found


def _plan(found: Sequence[tuple[PipelineCandidate, Plan, StageCosts]], flat: FlatFunction) -> Plan:
    best, inner, costs = found[0]
    readers = _first_readers(flat)
    bounds = [0, *(cut + 1 for cut in best.cuts), len(flat.equations)]
    crossing = dict(zip(flat.cuts, flat.crossing, strict=True))
    parts = []
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        names = tuple(name for n, name in enumerate(flat.parameters) if a <= readers.get(n, 0) < b)
        after = "" if i == len(best.cuts) else crossing[best.cuts[i]].aval.str_short()
        parts.append(PlannedStage(a, b, best.parts[i], names, after))
    others = tuple(
        RunnerUp(f"{c.schedule.stages} stages, {c.schedule.name}", c.seconds) for c, _, _ in found[1:6]
    )
    s = best.schedule
    return replace(
        inner,
        pipeline=PlannedPipeline(
            s.stages,
            s.chunks,
            s.name,
            s.micro_batches,
            best.cuts,
            tuple(parts),
            best.seconds,
            s.bubble(costs.actions(best.cuts)),
            best.memory,
            others,
            s.to_svg(costs.actions(best.cuts)),
        ),
    )
