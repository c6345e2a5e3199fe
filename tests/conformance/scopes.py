"""Translations of the cases about scopes, contexts and devices."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest

import phalanx as px
from tests.conformance.harness import case, cases, differs, mirrored, rc, rid

# -- scopes ---------------------------------------------------------------------------------------


@case()
def ctx_scope_reenter_same_strategy() -> Any:
    s = mirrored(2)
    r = []
    with s.scope():
        with s.scope():
            r.append(px.get_strategy() is s)
        r.append(px.get_strategy() is s)
    r.append(px.has_strategy())
    return r


@case()
def ctx_state_after_failed_nested_scope() -> Any:
    a, b = mirrored(2), mirrored(2)
    r = []
    with a.scope():
        with contextlib.suppress(RuntimeError), b.scope():
            pass
        r.append(px.get_strategy() is a)
    r.append(px.has_strategy())
    return r


@case()
def ctx_scope_returns_strategy() -> Any:
    s = mirrored(2)
    with s.scope() as x:
        return x is s


@case()
def ctx_scope_inside_run_same_strategy() -> Any:
    s = mirrored(2)

    def f() -> Any:
        with s.scope():
            return 1

    return s.run(f)


@case()
def ctx_scope_of_exception_restores() -> Any:
    s = mirrored(2)
    with contextlib.suppress(KeyError), s.scope():
        raise KeyError("x")
    return px.has_strategy()


@case()
def ctx_set_strategy_global() -> Any:
    s = mirrored(2)
    r: list[Any] = []
    px.experimental_set_strategy(s)
    r.append([px.get_strategy() is s, px.in_cross_replica_context()])
    px.experimental_set_strategy(None)
    r.append(px.has_strategy())
    return r


@case()
def ctx_set_strategy_replace() -> Any:
    a, b = mirrored(2), mirrored(2)
    try:
        px.experimental_set_strategy(a)
        px.experimental_set_strategy(b)
        return px.get_strategy() is b
    finally:
        px.experimental_set_strategy(None)


@case()
def ctx_set_strategy_inside_scope() -> Any:
    s = mirrored(2)
    with s.scope():
        px.experimental_set_strategy(s)


# -- run and the contexts around it ---------------------------------------------------------------


@case()
def ctx_gather_inside_run() -> Any:
    s = mirrored(2)
    return s.run(lambda: s.gather(jnp.array([1.0]), axis=0))


@case()
def ctx_run_works_outside_scope() -> Any:
    s = mirrored(2)
    v = s.run(lambda: jnp.reshape(rid().astype(jnp.float32) + 1.0, (1,)))
    return {
        "reduce": s.reduce("SUM", v, axis=None),
        "gather": s.gather(v, axis=0),
        "has_after": px.has_strategy(),
    }


@case()
def ctx_merge_fn_is_cross_replica() -> Any:
    s = mirrored(2)

    def merge(st: px.Strategy) -> Any:
        return [
            px.get_replica_context() is None,
            px.in_cross_replica_context(),
            st is s,
            px.get_strategy() is s,
        ]

    return s.run(lambda: rc().merge_call(merge))


@case()
def ctx_run_exception_type_propagates() -> Any:
    s = mirrored(2)

    def f() -> Any:
        if int(rid()) == 1:
            raise KeyError("boom")
        return 1

    try:
        s.run(f)
        t = None
    except KeyError as e:
        t = type(e).__name__
    return {"type": t, "has_strategy": px.has_strategy()}


@case()
def ctx_replica_context_properties() -> Any:
    s = mirrored(2)
    return s.run(lambda: (rc().num_replicas_in_sync, rc().strategy is s))


@case()
def ctx_extended_needs_cross_replica_call_for_each_replica() -> Any:
    s = mirrored(2)
    a = s.extended.call_for_each_replica(lambda x: x + 1, args=(1,))
    try:
        s.run(lambda: s.extended.call_for_each_replica(lambda: 1))
        e = None
    except RuntimeError:  # ours is a subclass
        e = "RuntimeError"
    return [a, e]


# -- the default strategy -------------------------------------------------------------------------


@case()
def ctx_default_strategy_api() -> Any:
    s = px.get_strategy()
    return {
        "run": s.run(lambda x: x + 1, args=(jnp.array(1),)),
        "reduce_sum": s.reduce("SUM", jnp.array([1.0, 2.0]), axis=None),
        "reduce_mean_axis0": s.reduce("MEAN", jnp.array([1.0, 2.0]), axis=0),
        "n": s.num_replicas_in_sync,
        "local": s.experimental_local_results(jnp.array(3)),
        "gather": s.gather(jnp.array([1, 2]), axis=0),
    }


# -- copying strategies ---------------------------------------------------------------------------


@case()
def ctx_deepcopy_strategy() -> Any:
    s = px.OneDeviceStrategy("CPU:0")
    c = copy.deepcopy(s)
    return [c is not s, c.num_replicas_in_sync, c.extended._container_strategy() is c]


# -- devices --------------------------------------------------------------------------------------

_COUNT_DEFAULT_DEVICES = """
import phalanx as px
px.config.set_logical_device_configuration(
    px.config.list_physical_devices("CPU")[0], [px.config.LogicalDeviceConfiguration()] * 4
)
print(px.MirroredStrategy().num_replicas_in_sync)
"""


@case()
def ctx_mirrored_default_devices() -> Any:
    # A process of its own: it was recorded with four devices, and the tests have another number.
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_DEFAULT_DEVICES], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@differs()
def ctx_mirrored_unknown_device() -> None:
    with pytest.raises(ValueError, match="No such device"):
        px.MirroredStrategy(["CPU:0", "CPU:9"])


@case()
def ctx_one_device_scope_context() -> Any:
    s = px.OneDeviceStrategy("CPU:1")
    with s.scope():
        x = px.in_cross_replica_context()
    r = s.run(rid)
    return {
        "cross": x,
        "n": s.num_replicas_in_sync,
        "run": r,
        "worker_devices": list(s.extended.worker_devices),
    }


# -- whose variables ------------------------------------------------------------------------------


@case()
def ctx_variable_created_in_scope() -> Any:
    s, o = mirrored(2), mirrored(2)
    with s.scope():
        a = px.Variable(1.0)
    b = px.Variable(1.0)
    with o.scope():
        c = px.Variable(1.0)
    return [
        *[s.extended.variable_created_in_scope(v) for v in (a, b, c)],
        px.get_strategy().extended.variable_created_in_scope(b),
    ]


@case()
def ctx_colocate_vars_with_ok() -> Any:
    s = mirrored(2)
    with s.scope():
        v = px.Variable(1.0)
        with s.extended.colocate_vars_with(v):
            w = px.Variable(2.0)
    return [[c.device[-5:] for c in v.values], [c.device[-5:] for c in w.values]]


# -- what does not exist yet ----------------------------------------------------------------------


@case()
def ctx_make_input_fn_iterator_per_replica() -> Any:
    mode = px.InputReplicationMode.PER_REPLICA
    return mirrored(2).make_input_fn_iterator(lambda c: None, mode)


# -- one expression each ---------------------------------------------------------------------------

cases(
    {
        "ctx_run_args_list_ok": lambda: mirrored(2).run(lambda x: x + 1, args=[jnp.array(1)]),
        "ctx_default_strategy_worker_devices": lambda: px.get_strategy().extended.worker_devices,
        "ctx_copy_strategy": lambda: copy.copy(mirrored(2)),
    }
)
