"""`AutoParallelStrategy`: variables and batches laid out over devices by a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.core import context as ctx
from phalanx.core.strategy import Strategy
from phalanx.core.variables.traced_variables import compile_with, in_program, rewrite_program
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import InitialValue, VariableSpec
from phalanx.errors import ContextError, InvalidOptionsError, InvalidValueError
from phalanx.execution.eager import run_replicas
from phalanx.execution.gradients import gradients_by
from phalanx.parallel import layout_files
from phalanx.parallel.communication import compiler_options
from phalanx.parallel.context import current_options, options_in_force
from phalanx.parallel.hardware import Hardware
from phalanx.parallel.laid_out_extended import LaidOutExtended
from phalanx.parallel.laid_out_variable import LaidOutVariable, initial_parts, initial_shape
from phalanx.parallel.options import AUTO_MODES, changed
from phalanx.parallel.parallelizing import Setup, set_up
from phalanx.parallel.placing import Cuts, batch_spec, factored_mesh, fitting, specs_on
from phalanx.parallel.plan import Plan
from phalanx.parallel.planning import dataset_cuts
from phalanx.parallel.running import ParallelRun, in_run
from phalanx.parallel.spanning import all_devices, placed
from phalanx.parallel.step_options import StepGradients, rewriting
from phalanx.parallel.storing import is_named, like, made_in_parts, stored
from phalanx.runtime import compat
from phalanx.runtime.devices import DeviceLike, device_name
from phalanx.runtime.formatting import shown

__all__ = ["AutoParallelStrategy"]


class AutoParallelStrategy(Strategy):
    """One model over several devices, laid out by a plan or by given layouts.

    There is one replica, which sees whole arrays: the global batch, and all of each variable. Each
    device holds a part of them, and computes a part. Variables are made in parts, so that a model that
    fits no single device can be made.

    Args:
        plan: from `px.parallel.search`, or its file. Variables with the names of its parameters are
            laid out by it, and batches like its inputs. None if layouts are given, or if `search`
            follows.
        devices: to use; by default all accelerators, or all CPU devices where there is none.
        mesh: of the layouts, in place of devices.
        parameter_plan: the layouts of variables by name: a `px.parallel.Layout`, a `PartitionSpec`, or
            a tuple with the number of parts of each dim. Other variables are whole on every device.
        hardware: what the devices can do; see `px.parallel.search`.
        memory: the bytes that each device may hold; see `px.parallel.search`.
        time_limit: the seconds that a search may take.
        cluster_resolver: finds the workers whose devices are used, if none are given; by default the
            environment variable TF_CONFIG, which `phalanx run` sets. All run the same program.
        **options: MindSpore's options by their names, in place of those of the context.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.AutoParallelStrategy(
        ...     devices=["CPU:0", "CPU:1"], parameter_plan={"w": (2, 1)})
        >>> with strategy.scope():
        ...     w = px.Variable(lambda: jnp.ones((4, 2)), name="w")
        >>> w.sharding.shard_shape(w.shape)
        (2, 2)
        >>> strategy.run(lambda x: jnp.sum(x @ w), args=(jnp.ones((8, 4)),))
        Array(64., dtype=float32)
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        devices: Sequence[DeviceLike] | None = None,
        mesh: Mesh | None = None,
        parameter_plan: Mapping[str, Cuts] | None = None,
        hardware: Hardware | str | None = None,
        memory: float | None = None,
        time_limit: float | None = None,
        cluster_resolver: ClusterResolver | None = None,
        **options: Any,
    ) -> None:
        wanted = changed(current_options(), options)
        if "parallel_mode" not in options and wanted.parallel_mode not in AUTO_MODES:
            wanted = changed(wanted, {"parallel_mode": "auto_parallel" if plan else AUTO_MODES[0]})
        if wanted.parallel_mode not in AUTO_MODES:
            raise InvalidOptionsError(
                f"AutoParallelStrategy is for {' and '.join(AUTO_MODES)}. Use px.MirroredStrategy for "
                "data_parallel, px.OneDeviceStrategy for stand_alone, and px.parallel.parallelize for "
                f"all modes. Received: parallel_mode={wanted.parallel_mode!r}"
            )
        limits = {"memory": memory, "time_limit": time_limit}
        if devices is None and mesh is None:
            devices = all_devices(cluster_resolver)
        setup = set_up(wanted, devices, mesh, parameter_plan, (), plan, hardware, **limits)
        super().__init__(AutoParallelExtended(self, setup))

    @property
    def plan(self) -> Plan | None:
        """The plan, if there is one."""
        return self._laid_out._planner.first or self._laid_out._setup.plan

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self._laid_out._mesh

    def search(
        self,
        loss: Callable[..., Any],
        example_args: Sequence[Any],
        parameters: int | Sequence[int] = 0,
    ) -> Plan:
        """Find a plan for a loss, and lay out by it all variables that are made from now on.

        Args:
            loss: a function of parameters, as nests with the names of variables, and a batch.
            example_args: its arguments; `jax.ShapeDtypeStruct` will do for arrays.
            parameters: the numbers of the arguments that are parameters.
        """
        return self._laid_out._search(loss, tuple(example_args), parameters)

    @property
    def _laid_out(self) -> AutoParallelExtended:
        extended = self.extended
        assert isinstance(extended, AutoParallelExtended)
        return extended


class AutoParallelExtended(LaidOutExtended):
    """What `AutoParallelStrategy` does."""

    def __init__(self, container_strategy: Strategy, setup: Setup) -> None:
        super().__init__(container_strategy)
        self._setup = setup
        self._mesh = factored_mesh(setup.devices) if setup.mesh is None else setup.mesh
        self._has_variables = False
        self._planner = setup.planner()
        self._layouts: dict[str, Cuts] = {}
        if setup.plan is not None:
            self._layouts |= {n: t.spec for n, t in setup.plan.parameters.items()}
        self._layouts |= setup.parameter_plan
        self._inputs = [] if setup.plan is None else list(setup.plan.inputs.values())
        self._known: dict[str, tuple[tuple[int, ...], PartitionSpec]] = {}
        self._run: ParallelRun | None = None
        self._has_files = False

    def _write_files(self) -> None:
        """Write the files that options ask for, when the first step runs and variables are there."""
        if not self._has_files and self._known:
            self._has_files = True
            inputs = {tensor.name: (tensor.shape, tensor.spec) for tensor in self._inputs}
            plan = self._planner.first or self._setup.plan
            layout_files.write(self._setup.options, self._mesh, self._known, inputs, plan)

    def _search(self, loss: Callable[..., Any], args: tuple[Any, ...], parameters: Any) -> Plan:
        if self._has_variables:
            raise ContextError(
                "A plan must be known before variables are made, because they are laid out by it. Call "
                "strategy.search first, with jax.ShapeDtypeStruct in place of arrays."
            )
        with options_in_force(self._setup.options):
            self._planner.laid_out(loss, args, parameters)
        plan = self._planner.first
        assert plan is not None
        self._mesh = self._planner.mesh_of(plan)
        self._planner.mesh = self._mesh
        self._layouts = {n: t.spec for n, t in plan.parameters.items()}
        self._inputs = list(plan.inputs.values())
        return plan

    # -- one replica over all devices ------------------------------------------------------------------

    @property
    def _replica_devices(self) -> tuple[jax.Device]:
        here = jax.process_index()
        return (next(d for d in self._mesh.devices.flat if d.process_index == here),)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this process that compute, as canonical device strings."""
        here = jax.process_index()
        return tuple(device_name(d) for d in self._mesh.devices.flat if d.process_index == here)

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        with jax.ensure_compile_time_eval():
            first = jnp.int32(0)
        options = self._setup.options
        if options.force_fp32_communication and not in_program():
            raise InvalidOptionsError(
                "force_fp32_communication changes programs, and in an eager step each operation is a "
                "program of its own. Run the step in px.function. "
                f"Received: an eager run of {shown(fn)}"
            )
        self._write_files()
        compile_with(compiler_options(options, self._mesh.devices.flat[0].platform))
        rewrite_program(id(self), rewriting(options, self._mesh))
        with in_run(self._present_run()), options_in_force(options), gradients_by(StepGradients()):
            devices = self._replica_devices
            return run_replicas(self._strategy, devices, [first], fn, tuple(args), kwargs)

    def _present_run(self) -> ParallelRun:
        """The same as long as no variable is made, so that eager steps find what was compiled."""
        if self._run is None or self._run.known != self._known:
            options = self._setup.options
            planner = self._planner if options.parallel_mode == "auto_parallel" else None
            self._run = ParallelRun(self._mesh, options, planner=planner, known=dict(self._known))
        return self._run

    # -- variables ---------------------------------------------------------------------------------

    def _create_variable_from(self, initial: InitialValue, kinds: tuple[Any, ...]) -> Variable:
        shape, initial = initial_shape(initial)
        given = tuple(initial.shape) if initial.shape is not None else tuple(shape.shape)
        if given != tuple(shape.shape):
            raise InvalidValueError(
                f"The initial value of variable {initial.name!r} does not have the shape that was "
                f"asked for. Received: shape={given} and an initial value of shape {tuple(shape.shape)}"
            )
        options, used = self._setup.options, self.layout_of(initial.name, shape).spec
        sharding = NamedSharding(self._mesh, stored(used, shape, self._mesh, options))
        value = initial_parts(initial, sharding, options.init_param_in_compile)
        self._has_variables = True
        if initial.name is not None:
            self._known[initial.name] = tuple(shape.shape), used
        return LaidOutVariable(VariableSpec(value, *kinds), self._strategy, sharding)

    def _computed(self, make: Callable[[Any], Any], values: list[Any]) -> Any:
        """Each device makes its own part; what is like a value is laid out as that is."""
        known = {str(i): (x.shape, x.sharding.spec) for i, x in enumerate(values)}

        def sharding(path: Any, x: Any) -> NamedSharding:
            spec = like(keystr(path, simple=True, separator="/"), x.shape, known)
            return NamedSharding(self._mesh, PartitionSpec() if spec is None else spec)

        with compat.evaluating():
            try:
                shapes = jax.eval_shape(make, values)
            except jax.errors.ConcretizationTypeError:  # it looks at what it computes
                return make(values)
            if not jax.tree.leaves(shapes):
                return shapes  # nothing but structure
            return made_in_parts(make, tree_map_with_path(sharding, shapes), values)

    def layout_of(self, name: str, value: Any) -> NamedSharding:
        """The layout of a variable: by its name, that of its neighbour or of its value, or whole."""
        for known, cuts in self._layouts.items():
            if is_named(name, known) and known:
                spec = specs_on(self._mesh, [cuts], [value.shape], [name])[0]
                return NamedSharding(self._mesh, spec)
        neighbour = ctx.colocated_with()
        if isinstance(neighbour, LaidOutVariable) and neighbour.shape == tuple(value.shape):
            return neighbour.sharding
        present = getattr(value, "sharding", None)
        if isinstance(present, NamedSharding) and present.mesh == self._mesh:
            return present
        return NamedSharding(self._mesh, PartitionSpec())

    # -- input -------------------------------------------------------------------------------------

    def _input_place(self) -> Callable[[int, Any], Any]:
        options, mesh, planned = self._setup.options, self._mesh, self._inputs
        strategy = "full_batch" if options.full_batch else options.dataset_strategy

        def place(number: int, rows: Any) -> jax.Array:
            if strategy == "full_batch":
                spec = PartitionSpec()
            elif not isinstance(strategy, str):
                names = [f"input {i}" for i in range(max(len(strategy), number + 1))]
                cuts = dataset_cuts(options, names)[names[number]]
                spec = fitting(mesh, cuts, rows.shape, names[number])
            elif number < len(planned) and len(planned[number].shape) == rows.ndim:
                spec = fitting(mesh, planned[number].spec, rows.shape, planned[number].name)
            else:
                spec = batch_spec(rows.shape, mesh.shape)
            found: jax.Array = placed(rows, NamedSharding(mesh, spec))
            return found

        return place
