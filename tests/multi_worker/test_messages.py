"""What travels between workers: how many messages, in which way, in order, and with which bits."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from tests.multi_worker.rules import strategy

SIZES = (3, 40_000, 1, 16_000)  # the second alone is larger than what one process packs


def reduced(s: px.Strategy, compiled: bool, options: Any = None) -> tuple[list[bytes], str]:
    """One reduction of several arrays: what comes out, and the program."""

    def step() -> Any:
        context = px.get_replica_context()
        assert context is not None
        replica = jnp.asarray(context.replica_id_in_sync_group, jnp.float32)
        xs = [(jnp.arange(n) + replica) / (replica + 3.0) for n in SIZES]
        return context.all_reduce("sum", xs, options=options)

    run = px.function(lambda: s.run(step))
    results = run() if compiled else s.run(step)
    host = [np.asarray(s.experimental_local_results(x)[-1]).tobytes() for x in results]
    return host, run.lower().as_text()


@pytest.mark.parametrize("compiled", [False, True])
def test_all_workers_have_the_same_bits(cluster: px.testing.MultiProcess, compiled: bool) -> None:
    def bits() -> list[bytes]:
        return reduced(strategy(), compiled)[0]

    first, *others = cluster.run(bits)
    replicas = cluster.run(lambda: strategy().num_replicas_in_sync)[0]
    for n, got in zip(SIZES, first, strict=True):
        parts = [(np.arange(n) + r) / (r + 3.0) for r in range(replicas)]
        np.testing.assert_allclose(np.frombuffer(got, np.float32), sum(parts), rtol=1e-5)
    assert all(other == first for other in others)


def test_small_arrays_travel_together(cluster: px.testing.MultiProcess) -> None:
    def messages() -> tuple[int, int, int, int]:
        s = strategy()
        auto = reduced(s, compiled=True)[1]
        ring = px.experimental.CommunicationOptions(implementation="RING")
        rings = reduced(s, compiled=True, options=ring)[1]
        kinds = ("stablehlo.collective_permute", "stablehlo.all_reduce")
        return tuple(text.count(kind) for text in (auto, rings) for kind in kinds)  # type: ignore[return-value]

    two = cluster.run(lambda: strategy().num_replicas_in_sync)[0] == 2
    for counts in cluster.run(messages):
        assert counts == ((1, 0, 0, 1) if two else (0, 1, 0, 1))


def test_a_loss_of_a_compiled_step_is_exchanged_too(cluster: px.testing.MultiProcess) -> None:
    def summed() -> tuple[float, list[float], bool]:
        s = strategy()
        x = s.experimental_distribute_values_from_function(
            lambda c: jnp.arange(3.0) + c.replica_id_in_sync_group
        )

        @px.function
        def total(x: Any) -> Any:
            losses = s.run(lambda x: x.sum(), args=(x,))
            return s.reduce("sum", losses, axis=None), s.reduce("mean", x, axis=None)

        loss, mean = total(x)
        return float(loss), np.asarray(mean).tolist(), "collective_permute" in total.lower(x).as_text()

    n = cluster.run(lambda: strategy().num_replicas_in_sync)[0]
    middle = (n - 1) / 2
    for found in cluster.run(summed):
        assert found == (3 * n * (1 + middle), [middle, 1 + middle, 2 + middle], n == 2)


def test_options_of_the_strategy_count_in_programs(cluster: px.testing.MultiProcess) -> None:
    def counts() -> list[int]:
        found = []
        for size in (0, 100_000):
            options = px.experimental.CommunicationOptions(size, implementation="RING")
            s = px.MultiWorkerMirroredStrategy(communication_options=options)
            found.append(reduced(s, compiled=True)[1].count("stablehlo.all_reduce"))
        return found

    # 160,000 bytes do not fit into a pack of 100,000, and nothing fits to them.
    for found in cluster.run(counts):
        assert found == [1, 3]


def test_variables_made_in_a_row_do_not_mix_up(cluster: px.testing.MultiProcess) -> None:
    """Each comes from the first worker, in a thread of its own; large ones are still on their way."""

    def digest() -> str:
        s = strategy()
        hashed = hashlib.sha256()
        for i in range(4):
            with s.scope():
                made = [
                    px.Variable(jnp.full(n, float(i + n + jax.process_index())))
                    for n in (300_000, 5, 2_000, 100)
                ]
            for v in made:
                assert set(np.asarray(v.value()).tolist()) == {float(i + v.shape[0])}
                hashed.update(np.asarray(v.value()).tobytes())
        return hashed.hexdigest()

    assert len(set(cluster.run(digest))) == 1
