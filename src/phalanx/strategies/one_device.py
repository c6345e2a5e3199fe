"""`OneDeviceStrategy`: everything on one device."""

from __future__ import annotations

from phalanx.core.strategy import Strategy
from phalanx.core.variables.variable import ResourceVariable, Variable
from phalanx.core.variables.variable_spec import VariableSpec
from phalanx.runtime.devices import DeviceLike, resolve_device
from phalanx.strategies.replicated import ReplicatedExtended


class OneDeviceStrategy(Strategy):
    """Places variables and computation on one device.

    Useful to try code that is written against strategies before running it on many devices. Values
    are never wrapped, and synchronization and aggregation have nothing to do.

    Args:
        device: a device string or `jax.Device`.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.OneDeviceStrategy(device="/cpu:0")
        >>> with strategy.scope():
        ...     v = px.Variable(1.0)
        >>> v.device
        '/job:localhost/replica:0/task:0/device:CPU:0'
        >>> sum(strategy.run(lambda x: x * 2, args=(i,)) for i in range(10))
        90
    """

    def __init__(self, device: DeviceLike) -> None:
        super().__init__(OneDeviceExtended(self, (resolve_device(device),)))


class OneDeviceExtended(ReplicatedExtended):
    """What `OneDeviceStrategy` does."""

    _wraps_values = False

    def _create_variable(self, spec: VariableSpec) -> Variable:
        return ResourceVariable(spec, self._strategy, self._devices[0])
