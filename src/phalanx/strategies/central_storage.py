"""`CentralStorageStrategy`: one copy of each variable, replicas on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from phalanx.collectives.cross_device_ops import AllReduceCrossDeviceOps
from phalanx.core.checks import first_by_name
from phalanx.core.options import check_dtype
from phalanx.core.strategy import Strategy
from phalanx.core.variables.distributed_variables import AggregatingVariable
from phalanx.core.variables.variable import ResourceVariable, Variable
from phalanx.core.variables.variable_spec import VariableSpec
from phalanx.runtime.devices import (
    DeviceLike,
    are_left_out,
    default_devices,
    device_kind,
    device_name,
    host_device,
    resolve_device,
    resolve_devices,
)
from phalanx.strategies.replicated import ReplicatedExtended


class CentralStorageStrategy(Strategy):
    """Synchronous training on several devices with variables on one of them, or on the host.

    Replicas read variables across devices; what they write is aggregated and applied once.

    Args:
        compute_devices: where replicas run; None for all accelerators, or the first CPU device where
            there is no accelerator.
        parameter_device: where variables live; None for the only compute device if there is one,
            else the host.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
        >>> with strategy.scope():
        ...     v = px.Variable(1.0)
        >>> type(v).__name__, v.device
        ('AggregatingVariable', '/job:localhost/replica:0/task:0/device:CPU:0')
    """

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
    ) -> None:
        if compute_devices is None or are_left_out(compute_devices):
            devices = default_devices()
            if device_kind(devices[0]) == "CPU":
                devices = devices[:1]
        else:
            devices = resolve_devices(compute_devices)
        if parameter_device is not None:
            parameters = resolve_device(parameter_device)
        else:
            parameters = devices[0] if len(devices) == 1 else host_device()
        super().__init__(CentralStorageExtended(self, devices, parameters))


class CentralStorageExtended(ReplicatedExtended):
    """What `CentralStorageStrategy` does."""

    def __init__(
        self,
        container_strategy: Strategy,
        devices: tuple[jax.Device, ...],
        parameter_device: jax.Device,
    ) -> None:
        super().__init__(container_strategy, devices, AllReduceCrossDeviceOps())
        self._parameter_device = parameter_device

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device that holds all variables."""
        return (device_name(self._parameter_device),)

    @property
    def experimental_between_graph(self) -> bool:
        """True, as in TensorFlow."""
        return True

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """The first variable by name."""
        return first_by_name(var_list)

    def _create_variable(self, spec: VariableSpec) -> Variable:
        # Synchronization has nothing to say here: there is only one copy.
        if len(self._devices) == 1:
            return ResourceVariable(spec, self._strategy, self._parameter_device)
        check_dtype(spec.aggregation, spec.value.dtype, spec.name)
        return AggregatingVariable(spec, self._strategy, self._parameter_device)
