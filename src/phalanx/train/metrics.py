"""Metrics: running totals that replicas add to, read as one number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core import traced_variables, transactions
from phalanx.core.options import VariableAggregation, VariableSynchronization
from phalanx.core.variables import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError, PhalanxError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown


def _total(name: str) -> Variable:
    return Variable(
        jnp.float32(0.0),
        trainable=False,
        name=name,
        synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation.SUM,
    )


class Sum:
    """The sum of all values that any replica has seen. Make it inside the strategy's scope.

    Examples:
        >>> import phalanx as px
        >>> total = px.train.Sum()
        >>> total.update_state([1.0, 2.0])
        >>> float(total.result())
        3.0
    """

    def __init__(self, name: str = "sum") -> None:
        if not isinstance(name, str):
            raise InvalidTypeError(f"The name of a metric must be a string. Received: {shown(name)}")
        self.name = name
        self._sum = _total(f"{name}/total")

    def __repr__(self) -> str:
        return f"<px.train.{type(self).__name__} {self.name!r}>"

    @property
    def variables(self) -> list[Variable]:
        """The metric's state."""
        return [self._sum]

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each times its weight."""
        weighted, _ = _weighted(values, sample_weight)
        self._sum.assign_add(weighted)

    def result(self) -> jax.Array:
        """The sum so far; outside of replicas over all of them."""
        return self._sum.value()

    def reset_state(self) -> None:
        """Start again."""

        def assign_zeros() -> None:
            for variable in self.variables:
                variable.assign(0.0)

        transactions.atomically(assign_zeros)


class Mean(Sum):
    """The weighted mean of all values that any replica has seen; 0 if there is none.

    Every example counts the same, however batches were split. Make it inside the strategy's scope.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     loss = px.train.Mean()
        >>> def step():
        ...     loss.update_state(px.get_replica_context().replica_id_in_sync_group + 1.0)
        >>> strategy.run(step)
        >>> float(loss.result())
        1.5
    """

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name)
        self._count = _total(f"{name}/count")

    @property
    def variables(self) -> list[Variable]:
        """The metric's state."""
        return [self._sum, self._count]

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each with its weight (1 by default)."""
        weighted, count = _weighted(values, sample_weight)

        def add() -> None:
            self._sum.assign_add(weighted)
            self._count.assign_add(count)

        transactions.atomically(add)

    def result(self) -> jax.Array:
        """The mean so far; outside of replicas over all of them."""

        def read() -> tuple[jax.Array, jax.Array]:
            return self._sum.value(), self._count.value()

        inside = traced_variables.in_program() or transactions.current() is not None
        total, count = read() if inside else transactions.between_steps(self.variables, read)
        return jnp.where(count == 0, 0.0, total / jnp.where(count == 0, 1.0, count))


class Accuracy(Mean):
    """How often predictions were right.

    Examples:
        >>> import phalanx as px
        >>> accuracy = px.train.Accuracy()
        >>> accuracy.update_state([0, 1, 2], [0, 1, 1])
        >>> round(float(accuracy.result()), 3)
        0.667
    """

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    def update_state(self, labels: Any, predictions: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Compare labels with predicted labels, or with scores whose last dimension is the class."""
        wanted, given = _known(labels), _known(predictions)
        with compat.without_differentiation():
            if given.ndim == wanted.ndim + 1:
                given = jnp.argmax(given, axis=-1)
            right = (given == wanted).astype(jnp.float32) if given.shape == wanted.shape else None
        if right is None:
            raise InvalidValueError(
                "Predictions must have the shape of the labels, or one dimension more for scores. "
                f"Received: labels {wanted.shape} and predictions {given.shape}"
            )
        super().update_state(right, sample_weight)


def _weighted(values: Any, sample_weight: Any) -> tuple[jax.Array, jax.Array]:
    array = _known(values, jnp.float32)
    weights = None if sample_weight is None else _known(sample_weight, jnp.float32)
    with compat.without_differentiation():
        if weights is None:
            return jnp.sum(array), jnp.float32(array.size)
        try:
            weights = jnp.broadcast_to(weights, array.shape)
        except ValueError as error:
            raise InvalidValueError(
                "sample_weight must broadcast to the shape of the values. "
                f"Received: weights of shape {weights.shape} for values of shape {array.shape}"
            ) from error
        return jnp.sum(array * weights), jnp.sum(weights)


def _known(x: Any, dtype: Any = None) -> jax.Array:
    """An array to count: metrics have no derivatives, also where one is being computed."""
    try:
        array: jax.Array = compat.primal_value(jnp.asarray(x, dtype))
    except (PhalanxError, SystemError):  # which NumPy makes of an interrupt
        raise
    except Exception as error:
        raise InvalidTypeError(
            f"A metric counts numbers: arrays or lists of them. Received: {shown(x)}"
        ) from error
    return array
