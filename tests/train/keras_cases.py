"""Batches for metrics, losses and optimizers; `record_keras` records what Keras makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

RNG = np.random.default_rng(7)
BINARY = RNG.integers(0, 2, (12,)).astype(np.float32)
CHANCES = np.round(RNG.random(12), 3).astype(np.float32)
CLASSES = RNG.integers(0, 4, (12,))
ONE_HOT = np.eye(4, dtype=np.float32)[CLASSES]
SCORES = RNG.normal(size=(12, 4)).astype(np.float32)
SCORES[3] = SCORES[3, 0]  # equal scores
SHARES = np.exp(SCORES) / np.exp(SCORES).sum(1, keepdims=True)
GUESSES = SCORES.argmax(1)
REAL = RNG.normal(size=(12, 3)).astype(np.float32)
OTHER = RNG.normal(size=(12, 3)).astype(np.float32)
MANY = RNG.integers(0, 2, (12, 3)).astype(np.float32)
MANY_CHANCES = RNG.random((12, 3)).astype(np.float32)
WEIGHTS = np.round(RNG.random(12), 2).astype(np.float32)

METRICS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "accuracy": ("Accuracy", {}, CLASSES, GUESSES),
    "binary_accuracy": ("BinaryAccuracy", {}, BINARY, CHANCES),
    "binary_accuracy_matrix": ("BinaryAccuracy", {"threshold": 0.3}, MANY, MANY_CHANCES),
    "categorical_accuracy": ("CategoricalAccuracy", {}, ONE_HOT, SCORES),
    "sparse_categorical_accuracy": ("SparseCategoricalAccuracy", {}, CLASSES, SCORES),
    "sparse_categorical_accuracy_column": ("SparseCategoricalAccuracy", {}, CLASSES[:, None], SCORES),
    "top_2": ("TopKCategoricalAccuracy", {"k": 2}, ONE_HOT, SCORES),
    "sparse_top_3": ("SparseTopKCategoricalAccuracy", {"k": 3}, CLASSES, SCORES),
    "sparse_top_1": ("SparseTopKCategoricalAccuracy", {"k": 1}, CLASSES, SCORES),
    "true_positives": ("TruePositives", {}, BINARY, CHANCES),
    "true_negatives": ("TrueNegatives", {"thresholds": [0.2, 0.8]}, BINARY, CHANCES),
    "false_positives": ("FalsePositives", {}, BINARY, CHANCES),
    "false_negatives": ("FalseNegatives", {"thresholds": 0.7}, BINARY, CHANCES),
    "precision": ("Precision", {}, BINARY, CHANCES),
    "precision_at": ("Precision", {"thresholds": [0.1, 0.5, 0.9]}, BINARY, CHANCES),
    "precision_top_2": ("Precision", {"top_k": 2}, ONE_HOT, SCORES),
    "precision_class": ("Precision", {"class_id": 1}, MANY, MANY_CHANCES),
    "recall": ("Recall", {}, BINARY, CHANCES),
    "recall_top_2": ("Recall", {"top_k": 2, "class_id": 2}, ONE_HOT, SCORES),
    "auc": ("AUC", {}, BINARY, CHANCES),
    "auc_few": ("AUC", {"num_thresholds": 5}, BINARY, CHANCES),
    "auc_pr": ("AUC", {"curve": "PR"}, BINARY, CHANCES),
    "auc_pr_minoring": ("AUC", {"curve": "PR", "summation_method": "minoring"}, BINARY, CHANCES),
    "auc_majoring": ("AUC", {"num_thresholds": 9, "summation_method": "majoring"}, BINARY, CHANCES),
    "auc_thresholds": ("AUC", {"thresholds": [0.2, 0.35, 0.9]}, BINARY, CHANCES),
    "auc_logits": ("AUC", {"from_logits": True}, MANY, REAL),
    "auc_labels": ("AUC", {"multi_label": True, "num_labels": 3}, MANY, MANY_CHANCES),
    "mean_iou": ("MeanIoU", {"num_classes": 4, "dtype": "float32"}, CLASSES, GUESSES),
    "mean_squared_error": ("MeanSquaredError", {}, REAL, OTHER),
    "mean_absolute_error": ("MeanAbsoluteError", {}, REAL, OTHER),
    "root_mean_squared_error": ("RootMeanSquaredError", {}, REAL, OTHER),
    "cosine_similarity": ("CosineSimilarity", {}, REAL, OTHER),
    "binary_crossentropy": ("BinaryCrossentropy", {"label_smoothing": 0.1}, MANY, MANY_CHANCES),
    "categorical_crossentropy": ("CategoricalCrossentropy", {"from_logits": True}, ONE_HOT, SCORES),
    "sparse_crossentropy": ("SparseCategoricalCrossentropy", {"from_logits": True}, CLASSES, SCORES),
}
"""The class, its arguments, labels and predictions."""

UNWEIGHTED = {"root_mean_squared_error"}
"""Whose weights Keras 3 and TensorFlow's Keras treat differently."""

LOSSES: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "mean_squared_error": ("MeanSquaredError", {}, REAL, OTHER),
    "mean_absolute_error": ("MeanAbsoluteError", {}, REAL, OTHER),
    "mean_absolute_percentage_error": ("MeanAbsolutePercentageError", {}, REAL, OTHER),
    "mean_squared_logarithmic_error": ("MeanSquaredLogarithmicError", {}, MANY, MANY_CHANCES),
    "huber": ("Huber", {"delta": 0.7}, REAL, OTHER),
    "log_cosh": ("LogCosh", {}, REAL, OTHER),
    "hinge": ("Hinge", {}, MANY, OTHER),
    "hinge_signs": ("Hinge", {}, 2 * MANY - 1, OTHER),
    "squared_hinge": ("SquaredHinge", {}, MANY, OTHER),
    "categorical_hinge": ("CategoricalHinge", {}, ONE_HOT, SCORES),
    "kl_divergence": ("KLDivergence", {}, ONE_HOT, SHARES),
    "poisson": ("Poisson", {}, MANY, MANY_CHANCES),
    "cosine_similarity": ("CosineSimilarity", {}, REAL, OTHER),
    "binary": ("BinaryCrossentropy", {}, MANY, MANY_CHANCES),
    "binary_logits": ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.2}, MANY, REAL),
    "categorical": ("CategoricalCrossentropy", {"label_smoothing": 0.1}, ONE_HOT, SHARES),
    "categorical_logits": ("CategoricalCrossentropy", {"from_logits": True}, ONE_HOT, SCORES),
    "sparse": ("SparseCategoricalCrossentropy", {}, CLASSES, SHARES),
    "sparse_logits": ("SparseCategoricalCrossentropy", {"from_logits": True}, CLASSES, SCORES),
    "sparse_ignoring": (
        "SparseCategoricalCrossentropy",
        {"from_logits": True, "ignore_class": 2},
        CLASSES,
        SCORES,
    ),
}
"""The class, its arguments, labels and predictions."""

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "nesterov": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True}),
    "clipped": ("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.5}),
    "clipped_value": ("SGD", {"learning_rate": 0.1, "clipvalue": 0.3}),
    "clipped_each": ("SGD", {"learning_rate": 0.1, "clipnorm": 0.4}),
    "decayed": ("SGD", {"learning_rate": 0.1, "weight_decay": 0.02}),
    "adam": ("Adam", {"learning_rate": 0.05}),
    "adam_rough": ("Adam", {"learning_rate": 0.05, "beta_1": 0.8, "epsilon": 0.1}),
    "amsgrad": ("Adam", {"learning_rate": 0.05, "amsgrad": True}),
    "adamw": ("AdamW", {"learning_rate": 0.05, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {"learning_rate": 0.05}),
    "rmsprop_momentum": ("RMSprop", {"learning_rate": 0.05, "momentum": 0.9, "centered": True}),
    "adagrad": ("Adagrad", {"learning_rate": 0.05}),
}
"""The class and its arguments; after two steps the learning rate is halved."""

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "restarts": (
        "CosineDecayRestarts",
        {"initial_learning_rate": 0.1, "first_decay_steps": 2, "m_mul": 0.5, "alpha": 0.1},
    ),
    "equal restarts": (
        "CosineDecayRestarts",
        {"initial_learning_rate": 0.1, "first_decay_steps": 3, "t_mul": 1.0},
    ),
    "exponential": (
        "ExponentialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 4, "decay_rate": 0.5},
    ),
    "staircase": (
        "ExponentialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 4, "decay_rate": 0.5, "staircase": True},
    ),
    "piecewise": ("PiecewiseConstantDecay", {"boundaries": [2, 5], "values": [1.0, 0.5, 0.1]}),
    "polynomial": (
        "PolynomialDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 6, "end_learning_rate": 0.01, "power": 2.0},
    ),
    "inverse": (
        "InverseTimeDecay",
        {"initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.5},
    ),
    "cosine": ("CosineDecay", {"initial_learning_rate": 0.1, "decay_steps": 6, "alpha": 0.1}),
    "cosine_warm": (
        "CosineDecay",
        {
            "initial_learning_rate": 0.0,
            "decay_steps": 6,
            "warmup_target": 0.1,
            "warmup_steps": 3,
        },
    ),
}
STEPS = 5
START = [np.float32([1.0, -2.0, 3.0]), np.float32([[0.5, -0.5]])]


def gradients(step: int) -> list[Any]:
    """Some gradients for `START`."""
    return [np.float32([0.1, -0.4, 0.2]) * (step + 1), np.float32([[0.3, 0.05]]) * (-1) ** step]
