"""`px.train`: what training loops need around the step."""

from phalanx.cluster.spec import ClusterDef, ClusterSpec, JobDef, ServerDef
from phalanx.train.metrics import Accuracy, Mean, Sum
from phalanx.train.optimizer import Optimizer

__all__ = [
    "Accuracy",
    "ClusterDef",
    "ClusterSpec",
    "JobDef",
    "Mean",
    "Optimizer",
    "ServerDef",
    "Sum",
]
