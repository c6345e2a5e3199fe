"""`px.experimental`: the names that TensorFlow keeps under `tf.distribute.experimental`."""

from phalanx import partitioners
from phalanx.core.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ValueContext,
)
from phalanx.core.options import CommunicationImplementation as CollectiveCommunication
from phalanx.core.options import collective_hints as CollectiveHints  # noqa: N812
from phalanx.data.optional import Optional
from phalanx.strategies.central_storage import CentralStorageStrategy
from phalanx.strategies.multi_worker import (
    OldMultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from phalanx.strategies.tpu import TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "Optional",
    "TPUStrategy",
    "ValueContext",
    "partitioners",
]
