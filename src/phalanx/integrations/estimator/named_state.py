"""Variables, parameters and metrics that `model_fn` asks for by name, and that are made once."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core.options import VariableAggregation, VariableSynchronization
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


class NamedState:
    """What one model has: its variables and metrics, by name.

    Args:
        seed: what initial values are drawn from, each with its name.
        global_step: counts the steps.
    """

    def __init__(self, seed: int, global_step: Variable) -> None:
        self._seed, self.global_step = seed, global_step
        self.variables: dict[str, Variable] = {}
        self.metrics: dict[str, Any] = {}
        self.initial: dict[str, Any] = {}  # values of variables that steps may write
        self._trees: dict[str, Any] = {}
        self.complete = False

    @property
    def trainable(self) -> list[Variable]:
        """The variables that an optimizer changes."""
        return [v for v in self.variables.values() if v.trainable]

    def key(self, name: str) -> jax.Array:
        """The random key of a name, whatever else is there."""
        return jax.random.fold_in(jax.random.key(self._seed), zlib.crc32(name.encode()))

    def variable(self, name: str, initial: Callable[[], Any], **kinds: Any) -> Variable:
        """The variable of a name; made if it is not there yet."""
        if name not in self.variables:
            if self.complete:
                raise ContextError(
                    "model_fn must ask for the same variables whenever it is called in a mode. "
                    f"Received: the new name {name!r}"
                )
            with jax.ensure_compile_time_eval():
                value = initial()
                variable = Variable(value, name=name, **kinds)
            if not variable.trainable:
                self.initial[name] = value
            self.variables[name] = variable
        return self.variables[name]

    def tree(self, name: str, init: Callable[[jax.Array], Any], trainable: bool) -> Any:
        """A pytree of variables."""
        if name not in self._trees:
            with jax.ensure_compile_time_eval():
                values = init(self.key(name))
            self._trees[name] = jax.tree_util.tree_map_with_path(
                lambda path, x: self.variable(
                    "/".join([name, jax.tree_util.keystr(path, simple=True, separator="/")]).rstrip(
                        "/"
                    ),
                    lambda: x,
                    trainable=trainable,
                ),
                values,
            )
        return self._trees[name]

    def metric(self, name: str, make: Callable[[], Any]) -> Any:
        """The metric of a name; made if it is not there yet."""
        if name not in self.metrics:
            with jax.ensure_compile_time_eval():
                metric = make()
            self.metrics[name] = metric
        return self.metrics[name]

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let this thread's `get_variable` and the like find this state."""
        before, _thread.state = _thread.state, self
        try:
            yield
        finally:
            _thread.state = before


class _Thread(threading.local):
    state: NamedState | None = None


_thread = _Thread()


def _state(what: str) -> NamedState:
    if _thread.state is None:
        raise ContextError(f"px.estimator.{what} is called in a model_fn, which an Estimator calls.")
    return _thread.state


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidTypeError(f"name must be a non-empty string. Received: {shown(name)}")


def get_variable(
    name: str,
    shape: Any = None,
    dtype: Any = jnp.float32,
    initializer: Any = None,
    trainable: bool = True,
    *,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    aggregation: VariableAggregation = VariableAggregation.NONE,
) -> Variable:
    """The variable of the model with this name; made by the first call, in the strategy's scope.

    Call it in `model_fn`. Random initial values depend on the seed and the name alone, so they are the
    same on any number of replicas, and wherever in `model_fn` the variable is made.

    Args:
        name: of the variable; also in checkpoints.
        shape: of the value. Not needed if `initializer` is an array.
        dtype: of the value.
        initializer: a function of a random key, a shape and a dtype, as in `jax.nn.initializers`, an
            array, or a number. By default `jax.nn.initializers.glorot_uniform`, and zeros for vectors
            and scalars.
        trainable: whether the optimizer changes it.
        synchronization: as for `px.Variable`.
        aggregation: as for `px.Variable`; MEAN lets replicas write running statistics.

    Examples:
        >>> import phalanx as px
        >>> def model_fn(features, labels, mode):
        ...     kernel = px.estimator.get_variable("kernel", (2, 1))
        ...     bias = px.estimator.get_variable("bias", (1,))
        ...     return px.estimator.EstimatorSpec(mode, predictions=features @ kernel + bias)
    """
    state = _state("get_variable")
    _check_name(name)
    known = state.variables.get(name)
    if known is not None:
        if shape is not None and tuple(known.shape) != _as_shape(shape):
            raise InvalidValueError(
                f"The variable {name!r} has the shape {tuple(known.shape)}. Received: shape={shape}"
            )
        return known

    def initial() -> Any:
        if initializer is not None and not callable(initializer):
            value = jnp.asarray(initializer, dtype)
            return value if shape is None else jnp.broadcast_to(value, _as_shape(shape))
        if shape is None:
            raise InvalidValueError(
                f"The variable {name!r} needs a shape, or an array as initializer. Received: shape=None"
            )
        dims = _as_shape(shape)
        vector = jax.nn.initializers.zeros
        usual = jax.nn.initializers.glorot_uniform() if len(dims) > 1 else vector
        return (initializer or usual)(state.key(name), dims, dtype)

    return state.variable(
        name, initial, trainable=trainable, synchronization=synchronization, aggregation=aggregation
    )


def _as_shape(shape: Any) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def get_parameters(name: str, init: Callable[[jax.Array], Any], trainable: bool = True) -> Any:
    """The values of a pytree of variables, as models of flax, equinox or plain JAX want them.

    Call it in `model_fn`. The first call makes a variable for each array.

    Args:
        name: in front of the names of the variables.
        init: takes a random key and returns a pytree of arrays.
        trainable: whether the optimizer changes them.

    Examples:
        >>> import jax, phalanx as px
        >>> def init(key):
        ...     return {"w": jax.random.normal(key, (3,)), "b": 0.0}
        >>> def model_fn(features, labels, mode):
        ...     params = px.estimator.get_parameters("linear", init)
        ...     outputs = features @ params["w"] + params["b"]
        ...     return px.estimator.EstimatorSpec(mode, predictions=outputs)
    """
    state = _state("get_parameters")
    _check_name(name)
    if not callable(init):
        raise InvalidTypeError(
            f"init must be a function of a random key that returns arrays. Received: {shown(init)}"
        )
    tree = state.tree(name, init, trainable)
    return jax.tree.map(lambda v: v.value(), tree, is_leaf=lambda x: isinstance(x, Variable))


def get_metric(name: str, make: Callable[[], Any]) -> Any:
    """The metric of the model with this name; made by the first call.

    Call it in `model_fn`, for EVAL, update the metric, and return it in `eval_metric_ops`.

    Args:
        name: of the metric.
        make: makes it, as `px.train.Accuracy` does.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> def model_fn(features, labels, mode):
        ...     right = px.estimator.get_metric("accuracy", px.train.Accuracy)
        ...     right.update_state(labels, features > 0)
        ...     ops = {"accuracy": right}
        ...     return px.estimator.EstimatorSpec(mode, loss=jnp.zeros(3), eval_metric_ops=ops)
    """
    state = _state("get_metric")
    _check_name(name)
    return state.metric(name, make)


def get_global_step() -> Variable:
    """The variable that counts the steps of training. Call it in `model_fn`.

    Examples:
        >>> import jax, phalanx as px
        >>> def model_fn(features, labels, mode):
        ...     step = px.estimator.get_global_step()
        ...     key = px.random.replica_key(jax.random.fold_in(jax.random.key(0), step.value()))
        ...     kept = jax.random.bernoulli(key, 0.9, features.shape)
        ...     return px.estimator.EstimatorSpec(mode, predictions=features * kept)
    """
    return _state("get_global_step").global_step
