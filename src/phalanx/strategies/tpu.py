"""`TPUStrategy`: the mirrored strategy over the TPU cores of this process."""

from __future__ import annotations

from typing import Any

from phalanx.core.strategy import Strategy
from phalanx.errors import NoTPUError, UnsupportedError
from phalanx.runtime.devices import local_devices
from phalanx.runtime.formatting import shown
from phalanx.strategies.mirrored import MirroredExtended


class TPUStrategy(Strategy):
    """Synchronous training on the TPU cores of this process.

    Variables are mirrored as under `MirroredStrategy`. JAX finds TPUs, so you need no resolver. (The
    project's own tests have not run on TPU hardware.)

    Args:
        tpu_cluster_resolver: kept for ported code and available as `cluster_resolver`.
        experimental_device_assignment: must be None: each core runs one replica.
        experimental_spmd_xla_partitioning: must be False; use `jax.sharding` inside the step to
            split one replica over several cores.
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: Any = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        if (
            experimental_device_assignment is not None
            or experimental_spmd_xla_partitioning is not False
        ):
            raise UnsupportedError(
                "TPUStrategy runs one replica per core. To split a replica over several cores, "
                "use jax.sharding inside the step. Received: "
                f"experimental_device_assignment={shown(experimental_device_assignment)}, "
                f"experimental_spmd_xla_partitioning={shown(experimental_spmd_xla_partitioning)}"
            )
        devices = tuple(local_devices("TPU"))
        if not devices:
            raise NoTPUError(
                "JAX finds no TPU in this process. Use px.MirroredStrategy() to train on the "
                "devices that exist."
            )
        self._resolver = tpu_cluster_resolver
        super().__init__(TPUExtended(self, devices, None))

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that was given."""
        return self._resolver


class TPUExtended(MirroredExtended):
    """What `TPUStrategy` does."""

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: programs for TPUs are compiled for fixed shapes."""
        return True
