"""Automatic cuts against all cuts, for `pipeline.py`: predicted and measured."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from typing import Any

import _harness as harness
from _pipeline_ranks import MICRO_BATCHES

WIDTHS = [64, 512, 128, 384, 64, 256, 64]


def proposed(quick: bool) -> str:
    """How far the proposals of the dynamic program are from the best of all, on random costs."""
    from phalanx.parallel import schedule
    from phalanx.parallel.pipelines.cut_search import StageCosts, best_cuts

    rng = random.Random(0)
    rows = [["stages", "schedule", "models", "best cut found", "mean excess", "worst"]]
    for stages, name in itertools.product((2, 4), ("1f1b", "gpipe", "interleaved")):
        made = schedule(name, stages, MICRO_BATCHES)
        excess = []
        count = 4 if quick else 12
        for _ in range(count):
            size = 12
            costs = tuple(rng.uniform(1, 9) for _ in range(size))
            zeros = (0.0,) * size
            moves = tuple(rng.uniform(0, 0.5) for _ in range(size - 1))
            known = StageCosts(tuple(range(size - 1)), costs, zeros, zeros, moves)
            best, found = (best_cuts(known, made, float("inf"), **how) for how in ({}, {"most": 0}))
            assert best is not None
            assert found is not None
            excess.append(found.seconds / best.seconds - 1)
        same = sum(e < 1e-9 for e in excess)
        mean, worst = sum(excess) / len(excess), max(excess)
        rows.append([str(stages), name, str(count), f"{same} times", f"{mean:.2%}", f"{worst:.2%}"])
    return harness.markdown_table(rows)


def measured(stages: int, rows: int, rounds: int, steps: int) -> list[str]:
    """A row: an MLP of uneven layers, cut automatically and after all choices of layers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import phalanx as px
    from phalanx.parallel.pipelines.cut_search import candidate, stage_costs
    from phalanx.parallel.pipelines.cutting import cut_function, flattened
    from phalanx.parallel.searching import searched_hardware

    px.config.ensure_cpu_devices(4)
    r = np.random.default_rng(0)
    shapes = list(itertools.pairwise(WIDTHS))
    params = [np.asarray(r.normal(size=s) / np.sqrt(s[0]), "float32") for s in shapes]
    batch = tuple(np.asarray(r.normal(size=(rows, n)), "float32") for n in (WIDTHS[0], WIDTHS[-1]))

    def loss(params: Any, x: Any, target: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - target) ** 2)

    micro = tuple(x[: rows // MICRO_BATCHES] for x in batch)
    made = px.parallel.schedule("1f1b", stages, MICRO_BATCHES)
    plan = px.parallel.search_pipeline(
        loss,
        params,
        batch,
        stages,
        "CPU",
        stages=stages,
        schedules=["1f1b"],
        micro_batches=MICRO_BATCHES,
    )
    assert plan.pipeline is not None
    flat = flattened(loss, params, micro)
    known = stage_costs(flat, plan, searched_hardware("CPU"), 2.0)
    everything = itertools.combinations(known.cuts, stages - 1)
    least = min(candidate(known, made, cuts).seconds for cuts in everything)
    layers = [i for i in flat.cuts if flat.equations[i].primitive.name == "tanh"]
    chosen = tuple(plan.pipeline.cuts)
    every = {chosen, *itertools.combinations(layers[:-1], stages - 1)}
    pipes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    for cuts in sorted(every):
        cut = cut_function(loss, params, micro, cuts)
        pipe = px.parallel.pipeline(
            cut.stages,
            made,
            MICRO_BATCHES,
            shared=cut.shared,
            devices=[f"CPU:{i}" for i in range(stages)],
        )
        pipes[cuts] = pipe, pipe.place(cut.split(params))
        jax.block_until_ready(pipe.value_and_grad(pipes[cuts][1], *batch))
    times: dict[tuple[int, ...], list[float]] = {cuts: [] for cuts in pipes}
    for order in harness.rotated(list(pipes), rounds):
        for cuts in order:
            pipe, placed = pipes[cuts]
            start = time.perf_counter()
            for _ in range(steps):
                jax.block_until_ready(pipe.value_and_grad(placed, *batch))
            times[cuts].append((time.perf_counter() - start) / steps * 1e3)
    medians = {cuts: statistics.median(found) for cuts, found in times.items()}
    fastest, slowest = (choose(medians, key=lambda c: medians[c]) for choose in (min, max))
    against = harness.ratios(times[chosen], times[fastest])
    return [
        str(stages),
        f"{plan.pipeline.seconds / least:.3f}",
        str(len(pipes)),
        harness.median_and_spread(times[chosen]),
        harness.median_and_spread(times[fastest]),
        harness.median_and_spread(times[slowest]),
        harness.median_and_spread(against),
    ]


def measured_table(quick: bool, rounds: int) -> str:
    """Predicted and measured times of automatic cuts, with 2 and 4 stages."""
    heads = ["stages", "predicted, times the best of all cuts", "cuts measured"]
    rows = [[*heads, "automatic, ms", "fastest, ms", "slowest, ms", "automatic times fastest"]]
    size, steps = (256, 3) if quick else (2048, 10)
    rows += [measured(stages, size, 2 if quick else rounds, steps) for stages in (2, 4)]
    return harness.markdown_table(rows)
