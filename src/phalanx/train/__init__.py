"""`px.train`: what training loops need around the step."""

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
from phalanx.train.loop import LoopResults, loop
from phalanx.train.metrics import Accuracy, Mean, Sum
from phalanx.train.optimizer import Optimizer
from phalanx.train.precision import LossScale, Policy
from phalanx.train.snapshot import snapshot

__all__ = [
    "Accuracy",
    "BytesList",
    "ClusterDef",
    "ClusterSpec",
    "Example",
    "Feature",
    "Features",
    "FloatList",
    "Int64List",
    "JobDef",
    "LoopResults",
    "LossScale",
    "Mean",
    "Optimizer",
    "Policy",
    "ServerDef",
    "Sum",
    "accumulate_gradients",
    "loop",
    "snapshot",
]


def __dir__() -> list[str]:
    return __all__
