"""Every private or experimental JAX call, in one place.

Phalanx pins ``jax>=0.10.2,<0.11``. When that range moves, this module is the one to look at: nothing
else in the package imports from ``jax._src`` or relies on undocumented behaviour.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax._src import api as _api
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import xla_bridge as _bridge
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _pe
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax  # type: ignore[attr-defined]
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Sharding, SingleDeviceSharding

# -- backends -----------------------------------------------------------------------------------


def backends_are_initialized() -> bool:
    """Whether JAX has started its backends, after which the device count is fixed."""
    return bool(_bridge.backends_are_initialized())


def platform_may_exist(platform: str) -> bool:
    """Whether a backend for `platform` could start, judged without starting any backend."""
    if platform == "tpu":  # always registered, so look for the library behind it
        return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    aliases = {"gpu": ("gpu", "cuda", "rocm")}.get(platform, (platform,))
    return any(name in _bridge._backend_factories for name in aliases)


# -- several processes --------------------------------------------------------------------------

_HEARTBEAT = 7 * 24 * 3600
"""Seconds after which JAX would end the process because of a silent peer; Phalanx is much quicker."""


def join_processes(
    address: str, process: int, processes: int, *, timeout: float, host: str | None = None
) -> None:
    """Make this process one of several that compute together, before JAX starts its backends.

    Like `jax.distributed.initialize`, but with a service that runs elsewhere, and without handling
    SIGTERM, which belongs to the program. CPU devices talk to each other through gloo at `host`, the
    address of this machine for the others; None leaves the choice to gloo.
    """
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    state = _distributed.global_state
    client = _jax.get_distributed_runtime_client(
        address,
        process,
        init_timeout=max(1, int(timeout)),
        shutdown_timeout=10,
        heartbeat_timeout=_HEARTBEAT,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state.client = client
    state.process_id, state.num_processes = process, processes
    state.coordinator_address = address
    if host is not None:
        usual = _bridge._backend_factories["cpu"]
        factory = functools.partial(_cpu_client_at, host)
        _bridge._backend_factories["cpu"] = dataclasses.replace(usual, factory=factory)


def _cpu_client_at(host: str) -> Any:
    client = _distributed.global_state.client
    if client is None:
        return _bridge.make_cpu_client()
    return _bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, hostname=host))


def processes_are_joined() -> bool:
    """Whether this process is one of several for JAX."""
    return _distributed.global_state.client is not None


def leave_processes(*, abandon: bool = False) -> None:
    """Undo `join_processes`. With the service's peers gone or not, this does not wait for them.

    `abandon` is for a service that is gone, and would not answer.
    """
    state = _distributed.global_state
    client, state.client = state.client, None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    if client is not None and abandon:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # so that it is never destroyed
    elif client is not None:
        client.shutdown()


def abandon_backends() -> None:
    """Let the process end without waiting for programs that will never finish.

    JAX waits for its devices when it is cleaned up, and for ever if another process is gone.
    """
    atexit.unregister(_api.clean_up)
    for backend in _bridge._backends.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))  # so that it is never destroyed


# -- jit ---------------------------------------------------------------------------------------------

replica_count_in_jit_key = jax.make_user_context(None)
"""A context manager that keeps programs traced for one number of replicas from serving another.

Functions such as `px.nn.compute_average_loss` ask for the number while they are traced, so it must be
a part of the key under which `jax.jit` caches what it has traced.
"""


# -- arrays -------------------------------------------------------------------------------------


def uncommitted(x: jax.Array) -> jax.Array:
    """The same buffer as `x`, free to follow the computation to another device.

    JAX refuses to combine arrays that are *committed* to different devices. TensorFlow copies
    silently, and ported code relies on it (``sum(strategy.experimental_local_results(x))``), so
    the single-device arrays that Phalanx hands out are uncommitted. No copy is made.
    """
    if not isinstance(x, _array.ArrayImpl) or not x._committed:
        return x
    return _array.ArrayImpl(x.aval, x.sharding, x._arrays, committed=False, _skip_checks=True)


def movable(x: Any) -> Any:
    """`x` itself, but never committed to a single device."""
    if isinstance(x, _array.ArrayImpl) and x._committed and len(x.sharding.device_set) == 1:
        return uncommitted(x)
    return x


def assemble(shape: tuple[int, ...], sharding: Sharding, pieces: Sequence[jax.Array]) -> jax.Array:
    """One global array over `sharding` from its single-device pieces, without copying.

    Like `jax.make_array_from_single_device_arrays` but about four times cheaper, because the caller
    has already made sure that shapes, dtypes and devices fit.
    """
    if is_key_array(pieces[0]):  # the keys are a view of the integers below
        data = [jax.random.key_data(piece) for piece in pieces]
        whole = assemble((*shape, *data[0].shape[pieces[0].ndim :]), sharding, data)
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(pieces[0]))
    aval = _core.ShapedArray(shape, pieces[0].dtype)
    buffers = [piece._arrays[0] for piece in pieces]  # type: ignore[attr-defined]
    return _array.ArrayImpl(aval, sharding, buffers, committed=True, _skip_checks=True)


def put_pieces(
    shape: tuple[int, ...], sharding: Sharding, pieces: Sequence[Any], devices: Sequence[jax.Device]
) -> jax.Array:
    """One global array over `sharding` from a NumPy array for each device, in device order.

    The cheapest way from the host to several devices. JAX does not copy memory that is aligned to 64
    bytes: CPU devices then use the arrays as they are, so nobody may write into them afterwards.
    The dtype must be one that JAX has.
    """
    aval = _core.ShapedArray(shape, pieces[0].dtype)
    return _pxla.batched_device_put(aval, sharding, pieces, devices)


def put_on(x: Any, device: jax.Device) -> jax.Array:
    """A NumPy array on one device, uncommitted; the cautions of `put_pieces` apply."""
    aval = _core.ShapedArray(x.shape, x.dtype)
    sharding = _single_device_sharding(device)
    return _pxla.batched_device_put(aval, sharding, [x], [device], committed=False)


@functools.cache
def _single_device_sharding(device: jax.Device) -> Sharding:
    return SingleDeviceSharding(device)


def pieces(x: jax.Array) -> list[jax.Array]:
    """The single-device arrays behind a global array, in device order, without copying."""
    return [shard.data for shard in x.addressable_shards]


def span_of(x: jax.Array) -> tuple[jax.Device, ...] | None:
    """The devices of an array that other processes hold parts of, in mesh order; None for others."""
    if is_tracer(x) or x.is_fully_addressable:
        return None
    return tuple(x.sharding.mesh.devices.flat)  # type: ignore[attr-defined]


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype that `x` has inside a program."""
    aval = _core.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def one_piece(x: jax.Array, device: jax.Device | None = None) -> jax.Array:
    """One of the arrays behind a replicated array, uncommitted; the one on `device` if there is one."""
    if not isinstance(x, _array.ArrayImpl):
        found = pieces(x)
        return next((p for p in found if device in p.devices()), found[0])
    buffers = x._arrays
    if device is not None:
        buffers = [b for b in buffers if device in b.devices()] or buffers
    return uncommitted(buffers[0])


def has_whole_bytes(dtype: Any) -> bool:
    """Whether each element of this dtype has bytes of its own, which int4 has not."""
    return bool(_dtypes.itemsize_bits(dtype) % 8 == 0)


def is_key_array(x: Any) -> bool:
    """Whether `x` is an array of typed random keys."""
    return isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_tracer(x: Any) -> bool:
    """Whether `x` stands for a value inside a JAX transformation."""
    return isinstance(x, _core.Tracer)


def primal_value(x: Any) -> Any:
    """The value behind the tracers of `grad` and `jvp`; tracers of other kinds have none.

    Outside of `jit` the values that are being differentiated are known all the time.
    """
    while isinstance(x, _DIFFERENTIATED):
        x = x.primal
    return x


def is_staged(x: Any) -> bool:
    """Whether `x` is being staged into a program (`jit`, `scan`, `vmap`, …), so has no value yet."""
    return isinstance(primal_value(x), _core.Tracer)


_DIFFERENTIATED = (_ad.JVPTracer, _ad.LinearizeTracer)
_DIFFERENTIATING = (_ad.JVPTrace, _ad.LinearizeTrace)


def current_trace() -> Any:
    """The JAX transformation that the calling thread is in, as an opaque object."""
    return _core.trace_ctx.trace


def is_transformation(trace: Any) -> bool:
    """Whether a trace is a transformation rather than plain evaluation."""
    return trace is not _core.eval_trace


def without_differentiation() -> AbstractContextManager[None]:
    """Compute below the differentiation that is going on: with its values, without derivatives.

    `jax.jit` keeps what it has compiled by the trace that it was called under, and each gradient is a
    trace of its own. What is called under it with plain values would be kept again at each step.
    """
    trace = _core.trace_ctx.trace
    while isinstance(trace, _DIFFERENTIATING):
        trace = trace.parent_trace
    below: AbstractContextManager[None] = _core.set_current_trace(trace)
    return below


def belongs_to(x: Any, trace: Any) -> bool:
    """Whether `x` is a tracer that was made under `trace`."""
    return isinstance(x, _core.Tracer) and x._trace is trace


def is_staging() -> bool:
    """Whether the calling thread is staging a program, at whatever depth of differentiation."""
    return staging_since(_core.eval_trace)


def staging_since(outer: Any) -> bool:
    """Whether, since `outer` was current, this thread has begun to stage a program.

    Differentiation does not count: it runs with known values.
    """
    trace = _core.trace_ctx.trace
    while trace is not outer and trace is not _core.eval_trace:
        if not isinstance(trace, _DIFFERENTIATING):
            return True
        trace = trace.parent_trace
    return False


# -- types that JAX should accept as arrays -----------------------------------------------------


def register_array_like(cls: type, read: Callable[[Any], jax.Array]) -> None:
    """Let JAX functions take instances of `cls` wherever they take arrays.

    ``__jax_array__`` alone no longer does this: since 0.10 it is only honoured where a function
    converts explicitly. Registering the type (rather than making it a pytree node) keeps instances
    whole in `jax.tree.map`, so trees of variables stay trees of variables.
    """

    def aval(x: Any) -> Any:
        return _core.typeof(read(x))

    def shard(xs: Sequence[Any], *rest: Any) -> Any:
        arrays = [read(x) for x in xs]
        return _pxla.shard_arg_handlers[type(arrays[0])](arrays, *rest)

    _core.pytype_aval_mappings[cls] = aval
    _dtypes.canonicalize_value_handlers[cls] = read
    _pxla.shard_arg_handlers[cls] = shard


# -- a mark in programs ---------------------------------------------------------------------------

_same_p = Primitive("phalanx_same_on_all_replicas")
_same_p.def_impl(lambda x, *, label: x)
_same_p.def_abstract_eval(lambda x, *, label: x)
_ad.deflinear2(_same_p, lambda ct, _, *, label: [ct])
mlir.register_lowering(_same_p, lambda ctx, x, *, label: [x])


def mark_same_on_all_replicas(value: Any, label: str) -> Any:
    """The value itself, with a mark in the program that says: all replicas must have the same here."""
    return jax.tree.map(lambda x: _same_p.bind(x, label=label), value)


SAME_ON_ALL_REPLICAS = _same_p.name

_agreed_p = Primitive("phalanx_agreed_by_all_replicas")
_agreed_p.def_impl(lambda x: x)
_agreed_p.def_abstract_eval(lambda x: x)
_ad.deflinear2(_agreed_p, lambda ct, _: [ct])
_batching.defvectorized(_agreed_p)
mlir.register_lowering(_agreed_p, lambda ctx, x: [x])


def declare_same_on_all_replicas(x: jax.Array) -> jax.Array:
    """The array itself, with a mark in the program that says: all replicas do have the same here."""
    agreed: jax.Array = _agreed_p.bind(x)
    return agreed


AGREED_BY_ALL_REPLICAS = _agreed_p.name


def jaxpr_and_result(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a function, and the shapes of its results."""
    return jax.make_jaxpr(fn, return_shape=True)(*args)


def eval_jaxpr(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr; arguments that it does not use may be anything."""
    return list(_core.eval_jaxpr(closed.jaxpr, closed.consts, *args))


def used_part(jaxpr: Any) -> Any:
    """A jaxpr without inputs and equations that its results do not need."""
    return _pe.dce_jaxpr(jaxpr, True)[0]


def without_unused(closed: Any) -> tuple[Any, list[bool]]:
    """A closed jaxpr without what its results do not need, and for each input whether it is needed."""
    jaxpr, needed = _pe.dce_jaxpr(closed.jaxpr, True)
    return _core.ClosedJaxpr(jaxpr, closed.consts), needed


def is_literal(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a constant rather than a variable."""
    return isinstance(atom, _core.Literal)


def sub_jaxprs(eqn: Any) -> list[Any]:
    """The open jaxprs inside the parameters of an equation."""
    return list(_core.jaxprs_in_params(eqn.params))


# -- thread state -------------------------------------------------------------------------------

_EXTRA_STATE = (
    _config.mesh_context_manager,
    _config.abstract_mesh_context_manager,
    _config.device_context,
    _config.compute_on_context_manager,
    _config.xla_metadata_context_manager,
)


class ThreadState:
    """JAX's thread-local settings, captured in one thread to be used in another.

    ``with jax.enable_x64():`` and its relatives set thread-local state that new threads do not
    inherit. Replica threads must see what their caller sees, or replicas would compute different
    things; that includes the transformation that is going on (`jax.grad` around `Strategy.run`).
    """

    def __init__(self) -> None:
        unset = _config.config_ext.unset
        states = (*_config.config_states.values(), *_EXTRA_STATE)
        local = ((state, state.get_local()) for state in states)
        self._settings = [(state, value) for state, value in local if value is not unset]
        self._trace = _core.trace_ctx.trace
        self._axis_env = _core.trace_ctx.axis_env

    def apply(self) -> None:
        """Install the captured settings in the calling thread."""
        for state, value in self._settings:
            state.set_local(value)
            hook = getattr(state, "_update_thread_local_hook", None)
            if hook is not None:
                hook(value)
        _core.trace_ctx.set_trace(self._trace)
        _core.trace_ctx.set_axis_env(self._axis_env)


def is_array(x: Any) -> bool:
    """Whether `x` is an array in JAX's sense: a `jax.Array`, a tracer or a NumPy array."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)
