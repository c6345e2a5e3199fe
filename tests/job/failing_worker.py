"""A worker for tests, run as a program: ``failing_worker.py light|jax SCENARIO``.

Its task is in TF_CONFIG. It prints what happens, one JSON object per line, and waits for its parent by
reading lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def say(what, **more):
    # One write, so that lines of different threads do not mix; the clock is that of all processes.
    line = json.dumps({"what": what, "time": time.monotonic(), **more})
    os.write(1, f"{line}\n".encode())


def light(scenario):
    """A member without JAX, which takes long to import."""
    import importlib.util

    found = importlib.util.find_spec("phalanx")
    package = type(sys)("phalanx")
    package.__path__ = [str(Path(found.origin).parent)]
    package.__version__ = "unknown"
    sys.modules["phalanx"] = package
    from phalanx.job.hub.client import Member

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    member = Member(os.environ["PHALANX_HUB"], os.environ["PHALANX_TOKEN"], task["type"], task["index"])
    member.wait_joined(60)
    member.status.phase, member.status.site = "input", "data.py:7 in load"
    member.exchange("a place where all have a status", None)
    say("ready")
    assert scenario == "wait"
    try:
        member.exchange(f"where only {task['index']} comes", None)
    except OSError as error:
        say("raised", kind=type(error).__name__, text=str(error))
    member.leave()


def heavy(scenario):
    """A worker that computes with the others."""
    import phalanx as px  # noqa: F401 - as a user's program would
    from phalanx.cluster.resolvers import TFConfigClusterResolver
    from phalanx.job import bootstrap

    options = {"hang": {"deadline": 2.0, "warn_after": 0.5}, "stuck": {"grace": 1.0}}
    resolver = TFConfigClusterResolver()
    connection = bootstrap.connect(
        resolver, timeout=60, devices_per_worker=2, **options.get(scenario, {})
    )
    total = make_sum(connection.member.check)
    say("ready", total=total(), rank=connection.rank)
    globals()[scenario.replace(" ", "_")](connection, total)
    say("end")


def make_sum(look):
    """A program of all workers, awaited as strategies do it: whoever waits can leave."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from phalanx.runtime.awaiting import Waiter

    mesh = Mesh(np.array(jax.devices()), ("device",))
    spec = PartitionSpec("device")
    ones = jax.make_array_from_callback(
        (mesh.size, 2048), NamedSharding(mesh, spec), lambda index: np.ones((1, 2048), np.float32)
    )
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )
    program, waiter = jax.jit(summed), Waiter()

    def total():
        result = program(ones)
        waiter.wait(result, look)
        return float(result.addressable_shards[0].data[0, 0])

    return total


def leave(connection, total):
    sys.stdin.readline()
    connection.disconnect(timeout=0.1)


def survive(connection, total):
    sys.stdin.readline()
    try:
        with connection.member.waiting("train.py:5 in step"):
            for _ in range(1000):
                total()
    except OSError as error:
        say("raised", kind=type(error).__name__, text=str(error))
    import jax.numpy as jnp

    say("still computes", value=float(jnp.ones(3).sum()))


def crash(connection, total):
    if connection.rank == 1:
        raise KeyError("boom")
    for _ in range(1000):
        total()


def stuck(connection, total):
    if connection.rank == 1:
        raise KeyError("boom")
    import ctypes

    with connection.member.waiting("train.py:5 in step"):
        ctypes.CDLL(None).sleep(600)


def hang(connection, total):
    connection.member.status.begin(1, {})
    if connection.rank == 1:
        connection.member.status.phase, connection.member.status.site = "input", "data.py:7 in load"
        sys.stdin.readline()
        connection.member.check()
    connection.member.status.begin(2, {})
    with connection.member.waiting("train.py:5 in step"):
        total()


if __name__ == "__main__":
    {"light": light, "jax": heavy}[sys.argv[1]](sys.argv[2])
