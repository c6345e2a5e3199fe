"""Metrics: running totals that replicas add to, read as one number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from phalanx.core import context as ctx
from phalanx.core.options import VariableAggregation, VariableSynchronization
from phalanx.core.strategy import Strategy
from phalanx.core.values import DistributedValues, Mirrored
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError, InvalidValueError, PhalanxError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown


class Metric:
    """Base of metrics: variables that every replica adds to, and what is computed of their sums.

    Subclasses make variables with `add_weight` in ``__init__``, and implement `update_state` and
    `result`. Make metrics inside the strategy's scope. Outside of replicas an update counts once,
    however many replicas there are; one with a value per replica counts each of them.

    Args:
        name: a name.
        dtype: of the variables; float32 by default.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> class Largest(px.metrics.Metric):
        ...     def __init__(self):
        ...         super().__init__("largest")
        ...         self.count = self.add_weight("count")
        ...     def update_state(self, values):
        ...         self.count.assign_add(jnp.sum(jnp.asarray(values) > 10.0))
        ...     def result(self):
        ...         return self.count.value()
        >>> metric = Largest()
        >>> float(metric([9.0, 11.0])), float(metric([12.0]))
        (1.0, 2.0)
    """

    def __init__(self, name: str | None = None, dtype: Any = None) -> None:
        if name is not None and not isinstance(name, str):
            raise InvalidTypeError(f"The name of a metric must be a string. Received: {shown(name)}")
        self.name = name or type(self).__name__.lower()
        try:
            self._dtype = jnp.dtype("float32" if dtype is None else dtype)
        except TypeError:
            raise InvalidTypeError(
                f"The dtype of a metric must be a dtype. Received: {shown(dtype)}"
            ) from None
        self._weights: list[Variable] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "update_state" in vars(cls):
            cls.update_state = _counted(cls.update_state)  # type: ignore[method-assign]
        if "result" in vars(cls):
            cls.result = _read(cls.result)  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<px.metrics.{type(self).__name__} {self.name!r}>"

    # -- what subclasses use ---------------------------------------------------------------------

    def add_weight(
        self,
        name: Any = None,
        shape: Any = (),
        aggregation: VariableAggregation = VariableAggregation.SUM,
        synchronization: VariableSynchronization = VariableSynchronization.ON_READ,
        initializer: Any = "zeros",
        dtype: Any = None,
    ) -> Variable:
        """Make a variable of the metric: each replica has its own, and their sum is read.

        Args:
            name: what it is called, behind the name of the metric.
            shape: its shape.
            aggregation: how the replicas' values become one.
            synchronization: when they do.
            initializer: "zeros", "ones", a function of shape and dtype, or a value.
            dtype: the metric's by default.
        """
        if isinstance(name, tuple | list):  # Keras 3 has the shape first
            name, shape = None, name
        kind = jnp.dtype(dtype or self._dtype)
        variable = Variable(
            _initial(initializer, tuple(shape), kind),
            trainable=False,
            name=f"{self.name}/{name or 'weight'}",
            synchronization=synchronization,
            aggregation=aggregation,
        )
        self._weights.append(variable)
        return variable

    add_variable = add_weight

    @property
    def dtype(self) -> Any:
        """The dtype that the metric counts in."""
        return self._dtype

    @property
    def variables(self) -> list[Variable]:
        """The metric's state."""
        return list(self._weights)

    @property
    def weights(self) -> list[Variable]:
        """The same as `variables`."""
        return self.variables

    @property
    def non_trainable_variables(self) -> list[Variable]:
        """The same as `variables`: none of them is trained."""
        return self.variables

    @property
    def trainable_variables(self) -> list[Variable]:
        """None."""
        return []

    # -- counting --------------------------------------------------------------------------------

    def update_state(self, *args: Any, **kwargs: Any) -> Any:
        """Count something."""
        raise NotImplementedError(f"{type(self).__name__} must implement update_state.")

    def result(self) -> Any:
        """The metric so far: in replica context that of this replica, else over all of them."""
        raise NotImplementedError(f"{type(self).__name__} must implement result.")

    def reset_state(self) -> None:
        """Start again: all variables become zero."""

        def assign_zeros() -> None:
            for variable in self.variables:
                variable.assign(jnp.zeros(variable.shape, variable.dtype))

        transactions.atomically(assign_zeros)

    def reset_states(self) -> None:
        """The same as `reset_state`, by its older name."""
        self.reset_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count something, and give the result so far."""
        self.update_state(*args, **kwargs)
        return self.result()

    def _values(self) -> list[jax.Array]:
        """The values of all variables, as they were between two steps."""

        def read() -> list[jax.Array]:
            return [variable.value() for variable in self.variables]

        inside = traced_variables.in_program() or transactions.current() is not None
        return read() if inside else transactions.between_steps(self.variables, read)

    # -- configuration ---------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same metric of, without what it has counted."""
        return {"name": self.name, "dtype": self._dtype.name}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """A metric with what `get_config` returned."""
        return cls(**config)

    def _seen_from_outside(self) -> Strategy | None:
        """The strategy whose replicas count, unless this code runs for one of them."""
        owner = self._weights[0].distribute_strategy if self._weights else None
        mode = ctx.current_mode()
        if owner is None or owner is ctx.default_mode().strategy:
            return None
        if mode.strategy is owner and (
            mode.replica_context is not None or mode.update_index is not None
        ):
            return None
        return owner


def _initial(initializer: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if initializer is None or isinstance(initializer, str):
        makers = {None: jnp.zeros, "zeros": jnp.zeros, "ones": jnp.ones}
        if initializer not in makers:
            raise InvalidValueError(
                "initializer must be 'zeros', 'ones', a function of shape and dtype, or a value. "
                f"Received: {shown(initializer)}"
            )
        return makers[initializer](shape, dtype)
    value = initializer(shape, dtype) if callable(initializer) else initializer
    return jnp.broadcast_to(jnp.asarray(value, dtype), shape)


def _counted(update: Callable[..., Any]) -> Callable[..., Any]:
    """`update_state`, which counts once where it is called outside of replicas."""

    @functools.wraps(update)
    def counted(self: Metric, *args: Any, **kwargs: Any) -> Any:
        strategy = self._seen_from_outside()
        if strategy is None:
            return update(self, *args, **kwargs)
        ctx.require_same_strategy(strategy, f"update_state of metric {self.name!r}")
        values = jax.tree.leaves((args, kwargs), is_leaf=_is_whole)
        if any(isinstance(x, DistributedValues) and not isinstance(x, Mirrored) for x in values):
            strategy.run(functools.partial(update, self), args=args, kwargs=kwargs)
            return None
        args, kwargs = jax.tree.map(_first, (args, kwargs), is_leaf=_is_whole)
        if strategy.extended._first_replica == 0:  # other workers' copies stay as they are
            with ctx.push(ctx.Mode(strategy, update_index=0)):
                return transactions.atomically(update, self, *args, **kwargs)
        return None

    return counted


def _read(result: Callable[..., Any]) -> Callable[..., Any]:
    """`result`, which gives the values of variables: they must not change afterwards."""

    @functools.wraps(result)
    def read(self: Metric, *args: Any, **kwargs: Any) -> Any:
        found = result(self, *args, **kwargs)
        return jax.tree.map(
            lambda x: x.value() if isinstance(x, Variable) else x,
            found,
            is_leaf=lambda x: isinstance(x, Variable),
        )

    return read


def _is_whole(x: Any) -> bool:
    return isinstance(x, DistributedValues | Variable)


def _first(x: Any) -> Any:
    return x.component(0) if isinstance(x, Mirrored) else x


class Sum(Metric):
    """The sum of all values that any replica has seen. Make it inside the strategy's scope.

    Examples:
        >>> import phalanx as px
        >>> total = px.train.Sum()
        >>> total.update_state([1.0, 2.0])
        >>> float(total.result())
        3.0
    """

    def __init__(self, name: str = "sum", dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each times its weight."""
        weighted, _ = weighted_sum(values, sample_weight, self.dtype, jnp.sum)
        self.total.assign_add(weighted)

    def result(self) -> jax.Array:
        """The sum so far; outside of replicas over all of them."""
        return self.total.value()


class Mean(Metric):
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

    def __init__(self, name: str = "mean", dtype: Any = None) -> None:
        super().__init__(name, dtype)
        self.total = self.add_weight("total")
        self.count = self.add_weight("count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Add values, each with its weight (1 by default)."""
        weighted, count = weighted_sum(values, sample_weight, self.dtype)

        def add() -> None:
            self.total.assign_add(weighted)
            self.count.assign_add(count)

        transactions.atomically(add)

    def result(self) -> jax.Array:
        """The mean so far; outside of replicas over all of them."""
        return divide(*self._values())


class MeanMetricWrapper(Mean):
    """The mean of what a function gives for labels and predictions.

    Args:
        fn: a function of labels, predictions and the other arguments, such as a loss.
        name: a name.
        dtype: of the variables.
        **kwargs: more arguments of the function.

    Examples:
        >>> import phalanx as px
        >>> metric = px.metrics.MeanMetricWrapper(px.losses.huber, delta=2.0)
        >>> float(metric([[0.0]], [[1.0]]))
        0.5
    """

    def __init__(
        self, fn: Callable[..., Any], name: str | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(name or str(getattr(fn, "__name__", "mean")), dtype)
        self._fn, self._kwargs = fn, kwargs

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Count labels and predictions, each with its weight (1 by default)."""
        labels, predictions = known(y_true), known(y_pred)
        with compat.without_differentiation():
            values = self._fn(labels, predictions, **self._kwargs)
        super().update_state(values, sample_weight)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` makes the same metric of."""
        own = {"fn": self._fn} if type(self) is MeanMetricWrapper else {}
        return super().get_config() | own | self._kwargs


def divide(a: Any, b: Any) -> jax.Array:
    """The quotient; 0 where nothing is divided."""
    is_zero = b == 0
    return jnp.where(is_zero, 0.0, a / jnp.where(is_zero, 1.0, b)).astype(jnp.result_type(a))


def weighted_sum(
    values: Any, sample_weight: Any, dtype: Any, over: Callable[..., jax.Array] = jnp.mean
) -> tuple[jax.Array, jax.Array]:
    """The sum of values times their weights, and the sum of the weights.

    Weights of fewer dimensions are those of examples: the values of an example become one by `over`.
    """
    array = known(values, dtype)
    weights = None if sample_weight is None else known(sample_weight, dtype)
    with compat.without_differentiation():
        if weights is None:
            return jnp.sum(array), jnp.asarray(array.size, dtype)
        rank = weights.ndim
        if rank == array.ndim + 1 and weights.shape[-1] == 1:
            weights = jnp.squeeze(weights, -1)
        elif 0 < rank < array.ndim and weights.shape == array.shape[:rank]:
            array = over(array, axis=tuple(range(rank, array.ndim)))
        try:
            weights = jnp.broadcast_to(weights, array.shape)
        except ValueError as error:
            raise InvalidValueError(
                "sample_weight must broadcast to the shape of the values. "
                f"Received: weights of shape {weights.shape} for values of shape {array.shape}"
            ) from error
        return jnp.sum(array * weights), jnp.sum(weights)


def known(x: Any, dtype: Any = None) -> jax.Array:
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
