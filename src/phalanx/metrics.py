"""`px.metrics`: what training and evaluation count, with Keras's names.

Each replica counts for itself, and reading sums over all of them. `px.train` has the common ones too.
"""

from phalanx.train.accuracy_metrics import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from phalanx.train.class_metrics import ConfusionMatrix, MeanIoU, confusion_matrix
from phalanx.train.confusion_metrics import (
    AUC,
    FalseNegatives,
    FalsePositives,
    Precision,
    Recall,
    TrueNegatives,
    TruePositives,
)
from phalanx.train.error_metrics import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    CosineSimilarity,
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
    SparseCategoricalCrossentropy,
)
from phalanx.train.metrics import Mean, MeanMetricWrapper, Metric, Sum

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "ConfusionMatrix",
    "CosineSimilarity",
    "FalseNegatives",
    "FalsePositives",
    "Mean",
    "MeanAbsoluteError",
    "MeanIoU",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
    "TrueNegatives",
    "TruePositives",
    "confusion_matrix",
]
