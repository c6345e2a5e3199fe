"""`parallelize`: a plain function of JAX in one of MindSpore's five modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from phalanx.core.run_hooks import say_once
from phalanx.errors import InvalidOptionsError, InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.parallel import layout_files, modes, placing
from phalanx.parallel.arrays_of import (
    OtherResults,
    argument_numbers,
    dtype_of,
    is_array,
    merged,
    with_others,
)
from phalanx.parallel.combinations import check_together
from phalanx.parallel.context import current_options
from phalanx.parallel.hardware import Hardware
from phalanx.parallel.options import AUTO_MODES, ParallelOptions, changed
from phalanx.parallel.placing import Cuts, factored_mesh, names_of
from phalanx.parallel.plan import Plan
from phalanx.parallel.planning import Planner, given_plan, that_fit
from phalanx.parallel.ready import ReadyProgram
from phalanx.parallel.running import ParallelRun, value_and_grad
from phalanx.parallel.spanning import (
    all_devices,
    check_same,
    dispatched,
    fingerprint,
    from_first_device,
    placed,
    spans_workers,
)
from phalanx.parallel.storing import Known, made_in_parts
from phalanx.parallel.uneven_batches import of_parts
from phalanx.runtime import compat
from phalanx.runtime.devices import DeviceLike, default_devices, resolve_devices
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import REPLICA_AXIS, replica_mesh

__all__ = ["Parallelized", "Setup", "parallelize", "set_up"]


@dataclass(frozen=True)
class Setup:
    """Where and how functions run.

    Args:
        options: that are in force.
        devices: all of them.
        mesh: of the layouts that are given; None if a plan or the mode decides.
        parameter_plan: layouts of parameters.
        layerwise: parameters of which each device has its own part.
        plan: that was made before.
        hardware: of the devices.
        limits: of the search.
        loaded: the names of the layouts that a strategy file gave.
    """

    options: ParallelOptions
    devices: tuple[jax.Device, ...]
    mesh: Mesh | None
    parameter_plan: Mapping[str, Cuts]
    layerwise: Mapping[str, PartitionSpec]
    plan: Plan | None
    hardware: Hardware | str | None
    limits: Mapping[str, Any]
    loaded: frozenset[str] = frozenset()

    def planner(self) -> Planner:
        """Who finds plans for losses."""
        return Planner(
            self.options,
            self.devices,
            self.mesh,
            self.hardware,
            self.limits,
            self.parameter_plan,
            self.plan,
            self.loaded,
        )


def set_up(
    options: ParallelOptions,
    devices: Sequence[DeviceLike] | None = None,
    mesh: Mesh | None = None,
    parameter_plan: Mapping[str, Cuts] | None = None,
    layerwise_parallel: Sequence[str] | Mapping[str, Any] = (),
    plan: Plan | str | Path | None = None,
    hardware: Hardware | str | None = None,
    **limits: Any,
) -> Setup:
    """Check that options go together, and say where programs run."""
    if mesh is not None and devices is not None:
        raise InvalidValueError(
            f"Give a mesh, or devices, not both. Received: mesh={mesh}, devices={shown(devices)}"
        )
    mesh = None if mesh is None else placing.with_auto_axes(mesh)
    available = _available(options, devices, mesh)
    check_together(options, len(available))
    _check_acting(options)
    chosen = available[: 1 if options.parallel_mode == "stand_alone" else options.device_num]
    if mesh is not None and len(chosen) != len(available):
        raise InvalidOptionsError(
            "The mesh has another number of devices than device_num says. "
            f"Received: a mesh of {mesh.size} devices, device_num={options.device_num}"
        )
    if spans_workers(chosen) and len({d.process_index for d in chosen}) < jax.process_count():
        raise InvalidOptionsError(
            "All workers must take part, each with a device. "
            f"Received: {len(chosen)} devices of {len(available)}, on {jax.process_count()} workers"
        )
    _check_mode(options.parallel_mode, parameter_plan, layerwise_parallel, plan)
    cuts, loaded = dict(parameter_plan or {}), dict[str, tuple[int, ...]]()
    given = given_plan(plan)
    if given is None and options.strategy_ckpt_load_file:
        given, loaded = layout_files.load(options.strategy_ckpt_load_file)
        cuts = {**loaded, **cuts}
    if given is not None and options.parallel_mode == "semi_auto_parallel":
        cuts = {**{name: tensor.spec for name, tensor in given.parameters.items()}, **cuts}
    if given is not None and mesh is None:
        if given.mesh.size > len(chosen):
            raise InvalidValueError(
                f"The plan is for {given.mesh.size} devices ({given.mesh}). Received: {len(chosen)}."
            )
        mesh = given.device_mesh(chosen)
    strategy = options.dataset_strategy
    if mesh is None and options.parallel_mode in AUTO_MODES:
        mesh = placing.mesh_for(
            [*cuts.values(), *(() if isinstance(strategy, str) else strategy)], chosen
        )
    own, of_file = (
        placing.layerwise_specs(layerwise_parallel),
        frozenset(loaded) - set(parameter_plan or ()),
    )
    return Setup(options, chosen, mesh, cuts, own, given, hardware, limits, of_file)


def _available(
    options: ParallelOptions, devices: Sequence[DeviceLike] | None, mesh: Mesh | None
) -> tuple[jax.Device, ...]:
    if mesh is not None:
        return tuple(mesh.devices.flat)
    if devices is not None:
        if isinstance(devices, str | int) or not devices:
            raise InvalidTypeError(f"devices is a list of one device or more. Received: {devices!r}")
        if all(isinstance(device, jax.Device) for device in devices):
            return tuple(devices)  # perhaps of several processes
        return resolve_devices(devices)
    return default_devices() if options.parallel_mode == "stand_alone" else all_devices()


_PIPELINE = (
    "pipeline_stages",
    "pipeline_segments",
    "pipeline_result_broadcast",
    "pipeline_interleave",
    "pipeline_scheduler",
    "auto_pipeline",
)
_ELSEWHERE = {
    **dict.fromkeys(
        _PIPELINE,
        "Stages need micro batches: give px.parallel.PipelineCell(network, micro_size), or call "
        "px.parallel.pipeline",
    ),
}
"""Options that no program of this module acts on, and why."""


def _check_acting(options: ParallelOptions) -> None:
    """Refuse options that would be ignored."""
    default = ParallelOptions()
    for name, reason in _ELSEWHERE.items():
        if getattr(options, name) != getattr(default, name):
            raise UnsupportedError(
                f"{reason}. Leave the option at {getattr(default, name)!r}. "
                f"Received: {name}={getattr(options, name)!r}"
            )


def _check_mode(mode: str, parameter_plan: Any, layerwise: Any, plan: Any) -> None:
    wrong = [
        f"{name} is for {' and '.join(allowed)}"
        for name, value, allowed in (
            ("parameter_plan", parameter_plan, AUTO_MODES),
            ("plan", plan, AUTO_MODES),
            ("layerwise_parallel", layerwise, ("hybrid_parallel",)),
        )
        if value and mode not in allowed
    ]
    if wrong:
        raise InvalidOptionsError(
            f"{'; '.join(wrong)}. Received: parallel_mode={mode!r}",
        )


def parallelize(
    function: Callable[..., Any],
    example_args: Sequence[Any],
    *,
    parameters: int | Sequence[int] = 0,
    devices: Sequence[DeviceLike] | None = None,
    mesh: Mesh | None = None,
    parameter_plan: Mapping[str, Cuts] | None = None,
    layerwise_parallel: Sequence[str] | Mapping[str, Any] = (),
    plan: Plan | str | Path | None = None,
    hardware: Hardware | str | None = None,
    memory: float | None = None,
    time_limit: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    **options: Any,
) -> Parallelized:
    """A function of JAX in one of the five modes, compiled, and the shardings of its arguments.

    The function is a loss, or a whole step that calls `value_and_grad`. It is written for one device
    and one batch; `parallel_mode` says how many devices compute it:

    * ``stand_alone``: one.
    * ``data_parallel``: each has a part of the batch and all parameters.
    * ``hybrid_parallel``: the same, and the function itself communicates along the axis "replica".
    * ``semi_auto_parallel``: arrays are laid out as `parameter_plan`, `shard` and ``dataset_strategy``
      say. XLA spreads the layouts.
    * ``auto_parallel``: the layout of everything is searched.

    Args:
        function: takes and returns nests of arrays.
        example_args: its arguments; `jax.ShapeDtypeStruct` will do for arrays. Other shapes are
            compiled when they come.
        parameters: the numbers of the arguments that are parameters, or other state of a step. The
            others are batches.
        devices: to use; by default all accelerators, or all CPU devices where there is none.
        mesh: of the layouts that are given, in place of devices.
        parameter_plan: the layouts of parameters by name: a `Layout`, a `PartitionSpec`, or a tuple
            with the number of parts of each dim.
        layerwise_parallel: the names of parameters of which each device has its own part, cut along the
            first dim; or their layouts along the axis "replica", by name.
        plan: for ``auto_parallel``, made before; or its file.
        hardware: what the devices can do; see `search`.
        memory: the bytes that each device may hold; see `search`.
        time_limit: the seconds that the search may take.
        donate_argnums: the arguments whose memory the results may have.
        **options: MindSpore's options by their names, in place of those of the context.

    Examples:
        >>> import jax.numpy as jnp
        >>> def loss(w, x):
        ...     return jnp.sum((x @ w) ** 2)
        >>> args = jnp.ones((4, 2)), jnp.ones((8, 4))
        >>> program = parallelize(loss, args, devices=["CPU:0", "CPU:1"], parallel_mode="data_parallel")
        >>> float(program(*args)), program.arguments[1].spec
        (256.0, P('replica',))
    """
    if not callable(function):
        raise InvalidTypeError(f"parallelize needs a function. Received: {shown(function)}")
    wanted = changed(current_options(), options)
    limits = {"memory": memory, "time_limit": time_limit}
    setup = set_up(wanted, devices, mesh, parameter_plan, layerwise_parallel, plan, hardware, **limits)
    given = tuple(example_args)
    numbers = argument_numbers("parameters", parameters, len(given))
    donated = argument_numbers("donate_argnums", donate_argnums, len(given))
    return Parallelized(function, given, numbers, donated, setup)


class Parallelized:
    """A function in one of the five modes. Call it as the function itself.

    It is compiled for each shape of arguments. Parameters have the same layouts in all of them. A batch
    that cannot be divided evenly is computed exactly, with less parallelism.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        example_args: tuple[Any, ...],
        parameters: tuple[int, ...],
        donated: tuple[int, ...],
        setup: Setup,
    ) -> None:
        self._function, self._setup, self._parameters = function, setup, parameters
        self._donated = donated
        self._programs: dict[Any, modes.ParallelProgram] = {}
        self._ready: dict[Any, ReadyProgram] = {}
        self._planner = setup.planner()
        self._has_state = False
        self._first = self._program(example_args, False)
        arrays, self._others = self._parts(example_args)
        self._shapes = jax.eval_shape(lambda *x: x, *arrays)
        layout_files.write(setup.options, self.mesh, self._first.known, self._inputs(), self.plan)

    @property
    def mode(self) -> str:
        """The mode, by MindSpore's name."""
        return self._setup.options.parallel_mode

    @property
    def plan(self) -> Plan | None:
        """The plan, in ``auto_parallel``."""
        return self._planner.first

    @property
    def arguments(self) -> Any:
        """A nest of shardings like the example arguments."""
        return self._first.arguments

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        found: Mesh = jax.tree.leaves(self.arguments)[0].mesh
        return found

    @property
    def layouts(self) -> dict[str, PartitionSpec]:
        """The layouts of the parameters, by name."""
        return {name: spec for name, (_, spec) in self._first.known.items()}

    def __call__(self, *args: Any) -> Any:
        """What the function returns for these arguments."""
        return self._run(args, False)

    def value_and_grad(self, *args: Any) -> Any:
        """The value of the function, and its gradients for the parameters.

        They are those of one device if the loss is a sum over the examples of the batch, or, with
        ``gradients_mean=True``, a mean.
        """
        return self._run(args, True)

    def place(self, *args: Any) -> Any:
        """All arguments on the devices, each part where it is needed."""
        return placed(self._parts(args)[0], self._program(args, False).arguments)

    def create(self, make: Callable[..., Any], *args: Any, argument: int | None = None) -> Any:
        """Make a state on the devices; each makes its own part, so the whole need not fit one.

        Args:
            make: returns a state like the example argument.
            *args: of `make`, such as a random key.
            argument: which argument it is for; the first parameter by default.
        """
        number = self._parameters[0] if argument is None else argument
        shardings = jax.tree.leaves(self.arguments[number])
        others = OtherResults()
        arrays = others.left_out(make)
        found, wanted = names_of(jax.eval_shape(arrays, *args)), names_of(self._shapes[number])
        if found != wanted:
            strange = [f"has {n!r}" for n in found if n not in wanted]
            strange += [f"lacks {n!r}" for n in wanted if n not in found]
            raise InvalidValueError(
                f"The state that was made is not like argument {number}: it "
                f"{', '.join(strange[:8]) or 'has another order'}. Received: a state of {len(found)} "
                f"arrays, for an argument of {len(wanted)}"
            )

        def leaves(*args: Any) -> Any:
            return jax.tree.leaves(arrays(*args))

        in_parts = self._setup.options.init_param_in_compile
        made = made_in_parts(leaves, shardings, *args) if in_parts else placed(leaves(*args), shardings)
        nest = jax.tree.unflatten(jax.tree.structure(self._shapes[number]), made)
        return merged(nest, self._others[number])  # of which the programs are known

    def held(self, value: Any, rank: int | None = None) -> Any:
        """What one device holds of a nest of arrays; by default the one of ``global_rank``."""
        number = self._setup.options.global_rank if rank is None else rank
        if not 0 <= number < self.mesh.size:
            raise InvalidValueError(f"There are {self.mesh.size} devices. Received: rank={number}")
        device = self.mesh.devices.flat[number]

        def part(x: Any) -> Any:
            shards = x.addressable_shards if isinstance(x, jax.Array) else []
            if found := [s.data for s in shards if s.device == device]:
                return found[0]
            raise InvalidValueError(
                "Only what a program has placed or returned is on its devices; call `place` first. "
                f"Received: {shown(x)}, asked for what {device} has of it"
            )

        return jax.tree.map(part, value)

    def lower(self, *args: Any) -> Any:
        """The lowered program for these arguments, as `jax.jit` gives it."""
        return self._program(args, False).call.lower(*self._parts(args)[0])

    def __repr__(self) -> str:
        name = getattr(self._function, "__name__", self._function)
        return f"<px.parallel.Parallelized {name} in {self.mode} on {self.mesh.size} device(s)>"

    def _inputs(self) -> Known:
        """The shapes and layouts of the arguments that are no parameters."""
        found = {}
        for i, arg in enumerate(self._shapes):
            if i not in self._parameters:
                leaves = zip(
                    names_of(arg), jax.tree.leaves(arg), jax.tree.leaves(self.arguments[i]), strict=True
                )
                for name, leaf, sharding in leaves:
                    path = f"arg{i}/{name}" if name else f"arg{i}"
                    found[path] = (tuple(leaf.shape), sharding.spec)
        return found

    # -- programs ------------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], differentiated: bool) -> Any:
        name = getattr(self._function, "__name__", "function")
        leaves, structure = jax.tree.flatten(args)
        ready = self._ready.get((differentiated, structure))
        if ready is not None and ready.takes(leaves) and not compat.is_staging():
            program = ready.program
            return program.others.put_back(dispatched(program.call, args, self._setup.devices, name))
        program = self._program(args, differentiated)
        arrays = self._parts(args)[0]
        if compat.is_staging() or any(map(compat.is_tracer, leaves)):  # a part of a larger program
            results = program.inner(*jax.device_put(arrays, program.arguments))[0]
            return program.others.put_back(results)
        arrays = tuple(self._first_state(arrays, program))
        if all(map(is_array, leaves)):
            placed_leaves = jax.tree.leaves(arrays)
            self._ready[differentiated, structure] = ReadyProgram.for_arrays(program, placed_leaves)
        return program.others.put_back(dispatched(program.call, arrays, self._setup.devices, name))

    def _first_state(self, arrays: Sequence[Any], program: modes.ParallelProgram) -> Sequence[Any]:
        """Arguments on the devices; of the first call, with a state that all workers have."""
        if self._has_state:
            return placed(arrays, program.arguments)
        self._has_state = True
        state = {i: arrays[i] for i in self._parameters}
        broadcast = self._setup.options.parameter_broadcast
        if spans_workers(self._setup.devices) and not broadcast:
            check_same("state", fingerprint(state), "Set parameter_broadcast=True, or the same seed.")
        found = list(placed(arrays, program.arguments))
        if broadcast:
            for i in state:
                found[i] = from_first_device(found[i])
        return found

    def _parts(self, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """The arrays of arguments, and everything else, which programs have in them."""
        arrays = jax.tree.map(lambda x: x if is_array(x) else None, args)
        others = jax.tree.map(lambda x: None if is_array(x) else x, args)
        return arrays, others

    def _program(self, args: tuple[Any, ...], differentiated: bool) -> modes.ParallelProgram:
        arrays, others = self._parts(args)
        leaves, structure = jax.tree.flatten(arrays)
        statics = tuple(jax.tree.leaves(others))
        shapes = tuple((np.shape(x), dtype_of(x)) for x in leaves)
        key = (differentiated, structure, shapes, statics)
        if key not in self._programs:
            abstract = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*s) for s in shapes])
            self._programs[key] = self._build(abstract, others, differentiated)
        return self._programs[key]

    def _build(self, arrays: Any, static: Any, differentiated: bool) -> modes.ParallelProgram:
        function = with_others(self._function, static)
        numbers: Any = self._parameters[0] if len(self._parameters) == 1 else self._parameters
        if differentiated:
            function = value_and_grad(function, numbers)
        donated = () if differentiated else self._donated
        others = OtherResults()
        function = others.left_out(function)
        task = modes.ParallelTask(function, arrays, self._parameters, self._setup.options, donated)
        try:
            return replace(_build_in_mode(task, self._setup, self._planner), others=others)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise InvalidOptionsError(
                f"The function communicates along an axis by itself ({error}). It may do so in "
                "hybrid_parallel and data_parallel, where each device has its part of the batch and "
                f"the axis is {REPLICA_AXIS!r}. In the other modes it sees whole arrays, and needs no "
                f"communication. Received: parallel_mode={self.mode!r}"
            ) from error


def _build_in_mode(task: modes.ParallelTask, setup: Setup, planner: Planner) -> modes.ParallelProgram:
    mode = setup.options.parallel_mode
    if mode == "auto_parallel":
        return modes.planned(task, planner)
    if mode in ("data_parallel", "hybrid_parallel"):
        return of_parts(task, replica_mesh(setup.devices), setup.layerwise)
    mesh = factored_mesh(setup.devices) if setup.mesh is None else setup.mesh
    owned = zip(task.names(), task.shapes(), task.states(), strict=True)
    shapes = {name: shape for name, shape, is_state in owned if is_state}
    wanted, notes = that_fit(mesh, setup.parameter_plan, shapes, setup.loaded)
    for note in notes:
        say_once(note)
    specs, known = modes.laid_out(task, mesh, wanted)
    return modes.whole(task, ParallelRun(mesh, task.options), specs, known)
