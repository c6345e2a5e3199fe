"""Every private or experimental JAX call within one process.

Nothing else in the package imports from ``jax._src`` or relies on undocumented behaviour, but for
`phalanx.job.jax_distributed` and `phalanx.job.hub.coordination_service`, for jobs of several processes.
Names that JAX promises nothing about are sought with `phalanx.runtime.private_names.find`: without one
of them, the function that needs it takes a public way, or raises an error that names it. The page
"Versions" of the design lists them all.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from phalanx.runtime.private_names import Missing, find, need

# -- backends -----------------------------------------------------------------------------------

_initialized = find("Telling whether JAX has started", "jax._src.xla_bridge:backends_are_initialized")
_factories = find("Telling which devices JAX could have", "jax._src.xla_bridge:_backend_factories")


def backends_are_initialized() -> bool:
    """Whether JAX has started its backends, after which the device count is fixed."""
    if not isinstance(_initialized, Missing):
        return bool(_initialized())
    count = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:  # it can no longer change
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def platform_may_exist(platform: str) -> bool:
    """Whether a backend for `platform` could start, judged without starting any backend."""
    if platform == "tpu":  # always registered, so look for the library behind it
        return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None
    if isinstance(_factories, Missing):
        return platform == "cpu" or importlib.util.find_spec("jax_plugins") is not None
    aliases = {"gpu": ("gpu", "cuda", "rocm")}.get(platform, (platform,))
    return any(name in _factories for name in aliases)


# -- jit ---------------------------------------------------------------------------------------------

replica_count_in_jit_key = jax.make_user_context(None)
"""A context manager that keeps programs traced for one number of replicas from serving another.

Functions such as `px.nn.compute_average_loss` ask for the number while they are traced, so it must be
a part of the key under which `jax.jit` caches what it has traced.
"""


# -- arrays -------------------------------------------------------------------------------------

_Array = find("Making arrays without copies", "jax._src.array:ArrayImpl")
_buffers_of = find("Making arrays without copies", "jax._src.array:ArrayImpl._arrays")
_put = find("Copying to several devices at once", "jax._src.interpreters.pxla:batched_device_put")
_first_copy = find("Taking one copy", "jax._src.array:ArrayImpl._fully_replicated_shard")
_maker = find("Taking one copy", "jaxlib._jax:array_result_handler")
_unchecked = {"_skip_checks": True} if "_skip_checks" in (_maker.__doc__ or "") else {}  # until 0.12
_zero_copy = not isinstance(_Array, Missing) and not isinstance(_buffers_of, Missing)


def uncommitted(x: jax.Array) -> jax.Array:
    """The same buffer as `x`, free to follow the computation to another device.

    JAX refuses to combine arrays that are *committed* to different devices. TensorFlow copies silently,
    and ported code relies on it (``sum(strategy.experimental_local_results(x))``), so the single-device
    arrays that Phalanx hands out are uncommitted. Mostly no copy is made.
    """
    if not _is_plain(x) or not x.committed:
        return x
    if _zero_copy:
        return _Array(x.aval, x.sharding, x._arrays, committed=False, _skip_checks=True)  # type: ignore[attr-defined]
    if len(x.sharding.device_set) == 1:
        with jax.default_device(*x.sharding.device_set):
            return jax.numpy.asarray(np.asarray(x))
    return x


def _is_plain(x: Any) -> bool:
    """Whether `x` is an array with buffers: not a tracer, and not an array of keys."""
    if _zero_copy:
        return isinstance(x, _Array)
    return isinstance(x, jax.Array) and not is_tracer(x) and not is_key_array(x)


def movable(x: Any) -> Any:
    """`x` itself, but never committed to a single device."""
    if _is_plain(x) and x.committed and len(x.sharding.device_set) == 1:
        return uncommitted(x)
    return x


def assemble(shape: tuple[int, ...], sharding: Sharding, pieces: Sequence[jax.Array]) -> jax.Array:
    """One global array over `sharding` from its single-device pieces, without copying.

    Like `jax.make_array_from_single_device_arrays`, but cheaper: the caller sees to it that they fit.
    """
    if is_key_array(pieces[0]):  # the keys are a view of the integers below
        data = [jax.random.key_data(piece) for piece in pieces]
        whole = assemble((*shape, *data[0].shape[pieces[0].ndim :]), sharding, data)
        return jax.random.wrap_key_data(whole, impl=jax.random.key_impl(pieces[0]))
    if not _zero_copy:
        return jax.make_array_from_single_device_arrays(shape, sharding, list(pieces))
    aval = jax.core.ShapedArray(shape, pieces[0].dtype)
    buffers = [piece._arrays[0] for piece in pieces]  # type: ignore[attr-defined]
    return _Array(aval, sharding, buffers, committed=True, _skip_checks=True)


def put_pieces(
    shape: tuple[int, ...], sharding: Sharding, pieces: Sequence[Any], devices: Sequence[jax.Device]
) -> jax.Array:
    """One global array over `sharding` from a NumPy array for each device, in device order.

    The cheapest way from the host to several devices. JAX does not copy memory that is aligned to 64
    bytes, so do not write into the arrays afterwards. The dtype must be one that JAX has.
    """
    if isinstance(_put, Missing):
        return assemble(
            shape, sharding, [jax.device_put(x, d) for x, d in zip(pieces, devices, strict=True)]
        )
    return _put(jax.core.ShapedArray(shape, pieces[0].dtype), sharding, pieces, devices)


def put_on(x: Any, device: jax.Device) -> jax.Array:
    """A NumPy array on one device, uncommitted; the cautions of `put_pieces` apply."""
    if isinstance(_put, Missing):
        return uncommitted(jax.device_put(x, device))
    aval = jax.core.ShapedArray(x.shape, x.dtype)
    return _put(aval, _single_device_sharding(device), [x], [device], committed=False)


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
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def one_piece_taker(like: jax.Array, device: jax.Device | None = None) -> Callable[..., jax.Array]:
    """What takes one of the copies behind replicated arrays like this, on `device` if it can."""
    if device is None and _is_plain(like) and Missing not in (type(_first_copy), type(_maker)):
        first = _first_copy(like)
        free = _maker(first.aval, first.sharding, committed=False, **_unchecked)
        return lambda x: free(_first_copy(x))

    def take(x: jax.Array) -> jax.Array:
        buffers = x._arrays if _zero_copy and _is_plain(x) else pieces(x)  # type: ignore[attr-defined]
        return uncommitted(([b for b in buffers if device in b.devices()] or buffers)[0])

    return take


def has_whole_bytes(dtype: Any) -> bool:
    """Whether each element of this dtype has bytes of its own, which int4 has not."""
    return bool(jax.dtypes.itemsize_bits(dtype) % 8 == 0)


def is_key_array(x: Any) -> bool:
    """Whether `x` is an array of typed random keys."""
    return isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_tracer(x: Any) -> bool:
    """Whether `x` stands for a value inside a JAX transformation."""
    return isinstance(x, jax.core.Tracer)


def primal_value(x: Any) -> Any:
    """The value behind the tracers of `grad` and `jvp`; tracers of other kinds have none.

    Outside of `jit` the values that are being differentiated are known all the time.
    """
    while is_tracer(x) and hasattr(type(x), "primal"):  # tracers pass other questions on to their types
        x = x.primal
    return x


def is_staged(x: Any) -> bool:
    """Whether `x` is being staged into a program (`jit`, `scan`, `vmap`, …), so has no value yet."""
    return is_tracer(primal_value(x))


# -- transformations ------------------------------------------------------------------------------

_TRACING = "Telling which transformation is going on"
_top_trace = find(_TRACING, "jax.extend.core:find_top_trace", "jax._src.core:unsafe_get_current_trace")
_trace_of = find("Telling which transformation an array belongs to", "jax.core:Tracer._trace")


def current_trace() -> Any:
    """The JAX transformation that the calling thread is in, as an opaque object."""
    return _top_trace(())


def under_trace(trace: Any) -> AbstractContextManager[Any]:
    """Be in a trace that another thread has begun, for the duration of a ``with`` block."""
    entered: AbstractContextManager[Any] = _set_trace(trace)
    return entered


@functools.cache
def _evaluation() -> Any:
    """What `current_trace` is outside of all transformations."""
    with jax.core.eval_context():
        return current_trace()


def evaluating() -> AbstractContextManager[None]:
    """Compute at once, also while a program is traced; functions that are traced inside are not."""
    return jax.core.eval_context()


def is_transformation(trace: Any) -> bool:
    """Whether a trace is a transformation rather than plain evaluation."""
    return trace is not _evaluation()


def in_transformation() -> bool:
    """Whether the calling thread is in a transformation."""
    return _top_trace(()) is not _evaluation()


def without_differentiation() -> AbstractContextManager[None]:
    """Compute below the differentiation that is going on: with its values, without derivatives.

    `jax.jit` keeps what it has compiled by the trace that it was called under, and each gradient is a
    trace of its own. What is called under it with plain values would be kept again at each step.
    """
    here = trace = current_trace()
    while is_transformation(trace) and isinstance(trace, _kinds()):
        trace = trace.parent_trace
    if trace is here or isinstance(_set_trace, Missing):
        return nullcontext()
    below: AbstractContextManager[None] = _set_trace(trace)
    return below


def belongs_to(x: Any, trace: Any) -> bool:
    """Whether `x` is a tracer that was made under `trace`."""
    need(_trace_of)
    return is_tracer(x) and x._trace is trace


def is_staging(batching: bool = True) -> bool:
    """Whether the calling thread stages a program, or maps with `jax.vmap` if `batching` counts."""
    return staging_since(_evaluation(), batching)


def staging_since(outer: Any, batching: bool = True) -> bool:
    """The same, of what this thread has begun since `outer` was current."""
    trace = current_trace()
    while trace is not outer and is_transformation(trace):
        if not isinstance(trace, _kinds(vmap=not batching)):
            return True
        trace = trace.parent_trace
    return False


@functools.cache
def _kinds(vmap: bool = False) -> tuple[Any, ...]:
    """The kinds of traces of `jvp`, `grad` and perhaps `vmap`, found without starting a backend."""
    kinds: list[type] = []

    def look(x: Any) -> Any:
        kinds.append(type(current_trace()))
        return x

    with jax.core.eval_context():
        jax.jvp(look, (0.0,), (0.0,))
        jax.linearize(look, 0.0)
        if vmap:
            jax.vmap(look)(np.zeros(1))
    return tuple(kinds)


# -- types that JAX should accept as arrays -----------------------------------------------------

_PASSING = "Passing variables to functions of JAX, which works with variable.value(),"
_types = find(_PASSING, "jax._src.core:pytype_aval_mappings")
_canonical = find(_PASSING, "jax._src.dtypes:canonicalize_value_handlers")
_sharders = find(_PASSING, "jax._src.interpreters.pxla:shard_arg_handlers")


def register_array_like(cls: type, read: Callable[[Any], jax.Array]) -> None:
    """Let JAX functions take instances of `cls` wherever they take arrays.

    ``__jax_array__`` alone no longer does this: since 0.10 it is only honoured where a function
    converts explicitly. Registering the type (rather than making it a pytree node) keeps instances
    whole in `jax.tree.map`, so trees of variables stay trees of variables.
    """

    def aval(x: Any) -> Any:
        need(_canonical, _sharders)
        return jax.typeof(read(x))

    def shard(xs: Sequence[Any], *rest: Any) -> Any:
        arrays = [read(x) for x in xs]
        return _sharders[type(arrays[0])](arrays, *rest)

    for registry, handler in ((_types, aval), (_canonical, read), (_sharders, shard)):
        if not isinstance(registry, Missing):
            registry[cls] = handler


# -- a mark in programs ---------------------------------------------------------------------------

SAME_ON_ALL_REPLICAS = "phalanx_same_on_all_replicas"
AGREED_BY_ALL_REPLICAS = "phalanx_agreed_by_all_replicas"
SAME_IN_ALL_PROGRAMS = "phalanx_same_in_all_programs"

_MARKING = "Checking that all replicas write the same"
_Primitive = find(_MARKING, "jax.extend.core:Primitive")
_deflinear = find(_MARKING, "jax.interpreters.ad:deflinear2")
_defvectorized = find(_MARKING, "jax.interpreters.batching:defvectorized")
_register_lowering = find(_MARKING, "jax.interpreters.mlir:register_lowering")


def primitive(name: str) -> Any:
    """A new primitive."""
    need(_Primitive)
    return _Primitive(name)


@functools.cache
def _mark(name: str) -> Any:
    """A primitive that does nothing, and is found in programs by its name."""
    need(_deflinear, _defvectorized, _register_lowering)
    mark = primitive(name)
    mark.def_impl(lambda x, **_: x)
    mark.def_abstract_eval(lambda x, **_: x)
    _deflinear(mark, lambda ct, _, **__: [ct])
    if name != SAME_ON_ALL_REPLICAS:
        _defvectorized(mark)
    _register_lowering(mark, lambda _, x, **__: [x])
    return mark


def mark_same_on_all_replicas(value: Any, label: str) -> Any:
    """The value itself, with a mark in the program that says: all replicas must have the same here."""
    return jax.tree.map(lambda x: _mark(SAME_ON_ALL_REPLICAS).bind(x, label=label), value)


def declare_same_on_all_replicas(x: jax.Array) -> jax.Array:
    """The array itself, with a mark in the program that says: all replicas do have the same here."""
    agreed: jax.Array = _mark(AGREED_BY_ALL_REPLICAS).bind(x)
    return agreed


def mark_same_in_all_programs(x: jax.Array) -> jax.Array:
    """The array itself, with a mark that says: programs for other shapes must compute it alike."""
    marked: jax.Array = _mark(SAME_IN_ALL_PROGRAMS).bind(x)
    return marked


# -- programs -------------------------------------------------------------------------------------

_READING = "Checking what a compiled function does"
_without_dead_code = find(_READING, "jax.interpreters.partial_eval:dce_jaxpr")
_Literal = find(_READING, "jax.extend.core:Literal")
_jaxprs_in = find(_READING, "jax.extend.core:jaxprs_in_params")


def jaxpr_and_result(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """The closed jaxpr of a function, and the shapes of its results."""
    return jax.make_jaxpr(fn, return_shape=True)(*args)


def eval_jaxpr(closed: Any, args: Sequence[Any]) -> list[Any]:
    """Run a closed jaxpr; arguments that it does not use may be anything."""
    return list(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *args))


def used_part(jaxpr: Any) -> Any:
    """A jaxpr without inputs and equations that its results do not need, as far as JAX can tell."""
    return jaxpr if isinstance(_without_dead_code, Missing) else _without_dead_code(jaxpr, True)[0]


def without_unused(closed: Any, outputs: Any = True) -> tuple[Any, list[bool]]:
    """A closed jaxpr without what `outputs` do not need, and for each input whether it is needed."""
    if isinstance(_without_dead_code, Missing) and outputs is True:
        return closed, [True] * len(closed.jaxpr.invars)
    need(_without_dead_code)
    jaxpr, needed = _without_dead_code(closed.jaxpr, outputs)
    return closed.replace(jaxpr=jaxpr), needed


def is_literal(atom: Any) -> bool:
    """Whether an atom of a jaxpr is a constant rather than a variable."""
    return isinstance(atom, _Literal)


def sub_jaxprs(eqn: Any) -> list[Any]:
    """The open jaxprs inside the parameters of an equation."""
    return list(_jaxprs_in(eqn.params))


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants, and how many values that it carries, a scan has: its first inputs."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    if "ft_in" not in eqn.params:  # which is how JAX says it since 0.11
        Missing("the parameter num_consts of scan", _READING).fail()
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


# -- thread state -------------------------------------------------------------------------------

_THREADS = "Giving threads the settings of their caller"
_settings = find(_THREADS, "jax._src.config:config_states")
_unset = find(_THREADS, "jax._src.config:config_ext.unset")
_set_trace = find("Running replicas inside a transformation", "jax.extend.core:set_current_trace")
_tracing = find("Giving threads the named axes of their caller", "jax._src.core:trace_ctx")
_contexts = [
    find(_THREADS, *(f"jax._src.{module}:{name}" for module in modules))
    for name, *modules in (
        ("mesh_context_manager", "config"),
        ("abstract_mesh_context_manager", "mesh", "config"),
        ("device_context", "mesh", "config"),
        ("compute_on_context_manager", "config"),
        ("xla_metadata_context_manager", "config"),
    )
]

_PUBLIC_SETTINGS = """
check_tracer_leaks debug_infs debug_key_reuse debug_nans default_device default_matmul_precision
default_prng_impl disable_jit enable_checks enable_x64 legacy_prng_key log_compiles
numpy_dtype_promotion numpy_rank_promotion threefry_partitionable
"""
"""Settings ``jax_NAME`` whose context manager is ``jax.NAME``."""


class ThreadState:
    """JAX's thread-local settings, captured in one thread to be used in another.

    ``with jax.enable_x64():`` and its relatives set thread-local state that new threads do not
    inherit. Replica threads must see what their caller sees, or replicas would compute different
    things; that includes the transformation that is going on (`jax.grad` around `Strategy.run`).
    """

    def __init__(self) -> None:
        self._apply = _settings_here()
        self._trace = current_trace()
        self._axis_env = None if isinstance(_tracing, Missing) else _tracing.axis_env

    def apply(self) -> None:
        """Install the captured settings in the calling thread."""
        for apply in self._apply:
            apply()
        if is_transformation(self._trace):
            _set_trace(self._trace).__enter__()
        if self._axis_env is not None:
            _tracing.set_axis_env(self._axis_env)


def _settings_here() -> list[Callable[[], None]]:
    """What a new thread must call to have the settings of this one."""
    if isinstance(_settings, Missing) or isinstance(_unset, Missing):
        values = ((name, getattr(jax.config, f"jax_{name}")) for name in _PUBLIC_SETTINGS.split())
        return [getattr(jax, name)(value).__enter__ for name, value in values]
    states = (*_settings.values(), *(x for x in _contexts if not isinstance(x, Missing)))
    local = ((state, state.get_local()) for state in states)
    return [functools.partial(_set, state, value) for state, value in local if value is not _unset]


def _set(state: Any, value: Any) -> None:
    state.set_local(value)
    hook = getattr(state, "_update_thread_local_hook", None)
    if hook is not None:
        hook(value)
