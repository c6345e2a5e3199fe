"""Keras models in loops of one's own: called on replicas and in `px.function`.

There the values of Keras's variables would be constants of the program, and what layers assign would
leak out of it. So a model is lifted first: each of its variables gets a `px.Variable`, and
`keras.StatelessScope` sends reads and writes there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.options import VariableAggregation
from phalanx.core.variables import traced_variables, transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError
from phalanx.execution.later_variables import LaterVariables, variables_are_made
from phalanx.integrations.keras import touch_points
from phalanx.integrations.keras.distribution import strategy_of
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown

_ATTRIBUTE = "_px_lifted"
_SEED_STEP = np.uint32(0x9E3779B9)


class LiftedModel:
    """A Keras model, or a layer, with variables of a strategy; made by `px.keras.lift`."""

    def __init__(self, model: Any, strategy: Any) -> None:
        self._model, self._strategy = model, strategy
        self._made: list[tuple[Any, Variable]] | None = None
        self._then: Callable[[], None] | None = None  # see `when_built`
        self._latest = threading.local()  # what layers have added to the loss in the latest call
        self._take_variables()

    def __getstate__(self) -> dict[str, Any]:
        """What another process gets, which makes a model of its own of it."""
        variables = None if self._made is None else self.variables
        return {"model": self._model, "strategy": self._strategy, "variables": variables}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model, self._strategy = state["model"], state["strategy"]
        known = state["variables"]
        pairs = zip(self._model.variables, known or (), strict=known is not None)
        self._made = None if known is None else list(pairs)
        self._then = None
        self._latest = threading.local()
        object.__setattr__(self._model, _ATTRIBUTE, self)

    @property
    def is_built(self) -> bool:
        """Whether there are variables; takes those of a model that has them now."""
        self._take_variables()
        return self._made is not None

    def when_built(self, then: Callable[[], None]) -> None:
        """Call a function when there are variables, before they are used; one function only."""
        self._then = then

    def _take_variables(self) -> None:
        if self._made is not None or not self._model.built:
            return
        with ctx.push(ctx.Mode(self._strategy)), compat.evaluating(), _building():
            self._made = [(v, _variable(v)) for v in self._model.variables]
        if self._then is not None:
            try:
                transactions.at_once(self._then)
            except BaseException:
                self._made = None  # so that the next call fails as well
                raise
            self._then = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        if not self.is_built:
            self._build(args, kwargs)
        with self.scope():
            return self._model(*args, **kwargs)

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the model make its weights, for arguments of these shapes."""

        def described(x: Any) -> Any:
            is_array = hasattr(x, "shape") and hasattr(x, "dtype")
            return touch_points.batch_like(x.shape, x.dtype) if is_array else x

        given = jax.tree.map(described, (args, kwargs), is_leaf=lambda x: x is None)
        with ctx.push(ctx.Mode(self._strategy)), compat.evaluating(), _building():
            self._model(*given[0], **given[1])
        self._take_variables()
        variables_are_made()

    @property
    def _pairs(self) -> list[tuple[Any, Variable]]:
        if not self.is_built:
            LaterVariables(lambda: None, self._model).now()
        assert self._made is not None
        return self._made

    def _those(self, wanted: Callable[[Any], bool]) -> Any:
        """Some of the variables, or what will be them."""

        def find() -> list[Variable] | None:
            return [p for v, p in self._pairs if wanted(v)] if self.is_built else None

        found = find()
        return LaterVariables(find, self._model) if found is None else found

    @property
    def variables(self) -> list[Variable]:
        """The variables, in the order of the model's."""
        return [p for _, p in self._pairs]

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables that optimizers change."""
        return self._those(lambda v: bool(v.trainable))

    @property
    def non_trainable_variables(self) -> list[Variable]:
        """The variables that layers change by themselves, such as moving statistics."""
        return self._those(lambda v: not v.trainable)

    @property
    def losses(self) -> list[Any]:
        """What layers have added to the loss in the latest call, and what regularizers give now."""
        added = list(getattr(self._latest, "losses", ()))
        with self.scope():
            found = [*added, *self._model.losses]
        self._latest.losses = added
        return found

    @contextlib.contextmanager
    def scope(self) -> Iterator[Any]:
        """Code inside sees the model with these variables: several calls, or `model.losses`."""
        import keras

        replica = ctx.active_replica()
        number = None if replica is None else replica.replica_id_in_sync_group
        given = [_seen(v, jnp.asarray(p.value()), number) for v, p in self._pairs]
        keys = [v for v, _ in self._pairs]
        mapping = list(zip(keys, given, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as inside:
            before = [inside.get_current_value(v) for v in keys]
            yield inside
            after = [inside.get_current_value(v) for v in keys]
        self._latest.losses = list(inside.losses)
        for (v, p), old, new in zip(self._pairs, before, after, strict=True):
            if new is not old:
                p.assign(_kept(v, new, jnp.asarray(p.value())))

    def update_model(self) -> Any:
        """Give the values to the Keras model, as before `model.save`, and return it."""
        for v, p in self._pairs if self.is_built else ():
            v.assign(p.numpy())
        return self._model

    def __getattr__(self, name: str) -> Any:
        """What else the Keras model has, such as `save` or `summary`, with the present values."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if _needs_lifting():
            return getattr(self._model, name)
        found = getattr(self.update_model(), name)
        if name not in _CHANGING:
            return found

        @functools.wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            for v, p in self._pairs:
                p.assign(v.value)
            return result

        return call


_CHANGING = ("fit", "load_weights", "set_weights", "train_on_batch")
"""Methods of models after which variables take the values of the model."""


def lift(model: Any) -> LiftedModel:
    """Make a Keras model usable on replicas and in `px.function`.

    Call it in the scope. From then on the model itself may be called there, too. Its Keras variables
    keep their values until `LiftedModel.update_model`. A model that is not built gets its weights when
    it is called for the first time, also inside `px.value_and_grad`.

    Args:
        model: a Keras model or layer.

    Examples:
        >>> import jax.numpy as jnp, keras, optax, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     lifted = px.keras.lift(model)
        ...     optimizer = px.train.Optimizer(optax.sgd(0.1))
        >>> @px.function
        ... def step(x, y):
        ...     def on_replica(x, y):
        ...         loss = lambda: jnp.sum((model(x) - y) ** 2) / 4
        ...         value, gradients = px.value_and_grad(loss, lifted.trainable_variables)()
        ...         optimizer.apply_gradients(zip(gradients, lifted.trainable_variables))
        ...         return value
        ...     return strategy.reduce("sum", strategy.run(on_replica, args=(x, y)), axis=None)
        >>> data = px.data.Dataset.from_tensor_slices(
        ...     (jnp.arange(4.0)[:, None], jnp.ones((4, 1)))).batch(4).repeat(50)
        >>> losses = [float(step(x, y)) for x, y in strategy.experimental_distribute_dataset(data)]
        >>> losses[-1] < 0.1
        True
        >>> float(abs(lifted.update_model().predict(jnp.ones((1, 1)), verbose=0) - 1)[0, 0]) < 0.5
        True
    """
    import keras

    if isinstance(model, LiftedModel):
        return model
    if not isinstance(model, keras.Layer):
        raise InvalidTypeError(f"lift needs a Keras model or layer. Received: {shown(model)}")
    lifted = LiftedModel(model, strategy_of(model) or ctx.get_strategy())
    object.__setattr__(model, _ATTRIBUTE, lifted)
    return lifted


def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of layers, of which those that would go wrong on replicas are refused."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if not _needs_lifting() or touch_points.in_stateless_scope() or _state.building:
            return call(self, *args, **kwargs)
        lifted = vars(self).get(_ATTRIBUTE)
        if lifted is not None:
            return lifted(*args, **kwargs)
        if self.built and not self.variables:
            return call(self, *args, **kwargs)
        raise ContextError(
            "A Keras model or layer was called on a replica or in a px.function, where its weights "
            "would be constants and its updates would be lost. Lift it after it was built: `with "
            "strategy.scope(): lifted = px.keras.lift(model)`; or train it with model.fit. "
            f"Received: {shown(self)}"
        )

    return __call__


def guarded_losses(losses: property) -> property:
    """The losses of layers, which on replicas must not be those of weights that are constants there."""
    find = losses.fget
    assert find is not None

    def guarded_find(self: Any) -> Any:
        lifted = vars(self).get(_ATTRIBUTE)
        if lifted is None or not _needs_lifting() or touch_points.in_stateless_scope():
            return find(self)
        return lifted.losses

    return property(guarded_find, doc=losses.__doc__)


def guarded_assign(assign: Callable[..., Any]) -> Callable[..., Any]:
    """Writes to variables, of which those that would be lost on replicas are refused."""

    @functools.wraps(assign)
    def checked(self: Any, value: Any) -> Any:
        if _needs_lifting() and not (touch_points.in_stateless_scope() or _state.building):
            raise ContextError(
                "A metric, an optimizer or another object of Keras has written a variable on a replica "
                "or in a px.function, where that would be lost. Use px.metrics and px.optimizers, "
                f"which have Keras's names, and lift models: px.keras.lift. Received: {self.path!r}"
            )
        return assign(self, value)

    return checked


class _State(threading.local):
    building = False


_state = _State()


@contextlib.contextmanager
def _building() -> Iterator[None]:
    """Code inside makes weights: what layers do there is meant for them."""
    before, _state.building = _state.building, True
    try:
        yield
    finally:
        _state.building = before


def _needs_lifting() -> bool:
    return ctx.active_replica() is not None or traced_variables.program() is not None


def _variable(v: Any) -> Variable:
    floating = jnp.issubdtype(jnp.dtype(v.dtype), jnp.floating)
    aggregation = VariableAggregation.MEAN if floating else VariableAggregation.ONLY_FIRST_REPLICA
    name = v.path.replace("/", "_")
    return Variable(v.value, trainable=v.trainable, name=name, aggregation=aggregation)


def _is_seed(v: Any) -> bool:
    return bool(v.path.endswith("seed_generator_state"))


def _seen(v: Any, value: Any, replica: Any) -> Any:
    """What a replica sees of a variable: of a seed, one of its own."""
    if replica is None or not _is_seed(v):
        return value
    return value.at[0].add(jnp.asarray(replica, value.dtype) * jnp.asarray(_SEED_STEP, value.dtype))


def _kept(v: Any, value: Any, common: Any) -> Any:
    """What a variable keeps of what a replica has written."""
    return value.at[0].set(common[0]) if _is_seed(v) else value
