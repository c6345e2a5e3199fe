"""What the strategies of one process share: replicas on local devices, run by the eager executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from phalanx.collectives.cross_device_ops import CrossDeviceOps, ReductionToOneDevice
from phalanx.core.structure import leaves
from phalanx.core.values import check_count
from phalanx.core.variables import traced_variables
from phalanx.errors import InvalidTypeError
from phalanx.execution.compiled import in_compiled_run, run_inlined
from phalanx.execution.eager import run_replicas
from phalanx.execution.runs import run_compiled
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import place
from phalanx.strategies.input import DistributesInput

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy


class ReplicatedExtended(DistributesInput):
    """Replicas on a fixed list of local devices."""

    def __init__(
        self,
        container_strategy: Strategy,
        devices: tuple[jax.Device, ...],
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        super().__init__(container_strategy)
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise InvalidTypeError(
                "cross_device_ops must be a px.CrossDeviceOps, such as px.NcclAllReduce(), or "
                f"None. Received: {shown(cross_device_ops)}"
            )
        self._devices = devices
        self._cross_device_ops = cross_device_ops or ReductionToOneDevice()

    @property
    def _replica_devices(self) -> tuple[jax.Device, ...]:
        return self._devices

    @property
    def _communicator(self) -> CrossDeviceOps:
        return self._cross_device_ops

    @functools.cached_property
    def _replica_ids(self) -> list[jax.Array]:
        with jax.ensure_compile_time_eval():  # they outlive the program that may ask first
            return [place(jnp.int32(self._first_replica + i), d) for i, d in enumerate(self._devices)]

    def _call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        for leaf in leaves((args, kwargs)):
            check_count(leaf, self._num_replicas_in_sync, "Strategy.run")
        program = traced_variables.current()
        everywhere = self._span or self._devices
        if program is not None and self._span is not None:
            program.spans_workers = True
        if len(everywhere) == 1:
            if program is not None:
                program.device = self._devices[0]
        elif in_compiled_run(self._strategy):
            return run_inlined(self._strategy, len(everywhere), fn, tuple(args), kwargs)
        elif compat.is_staging():
            for outer in traced_variables.enclosing()[:1]:
                outer.spread_over(everywhere, f"a run of {self._strategy!r}")
            return run_compiled(self._strategy, everywhere, fn, tuple(args), kwargs)
        return run_replicas(self._strategy, self._devices, self._replica_ids, fn, tuple(args), kwargs)
