"""Plans: how long a search takes, how fast its plan is, what it holds, and how far heuristics are off.

``python benchmarks/plan.py`` searches plans for transformers, runs the searched plan beside three that
are written by hand, in turns, and writes ``benchmarks/results/plan.md``. Everything is in one process
with logical CPU devices.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import _harness as harness
from _harness import markdown_table, median_and_spread, ratios, say

DEVICES = 4
for _name, _value in {**harness.ENVIRONMENT, "JAX_NUM_CPU_DEVICES": str(DEVICES)}.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P  # noqa: E402

sys.path.insert(0, str(harness.HERE.parent))

from tests.parallel import gpt  # noqa: E402

import phalanx as px  # noqa: E402
from phalanx.cli.bench_hardware import measure  # noqa: E402
from phalanx.parallel import (  # noqa: E402
    Hardware,
    Plan,
    fit,
    mesh_of,
    parallelize,
    profile,
    reset_algo_parameters,
    search,
    set_algo_parameters,
)

HEADS = 8
BUDGET_SECONDS, BUDGET_RATIO = 2.0, 1.1
MEMORY = 1e15  # more than any plan needs: 48 blocks do not fit eight devices
MESHES = {8: (2, 4), 64: (8, 8), 512: (16, 32)}
BLOCKS = (1, 2, 4, 8, 16, 32, 48, 96)
_SIZES = ("blocks", "width", "vocabulary", "batch", "length")
REGIMES: dict[str, dict[str, int]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "large batch, small weights": (2, 64, 64, 64, 32),
        "small batch, large weights": (2, 512, 64, 4, 8),
        "large vocabulary": (1, 128, 8192, 8, 16),
    }.items()
}
OPTIMIZER = optax.adam(1e-3)


# -- search ------------------------------------------------------------------------------------------


def mesh_for(hardware: Hardware, devices: int) -> Any:
    return mesh_of(hardware.topology(devices), MESHES[devices])


def search_times(blocks: Sequence[int], rounds: int) -> tuple[str, bool]:
    """Processor seconds of a search, with the reading of the program, by blocks and devices."""
    hardware, loss = profile("A100"), gpt.loss_of(HEADS)
    rows = [["blocks", *(f"{n} devices ({a} x {b})" for n, (a, b) in MESHES.items()), "proven"]]
    within = True
    for count in blocks:
        args = gpt.arguments(blocks=count, width=1024, vocabulary=32_768, batch=512, length=512)
        cells, proven = [], True
        for devices in MESHES:
            times = []
            for _ in range(rounds if count <= 48 else 1):
                start = time.process_time()
                mesh = mesh_for(hardware, devices)
                plan = search(loss, args, mesh, hardware, memory=MEMORY)
                times.append(time.process_time() - start)
            proven &= plan.proven
            cells.append(f"{min(times):.2f} s")
            if count == 48:
                within &= min(times) <= BUDGET_SECONDS
            say(f"{count} blocks, {devices} devices: {min(times):.2f} s")
        rows.append([str(count), *cells, "yes" if proven else "no"])
    return markdown_table(rows), within


def all_meshes() -> str:
    """The search for the mesh itself."""
    hardware, loss = profile("A100"), gpt.loss_of(HEADS)
    args = gpt.arguments(blocks=2, width=1024, vocabulary=32_768, batch=512, length=512)
    start = time.perf_counter()
    plan = search(loss, args, 8, hardware)
    seconds = time.perf_counter() - start
    return f"All meshes of 8 devices for 2 blocks take {seconds:.1f} s; the best is {plan.mesh}."


# -- heuristics ----------------------------------------------------------------------------------------


def heuristics(hardware: Hardware) -> str:
    """What plans of other algorithms cost, relative to the best one, on the same model of costs."""
    rows = [["model", "exact", "greedy", "propagated from the batch", "elementwise operators follow"]]
    loss = gpt.loss_of(HEADS)
    for name, sizes in REGIMES.items():
        args = gpt.arguments(**sizes)
        mesh = mesh_for(hardware, 8)
        run = functools.partial(search, loss, args, mesh, hardware)
        exact = run()
        greedy = run(mode="recursive_programming")
        first = mesh.names[0]
        pins = {n: P(first) for n in exact.inputs}
        spread = run(mode="sharding_propagation", pins=pins)
        set_algo_parameters(elementwise_op_strategy_follow=True)
        follows = run()
        reset_algo_parameters()
        others = (greedy, spread, follows)
        cells = [f"{plan.cost / exact.cost:.2f}" for plan in others]
        rows.append([name, f"{exact.cost * 1e3:.3f} ms", *cells])
    return markdown_table(rows)


# -- steps --------------------------------------------------------------------------------------------


def values_of(shapes: Any) -> Any:
    """Parameters, and a batch."""
    random = np.random.default_rng(0)

    def value(path: Any, x: Any) -> Any:
        if x.dtype == jnp.int32:
            return random.integers(0, 64, x.shape).astype(np.int32)
        if "scale" in jax.tree_util.keystr(path):
            return np.ones(x.shape, np.float32)
        return (random.normal(size=x.shape) * 0.02).astype(np.float32)

    return jax.tree_util.tree_map_with_path(value, shapes)


def step_of(gradient: Callable[..., Any]) -> Callable[..., Any]:
    def step(state: Any, tokens: Any, targets: Any) -> Any:
        params, slots = state
        value, gradients = gradient(params, tokens, targets)
        updates, slots = OPTIMIZER.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), value

    return step


def tensor_parallel(name: str, x: Any) -> P:
    """Megatron's layout, and a head that is cut along the vocabulary."""
    last = name.rpartition("/")[2]
    if last in ("query", "key", "value", "up", "head"):
        return P(None, "x")
    if last in ("out", "down", "embedding"):
        return P("x")
    return P("x") if last == "up_bias" else P()


def fully_sharded(name: str, x: Any) -> P:
    """Each device keeps a part of everything that can be divided."""
    del name
    return P("x") if x.ndim and x.shape[0] % DEVICES == 0 else P()


HAND: dict[str, tuple[Callable[[str, Any], P], P]] = {
    "data parallel": (lambda name, x: P(), P("x")),
    "tensor parallel": (tensor_parallel, P()),
    "fully sharded": (fully_sharded, P("x")),
}


def by_hand(mesh: Mesh, layout: Callable[[str, Any], P], batch: P, state: Any, inputs: Any) -> Any:
    """A step in plain JAX: shardings of arguments and results, and XLA does the rest."""

    def sharding(path: Any, x: Any) -> NamedSharding:
        name = "/".join(str(getattr(k, "key", getattr(k, "idx", ""))) for k in path)
        return NamedSharding(mesh, layout(name, x) if getattr(x, "ndim", 0) else P())

    kept = jax.tree_util.tree_map_with_path(sharding, state)
    cut = jax.tree.map(lambda _: NamedSharding(mesh, batch), inputs)
    step = step_of(jax.value_and_grad(gpt.loss_of(HEADS)))
    program = jax.jit(step, in_shardings=(kept, *cut), out_shardings=(kept, None))
    return program, jax.device_put(state, kept), jax.device_put(inputs, cut)


def steps(hardware: Hardware, rounds: int, seconds: float) -> tuple[str, bool]:
    """Milliseconds of a step with each plan; the plans take turns."""
    rows = [["model", "searched", *HAND, "searched / best by hand", "predicted"]]
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
    within = True
    for name, sizes in REGIMES.items():
        params, *inputs = values_of(gpt.arguments(**sizes))
        state = params, OPTIMIZER.init(params)
        found = parallelize(
            step_of(px.parallel.value_and_grad(gpt.loss_of(HEADS))),
            (state, *inputs),
            parallel_mode="auto_parallel",
            search_mode="dynamic_programming",
            enable_alltoall=True,
            hardware=hardware,
        )
        plan = found.plan
        assert plan is not None
        say(f"{name}: {plan.mesh}, {_summary(plan)}")
        ways: dict[str, Any] = {"searched": (found, *found.place(state, *inputs))}
        for way, (layout, batch) in HAND.items():
            program, kept, given = by_hand(mesh, layout, batch, state, tuple(inputs))
            ways[way] = (program, kept, *given)
        times, losses = _in_turns(ways, rounds, seconds)
        harness.check_same(f"the loss of {name}", losses, 1e-3)
        best = min((w for w in ways if w != "searched"), key=lambda w: statistics.median(times[w]))
        against = ratios(times["searched"], times[best])
        within &= statistics.median(against) <= BUDGET_RATIO
        cells = [f"{statistics.median(times[way]):.1f}" for way in ways]
        rows.append([name, *cells, f"{median_and_spread(against)} ({best})", f"{plan.cost * 1e3:.1f}"])
    return markdown_table(rows), within


def _summary(plan: Plan) -> str:
    return ", ".join(f"{n} {tuple(t.spec)}" for n, t in list(plan.parameters.items())[:6])


def _in_turns(ways: dict[str, Any], rounds: int, seconds: float) -> tuple[dict[str, list[float]], Any]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    losses = {}
    counts = {}
    for way, (program, state, *inputs) in ways.items():
        _, value = program(state, *inputs)  # which compiles
        losses[way] = float(value)
        start = time.perf_counter()
        jax.block_until_ready(program(state, *inputs))
        counts[way] = max(2, min(50, int(seconds / (time.perf_counter() - start))))
    for order in harness.rotated(list(ways), rounds):
        for way in order:
            program, state, *inputs = ways[way]
            start = time.perf_counter()
            for _ in range(counts[way]):
                state, value = program(state, *inputs)
            jax.block_until_ready((state, value))
            times[way].append((time.perf_counter() - start) / counts[way] * 1e3)
    return times, losses


# -- memory --------------------------------------------------------------------------------------------


def memory() -> str:
    """What one of the devices holds at each level of a parallel optimizer."""
    params, *inputs = values_of(gpt.arguments(blocks=2, width=256, vocabulary=512, batch=8, length=16))
    state = params, OPTIMIZER.init(params)
    rows = [["level", "state, MB", "state and batch, MB", "and temporary, MB"]]
    for level in (None, "level1", "level2", "level3"):
        options: dict[str, Any] = {}
        if level is not None:
            config = {"parallel_optimizer_threshold": 0, "optimizer_level": level}
            options = {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
        found = parallelize(
            step_of(px.parallel.value_and_grad(gpt.loss_of(HEADS))),
            (state, *inputs),
            parallel_mode="data_parallel",
            gradients_mean=True,
            donate_argnums=0,
            **options,
        )
        kept = found.place(state, *inputs)[0]
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(kept))
        used = found.lower(state, *inputs).compile().memory_analysis()
        total = used.argument_size_in_bytes + used.temp_size_in_bytes
        cells = [held, used.argument_size_in_bytes, total]
        rows.append(["none" if level is None else level, *(f"{n / 1e6:.1f}" for n in cells)])
    return markdown_table(rows)


# -- what peers cannot search ------------------------------------------------------------


def irreducible() -> str:
    """Programs that MindSpore's search cannot answer, as its source says, and what is found here."""

    def clique(params: Any, x: Any) -> Any:
        tensors = [x]
        for w in params:
            tensors.append(jnp.tanh(sum(tensors) @ w))
        return sum(jnp.sum(t**2) for t in tensors)

    args = [gpt.array(256, 256)] * 6, gpt.array(256, 256)
    hardware = profile("A100")
    plan = search(clique, args, mesh_for(hardware, 8), hardware)
    memory = plan.memory.total
    tight = search(clique, args, mesh_for(hardware, 8), hardware, memory=0.7 * memory)
    proofs = ["proven" if found.proven else "not proven" for found in (plan, tight)]
    return f"""Each of six layers reads all layers before it: MindSpore's six ways to shrink a graph
leave more than two operators, and its search ends with an exception. Here:
{plan.cost * 1e6:.0f} µs, {proofs[0]}. With 70 % of the memory that this plan needs:
{tight.cost * 1e6:.0f} µs, {proofs[1]}. MindSpore's lists of costs forget plans that need less memory,
so it may find none."""


def report(options: Any) -> str:
    hardware = fit(measure("this machine", jax.devices()[:DEVICES], 3 if options.quick else 7))
    blocks = BLOCKS[:3] if options.quick else BLOCKS
    table, quick_enough = search_times(blocks, 1 if options.quick else 2)
    step_table, fast_enough = steps(hardware, options.rounds, 0.3 if options.quick else 1.0)
    met = {True: "met", False: "missed"}
    rate, link = hardware.device.flops["float32"] / 1e9, hardware.inner
    in_time = "not measured" if options.quick else met[quick_enough]
    return f"""# Plans

## Search

{table}

Seconds of processor time of `px.parallel.search` for the loss of a GPT (width 1024, vocabulary 32768,
batch 512, length 512) on two-dimensional meshes of A100s, with the reading of the program and without
a budget of memory, because 48 blocks do not fit eight devices. The budget is
{BUDGET_SECONDS:.0f} s for 48 blocks: {in_time}. Equal blocks are recognised. {all_meshes()}

## Steps

{step_table}

Milliseconds of a training step (Adam) of a small GPT on {DEVICES} logical CPU devices, with the
searched plan and with three that are written by hand in plain JAX; medians of {options.rounds} rounds
in which they take turns. The search used what was measured here: {rate:.0f} GFLOP/s per device
while all compute,
{link.alpha * 1e6:.0f} µs and {1e-9 / link.beta:.2f} GB/s for sums over devices. The budget is
{BUDGET_RATIO} times the best plan by hand: {met[fast_enough]}.

## Memory

{memory()}

A GPT of two blocks of width 256 in `data_parallel` on {DEVICES} devices, by `memory_analysis`. At level
3 parameters are gathered again for the gradient, which XLA undoes on CPU devices.

## Other algorithms

{heuristics(profile("A100"))}

The cost of the best plan on 8 A100s (2 x 4), and that of other plans relative to it, all by the same
model of costs: MindSpore's greedy `recursive_programming`, `sharding_propagation` from a batch that is
cut along the first axis, and plans in which elementwise operators follow what they read, as in Alpa.

{irreducible()}

{harness.circumstances([f"Phalanx {px.__version__}", f"JAX {jax.__version__}"])}

To repeat: `python benchmarks/plan.py --rounds {options.rounds}`.
"""


def main() -> int:
    options = harness.parse(harness.options_parser(__doc__ or "", 5))
    return harness.finish("plan.md", functools.partial(report, options), keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
