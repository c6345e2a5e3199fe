"""`px.train`: optimizers, metrics, loops and precision for training.

* ``optimizer``, with ``precision`` and ``server_updates`` (on parameter servers); ``accumulate``
* ``metrics``, with ``accuracy_metrics``, ``class_metrics``, ``confusion_metrics`` and
  ``error_metrics``
* ``loss_functions`` and ``losses``; ``keras_optimizers`` and ``schedules``
* ``loop``, ``snapshot``
* ``checkpoints``; ``preemption`` and ``termination``, which save in time; ``weights``
* ``module``; ``summaries`` and ``event_files`` for TensorBoard, ``loggers``, ``progress``,
  ``profiling``, ``overview``
* ``elastic_training``: training with workers that come and go
"""

from phalanx.cluster import ClusterDef, ClusterSpec, JobDef, ServerDef
from phalanx.data.files.example import (
    BytesList,
    Example,
    Feature,
    Features,
    FloatList,
    Int64List,
)
from phalanx.train.accumulate import accumulate_gradients
from phalanx.train.accuracy_metrics import Accuracy
from phalanx.train.checkpoints.checkpoint import Checkpoint
from phalanx.train.checkpoints.converting import convert_checkpoint
from phalanx.train.checkpoints.manager import CheckpointManager, checkpoints_iterator
from phalanx.train.checkpoints.options import CheckpointOptions
from phalanx.train.checkpoints.reader import (
    CheckpointReader,
    list_variables,
    load_checkpoint,
    load_variable,
)
from phalanx.train.checkpoints.state import latest_checkpoint
from phalanx.train.checkpoints.status import CheckpointStatus
from phalanx.train.elastic_training.context import ElasticContext
from phalanx.train.elastic_training.session import elastic
from phalanx.train.gradient_communication import GradientCommunication
from phalanx.train.loggers import CSVLogger, JSONLinesLogger, TensorBoardLogger
from phalanx.train.loop import LoopResults, loop
from phalanx.train.metrics import Mean, Metric, Sum
from phalanx.train.optimizer import Optimizer
from phalanx.train.overview import Overview, summary
from phalanx.train.precision import LossScale, Policy
from phalanx.train.profiling import Profile
from phalanx.train.progress import Progress
from phalanx.train.replica_agreement import broadcast_parameters, repeated_loss
from phalanx.train.sharding import OptimizerSharding
from phalanx.train.snapshot import snapshot
from phalanx.train.weights import export_weights, load_weights

__all__ = [
    "Accuracy",
    "BytesList",
    "CSVLogger",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "CheckpointReader",
    "CheckpointStatus",
    "ClusterDef",
    "ClusterSpec",
    "ElasticContext",
    "Example",
    "Feature",
    "Features",
    "FloatList",
    "GradientCommunication",
    "Int64List",
    "JSONLinesLogger",
    "JobDef",
    "LoopResults",
    "LossScale",
    "Mean",
    "Metric",
    "Optimizer",
    "OptimizerSharding",
    "Overview",
    "Policy",
    "Profile",
    "Progress",
    "ServerDef",
    "Sum",
    "TensorBoardLogger",
    "accumulate_gradients",
    "broadcast_parameters",
    "checkpoints_iterator",
    "convert_checkpoint",
    "elastic",
    "export_weights",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "load_variable",
    "load_weights",
    "loop",
    "repeated_loss",
    "snapshot",
    "summary",
]


def __dir__() -> list[str]:
    return __all__
