"""`px.experimental`: the names that TensorFlow keeps under `tf.distribute.experimental`."""

from phalanx import coordinator, partitioners, rpc
from phalanx.core.options import (
    CommunicationImplementation,
    CommunicationImplementation as CollectiveCommunication,
    CommunicationOptions,
    ValueContext,
    collective_hints as CollectiveHints,  # noqa: N812
)
from phalanx.data.distribute.optional import Optional
from phalanx.parameter_server.options import ParameterServerOptions
from phalanx.strategies.central_storage import CentralStorageStrategy
from phalanx.strategies.multi_worker import (
    OldMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from phalanx.strategies.old_parameter_server import (
    OldParameterServerStrategy as ParameterServerStrategy,
)
from phalanx.strategies.tpu import TPUStrategy
from phalanx.train.preemption import PreemptionCheckpointHandler
from phalanx.train.termination import TerminationConfig

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "Optional",
    "ParameterServerOptions",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "rpc",
]
