"""What options of the context make of the steps of a strategy, in which variables are read and written.

`parallelize` has a function of arrays, which it can trace as often as it likes. A step of a strategy is
traced by `px.function`, so what a mode does to a program is done to what was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.core.variables.traced_variables import in_program
from phalanx.core.variables.variable import Variable
from phalanx.parallel.applying import with_branches_apart
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.running import (
    current_run,
    finished_gradients,
    gathered,
    keeping_no_gathers,
)
from phalanx.parallel.wide_sums import (
    is_narrow,
    marked_gradient,
    with_wide_marked_gradients,
    with_wide_results,
    with_wide_sums,
)
from phalanx.parallel.without_all_to_all import without_all_to_all
from phalanx.runtime import compat

__all__ = ["StepGradients", "rewriting"]


class StepGradients:
    """The gradients of variables in a step, as the options of the run want them."""

    def staged(
        self, function: Callable[..., Any], variables: Sequence[Variable]
    ) -> Callable[..., Any] | None:
        """For ``level3``, a function that gathers variables again for the gradient.

        Eager operations gather for themselves, and keep the parts.
        """
        run = current_run()
        if run is None or not run.known or run.options.optimizer_level != "level3":
            return None
        if not in_program():
            return None
        names = _names(variables)

        def again(values: list[Any], *rest: Any) -> Any:
            return function(gathered(values, names, run), *rest)

        return keeping_no_gathers(again)

    def pulled(self, pull: Callable[..., Any], variables: Sequence[Variable]) -> Callable[..., Any]:
        """In an eager step, whose operations are programs of their own, sums in 32 bits."""
        run = current_run()
        is_narrow_one = any(is_narrow(variable) for variable in variables)
        if run is None or not run.options.gradient_fp32_sync or not is_narrow_one:
            return pull
        return with_wide_results(pull)

    def finished(self, variables: Sequence[Variable], gradients: Sequence[Any]) -> Sequence[Any]:
        """Marked, scaled, cut and told."""
        run = current_run()
        if run is None:
            return gradients
        if run.options.gradient_fp32_sync:
            gradients = [marked_gradient(x) for x in gradients]
        found: Sequence[Any] = finished_gradients(list(gradients), _names(variables), run)
        return found


def _names(variables: Sequence[Variable]) -> list[str]:
    return [variable.name.partition(":")[0] for variable in variables]


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
        else:
            function = with_branches_apart(function)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.in_avals]
        return compat.jaxpr_and_result(function, *shapes)[0]

    return rewritten


def _spec(sharding: Any, mesh: Mesh) -> PartitionSpec:
    """How an input of the program is laid out, as far as it is known."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.shape == mesh.shape:
        return sharding.spec
    return PartitionSpec()
