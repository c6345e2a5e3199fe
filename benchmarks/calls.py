"""What a call of a compiled function costs beside the same program called by hand.

``python benchmarks/calls.py`` measures both in one process, in turns, prints a table and writes it to
``benchmarks/results/calls.md``.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import _harness as harness
import phalanx as px
from _child import phalanx_versions
from phalanx.execution.throttle import THROTTLE

BUDGETS = {6: 30, 100: 60}  # microseconds


@dataclass
class Case:
    """What calls took, in microseconds."""

    variables: int
    replicas: int
    around: list[float] = field(default_factory=list)  # Python around the jitted program
    inside: list[float] = field(default_factory=list)  # the jitted program, until it is dispatched
    by_hand: list[float] = field(default_factory=list)  # the same by hand


class Watch:
    """Times the jitted program alone."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = THROTTLE.start

    def start(self, program: Callable[..., Any], *args: Any) -> Any:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = program(*args)
            self.seconds = time.perf_counter() - begin
            return result

        return self._start(timed, *args)


def with_phalanx(count: int, replicas: int) -> Callable[[], jax.Array]:
    names = [f"CPU:{i}" for i in range(replicas)]
    strategy = px.MirroredStrategy(names) if replicas > 1 else px.OneDeviceStrategy(names[0])
    with strategy.scope():
        variables = [px.Variable(jnp.zeros(8)) for _ in range(count)]

    def step(x: jax.Array) -> jax.Array:
        for v in variables:
            v.assign_add(jnp.ones(8))
        return x.sum()

    @px.function
    def run(x: Any) -> Any:
        return strategy.reduce("sum", strategy.run(step, args=(x,)), axis=None)

    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.ones(8))
    return lambda: run(x)


def by_hand(count: int, replicas: int) -> Callable[[], jax.Array]:
    mesh = jax.make_mesh((replicas,), ("replica",), axis_types=(AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec("replica")

    def step(values: list[jax.Array], x: jax.Array) -> Any:
        return jax.lax.psum(x.sum(), "replica"), [v + jnp.ones(8) for v in values]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)
    run = jax.jit(mapped, donate_argnums=0)
    place = NamedSharding(mesh, whole)
    state = [[jax.device_put(jnp.zeros(8), place) for _ in range(count)]]
    x = jax.device_put(jnp.ones(8 * replicas), NamedSharding(mesh, split))

    def call() -> jax.Array:
        result, state[0] = run(state[0], x)
        return result

    return call


def measure(variables: int, replicas: int, rounds: int) -> Case:
    case = Case(variables, replicas)
    mine, theirs = with_phalanx(variables, replicas), by_hand(variables, replicas)
    watch = Watch()
    for call in (mine, theirs):
        for _ in range(20):  # compile, and warm up
            call().block_until_ready()
    THROTTLE.start = watch.start  # type: ignore[method-assign]
    for _ in range(rounds):
        begin = time.perf_counter()
        result = mine()
        took = time.perf_counter() - begin
        result.block_until_ready()
        case.around.append(1e6 * (took - watch.seconds))
        case.inside.append(1e6 * watch.seconds)
        begin = time.perf_counter()
        result = theirs()
        case.by_hand.append(1e6 * (time.perf_counter() - begin))
        result.block_until_ready()
    THROTTLE.start = watch._start  # type: ignore[method-assign]
    harness.say(f"{variables} variables, {replicas} replicas: {statistics.median(case.around):.0f} us")
    return case


def report(cases: Sequence[Case], rounds: int, versions: Sequence[str]) -> str:
    head = ["variables", "replicas", "Python around it, µs", "aim", "jitted program, µs", "by hand, µs"]
    rows = [head]
    for case in cases:
        first, median, third = statistics.quantiles(case.around, n=4)
        rows.append(
            [
                str(case.variables),
                str(case.replicas),
                f"{median:.0f} ({first:.0f}..{third:.0f})",
                str(BUDGETS.get(case.variables, "")),
                f"{statistics.median(case.inside):.0f}",
                f"{statistics.median(case.by_hand):.0f}",
            ]
        )
    return f"""# Calls

{harness.markdown_table(rows)}

Measured: calls of a compiled function that adds to each of its variables and sums a number over
replicas, and of `jax.jit` around `jax.shard_map` that does the same with a list of donated arrays. Both
are in one process and take turns, and each call waits for the one before. A call of Phalanx consists
of Python and of the call of the jitted program, which are given apart; times end when the call
returns. They are medians over {rounds} calls, with the quartiles of the first.

{harness.circumstances(versions)}

To repeat: `python benchmarks/calls.py --rounds {rounds}`.
"""


def main() -> int:
    parser = harness.options_parser("Time calls of compiled functions.", 2000)
    parser.add_argument("--variables", type=harness.positive, nargs="+", default=[6, 100])
    parser.add_argument("--replicas", type=harness.positive, nargs="+", default=[1, 2])
    options = harness.parse(parser)
    px.config.ensure_cpu_devices(max(options.replicas))

    def measured() -> str:
        counts = itertools.product(options.variables, options.replicas)
        cases = [measure(variables, replicas, options.rounds) for variables, replicas in counts]
        versions = [f"{name} {number}" for name, number in phalanx_versions().items()]
        return report(cases, options.rounds, versions)

    return harness.finish("calls.md", measured, keep=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
