"""`px.estimator`: a function that says what a model is, and loops that train, evaluate and predict.

`Estimator` has the loops, `RunConfig` says under which strategies they run, and `train_and_evaluate`
what each task of a cluster does.
"""

from phalanx.integrations.estimator.driving import train_and_evaluate
from phalanx.integrations.estimator.estimator import Estimator
from phalanx.integrations.estimator.hooks import (
    CheckpointSaverHook,
    LoggingTensorHook,
    NanTensorHook,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
)
from phalanx.integrations.estimator.named_state import (
    get_global_step,
    get_metric,
    get_parameters,
    get_variable,
)
from phalanx.integrations.estimator.run_config import RunConfig
from phalanx.integrations.estimator.specs import EstimatorSpec, EvalSpec, ModeKeys, TrainSpec

__all__ = [
    "CheckpointSaverHook",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "LoggingTensorHook",
    "ModeKeys",
    "NanTensorHook",
    "RunConfig",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "TrainSpec",
    "get_global_step",
    "get_metric",
    "get_parameters",
    "get_variable",
    "train_and_evaluate",
]
