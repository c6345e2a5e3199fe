"""`Strategy.run` in traced code: which kind of run it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from phalanx.core.padding import CannotJoin
from phalanx.core.structure import leaves, map_nest
from phalanx.core.values import PerReplica
from phalanx.core.variables import traced_variables
from phalanx.errors import InvalidArgumentError
from phalanx.execution.compiled import CompiledRun
from phalanx.execution.uneven import UnevenRun
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy


def run_compiled(
    strategy: Strategy,
    devices: tuple[jax.Device, ...],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Add a run of `fn` on all replicas to the program that is being traced."""
    inputs = map_nest(_with_arrays, (args, dict(kwargs)))
    uneven = any(isinstance(x, PerReplica) and x.padded is not None for x in leaves(inputs))
    run = (UnevenRun if uneven else CompiledRun)(strategy, devices, fn, inputs)
    try:
        return run.add()
    except CannotJoin as reason:
        if traced_variables.in_program():
            raise  # px.function can run it eagerly
        raise InvalidArgumentError(
            f"Replicas hold different shapes, and {reason}, so jax.jit cannot make one program of the "
            "step. Use px.function, which can run it eagerly, or call strategy.run outside of jax.jit. "
            f"Received: {shown(inputs)}"
        ) from None


def _with_arrays(x: Any) -> Any:
    """A value with arrays in place of Python numbers that differ between replicas."""
    if not isinstance(x, PerReplica) or x.is_local or x.is_one_leaf:
        return x
    arrays = x.of_arrays()
    return x if arrays is None else arrays
