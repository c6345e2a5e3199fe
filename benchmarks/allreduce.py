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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _harness import (
    Child,
    circumstances,
    markdown_table,
    median_and_spread,
    positive,
    ratios,
    say,
    started,
    take_turns,
    write_result,
)

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
    from _eager_common import serve
    from phalanx.collectives import host
    from step import phalanx_strategy

    if variant == "XLA":
        host.LARGE_TENSOR_BYTES = sys.maxsize
    strategy = phalanx_strategy(replicas)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full(megabytes << 18, context.replica_id_in_sync_group + 1.0)
    )

    def all_reduce(x: jax.Array) -> Any:
        return px.get_replica_context().all_reduce("sum", x)

    def step(_: int) -> Any:
        return jax.block_until_ready(strategy.run(all_reduce, args=(value,)).values)

    versions = {"Phalanx": version("phalanx"), "JAX": jax.__version__}
    serve(versions, lambda: step(0), step, lambda copies: float(copies[0][0]))


def compiled_child(variant: str, replicas: int, width: int) -> None:
    """The training step of step.py."""
    os.environ["PHALANX_RETAIN_HOST_MEMORY"] = "1" if variant == "kept" else "0"
    import step

    step.phalanx_child(step.Problem(width, replicas))


# -- parent --------------------------------------------------------------------------------------


def child(kind: str, number: int, replicas: int, variant: str) -> Child:
    arguments = [str(Path(__file__)), "--child", kind, variant, str(replicas), str(number)]
    return Child(f"{variant}, {replicas} replicas, {number}", Path(sys.executable), arguments)


def row(
    kind: str, variants: Sequence[str], number: int, replicas: int, options: Any, versions: list[str]
) -> list[str]:
    """One line of a table: the times of two variants, and their ratio."""
    say(f"{kind}: {number}, {replicas} replicas")
    with started(variants, partial(child, kind, number, replicas), versions) as children:
        trial = {v: c.run(2).milliseconds for v, c in children.items()}
        steps = {v: max(2, int(options.seconds * 1000 / ms)) for v, ms in trial.items()}
        rounds = list(take_turns(children, options.rounds, steps))
    times = {v: [r[v].milliseconds for r in rounds] for v in variants}
    first, second = (times[v] for v in variants)
    ratio = ratios(first, second)
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

{circumstances(versions)} The load average was {load:.1f} before the first process was started.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long a round takes, about")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, variant, replicas, number = options.child
        serve = eager_child if kind == "eager" else compiled_child
        serve(variant, int(replicas), int(number))
        return 0
    text = report(options)
    print(text)
    write_result("allreduce.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
