"""`shard`: layouts of what goes into a function and comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.parallel.context import current_options
from phalanx.parallel.device_layout import Layout
from phalanx.parallel.options import AUTO_MODES
from phalanx.parallel.placing import Cuts, factored_mesh, mesh_for, names_of, specs_on
from phalanx.parallel.planning import check_known
from phalanx.parallel.running import current_run
from phalanx.parallel.without_all_to_all import ready_for
from phalanx.runtime import compat
from phalanx.runtime.devices import default_devices
from phalanx.runtime.formatting import shown

__all__ = ["shard"]


def shard(
    fn: Callable[..., Any],
    in_strategy: tuple[Cuts, ...],
    out_strategy: tuple[Cuts, ...] | None = None,
    parameter_plan: Mapping[str, Cuts] | None = None,
) -> Callable[..., Any]:
    """A function whose arguments and results are laid out as given; the rest is up to XLA.

    Layouts count in ``semi_auto_parallel`` and ``auto_parallel``: in a program of `parallelize`, in
    `AutoParallelStrategy.run`, or in `jax.jit` while the context says so. In other modes the function
    is as it was. Gradients are laid out like the arrays that they belong to.

    Args:
        fn: a function of arrays.
        in_strategy: for each positional argument a `Layout`, a tuple with the number of parts of each
            dim, or None if nothing is said of it.
        out_strategy: the same for each result.
        parameter_plan: layouts for arrays in nested arguments, by their names: ``"layer/kernel"``.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from phalanx.parallel import reset_auto_parallel_context, set_auto_parallel_context
        >>> set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4)
        >>> multiply = jax.jit(shard(jnp.matmul, ((2, 1), (1, 2)), ((2, 2),)))
        >>> multiply(jnp.ones((4, 8)), jnp.ones((8, 4))).sharding.shard_shape((4, 4))
        (2, 2)
        >>> reset_auto_parallel_context()
    """
    if not callable(fn):
        raise InvalidTypeError(f"shard needs a function. Received: {shown(fn)}")
    inputs = _checked("in_strategy", in_strategy)
    outputs = None if out_strategy is None else _checked("out_strategy", out_strategy)
    plan = {_path(name): cuts for name, cuts in (parameter_plan or {}).items()}

    def sharded(*args: Any, **kwargs: Any) -> Any:
        mesh = _mesh([*inputs, *(outputs or ()), *plan.values()])
        if mesh is None or mesh.size == 1:
            return fn(*args, **kwargs)
        if len(inputs) != len(args):
            raise InvalidValueError(
                f"in_strategy has a layout for each positional argument. Received: {len(inputs)} "
                f"layouts, {len(args)} arguments"
            )
        given = _with_parameters(mesh, _constrained(mesh, args, inputs), plan)
        results = fn(*given, **kwargs)
        if outputs is None:
            return results
        listed = results if isinstance(results, tuple) else (results,)
        if len(listed) != len(outputs):
            raise InvalidValueError(
                f"out_strategy has a layout for each result. Received: {len(outputs)} layouts, "
                f"{len(listed)} results"
            )
        found = _constrained(mesh, listed, outputs)
        return found if isinstance(results, tuple) else found[0]

    return sharded


def _checked(name: str, strategy: Any) -> tuple[Cuts, ...]:
    if not isinstance(strategy, tuple):
        raise InvalidTypeError(f"{name} must be tuple type, but got:{type(strategy)}")
    for cuts in strategy:
        if cuts is None or isinstance(cuts, Layout):
            continue
        if not isinstance(cuts, tuple):
            raise InvalidTypeError(
                f"The {name}: {strategy} is not valid, its elements are tuples, layouts or None, "
                f"but got:{type(cuts)}"
            )
        for count in cuts:
            if type(count) is not int:
                raise InvalidTypeError(
                    f"The {name}: {strategy} is not valid, the value of strategy must be int type, "
                    f"but got:{type(count)}"
                )
    return strategy


def _path(name: str) -> str:
    """The name of a parameter as plans write it, from MindSpore's ``self.layer.kernel``."""
    return name.removeprefix("self.").replace(".", "/")


def _mesh(given: Sequence[Cuts]) -> Mesh | None:
    """The devices that layouts are for here; None if they do not count."""
    run = current_run()
    if run is None:
        options = current_options()
        if options.parallel_mode not in AUTO_MODES:
            return None
        devices = default_devices()[: options.device_num]
        return mesh_for(given, devices) or factored_mesh(devices)
    if run.divided or run.options.parallel_mode not in AUTO_MODES:
        return None
    if run.mesh is None:
        raise InvalidValueError(
            "A program with px.parallel.shard is searched on one mesh. Give parallelize or "
            "AutoParallelStrategy a mesh, as mesh=px.parallel.Layout((2, 4), ('data', 'model')).mesh()."
        )
    return run.mesh


def _constrained(mesh: Mesh, values: Sequence[Any], strategy: Sequence[Cuts]) -> tuple[Any, ...]:
    said = [i for i, cuts in enumerate(strategy) if cuts is not None]
    for i in said:
        if not hasattr(values[i], "shape"):
            raise InvalidTypeError(
                "A nest of arrays is laid out by names, with parameter_plan; write None for it here. "
                f"Received: {shown(values[i])}"
            )
    shapes = [values[i].shape for i in said]
    specs = specs_on(mesh, [strategy[i] for i in said], shapes, [f"argument {i}" for i in said])
    found = list(values)
    for i, spec in zip(said, specs, strict=True):
        found[i] = _laid_out(values[i], mesh, spec)
    return tuple(found)


def _laid_out(x: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    run = current_run()
    if run is not None and not run.options.enable_alltoall and not compat.is_staging():
        x = ready_for(x, mesh, spec)  # programs are rewritten as a whole
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _with_parameters(mesh: Mesh, args: tuple[Any, ...], plan: Mapping[str, Cuts]) -> tuple[Any, ...]:
    if not plan:
        return args
    names = [name for arg in args for name in names_of(arg)]
    check_known(plan, names)
    leaves, structure = jax.tree.flatten(args)
    said = [i for i, name in enumerate(names) if name in plan]
    cuts = [plan[names[i]] for i in said]
    specs = specs_on(mesh, cuts, [leaves[i].shape for i in said], [names[i] for i in said])
    for i, spec in zip(said, specs, strict=True):
        leaves[i] = _laid_out(leaves[i], mesh, spec)
    found: tuple[Any, ...] = jax.tree.unflatten(structure, leaves)
    return found
