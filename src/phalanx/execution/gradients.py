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

from phalanx.core import traced_variables
from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import Variable
from phalanx.errors import InvalidTypeError
from phalanx.execution.regathering import gathers_again, is_gathered_again, stand_in
from phalanx.execution.taps import Tap
from phalanx.runtime.formatting import shown


def value_and_grad(
    fn: Callable[..., Any], variables: Any, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that computes `fn` and its gradient with respect to variables.

    Args:
        fn: a function with a scalar result that reads the variables, by capturing them.
        variables: a variable, or a nest of variables.
        has_aux: whether `fn` returns a pair of the scalar and something else, which is passed on.

    Returns:
        A function with the arguments of `fn` that returns a pair of what `fn` returned and a nest of
        gradients like `variables`. Gradients of variables that `fn` does not read are zero. If `fn`
        reads only rows of a variable on a parameter server, its gradient is `px.IndexedSlices`.

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

    here = [v for v in listed if v.home is None]
    elsewhere = [v for v in listed if v.home is not None]

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        parent = traced_variables.current()
        made: list[traced_variables.Substitution] = []
        taps: dict[Any, Tap] = {}

        def of_values(values: list[Any], probe: Any) -> Any:
            held = {v: _as_held(v, x) for v, x in zip(here, values, strict=True)}
            taps.update((v, Tap(v, probe)) for v in elsewhere)
            made.append(traced_variables.Substitution(held, parent, taps))
            with traced_variables.recording(made[-1]):
                return fn(*args, **kwargs)

        values = [stand_in(v) if is_gathered_again(v) else jnp.asarray(v.value()) for v in here]
        arguments = (0, 1) if elsewhere else 0
        both = jax.value_and_grad(gathers_again(of_values, here), arguments, has_aux=has_aux)
        result, found = traced_variables.tracing(
            lambda: both(values, jnp.float32(0)), lambda: not made[-1].has_written
        )
        gradients = iter(found[0] if elsewhere else found)
        return result, jax.tree.map(
            lambda v: next(gradients) if v.home is None else taps[v].gradient(), variables
        )

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


def with_values(fn: Callable[[], Any], variables: list[Variable], values: list[Any]) -> Any:
    """What a function returns while its variables hold other values, in this context.

    What it writes to variables is forgotten.

    >>> from phalanx.core.variables import Variable
    >>> w = Variable(3.0)
    >>> float(with_values(lambda: w * w, [w], [jnp.float32(5.0)])), float(w)
    (25.0, 3.0)
    """
    held = {v: _as_held(v, x) for v, x in zip(variables, values, strict=True)}
    substitution = traced_variables.Substitution(held, traced_variables.current(), {})
    with traced_variables.recording(substitution):
        return fn()


def _as_held(variable: Variable, x: jax.Array) -> Any:
    """What a variable holds while this context's view of it is replaced by `x`."""
    value = variable._value
    if isinstance(value, Mirrored | PerReplica):
        # One array stands for all copies: only this context's copy can be seen here.
        return Mirrored.of_global(x, value.count)
    return x
