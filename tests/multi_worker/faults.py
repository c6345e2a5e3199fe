"""What goes wrong in the tests of faults; runs on the workers."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

import phalanx as px


def reduce(x: Any) -> Any:
    return px.get_replica_context().all_reduce("sum", x)  # type: ignore[union-attr]


def say(text: str) -> None:
    print(text, flush=True)


def loop(steps: int, compiled: bool, fault: str = "", guilty: int = -1) -> Any:
    """Steps with a collective each; one worker does something else in the third."""
    if fault == "before" and me() == guilty:
        say("ready")
        threading.Event().wait(120)
    s = px.MultiWorkerMirroredStrategy()

    def step(x: jax.Array) -> jax.Array:
        if fault == "trace" and me() == guilty and compiled:
            say("ready")
            threading.Event().wait(120)
        return reduce(x * 2.0)

    run = (
        px.function(lambda x: s.run(step, args=(x,))) if compiled else lambda x: s.run(step, args=(x,))
    )

    def call(x: Any) -> float:
        given = s.experimental_distribute_values_from_function(lambda c: x)
        return float(s.experimental_local_results(run(given))[0].sum())

    total = 0.0
    for i in range(steps):
        if i == 2 and me() == guilty:
            total += misbehave(s, fault, call)
            if fault in ("early", "order"):
                return total
        elif i == 2 and fault == "order":
            total += call(jnp.ones(2)) + gather(s)
        if i == 3:
            say("started")
        total += call(jnp.ones(2))
    return total


def gather(s: px.Strategy) -> float:
    value = s.experimental_distribute_values_from_function(lambda c: jnp.ones(1))
    return float(s.gather(value, axis=0).sum())


def me() -> int:
    import json

    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def misbehave(s: px.Strategy, fault: str, call: Any) -> float:
    if fault == "raise":
        raise KeyError("a fault of its own")
    if fault == "exit":
        os._exit(3)
    if fault == "loop":
        say("ready")
        while True:  # until the job ends: an exception of the job does not reach this loop
            time.monotonic()
    if fault == "wait":
        say("ready")
        threading.Event().wait(120)
    if fault == "shape":
        return float(call(jnp.ones(3)))
    if fault == "dtype":
        return float(call(jnp.ones(2, jnp.float16)))
    if fault == "order":
        return gather(s) + float(call(jnp.ones(2)))
    return 0.0


def timed(*args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """The loop; the type and text of what it raised, and when."""
    try:
        loop(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error), time.time()
    return "", "", time.time()


def as_program(*args: Any, **kwargs: Any) -> tuple[str, str, float]:
    """The same, but the guilty worker then ends, as a program does, with all its connections."""
    begun = time.time()
    kind, text, when = timed(*args, **kwargs)
    if me() == kwargs["guilty"]:
        say(f"{kind}: {text}")
        if not kind:
            px.MultiWorkerMirroredStrategy().extended._connection.disconnect(1.0)  # type: ignore[attr-defined]
        os._exit(1 if kind else 0)
    return kind, text, when - begun
