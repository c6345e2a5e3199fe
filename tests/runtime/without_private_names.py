"""Hides private names of JAX from Phalanx and tries its features; run by `test_private_names.py`.

First, all names that Phalanx has a substitute for are hidden at once, while it is imported and trains.
Then one name after the other. Prints what happened, as JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

hidden: set[str] = set()
real_resolve = pkgutil.resolve_name


def resolve(name: str) -> Any:
    if name in hidden:
        raise AttributeError(name)
    return real_resolve(name)


pkgutil.resolve_name = resolve


def train() -> list[float]:
    """Two steps, eager and compiled, on two replicas."""
    import phalanx as px

    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = px.Variable(jnp.array([1.0, 2.0]), aggregation=px.VariableAggregation.MEAN)

    def step(x: jax.Array) -> jax.Array:
        loss, (grad,) = px.value_and_grad(lambda: jnp.sum(w.value() * x), [w])()
        total = px.get_replica_context().all_reduce(px.ReduceOp.SUM, grad)
        w.assign_sub(0.1 * total)
        return loss

    rows = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    data = strategy.experimental_distribute_dataset(
        px.data.Dataset.from_tensor_slices(rows).batch(2).repeat(2)
    )
    losses = []
    for run, batch in zip((strategy.run, px.function(strategy.run)), data, strict=True):
        per_replica = run(step, args=(batch,))
        losses.append(float(strategy.reduce(px.ReduceOp.SUM, per_replica, axis=None)))
    return [*losses, *w.numpy().tolist()]


# -- features, each of which fails if it does not do what it should ---------------------------------


def arrays(compat: Any) -> None:
    devices = jax.devices()[:2]
    x = jax.device_put(np.array([1.0, 2.0], np.float32), devices[1])
    assert x.committed
    for free in (compat.uncommitted(x), compat.movable(x), compat.put_on(np.asarray(x), devices[1])):
        assert not free.committed
        assert free.devices() == {devices[1]}
        assert free.tolist() == [1.0, 2.0]
    mesh = jax.sharding.Mesh(np.array(devices), ("replica",))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("replica"))
    rows = [np.array([1.0], np.float32), np.array([2.0], np.float32)]
    whole = compat.put_pieces((2,), sharding, rows, devices)
    again = compat.assemble((2,), sharding, compat.pieces(whole))
    assert again.tolist() == whole.tolist() == [1.0, 2.0]
    everywhere = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P()))
    for device in devices:
        take = compat.one_piece_taker(everywhere, None if device is devices[0] else device)
        one = take(everywhere)
        assert not one.committed
        assert one.devices() == {device}
        assert one.tolist() == [1.0, 2.0]


def backends(compat: Any) -> None:
    assert compat.backends_are_initialized()
    assert compat.platform_may_exist("cpu")
    assert not compat.platform_may_exist("rocm")


def tracing(compat: Any) -> None:
    assert not compat.is_transformation(compat.current_trace())

    def differentiated(x: jax.Array) -> jax.Array:
        assert compat.is_transformation(compat.current_trace())
        assert not compat.is_staging()
        assert float(compat.primal_value(x)) == 2.0
        return x * x

    jax.grad(differentiated)(2.0)
    jax.jvp(differentiated, (2.0,), (1.0,))

    def staged(x: jax.Array) -> jax.Array:
        assert compat.is_staging()
        assert compat.is_staged(x)
        return x

    jax.make_jaxpr(staged)(2.0)


def owning(compat: Any) -> None:
    def staged(x: jax.Array) -> jax.Array:
        assert compat.belongs_to(x, compat.current_trace())
        return x

    jax.make_jaxpr(staged)(2.0)


def passing(compat: Any) -> None:
    class Box:
        shape = ()

    compat.register_array_like(Box, lambda _: jnp.float32(2.0))
    assert float(jax.jit(jnp.negative)(Box())) == -2.0


def marking(compat: Any) -> None:
    text = str(jax.make_jaxpr(lambda x: compat.mark_same_on_all_replicas(x, "w"))(1.0))
    assert compat.SAME_ON_ALL_REPLICAS in text
    assert float(jax.jit(compat.declare_same_on_all_replicas)(3.0)) == 3.0


def reading(compat: Any) -> None:
    closed, _ = compat.jaxpr_and_result(lambda x: jax.jit(jnp.negative)(x) + 1.0, 2.0)
    (inner,) = (sub for eqn in closed.jaxpr.eqns for sub in compat.sub_jaxprs(eqn))
    assert inner.eqns[0].primitive.name == "neg"
    assert compat.is_literal(closed.jaxpr.eqns[-1].invars[1])
    assert compat.used_part(closed.jaxpr).eqns
    assert compat.eval_jaxpr(closed, [2.0]) == [-1.0]


def in_thread(compat: Any, task: Callable[[], Any]) -> Any:
    state, results = compat.ThreadState(), []

    def run() -> None:
        try:
            state.apply()
            results.append(task())
        except Exception as error:  # noqa: BLE001 - raised below, in the test's thread
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


def threads(compat: Any) -> None:
    with jax.enable_x64(True), jax.default_device(jax.devices()[1]):
        x = in_thread(compat, lambda: jnp.arange(2.0))
    assert x.dtype == np.float64
    assert x.devices() == {jax.devices()[1]}


def traced_threads(compat: Any) -> None:
    assert float(jax.grad(lambda x: in_thread(compat, lambda: x * x))(3.0)) == 6.0


# -- without one name after the other ---------------------------------------------------------------

MODULES = {
    "join": "job.jax_distributed",
    "end": "job.jax_distributed",
    "stay": "job.jax_distributed",
    "start": "job.hub.coordination_service",
}
FEATURES: dict[str, Callable[[Any], Any]] = {
    **{
        f.__name__: f
        for f in (arrays, backends, tracing, owning, passing, marking, reading, threads, traced_threads)
    },
    # These are tried without a name that they cannot do without, and so reach no other process.
    "join": lambda processes: processes.join("127.0.0.1:1", 0, 2, timeout=1.0, host="127.0.0.1"),
    "end": lambda processes: processes.abandon_backends(),
    "stay": lambda processes: processes.forget_devices(),
    "start": lambda service: service.start_coordination_service("127.0.0.1:0", 1),
}


def fresh(name: str) -> ModuleType:
    """A copy of a module of Phalanx that has sought its names anew."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(feature: str, homes: list[str]) -> str | None:
    """What a feature says without a name, wherever that may live; None if it works."""
    hidden.update(homes)
    try:
        FEATURES[feature](fresh(f"phalanx.{MODULES.get(feature, 'runtime.compat')}"))
    except (importlib.import_module("phalanx").errors.UnimplementedError, TypeError) as error:
        return str(error)  # JAX itself raises the latter
    finally:
        hidden.clear()
    return None


def main() -> None:
    optional, needed = json.loads(
        sys.stdin.read()
    )  # the homes of each name, and a feature that uses it
    jax.config.update("jax_num_cpu_devices", 2)
    hidden.update(home for homes, _ in optional for home in homes)
    hidden.add("jax._src.xla_bridge:_backend_factories")  # devices can be listed without it
    trained = train()
    hidden.clear()
    problems = {homes[0]: problem(feature, homes) for homes, feature in (*optional, *needed)}
    sought = importlib.import_module("phalanx.runtime.private_names").SOUGHT
    print(json.dumps({"trained": trained, "problems": problems, "sought": sorted(sought)}))


if __name__ == "__main__":
    main()
