"""The default strategy: what is current outside of every scope."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from phalanx.collectives.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from phalanx.core import context as ctx
from phalanx.core.checks import check_variable, first_by_name
from phalanx.core.replica_context import ReplicaContext
from phalanx.core.strategy import Strategy
from phalanx.core.variables import transactions
from phalanx.core.variables.variable import ResourceVariable, Variable
from phalanx.core.variables.variable_spec import VariableSpec
from phalanx.errors import ContextError
from phalanx.runtime.formatting import shown
from phalanx.strategies.input import DistributesInput


class DefaultReplicaContext(ReplicaContext):
    """The replica context outside of every strategy: one replica, with the Python id 0."""


class DefaultStrategy(Strategy):
    """One replica on JAX's default device; everything behaves as without a strategy."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended(self))


class DefaultExtended(DistributesInput):
    """What the default strategy does."""

    _wraps_values = False

    def __init__(self, container_strategy: Strategy) -> None:
        super().__init__(container_strategy)
        self._ops = ReductionToOneDevice()

    @property
    def _replica_devices(self) -> tuple[None]:
        return (None,)

    @property
    def _communicator(self) -> CrossDeviceOps:
        return self._ops

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Not available: the default strategy follows JAX's default device."""
        raise ContextError(
            "The default strategy has no devices of its own. Create a strategy, such as "
            "px.OneDeviceStrategy('CPU:0'), and enter its scope."
        )

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Not available: the default strategy follows JAX's default device."""
        return self.worker_devices

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """The first variable by name."""
        return first_by_name(var_list)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether a variable was made without a strategy."""
        return check_variable(v, "variable_created_in_scope").distribute_strategy is None

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        with ReplicaContext(self._strategy, jnp.int32(0), index=0):
            return transactions.atomically(fn, *args, **kwargs)

    def _create_variable(self, spec: VariableSpec) -> Variable:
        return ResourceVariable(spec)

    def _scope(self) -> Any:
        return _DefaultScope(self._strategy)


class _DefaultScope:
    """The default strategy's scope: changes nothing, and refuses to be inside another scope."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __enter__(self) -> Strategy:
        if ctx.has_strategy():
            raise ContextError(
                "The default strategy's scope must not be nested in the scope of another strategy. "
                f"Received: current strategy {shown(ctx.get_strategy())}"
            )
        return self._strategy

    def __exit__(self, *exc_info: object) -> None:
        pass


def default_mode() -> ctx.Mode:
    """The mode outside of every scope."""
    strategy = DefaultStrategy()
    return ctx.Mode(strategy, DefaultReplicaContext(strategy, 0))
