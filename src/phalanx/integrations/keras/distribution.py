"""Which strategy a model belongs to, and how its steps differ from Keras's own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from phalanx.core import context as ctx
from phalanx.core.strategy import Strategy
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.integrations.keras import touch_points
from phalanx.integrations.keras.model_devices import ModelDevices, devices_of
from phalanx.runtime.formatting import shown
from phalanx.strategies.parameter_server import ParameterServerStrategy

BATCH_NORMS = ("global", "replica")
_ATTRIBUTE = "_px_distribution"


@dataclass(frozen=True)
class ModelDistribution:
    """How a model is distributed."""

    strategy: Strategy
    batch_norm: str = "global"

    @property
    def on_servers(self) -> bool:
        """Whether parameter servers hold its variables."""
        return isinstance(self.strategy, ParameterServerStrategy)

    @functools.cached_property
    def devices(self) -> ModelDevices:
        """Where its arrays lie."""
        return devices_of(self.strategy)


def distribution_of(model: Any) -> ModelDistribution | None:
    """How a model is distributed; None if Keras trains it alone."""
    return vars(model).get(_ATTRIBUTE)


def remember_scope(model: Any) -> None:
    """Let a new model belong to the strategy of the scope that it is made in, if there is one."""
    if ctx.has_strategy() and ctx.in_cross_replica_context():
        object.__setattr__(model, _ATTRIBUTE, ModelDistribution(ctx.get_strategy()))


def distribute(model: Any, strategy: Strategy | None = None, *, batch_norm: str = "global") -> Any:
    """Say how a Keras model is distributed; models that are made in a scope need it only for options.

    Args:
        model: the model. It may have been made anywhere, and may be built, compiled and trained.
        strategy: which strategy trains it; by default the one in whose scope it was made, or the
            current one.
        batch_norm: what `BatchNormalization` layers take statistics of in training: ``"global"`` for
            all rows of the batch, which gives the same results on any number of replicas, or
            ``"replica"`` for each replica's rows, as in TensorFlow, which needs no communication.
            Moving statistics then become the mean of all replicas'.

    Returns:
        The model.

    Examples:
        >>> import keras, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> px.keras.distribute(model, strategy) is model
        True
        >>> px.keras.strategy_of(model) is strategy
        True
    """
    import keras

    if not isinstance(model, keras.Model):
        raise InvalidTypeError(f"distribute needs a Keras model. Received: {shown(model)}")
    if strategy is None:
        known = distribution_of(model)
        strategy = ctx.get_strategy() if known is None else known.strategy
    if not isinstance(strategy, Strategy):
        raise InvalidTypeError(f"strategy must be a px.Strategy. Received: {shown(strategy)}")
    if batch_norm not in BATCH_NORMS:
        raise InvalidValueError(
            "batch_norm is 'global' for statistics of the whole batch, or 'replica' for those of each "
            f"replica's rows. Received: {shown(batch_norm)}"
        )
    default = strategy is ctx.default_mode().strategy
    found = None if default else ModelDistribution(strategy, batch_norm)
    object.__setattr__(model, _ATTRIBUTE, found)
    touch_points.forget_programs(model)
    return model


def strategy_of(model: Any) -> Strategy | None:
    """The strategy that trains a Keras model; None if Keras does without one.

    Examples:
        >>> import keras, phalanx as px
        >>> with px.OneDeviceStrategy("CPU:0").scope() as strategy:
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        >>> px.keras.strategy_of(model) is strategy
        True
    """
    found = distribution_of(model)
    return None if found is None else found.strategy
