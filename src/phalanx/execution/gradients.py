"""Gradients with respect to variables.

`jax.grad` differentiates with respect to arguments. These functions do it with respect to variables
that the function reads, as a `GradientTape` does. Inside `Strategy.run` gradients are local to the
replica.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.core import lifting
from phalanx.core.errors import InvalidTypeError
from phalanx.core.showing import shown
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import Variable


def value_and_grad(
    fn: Callable[..., Any], variables: Any, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that computes `fn` and its gradient with respect to variables.

    Args:
        fn: a function with a scalar result that reads the variables, by capturing them.
        variables: a variable, or a nest of variables.
        has_aux: whether `fn` returns a pair of the scalar and something else, which is passed on.

    Returns:
        A function with the arguments of `fn` that returns a pair: what `fn` returned, and a nest of
        gradients like `variables`. Gradients of variables that `fn` does not read are zero.

    Examples:
        >>> import phalanx as px
        >>> w = px.Variable([1.0, 2.0])
        >>> loss, gradient = px.value_and_grad(lambda x: (w * w * x).sum(), w)(3.0)
        >>> float(loss), gradient.tolist()
        (15.0, [6.0, 12.0])
    """
    listed = jax.tree.leaves(variables)
    if not listed or not all(isinstance(v, Variable) for v in listed):
        raise InvalidTypeError(
            "value_and_grad needs variables: a px.Variable, or a list or dict of them. For arrays use "
            f"jax.value_and_grad. Received: {shown(variables)}"
        )
    repeated = len({id(v) for v in listed}) != len(listed)
    if repeated:
        raise InvalidTypeError(f"A variable occurs twice. Received: {[v.name for v in listed]}")
    if not callable(fn):
        raise InvalidTypeError(f"fn must be callable. Received: {shown(fn)}")

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        parent = lifting.current()
        made: list[lifting.Substitution] = []

        def of_values(values: Any) -> Any:
            held = {v: _as_held(v, x) for v, x in zip(listed, jax.tree.leaves(values), strict=True)}
            made.append(lifting.Substitution(held, parent))
            with lifting.lifted(made[-1]):
                return fn(*args, **kwargs)

        values = jax.tree.map(lambda v: jnp.asarray(v.value()), variables)
        both = jax.value_and_grad(of_values, has_aux=has_aux)
        return lifting.tracing(lambda: both(values), lambda: not made[-1].has_written)

    return differentiated


def grad(fn: Callable[..., Any], variables: Any, has_aux: bool = False) -> Callable[..., Any]:
    """A function that computes the gradient of `fn` with respect to variables.

    Like `value_and_grad`, without the value; with `has_aux` a pair of the gradients and what `fn`
    returned besides its scalar.

    Examples:
        >>> import phalanx as px
        >>> w = px.Variable(3.0)
        >>> float(px.grad(lambda: w * w, w)())
        6.0
    """
    both = value_and_grad(fn, variables, has_aux=has_aux)

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def _as_held(variable: Variable, x: jax.Array) -> Any:
    """What a variable holds while this context's view of it is replaced by `x`."""
    value = variable._value
    if isinstance(value, Mirrored | PerReplica):
        # One array stands for all copies: only this context's copy can be seen here.
        return Mirrored.of_global(x, value.count)
    return x
