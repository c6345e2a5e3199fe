"""What a call of a compiled function costs beside the same program called by hand.

``python benchmarks/calls.py`` measures both in one process, in turns, prints a table and writes it to
``benchmarks/results/calls.md``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import phalanx as px
from _harness import circumstances, markdown_table, positive, say, spread, write_result

BUDGETS = {6: 30, 100: 60}  # microseconds
CALLS = 10  # in a row, and then both wait


@dataclass
class Case:
    """What both took, in microseconds per call."""

    variables: int
    replicas: int
    phalanx: list[float]
    by_hand: list[float]

    @property
    def overhead(self) -> list[float]:
        """The difference, round by round."""
        return [a - b for a, b in zip(self.phalanx, self.by_hand, strict=True)]


def with_phalanx(count: int, replicas: int) -> Callable[[], Any]:
    names = [f"CPU:{i}" for i in range(replicas)]
    strategy = px.MirroredStrategy(names) if replicas > 1 else px.OneDeviceStrategy(names[0])
    with strategy.scope():
        variables = [px.Variable(jnp.zeros(4)) for _ in range(count)]
        total = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)

    def step(x: jax.Array) -> None:
        for v in variables[1:]:
            v.assign(v.value() + 1.0)
        total.assign(x)

    run = px.function(lambda x: strategy.run(step, args=(x,)))
    x = strategy.experimental_distribute_values_from_function(lambda _: jnp.float32(1.0))
    return lambda: run(x)


def by_hand(count: int, replicas: int) -> Callable[[], Any]:
    mesh = jax.make_mesh((replicas,), ("replica",), axis_types=(AxisType.Auto,))
    whole, split = PartitionSpec(), PartitionSpec("replica")

    def step(values: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return [*(v + 1.0 for v in values[:-1]), jax.lax.psum(x, "replica")[0]]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(whole, split), out_specs=whole, check_vma=False)
    run = jax.jit(mapped, donate_argnums=0)
    place = NamedSharding(mesh, whole)
    values = [*(jax.device_put(jnp.zeros(4), place) for _ in range(count - 1))]
    state = [[*values, jax.device_put(jnp.float32(0.0), place)]]
    x = jax.device_put(jnp.ones(replicas), NamedSharding(mesh, split))

    def call() -> list[jax.Array]:
        state[0] = run(state[0], x)
        return state[0]

    return call


def timed(call: Callable[[], Any]) -> float:
    """Microseconds per call, without waiting for the last program."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def measure(variables: int, replicas: int, rounds: int) -> Case:
    case = Case(variables, replicas, [], [])
    mine, theirs = with_phalanx(variables, replicas), by_hand(variables, replicas)
    wait = jax.jit(lambda: jnp.zeros(()))
    for round_ in range(rounds + 20):
        took = []
        for call in (mine, theirs):
            took.append(timed(call))
            wait().block_until_ready()
        if round_ >= 20:  # the first ones compile and warm up
            case.phalanx.append(took[0])
            case.by_hand.append(took[1])
    say(f"{variables} variables, {replicas} replica(s): {statistics.median(case.overhead):.0f} us more")
    return case


def report(cases: Sequence[Case], rounds: int, versions: Sequence[str]) -> str:
    rows = [["variables", "replicas", "Phalanx, µs", "by hand, µs", "more, µs", "aim"]]
    for case in cases:
        quarter = statistics.quantiles(case.overhead, n=4)
        rows.append(
            [
                str(case.variables),
                str(case.replicas),
                f"{statistics.median(case.phalanx):.0f}",
                f"{statistics.median(case.by_hand):.0f}",
                f"{quarter[1]:.0f} ({spread((quarter[0], quarter[2]))})",
                str(BUDGETS.get(case.variables, "")),
            ]
        )
    return f"""# Calls

{markdown_table(rows)}

Measured: calls of a compiled function that adds a number to each of its variables and sums one over
replicas, beside `jax.jit` around `jax.shard_map` that does the same with a list of donated arrays. Both
run in one process, in turns of {CALLS} calls. Times are medians over {rounds} rounds; "more" is the
median of the differences in the same round, and where the middle half of them lies.

{circumstances(versions)}

To repeat: `python benchmarks/calls.py --rounds {rounds}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Time calls of compiled functions.")
    parser.add_argument("--rounds", type=positive, default=200, help="rounds (default 200)")
    parser.add_argument("--variables", type=positive, nargs="+", default=[6, 100])
    parser.add_argument("--replicas", type=positive, nargs="+", default=[1, 2])
    options = parser.parse_args()
    px.config.ensure_cpu_devices(max(options.replicas))
    cases = [measure(v, r, options.rounds) for v in options.variables for r in options.replicas]
    versions = [f"Phalanx {version('phalanx')}", f"JAX {jax.__version__}"]
    text = report(cases, options.rounds, versions)
    print(text)
    write_result("calls.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
