"""Keeping freed memory for large steps."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import phalanx as px

LARGE_STEPS = """
    import resource, sys
    import jax, jax.numpy as jnp
    import phalanx as px

    px.config.set_logical_device_configuration(
        px.config.list_physical_devices("CPU")[0], [px.config.LogicalDeviceConfiguration()] * 2
    )
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    rows = 5 * 1024 if sys.argv[1] == "variables" else 10 * 1024

    def update(w):
        return w - 0.1 * px.get_replica_context().all_reduce("sum", w * w)

    if sys.argv[1] == "variables":
        with strategy.scope():
            w = px.Variable(jnp.ones((rows, 1024)))

        def replica_step():
            w.assign(update(w.value()))
            return jnp.float32(0.0) * w[0, 0]

        step = px.function(lambda: strategy.run(replica_step))
        run = lambda: jax.block_until_ready(step())
    else:
        state = [jnp.ones((rows, 1024))]
        step = jax.jit(lambda w: strategy.reduce("mean", strategy.run(update, args=(w,)), axis=None))
        run = lambda: state.append(jax.block_until_ready(step(state.pop())))
    for _ in range(8):
        run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        run()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 6)
"""


BATCHES = """
    import resource
    import numpy as np
    import phalanx as px

    def normalised(x):
        x = x - x.mean(axis=1, keepdims=True)
        return x / (x.std(axis=1, keepdims=True) + 1)

    rows = px.data.Dataset.from_tensor_slices(np.ones((2048, 1024), np.float32))
    batches = iter(rows.shuffle(2048).repeat().batch(512).map(normalised))
    for _ in range(8):
        next(batches)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(32):
        next(batches)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 32)
"""


def page_faults(style: str, program: str = LARGE_STEPS, **environment: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), style],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only the GNU C library can keep memory")
@pytest.mark.parametrize("style", ["variables", pytest.param("pure", marks=pytest.mark.soak)])
def test_large_steps_keep_their_memory(style: str) -> None:
    assert page_faults(style) < page_faults(style, PHALANX_RETAIN_HOST_MEMORY="0") / 2


@pytest.mark.skipif(sys.platform != "linux", reason="only the GNU C library can keep memory")
def test_batches_keep_their_memory() -> None:
    assert page_faults("", BATCHES) < page_faults("", BATCHES, PHALANX_RETAIN_HOST_MEMORY="0") / 2


def test_settings_only_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.runtime import host_memory

    monkeypatch.setattr(host_memory, "_done", ["steps"])
    monkeypatch.setattr(host_memory.ctypes, "CDLL", None)  # which must not be needed
    host_memory.expect_input()
    assert host_memory._done == ["steps"]


def test_a_bad_switch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.runtime import host_memory

    monkeypatch.setenv("PHALANX_RETAIN_HOST_MEMORY", "yes")
    monkeypatch.setattr(host_memory, "LARGE_MODEL_BYTES", 1)
    variable = px.Variable(1.0)
    with pytest.raises(ValueError, match=r"PHALANX_RETAIN_HOST_MEMORY must be 0 or 1. Received: 'yes'"):
        px.function(lambda: variable.assign_add(1.0))()
