"""Large all-reduces between CPU devices: what Phalanx does about page faults, side by side.

    python benchmarks/allreduce.py

1. The eager executor: summing on the host into one shared buffer, against XLA's all-reduce.
2. Compiled steps: keeping freed memory, against giving it back to the system after every step.

Writes benchmarks/results/allreduce.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _harness as harness
from _child import phalanx_strategy, phalanx_versions, serve
from _harness import Child, markdown_table, median_and_spread

EAGER = ["host", "XLA"]
COMPILED = ["kept", "given back"]
REPLICAS = [2, 4, 8]
MEGABYTES = [1, 4, 32]
WIDTHS = [512, 2048]


# -- children ------------------------------------------------------------------------------------


def eager_child(variant: str, replicas: int, megabytes: int) -> None:
    """All-reduces one array per replica in each step."""
    import jax
    import jax.numpy as jnp

    import phalanx as px
    from phalanx.collectives import large_sums

    if variant == "XLA":
        large_sums.LARGE_TENSOR_BYTES = sys.maxsize
    strategy = phalanx_strategy(replicas)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full(megabytes << 18, context.replica_id_in_sync_group + 1.0)
    )

    def all_reduce(x: jax.Array) -> Any:
        return px.get_replica_context().all_reduce("sum", x)

    def step(_: int) -> Any:
        return jax.block_until_ready(strategy.run(all_reduce, args=(value,)).values)

    serve(phalanx_versions(), lambda: step(0), step, lambda copies: float(copies[0][0]))


def compiled_child(variant: str, replicas: int, width: int) -> None:
    """The training step of step.py."""
    os.environ["PHALANX_RETAIN_HOST_MEMORY"] = "1" if variant == "kept" else "0"
    import _mlp

    _mlp.phalanx_child(_mlp.Problem(width, replicas))


# -- parent --------------------------------------------------------------------------------------


def child(kind: str, number: int, replicas: int, variant: str) -> Child:
    arguments = [__file__, "child", kind, variant, str(replicas), str(number)]
    return Child(f"{variant}, {replicas} replicas, {number}", Path(sys.executable), arguments)


def row(
    kind: str, variants: Sequence[str], number: int, replicas: int, options: Any, versions: list[str]
) -> list[str]:
    """One line of a table: the times of two variants, and their ratio."""
    harness.say(f"{kind}: {number}, {replicas} replicas")
    with harness.started(variants, partial(child, kind, number, replicas), versions) as children:
        trial = {v: c.run(2).milliseconds for v, c in children.items()}
        steps = {v: max(2, int(options.seconds * 1000 / ms)) for v, ms in trial.items()}
        rounds = list(harness.take_turns(children, options.rounds, steps))
    times = {v: [r[v].milliseconds for r in rounds] for v in variants}
    first, second = (times[v] for v in variants)
    ratio = harness.ratios(first, second)
    cells = [median_and_spread(times[v]) for v in variants]
    return [str(number), str(replicas), *cells, f"{statistics.median(ratio):.2f}"]


def report(options: argparse.Namespace) -> str:
    versions: list[str] = []
    load = os.getloadavg()[0]
    eager = [["MB", "replicas", "host, ms", "XLA, ms", "host / XLA"]]
    eager += [row("eager", EAGER, mb, n, options, versions) for mb in MEGABYTES for n in REPLICAS]
    compiled = [["width", "replicas", "kept, ms", "given back, ms", "kept / given back"]]
    compiled += [row("compiled", COMPILED, w, n, options, versions) for w in WIDTHS for n in REPLICAS]
    return f"""# Large all-reduces between CPU devices

Medians over {options.rounds} rounds (min..max), and the median of the ratios within a round.

## Eager: summing on the host

One `all_reduce` of one float32 array per replica inside `strategy.run`.

{markdown_table(eager)}

## Compiled: keeping freed memory

The training step of `benchmarks/step.py`. Below 12 MB of variables nothing is done, so width 512
shows the noise.

{markdown_table(compiled)}

## Circumstances

{harness.circumstances(versions)} The load average was {load:.1f} before the first process was started.
"""


def main() -> int:
    parser = harness.options_parser("Time large all-reduces between CPU devices.", 5)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a round takes, about")
    options = harness.parse(parser)
    return harness.finish("allreduce.md", lambda: report(options), keep=not options.quick)


def child_main(kind: str, variant: str, replicas: str, number: str) -> None:
    serve_kind = eager_child if kind == "eager" else compiled_child
    serve_kind(variant, int(replicas), int(number))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child_main(*sys.argv[2:])
    else:
        sys.exit(main())
