"""`px.keras`: Keras 3 on JAX under strategies.

Models that are made in ``strategy.scope()`` train with `model.fit` on all replicas, by themselves. The
names here are for what goes beyond that.
"""

from phalanx.integrations.keras import touch_points

touch_points.require()

from phalanx.integrations.keras.distribution import distribute, strategy_of  # noqa: E402
from phalanx.integrations.keras.installing import install  # noqa: E402
from phalanx.integrations.keras.lifting import LiftedModel, lift  # noqa: E402
from phalanx.integrations.keras.own_steps import (  # noqa: E402
    stateful,
    value_and_grad,
    values_and_grads,
)
from phalanx.integrations.keras.parameter_servers import DatasetCreator  # noqa: E402

__all__ = [
    "DatasetCreator",
    "LiftedModel",
    "distribute",
    "lift",
    "stateful",
    "strategy_of",
    "value_and_grad",
    "values_and_grads",
]

install()
