"""`MirroredStrategy`: one replica per local device, variables mirrored on all of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax

from phalanx.collectives.cross_device_ops import AllReduceCrossDeviceOps, CrossDeviceOps
from phalanx.core import context as ctx
from phalanx.core.options import VariableSynchronization, check_dtype, effective_synchronization
from phalanx.core.strategy import Strategy
from phalanx.core.variables.distributed_variables import (
    CopiedVariable,
    MirroredVariable,
    SyncOnReadVariable,
)
from phalanx.core.variables.variable import Variable
from phalanx.core.variables.variable_spec import VariableSpec
from phalanx.runtime.devices import (
    DeviceLike,
    are_left_out,
    default_devices,
    device_name,
    resolve_devices,
)
from phalanx.strategies.replicated import ReplicatedExtended

_log = logging.getLogger("phalanx")


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Each device runs one replica on its part of the input. Variables have a copy on every device.
    Aggregating what replicas write keeps the copies equal.

    Args:
        devices: device strings or `jax.Device` objects; None or an empty list for all accelerators, or
            all CPU devices where there is no accelerator.
        cross_device_ops: the algorithm for reductions; the default uses XLA's all-reduce.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.num_replicas_in_sync
        2
        >>> strategy.extended.worker_devices[1]
        '/job:localhost/replica:0/task:0/device:CPU:1'
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        if devices is None or are_left_out(devices):
            resolved = default_devices()
        else:
            resolved = resolve_devices(devices)
        super().__init__(MirroredExtended(self, resolved, cross_device_ops))
        _log.info(
            "%s with devices %s", type(self).__name__, ", ".join(device_name(d) for d in resolved)
        )


class MirroredExtended(ReplicatedExtended):
    """What `MirroredStrategy` does."""

    def __init__(
        self,
        container_strategy: Strategy,
        devices: tuple[jax.Device, ...],
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        ops = AllReduceCrossDeviceOps() if cross_device_ops is None else cross_device_ops
        super().__init__(container_strategy, devices, ops)
        self._get_next_as_optional = True

    def _create_variable(self, spec: VariableSpec) -> Variable:
        synchronization = effective_synchronization(spec.synchronization, spec.name)
        check_dtype(spec.aggregation, spec.value.dtype, spec.name)
        neighbour = ctx.colocated_with()
        devices = neighbour._devices if isinstance(neighbour, CopiedVariable) else self._devices
        if synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable(spec, self._strategy, devices)
        return MirroredVariable(spec, self._strategy, devices)
