"""Steps of a model's own that are written as for TensorFlow: `train_step(self, data)`, which writes.

Keras on JAX wants `train_step(self, state, data)`, which returns the new state. `stateful` makes the
one of the other: it runs the method in a `keras.StatelessScope`, which sends reads and writes of
variables to the state. Other optimizers than `model.optimizer`, which GANs have, belong to it then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.execution.gradients import scalars
from phalanx.integrations.keras import touch_points
from phalanx.runtime.formatting import shown
from phalanx.runtime.seeding import keys_from

_MARK = "_px_stateful"
_SEEDS = "_px_seeds"


class _Running(threading.local):
    """The step that runs: its scope, and all variables whose values are there."""

    scope: Any = None
    variables: Sequence[Any] = ()


_running = _Running()


def stateful(step: Callable[..., Any]) -> Callable[..., Any]:
    """Let a Keras model have a step that reads and writes variables, as with TensorFlow.

    For methods named `train_step`, `test_step` or `predict_step` that take the model and the data.
    They may call the model, update metrics, and use optimizers: also others than `model.optimizer`,
    which are attributes of the model. Gradients are those of `px.keras.value_and_grad`. In train steps
    `px.random.next_key` gives other keys each time. The data are the whole batch, and the step is
    compiled, under strategies and without. A ``"loss"`` that the step returns, and does not count in
    Keras's metric for it, is counted.

    Examples:
        >>> import keras, numpy as np, phalanx as px
        >>> class Model(keras.Sequential):
        ...     @px.keras.stateful
        ...     def train_step(self, data):
        ...         x, y = data
        ...         def loss():
        ...             return self.compute_loss(y=y, y_pred=self(x, training=True))
        ...         value, gradients = px.keras.value_and_grad(loss, self.trainable_variables)()
        ...         self.optimizer.apply(gradients, self.trainable_variables)
        ...         for metric in self.metrics:  # here the loss only
        ...             metric.update_state(value)
        ...         return {metric.name: metric.result() for metric in self.metrics}
        >>> with px.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        ...     model = Model([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> x = np.ones((5, 1), "float32")
        >>> losses = model.fit(x, 3 * x, batch_size=2, epochs=5, verbose=0).history["loss"]
        >>> losses[-1] < losses[0]
        True
    """
    name = getattr(step, "__name__", "")
    if name not in touch_points.PARTS:
        raise InvalidValueError(
            f"stateful is for methods named {', '.join(touch_points.PARTS)}. Received: {shown(step)}"
        )

    @functools.wraps(step)
    def with_state(self: Any, state: Any, data: Any) -> Any:
        import keras

        parts = [state_variables(self, part) for part in touch_points.PARTS[name]]
        variables = [v for part in parts for v in part]
        pairs = list(zip(variables, [x for values in state for x in values], strict=True))
        with keras.StatelessScope(state_mapping=pairs, collect_losses=True) as scope:
            before = _running.scope, _running.variables
            _running.scope, _running.variables = scope, variables
            try:
                counted = _counted_loss(self, scope)
                with keys_from(functools.partial(_key, self)):
                    result = step(self, data)
                if name != "predict_step" and counted == _counted_loss(self, scope):
                    _count_loss(self, result, data)
            finally:
                _running.scope, _running.variables = before
        after = tuple([scope.get_current_value(v) for v in part] for part in parts)
        return (result, after[1]) if name == "predict_step" else (result, after)

    setattr(with_state, _MARK, True)
    return with_state


def _counted_loss(model: Any, scope: Any) -> list[int]:
    """Which values the metric has that a model shows as its loss."""
    tracker = touch_points.loss_tracker(model)
    return [] if tracker is None else [id(scope.get_current_value(v)) for v in tracker.variables]


def _count_loss(model: Any, result: Any, data: Any) -> None:
    """Count the loss that a step has returned and not counted: `fit` shows what was counted."""
    tracker = touch_points.loss_tracker(model)
    loss = result.get("loss") if isinstance(result, dict) else None
    if tracker is not None and loss is not None and jnp.ndim(loss) == 0:
        rows = next((x.shape[0] for x in jax.tree.leaves(data) if jnp.ndim(x)), 1)
        tracker.update_state(loss, sample_weight=rows)


def _key(model: Any) -> jax.Array:
    """A random key for a step, of seeds that are a part of its state."""
    a, b = vars(model)[_SEEDS].next()
    return jax.random.fold_in(jax.random.key(a), b)


def state_variables(model: Any, part: str) -> list[Any]:
    """The variables of a part of the state that steps take and return."""
    if part == "optimizer_variables":
        return [*model.optimizer.variables, *other_variables(model)]
    return list(getattr(model, part))


def is_stateful(model: Any, name: str) -> bool:
    """Whether a model has a step that `stateful` has made."""
    return bool(getattr(getattr(type(model), name, None), _MARK, False))


def _other_optimizers(model: Any) -> list[Any]:
    import keras

    found = {id(x): x for x in vars(model).values() if isinstance(x, keras.optimizers.Optimizer)}
    return [x for x in found.values() if x is not model.optimizer]


def other_variables(model: Any) -> list[Any]:
    """What the train step of a model writes besides what Keras knows of."""
    if not is_stateful(model, "train_step"):
        return []
    seeds = vars(model).get(_SEEDS)
    listed = [v for optimizer in _other_optimizers(model) for v in optimizer.variables]
    return listed if seeds is None else [*listed, seeds.state]


def give_back(model: Any, values: Sequence[Any]) -> None:
    """Put what a step has returned for other variables into them; it is behind the optimizer's."""
    more = other_variables(model)
    if more and values:
        for v, x in zip(more, values[-len(more) :], strict=True):
            v.assign(x)


class _AskedForVariables(Exception):
    """An optimizer was used that has no variables yet."""

    def __init__(self, optimizer: Any, variables: Any) -> None:
        super().__init__(optimizer, variables)
        self.optimizer, self.variables = optimizer, variables


def needs_batch(model: Any) -> bool:
    """Whether other optimizers of a model must be built, and so its train step looked at."""
    unbuilt = any(not optimizer.built for optimizer in _other_optimizers(model))
    return is_stateful(model, "train_step") and unbuilt


def prepare(model: Any) -> None:
    """Before a model is built: one that is only a place for others counts as built, if they are."""
    import keras

    if not _make_seeds(model):
        return
    others = [layer for layer in touch_points.all_layers(model) if layer is not model]
    has_no_call = type(model).call in (keras.Layer.call, keras.Model.call)
    if has_no_call and not model.built and all(layer.built for layer in others):
        model.built = True


def prepare_to_predict(model: Any) -> None:
    """Before a model predicts, which may be the first that it does."""
    _make_seeds(model)


def _make_seeds(model: Any) -> bool:
    """Let a model have seeds for its steps; whether it has steps that `stateful` has made."""
    import keras

    has_steps = any(is_stateful(model, name) for name in touch_points.PARTS)
    if has_steps and _SEEDS not in vars(model):
        object.__setattr__(model, _SEEDS, keras.random.SeedGenerator())
    return has_steps


def build_optimizers(model: Any, batch: Any, state_of: Callable[[], Any]) -> None:
    """Let other optimizers have their variables: those that the train step gives them.

    Args:
        model: the model, which is built.
        batch: shapes and dtypes of a batch.
        state_of: gives the state that the train step takes.
    """
    for _ in range(len(_other_optimizers(model)) + 1):
        unbuilt = [optimizer for optimizer in _other_optimizers(model) if not optimizer.built]
        try:
            with touch_points.replaced(unbuilt, "build", _asking):
                jax.eval_shape(model.train_step, state_of(), batch)
        except _AskedForVariables as asked:
            asked.optimizer.build(asked.variables)
        else:
            return


def _asking(optimizer: Any) -> Callable[[Any], None]:
    def build(variables: Any) -> None:
        raise _AskedForVariables(optimizer, list(variables))

    return build


# -- gradients ---------------------------------------------------------------------------------------


def value_and_grad(
    fn: Callable[..., Any], variables: Any, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that computes `fn` and its gradient with respect to variables of Keras.

    For methods that `px.keras.stateful` decorates; see there. Elsewhere use `px.value_and_grad`.

    Args:
        fn: a function with a scalar result. What it writes, such as moving statistics, is kept.
        variables: a list of variables of the model.
        has_aux: whether `fn` returns a pair of the scalar and something else, which is passed on.

    Returns:
        A function with the arguments of `fn` that returns a pair of what `fn` returned and a list of
        gradients.
    """
    listed = _checked(variables)
    several = values_and_grads(lambda *a, **k: _one(fn(*a, **k), has_aux), [listed], has_aux)

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result, (gradients,) = several(*args, **kwargs)
        if has_aux:
            (value,), aux = result
            return (value, aux), gradients
        return result[0], gradients

    return differentiated


def _one(result: Any, has_aux: bool) -> Any:
    return ((result[0],), result[1]) if has_aux else (result,)


def values_and_grads(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that computes several losses at once, and the gradient of each.

    As `px.values_and_grads`, for variables of Keras in methods that `px.keras.stateful` decorates.

    Args:
        fn: a function that returns a tuple of scalars.
        variables: for each scalar, a list of variables of the model. They may overlap.
        has_aux: whether `fn` returns a pair of the scalars and something else, which is passed on.

    Returns:
        A function with the arguments of `fn` that returns a pair of what `fn` returned and a tuple with
        a list of gradients for each scalar.
    """
    nests = [_checked(nest) for nest in variables]
    wanted = list({id(v): v for nest in nests for v in nest}.values())

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        import keras

        outer, known = _running.scope, _running.variables
        if outer is None:
            raise ContextError(
                "px.keras.value_and_grad differentiates in methods that px.keras.stateful decorates. "
                "In loops of your own lift the model, and use px.value_and_grad with its variables: "
                f"px.keras.lift. Received: {shown(fn)}"
            )
        strange = [v.path for v in wanted if not any(v is k for k in known)]
        if strange:
            raise InvalidValueError(
                f"These variables do not belong to the model whose step this is. Received: {strange}"
            )
        before = [outer.get_current_value(v) for v in known]

        def of_values(values: list[Any]) -> Any:
            here = {id(v): x for v, x in zip(wanted, values, strict=True)}
            pairs = [(v, here.get(id(v), x)) for v, x in zip(known, before, strict=True)]
            with keras.StatelessScope(state_mapping=pairs, collect_losses=True) as inner:
                _running.scope = inner
                try:
                    result = fn(*args, **kwargs)
                finally:
                    _running.scope = outer
            found, aux = result if has_aux else (result, None)
            losses = scalars(found, len(nests))
            after = [inner.get_current_value(v) for v in known]
            written = [None if b is a else b for (_, a), b in zip(pairs, after, strict=True)]
            return losses, (aux, written)

        values = [outer.get_current_value(v) for v in wanted]
        losses, pull, (aux, written) = jax.vjp(of_values, values, has_aux=True)
        for v, x in zip(known, written, strict=True):
            if x is not None:
                outer.add_update((v, x))
        found = []
        for i, nest in enumerate(nests):
            ones = tuple(
                jnp.ones_like(x) if i == j else jnp.zeros_like(x) for j, x in enumerate(losses)
            )
            of = dict(zip(map(id, wanted), pull(ones)[0], strict=True))
            found.append([of[id(v)] for v in nest])
        return ((losses, aux) if has_aux else losses), tuple(found)

    return differentiated


def _checked(variables: Any) -> list[Any]:
    import keras

    listed = list(variables) if isinstance(variables, list | tuple) else [variables]
    if not listed or not all(isinstance(v, keras.Variable) for v in listed):
        raise InvalidTypeError(
            "px.keras.value_and_grad needs a list of variables of a Keras model. "
            f"Received: {shown(variables)}"
        )
    return listed
