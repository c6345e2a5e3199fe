"""Writes `data/keras.json`: what Keras's own metrics, losses and optimizers give. Needs keras 3."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from tests.train import keras_cases as cases


def plain(x: Any) -> Any:
    return np.asarray(x, np.float64).round(7).tolist()


def metrics() -> dict[str, Any]:
    found = {}
    for name, (kind, arguments, labels, predictions) in cases.METRICS.items():
        whole = getattr(keras.metrics, kind)(**arguments)
        whole.update_state(labels, predictions)
        weighted = getattr(keras.metrics, kind)(**arguments)
        weighted.update_state(labels, predictions, sample_weight=cases.WEIGHTS)
        found[name] = {"whole": plain(whole.result()), "weighted": plain(weighted.result())}
    return found


def losses() -> dict[str, Any]:
    found = {}
    for name, (kind, arguments, labels, predictions) in cases.LOSSES.items():
        each = getattr(keras.losses, kind)(reduction=None, **arguments)(labels, predictions)
        mean = getattr(keras.losses, kind)(**arguments)
        weighted = mean(labels, predictions, sample_weight=cases.WEIGHTS)
        found[name] = {
            "each": plain(each),
            "mean": plain(mean(labels, predictions)),
            "weighted": plain(weighted),
        }
    return found


def optimizers() -> dict[str, Any]:
    found = {}
    for name, (kind, arguments) in cases.OPTIMIZERS.items():
        variables = [keras.Variable(x) for x in cases.START]
        optimizer = getattr(keras.optimizers, kind)(**arguments)
        for step in range(cases.STEPS):
            if step == 2:
                optimizer.learning_rate = arguments["learning_rate"] / 2
            optimizer.apply_gradients(zip(cases.gradients(step), variables, strict=True))
        found[name] = [plain(v.value) for v in variables]
    return found


def schedules() -> dict[str, Any]:
    return {
        name: [plain(getattr(keras.optimizers.schedules, kind)(**arguments)(s)) for s in range(9)]
        for name, (kind, arguments) in cases.SCHEDULES.items()
    }


if __name__ == "__main__":
    recorded = {
        "keras": keras.__version__,
        "metrics": metrics(),
        "losses": losses(),
        "optimizers": optimizers(),
        "schedules": schedules(),
    }
    path = Path(__file__).parent / "data" / "keras.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(recorded, indent=1) + "\n")
