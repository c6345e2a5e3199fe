"""What goes wrong in the tests of faults; runs on the workers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px

HELD = ("before", "compile", "trace", "input", "between", "end")
"""Places at which the guilty worker can wait for what is done to it."""

Outcome = tuple[str, str, float]
"""The type and text of what a worker raised, and when; both are empty if it raised nothing."""


def me() -> int:
    return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])


def say(text: str) -> None:
    print(text, flush=True)


def hold() -> None:
    say("ready")
    threading.Event().wait(120)


def reduce(x: Any) -> Any:
    return px.get_replica_context().all_reduce("sum", x)  # type: ignore[union-attr]


def gather(s: px.Strategy) -> float:
    value = s.experimental_distribute_values_from_function(lambda c: jnp.ones(1))
    return float(s.gather(value, axis=0).sum())


def loop(steps: int, compiled: bool, fault: str = "", guilty: int = -1) -> Any:
    """Steps with a collective each; one worker does something else, mostly in the third."""
    mine = fault if me() == guilty else ""
    if mine == "before":
        hold()
    s = px.MultiWorkerMirroredStrategy()
    if mine == "compile":
        hold_at_compilation()

    def step(x: jax.Array) -> jax.Array:
        if mine == "trace":
            hold()
        return reduce(x * 2.0)

    run = (
        px.function(lambda x: s.run(step, args=(x,))) if compiled else lambda x: s.run(step, args=(x,))
    )

    def call(x: Any) -> float:
        given = s.experimental_distribute_values_from_function(lambda c: x)
        return float(s.experimental_local_results(run(given))[0].sum())

    def batches() -> Iterator[Any]:
        for i in range(steps):
            if i == 2 and mine == "input":
                hold()
            yield np.ones(2, np.float32)

    dataset = px.data.Dataset.from_generator(batches, output_types=np.float32).batch(1)
    total = 0.0
    if fault == "input":
        for x in s.distribute_datasets_from_function(lambda c: dataset):
            total += float(s.experimental_local_results(run(x))[0].sum())
        return total
    for i in range(steps):
        if i == 2 and mine:
            total += misbehave(s, mine, call)
            if mine in ("early", "order"):
                return total
        elif i == 2 and fault == "order":
            total += call(jnp.ones(2)) + gather(s)
        if i == 3:
            say("started")
        total += call(jnp.ones(2))
    return total


def hold_at_compilation() -> None:
    from jax._src import compiler

    compiler.compile_or_get_cached = lambda *args, **kwargs: hold()  # type: ignore[assignment]


def misbehave(s: px.Strategy, fault: str, call: Any) -> float:
    if fault == "raise":
        raise KeyError("a fault of its own")
    if fault == "exit":
        os._exit(3)
    if fault == "loop":
        say("ready")
        while True:  # until the job ends: an exception of the job does not reach this loop
            time.monotonic()
    if fault == "between":
        hold()
    if fault == "shape":
        return float(call(jnp.ones(3)))
    if fault == "dtype":
        return float(call(jnp.ones(2, jnp.float16)))
    if fault == "order":
        return gather(s) + float(call(jnp.ones(2)))
    return 0.0


def caught(*args: Any) -> Outcome:
    """The loop, in a program that catches what it raises and lives on."""
    try:
        loop(*args)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error), time.time()
    return "", "", time.time()


def as_program(steps: int, compiled: bool, fault: str, guilty: int) -> Outcome:
    """The loop, where the guilty worker ends as a program does: of its exception, or of its end."""
    if me() != guilty:
        return caught(steps, compiled, fault, guilty)
    try:
        loop(steps, compiled, fault, guilty)
    except Exception:  # noqa: BLE001 - Python's own last resort
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(1)
    leave()
    os._exit(0)


def leave() -> float:
    """Come to the end of the program; returns when that was."""
    connection = px.MultiWorkerMirroredStrategy().extended._connection  # type: ignore[attr-defined]
    connection.disconnect()
    return time.time()


def to_the_end(compiled: bool, guilty: int) -> float:
    """All have done their steps; the guilty one never says goodbye."""
    loop(3, compiled)
    if me() == guilty:
        hold()
    return leave()


def left_in_native_code(compiled: bool, guilty: int) -> tuple[str, str, list[float]]:
    """A step that never comes back: nobody ends the connections over which its program waits."""
    from phalanx.job import device_connections, watchdog

    device_connections.cut = watchdog.cut = lambda addresses: 0  # type: ignore[assignment]
    s = px.MultiWorkerMirroredStrategy()
    with s.scope():
        w = px.Variable(np.ones(3, np.float32))

    def step(x: jax.Array) -> None:
        w.assign_add(reduce(x))

    run = px.function(lambda x: s.run(step, args=(x,))) if compiled else lambda x: s.run(step, (x,))
    x = s.experimental_distribute_values_from_function(lambda c: jnp.ones(3))
    for _ in range(2):
        run(x)
    kind, text = "", ""
    try:
        if me() == guilty:
            say("ready")
            threading.Event().wait(60)
        run(x)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        kind, text = type(error).__name__, str(error)
    return kind, text, [float(v) for v in w.numpy()]


def interrupted_wait(late: int) -> list[float]:
    """Ctrl-C comes while a worker waits in a step for the late one; it then makes the step again."""
    s = px.MultiWorkerMirroredStrategy()
    with s.scope():
        w = px.Variable(np.ones(3, np.float32))
    step = px.function(lambda x: s.run(lambda x: w.assign_add(reduce(x)), args=(x,)))
    x = s.experimental_distribute_values_from_function(lambda c: jnp.ones(3))
    step(x)
    if me() == late:
        come = threading.Event()
        signal.signal(signal.SIGUSR2, lambda *_: come.set())
        say("ready")
        assert come.wait(60)
        step(x)
    else:
        say("waits")
        try:
            step(x)
        except KeyboardInterrupt:
            say(f"left with {w.numpy().tolist()}")
    step(x)
    waiters = [t for t in threading.enumerate() if t.name == "phalanx-waiter"]
    for thread in waiters[:-1]:  # that of the wait that was left ends when its program has
        thread.join(30)
        assert not thread.is_alive()
    return [float(v) for v in w.numpy()]


def impatient_call(compiled: bool, late: int) -> Outcome:
    """A collective whose caller waits for two seconds only."""
    s = px.MultiWorkerMirroredStrategy()
    options = px.experimental.CommunicationOptions(timeout_seconds=2)

    def step(x: jax.Array) -> jax.Array:
        context = px.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", context.all_gather(x, axis=0, options=options), options)

    run = px.function(lambda x: s.run(step, args=(x,))) if compiled else lambda x: s.run(step, (x,))
    x = s.experimental_distribute_values_from_function(lambda c: jnp.ones(3))
    run(x)
    try:
        if me() == late:
            say("ready")
            threading.Event().wait(60)
        run(x)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error), time.time()
    return "", "", time.time()


def unread(guilty: int) -> Outcome:
    """Steps that return while they run, and results that the program does not read."""
    s = px.MultiWorkerMirroredStrategy()
    px.config.protect_variables(False)
    with s.scope():
        total = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
    one = s.experimental_distribute_values_from_function(lambda c: np.float32(1.0))
    step = px.function(lambda x: s.run(total.assign_add, args=(x,)))
    try:
        for i in range(10**9):
            if i == 3 and me() == guilty:
                hold()
            step(one)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error), time.time()
    return "", "", time.time()
