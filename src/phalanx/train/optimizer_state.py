"""What an optimizer keeps: its slots and their names, and the learning rate in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from phalanx.core.values import DistributedValues
from phalanx.core.variables.sliced_variables import SlicedVariable
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError
from phalanx.runtime.formatting import shown

__all__ = [
    "asked_for",
    "find_rate",
    "is_scheduled",
    "no_rate",
    "present_value",
    "slot_name",
    "with_rate",
]


def present_value(variable: Variable) -> jax.Array:
    """What a variable really holds, also while a program is being traced."""
    held = variable._value
    if isinstance(variable, SlicedVariable):  # by another optimizer
        return variable.whole_of(held)
    return held.values[0] if isinstance(held, DistributedValues) else held


def slot_name(names: Sequence[str], path: tuple[Any, ...], x: Any) -> str:
    """What a part of the state is called: after its variable, and after its role in optax's state.

    >>> field, index = jax.tree_util.GetAttrKey("mu"), jax.tree_util.SequenceKey(1)
    >>> slot_name(["w:0", "b:0"], (field, index), None), slot_name(["w:0"], (field,), None)
    ('b/mu', 'optimizer/mu')
    """
    roles = [str(getattr(key, "name", None) or getattr(key, "key", "")) for key in path]
    roles = [role for role in roles if role]
    last = path[-1] if path else None
    belongs = isinstance(last, jax.tree_util.SequenceKey) and last.idx < len(names)
    owner = names[last.idx].removesuffix(":0") if belongs else "optimizer"  # type: ignore[union-attr]
    return f"{owner}/{roles[-1] if roles else 'slot'}"


def find_rate(state: Any) -> Any | None:
    """The learning rate in a transformation's state, where `optax.inject_hyperparams` has put it.

    >>> float(find_rate(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5).init([])))
    0.5
    >>> find_rate(optax.sgd(0.5).init([])) is None
    True
    """
    hyperparams = getattr(state, "hyperparams", None)
    if isinstance(hyperparams, Mapping) and "learning_rate" in hyperparams:
        return hyperparams["learning_rate"]
    parts = state if isinstance(state, tuple | list) else ()
    return next((rate for rate in map(find_rate, parts) if rate is not None), None)


def with_rate(state: Any, rate: Any) -> Any:
    """A transformation's state with another learning rate, unless it is None.

    >>> state = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5).init([])
    >>> float(find_rate(with_rate((state,), 0.25)))
    0.25
    """
    if rate is None:
        return state
    hyperparams = getattr(state, "hyperparams", None)
    if isinstance(hyperparams, Mapping) and "learning_rate" in hyperparams:
        new = jnp.asarray(rate, jnp.asarray(hyperparams["learning_rate"]).dtype)
        return state._replace(hyperparams={**hyperparams, "learning_rate": new})
    if not isinstance(state, tuple | list):
        return state
    parts = [with_rate(part, rate) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else type(state)(parts)


def is_scheduled(state: Any) -> bool:
    """Whether a transformation computes its learning rate itself.

    >>> is_scheduled(optax.inject_hyperparams(optax.sgd)(learning_rate=lambda step: 0.5).init([]))
    True
    """
    states = getattr(state, "hyperparams_states", None)
    if isinstance(states, Mapping) and "learning_rate" in states:
        return True
    return isinstance(state, tuple | list) and any(map(is_scheduled, state))


def no_rate(transform: Any) -> ContextError:
    """The error for a transformation whose learning rate is a constant in its code."""
    return ContextError(
        "The learning rate of this transformation is a constant in it. Make an optimizer whose "
        "learning rate can be read and set: px.optimizers.Adam(1e-3), or "
        "px.train.Optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)). "
        f"Received: {shown(transform)}"
    )


def asked_for(transform: optax.GradientTransformation) -> frozenset[str]:
    """What a transformation needs besides gradients, state and parameters: the loss, or a line search.

    >>> sorted(asked_for(optax.adam(1e-3))), sorted(asked_for(optax.lbfgs()))
    ([], ['grad', 'value', 'value_fn'])
    >>> sorted(asked_for(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())))
    ['value']
    """
    like = [jax.ShapeDtypeStruct((2,), jnp.float32)]
    value = jax.ShapeDtypeStruct((), jnp.float32)

    def lacks_something(**given: Any) -> bool:
        try:
            state = jax.eval_shape(transform.init, like)
            jax.eval_shape(transform.update, like, state, like, **given)
        except TypeError as error:
            return "required keyword-only argument" in str(error)
        except Exception:  # noqa: BLE001 - it does not like these shapes, which says nothing
            return False
        return False

    if not lacks_something():
        return frozenset()
    return frozenset({"value", "grad", "value_fn"} if lacks_something(value=value) else {"value"})
