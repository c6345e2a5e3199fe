"""What strategies have in common whose variables are laid out over devices, for one replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from phalanx.collectives.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from phalanx.core.reduction import ReduceOp
from phalanx.core.strategy import Strategy
from phalanx.parallel.laid_out_variable import LaidOutVariable
from phalanx.runtime import compat
from phalanx.strategies.input import DistributesInput

__all__ = ["LaidOutExtended"]


class LaidOutExtended(DistributesInput):
    """One replica, whose variables are laid out over several devices."""

    _wraps_values = False

    def __init__(self, container_strategy: Strategy) -> None:
        super().__init__(container_strategy)
        self._ops = ReductionToOneDevice()

    @property
    def _communicator(self) -> CrossDeviceOps:
        return self._ops

    def _creation(self) -> AbstractContextManager[None]:
        return compat.evaluating()  # in which the parts of an initial value are one program

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """See `StrategyExtended.reduce_to`; what goes to a variable stays where it is."""
        if isinstance(destinations, LaidOutVariable):
            return value
        return super().reduce_to(reduce_op, value, destinations, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """See `StrategyExtended.batch_reduce_to`."""
        pairs = list(value_destination_pairs)
        if all(isinstance(destination, LaidOutVariable) for _, destination in pairs):
            return [value for value, _ in pairs]
        return super().batch_reduce_to(reduce_op, pairs, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """See `StrategyExtended.broadcast_to`."""
        if isinstance(destinations, LaidOutVariable):
            return tensor
        return super().broadcast_to(tensor, destinations)
