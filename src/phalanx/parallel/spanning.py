"""Programs over the devices of several workers: who takes part, where values go, what all agree on.

Every worker runs the same program with the same arguments, and each of its devices gets its part of
them. With one process, all of this is what JAX does anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.tfconfig import resolver_or_tf_config
from phalanx.collectives import device_programs
from phalanx.core.options import CommunicationOptions
from phalanx.errors import DivergenceError
from phalanx.execution.throttle import THROTTLE, token
from phalanx.job.connection import connected
from phalanx.job.shared_programs import SharedProgram, serial_of
from phalanx.parallel.plan import Plan
from phalanx.runtime import compat
from phalanx.runtime.deadlines import limit
from phalanx.runtime.devices import default_devices
from phalanx.strategies.multi_worker import connect_workers

__all__ = [
    "agree_on_plan",
    "all_devices",
    "check_same",
    "dispatched",
    "fingerprint",
    "from_first_device",
    "placed",
    "spans_workers",
    "whole_value",
]

_SYNCHRONOUS = {"chief", "worker", "master", "evaluator"}


def all_devices(resolver: ClusterResolver | None = None) -> tuple[jax.Device, ...]:
    """The devices of all workers, worker by worker; those of this process if it works alone.

    The first call waits until all workers have joined. So call it, or create a strategy, at the top of
    a program that `phalanx run` starts, before JAX makes an array. `parallelize` calls it, too.

    Args:
        resolver: who the workers are; by default TF_CONFIG, as `phalanx run` sets it.

    Examples:
        >>> import jax
        >>> all_devices() == tuple(jax.local_devices())
        True
    """
    found = resolver_or_tf_config(resolver)
    spec = found.cluster_spec()
    if spec and set(spec.jobs) <= _SYNCHRONOUS:
        connect_workers(found, CommunicationOptions())
    here = default_devices()
    if connected() is None:
        return here
    everywhere = [d for d in jax.devices() if d.platform == here[0].platform]
    return tuple(sorted(everywhere, key=lambda d: (d.process_index, d.id)))


def spans_workers(devices: Sequence[jax.Device]) -> bool:
    """Whether some of the devices belong to other processes."""
    here = jax.process_index()
    return any(device.process_index != here for device in devices)


def placed(nest: Any, shardings: Any) -> Any:
    """A nest of arrays, each part on its device.

    Values of the host must be the same on all workers, each of which takes what its devices need.
    """
    leaves, structure = jax.tree.flatten(nest)
    wanted = jax.tree.leaves(shardings)
    if all(s.is_fully_addressable for s in wanted):
        return jax.device_put(nest, shardings)
    return jax.tree.unflatten(structure, [_placed(x, s) for x, s in zip(leaves, wanted, strict=True)])


def _placed(x: Any, sharding: Sharding) -> Any:
    if compat.is_tracer(x):
        return jax.lax.with_sharding_constraint(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return _moved(x, sharding)
    if compat.is_key_array(x):
        return jax.random.wrap_key_data(
            _placed(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x)
        )
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _moved(x: jax.Array, sharding: Sharding) -> jax.Array:
    """An array of several workers in another layout; all of them must call it."""

    def same(x: jax.Array) -> Any:
        return x, token(between_workers=True)

    program = jax.jit(same, out_shardings=(sharding, None))
    text = f"{x.sharding} to {sharding}"
    shared = SharedProgram(("layout", text, x.shape, x.dtype), "a change of layout", [x], lambda: text)
    moved: jax.Array = THROTTLE.dispatch(program, x, shared=shared)
    return moved


def whole_value(x: jax.Array) -> jax.Array:
    """An array of which this process has all; all workers must call it."""
    sharding = x.sharding
    if x.is_fully_addressable or not isinstance(sharding, NamedSharding):
        return x
    whole: jax.Array = _placed(x, NamedSharding(sharding.mesh, PartitionSpec()))
    return whole.addressable_data(0)


def dispatched(call: Any, args: Sequence[Any], devices: Sequence[jax.Device], name: str) -> Any:
    """Start a program that returns its results and a token, on all workers if they take part."""
    if not spans_workers(devices):
        return THROTTLE.dispatch(call, *args)
    leaves = jax.tree.leaves(tuple(args))
    key = (serial_of(call), tuple((x.shape, x.dtype) for x in leaves))

    def content() -> str:
        return str(call.lower(*args).as_text())

    shared = SharedProgram(key, f"the function {name}", leaves, content, limit())
    return THROTTLE.dispatch(call, *args, shared=shared)


def from_first_device(nest: Any) -> Any:
    """Arrays that all devices have whole, with the values of the first device; others as they are."""

    def first(x: Any) -> Any:
        sharding = x.sharding
        if not isinstance(sharding, NamedSharding) or any(sharding.spec):
            return x
        span = tuple(sharding.mesh.devices.flat)
        here = tuple(d for d in span if d.process_index == jax.process_index())
        by_device = {shard.device: shard.data for shard in x.addressable_shards}
        found = device_programs.from_first([by_device[d] for d in here], here, span).array
        assert found is not None
        pieces = {shard.device: shard.data for shard in found.addressable_shards}
        return compat.assemble(x.shape, sharding, [pieces[s.device] for s in x.addressable_shards])

    return jax.tree.map(first, nest)


def fingerprint(state: Any) -> str:
    """A text that is the same for the same values; arrays of several workers are left out."""
    hashed = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            host = np.asarray(jax.random.key_data(leaf) if compat.is_key_array(leaf) else leaf)
            hashed.update(repr((host.shape, host.dtype.str)).encode() + host.tobytes())
    return hashed.hexdigest()


def check_same(what: str, text: str, help: str) -> None:
    """Refuse to go on if workers do not agree.

    Args:
        what: they must agree on.
        text: what this one has.
        help: what to do if they do not.
    """
    connection = connected()
    if connection is None:
        return
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    found = connection.member.exchange(what, digest)
    different = [i for i, other in enumerate(found) if other is not None and other != found[0]]
    if different:
        raise DivergenceError(
            f"The workers do not have the same {what}: worker {different[0]} differs from worker 0. "
            f"{help} Received: {digest} here, on worker {connection.rank}; {found} on all"
        )


def agree_on_plan(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Make sure that all workers have chosen the same plan, if they run it together."""
    if spans_workers(devices):
        check_same(
            "plan",
            plan.digest(),
            "They must search for the same program, with the same hardware, options and limits; a time "
            "limit may end searches at different points, so search once and share the plan's file.",
        )
