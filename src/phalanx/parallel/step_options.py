"""What options of the context make of the steps of a strategy, in which variables are read and written.

`parallelize` has a function of arrays, which it can trace as often as it likes. A step of a strategy is
traced by `px.function`, so what a mode does to a program is done to what was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.core.variables.variable import Variable
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.running import current_run, finished_gradients
from phalanx.parallel.wide_sums import marked_gradient, with_wide_marked_gradients, with_wide_sums
from phalanx.parallel.without_all_to_all import without_all_to_all
from phalanx.runtime import compat

__all__ = ["finished", "rewriting"]


def finished(variables: Sequence[Variable], gradients: Sequence[Any]) -> Sequence[Any]:
    """The gradients of variables, as the options of the run want them."""
    run = current_run()
    if run is None:
        return gradients
    if run.options.gradient_fp32_sync:
        gradients = [marked_gradient(x) for x in gradients]
    names = [variable.name.partition(":")[0] for variable in variables]
    found: Sequence[Any] = finished_gradients(list(gradients), names, run)
    return found


def rewriting(options: ParallelOptions, mesh: Mesh) -> Callable[[Any, Sequence[Any]], Any]:
    """What makes the program of a step communicate as options say.

    Args:
        options: of the strategy.
        mesh: its devices.
    """
    gathers = options.parallel_mode == "semi_auto_parallel" and not options.enable_alltoall

    def rewritten(closed: Any, shardings: Sequence[Any]) -> Any:
        function: Callable[..., Any] = with_wide_marked_gradients(closed)
        if options.force_fp32_communication:
            function = with_wide_sums(function)
        if gathers:
            function = without_all_to_all(function, mesh, [_spec(x, mesh) for x in shardings])
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.in_avals]
        return compat.jaxpr_and_result(function, *shapes)[0]

    return rewritten


def _spec(sharding: Any, mesh: Mesh) -> PartitionSpec:
    """How an input of the program is laid out, as far as it is known."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return sharding.spec
    return PartitionSpec()
