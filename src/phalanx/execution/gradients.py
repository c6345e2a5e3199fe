"""Gradients with respect to variables.

`jax.grad` differentiates with respect to arguments. These functions do it with respect to variables
that the function reads, as a `GradientTape` does. Inside `Strategy.run` gradients are local to the
replica.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from phalanx.core.values import Mirrored, PerReplica
from phalanx.core.variables import traced_variables
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError, UnsupportedError
from phalanx.execution.later_variables import LaterVariables, made_by
from phalanx.execution.regathering import gathers_again, is_gathered_again, stand_in
from phalanx.execution.taps import Tap
from phalanx.runtime.formatting import shown

Loss = Callable[[list[Any], Any], Any]
"""A function of the values of variables, and of something else."""


class GradientRules(Protocol):
    """What a strategy makes of the gradients of variables in its steps."""

    def staged(self, function: Loss, variables: Sequence[Variable]) -> Loss | None:
        """The function that is differentiated instead, in which JAX stages the given one; or None."""

    def pulled(self, pull: Callable[..., Any], variables: Sequence[Variable]) -> Callable[..., Any]:
        """What computes the gradients, after the function has run eagerly."""

    def finished(self, variables: Sequence[Variable], gradients: Sequence[Any]) -> Sequence[Any]:
        """What steps get of the gradients."""


_rules: contextvars.ContextVar[GradientRules | None] = contextvars.ContextVar(
    "gradient rules", default=None
)


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
    if isinstance(variables, LaterVariables) and callable(fn):

        @functools.wraps(fn)
        def made_first(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            (made,) = made_by(fn, [variables], args, kwargs)
            return value_and_grad(fn, made, has_aux)(*args, **kwargs)

        return made_first
    listed = _checked(fn, variables)
    here = [v for v in listed if v.home is None]
    elsewhere = [v for v in listed if v.home is not None]

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        parent = traced_variables.current()
        made: list[traced_variables.Substitution] = []
        others: list[Any] = []
        taps: dict[Any, Tap] = {}

        def of_values(values: list[Any], probe: Any) -> Any:
            held = {v: _as_held(v, x) for v, x in zip(here, values, strict=True)}
            taps.update((v, Tap(v, probe)) for v in elsewhere)
            made.append(traced_variables.Substitution(held, parent, taps, again is not None))
            with traced_variables.recording(made[-1]):
                result = fn(*args, **kwargs)
            return result if again is None else _with_written(_pair(result, has_aux), made[-1], others)

        again = _staged(of_values, here)
        values = [stand_in(v) if is_gathered_again(v) else jnp.asarray(v.value()) for v in here]
        arguments = (0, 1) if elsewhere else 0
        both = _value_and_grad(again or of_values, here, arguments, has_aux or again is not None)
        result, found = traced_variables.tracing(
            lambda: both(values, jnp.float32(0)), lambda: not made[-1].has_written
        )
        if again is not None:
            result = _written_now(result, has_aux, made[-1], others)
        gradients = iter(_finished(here, found[0] if elsewhere else found))
        return result, jax.tree.map(
            lambda v: next(gradients) if v.home is None else taps[v].gradient(), variables
        )

    return differentiated


@contextlib.contextmanager
def gradients_by(rules: GradientRules) -> Iterator[None]:
    """Let a strategy's rules make the gradients of variables."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def _finished(variables: Sequence[Variable], gradients: Sequence[Any]) -> Sequence[Any]:
    rules = _rules.get()
    return gradients if rules is None else rules.finished(variables, gradients)


def _staged(function: Loss, variables: Sequence[Variable]) -> Loss | None:
    """The function with its parameters gathered again for the gradient; None if none are."""
    if any(map(is_gathered_again, variables)):
        return gathers_again(function, variables)
    rules = _rules.get()
    return None if rules is None else rules.staged(function, variables)


def _pair(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """What a function has returned, and something else."""
    if not has_aux:
        return result, None
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise InvalidTypeError(
            "With has_aux=True, fn returns a pair of what is differentiated and something else. "
            f"Received: {shown(result)}"
        )
    return result[0], result[1]


def _with_written(
    result: tuple[Any, Any], made: traced_variables.Substitution, others: list[Any]
) -> Any:
    """What staged code returns: also what it has written, because it cannot write from there.

    Only arrays come out of staged code; the rest of what it returns is put into `others`.
    """
    value, aux = result
    leaves, structure = jax.tree.flatten(aux)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    others[:] = structure, [None if isinstance(x, jax.Array) else x for x in leaves]
    return value, (arrays, list(made.written.values()))


def _written_now(
    result: Any, has_aux: bool, made: traced_variables.Substitution, others: list[Any]
) -> Any:
    value, (found, written) = result
    made.write_kept(written)
    (structure, leaves), arrays = others, iter(found)
    aux = jax.tree.unflatten(structure, [next(arrays) if x is None else x for x in leaves])
    return (value, aux) if has_aux else value


def _value_and_grad(function: Loss, variables: Sequence[Variable], argnums: Any, has_aux: bool) -> Any:
    rules = _rules.get()
    usual = jax.value_and_grad(function, argnums, has_aux=has_aux)
    if rules is None or argnums != 0 or traced_variables.in_program():
        return usual

    def eagerly(values: list[Any], probe: Any) -> Any:
        vjp: Any = jax.vjp
        value, pull, *aux = vjp(lambda given: function(given, probe), values, has_aux=has_aux)
        if not _has_gradient(value, values):
            return usual(values, probe)  # which says what is wrong
        gradients = rules.pulled(pull, variables)(jnp.ones_like(value))[0]
        return (value, *aux) if has_aux else value, gradients

    return eagerly


def _has_gradient(value: Any, values: Sequence[Any]) -> bool:
    """Whether something is a real scalar, and can have a gradient with respect to some values."""
    if not jax.tree_util.all_leaves([value]) or jnp.shape(value):
        return False
    is_real = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return is_real and all(jnp.issubdtype(x.dtype, jnp.inexact) for x in values)


def _checked(fn: Any, variables: Any) -> list[Variable]:
    """The variables of a nest."""
    listed = jax.tree.leaves(variables)
    if not listed or not all(isinstance(v, Variable) for v in listed):
        raise InvalidTypeError(
            "value_and_grad needs variables: a px.Variable, or a list or dict of them. For arrays use "
            f"jax.value_and_grad. Received: {shown(variables)}"
        )
    if len({id(v) for v in listed}) != len(listed):
        raise InvalidTypeError(f"A variable occurs twice. Received: {[v.name for v in listed]}")
    if not callable(fn):
        raise InvalidTypeError(f"fn must be callable. Received: {shown(fn)}")
    return listed


def values_and_grads(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """A function that computes several losses at once, and the gradient of each.

    As several gradient tapes around the same code, or a persistent one: the code runs once.

    Args:
        fn: a function that returns a tuple of scalars, and reads the variables.
        variables: for each scalar, a variable or a nest of variables. They may overlap.
        has_aux: whether `fn` returns a pair of the scalars and something else, which is passed on.

    Returns:
        A function with the arguments of `fn` that returns a pair of what `fn` returned and a tuple with
        a nest of gradients for each scalar.

    Examples:
        >>> import phalanx as px
        >>> g, d = px.Variable(2.0), px.Variable(3.0)
        >>> losses, (of_g, of_d) = px.values_and_grads(lambda: (g * d, -g * d * d), [g, d])()
        >>> float(of_g), float(of_d)
        (3.0, -12.0)
    """
    nests = list(variables)
    if callable(fn) and any(isinstance(nest, LaterVariables) for nest in nests):

        @functools.wraps(fn)
        def made_first(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return values_and_grads(fn, made_by(fn, nests, args, kwargs), has_aux)(*args, **kwargs)

        return made_first
    listed = list({id(v): v for nest in nests for v in _checked(fn, nest)}.values())
    elsewhere = [v.name for v in listed if v.home is not None]
    if elsewhere:
        raise UnsupportedError(
            "The gradients of several losses are computed for variables of this process. Call "
            f"px.value_and_grad for each loss. Received: {elsewhere} on parameter servers"
        )

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        parent = traced_variables.current()
        made: list[traced_variables.Substitution] = []
        others: list[Any] = []

        def of_values(values: list[Any], _: Any) -> Any:
            held = {v: _as_held(v, x) for v, x in zip(listed, values, strict=True)}
            made.append(traced_variables.Substitution(held, parent, {}, again is not None))
            with traced_variables.recording(made[-1]):
                result = fn(*args, **kwargs)
                losses, aux = _pair(result, has_aux)
                return _with_written((scalars(losses, len(nests)), aux), made[-1], others)

        again = _staged(of_values, listed)
        values = [stand_in(v) if is_gathered_again(v) else jnp.asarray(v.value()) for v in listed]
        rules = _rules.get()

        def both() -> tuple[Any, list[Any]]:
            function = again or of_values
            losses, pull, rest = jax.vjp(lambda given: function(given, None), values, has_aux=True)
            if rules is not None and not traced_variables.in_program():
                pull = rules.pulled(pull, listed)
            found = []
            for i in range(len(nests)):
                ones = tuple(jnp.full_like(x, 1.0 if i == j else 0.0) for j, x in enumerate(losses))
                found.append(pull(ones)[0])
            return (losses, rest), found

        result, found = traced_variables.tracing(both, lambda: not made[-1].has_written)
        result = _written_now(result, has_aux, made[-1], others)
        gradients = []
        for nest, each in zip(nests, found, strict=True):
            known = dict(zip(map(id, listed), _finished(listed, each), strict=True))
            gradients.append(jax.tree.map(lambda v, known=known: known[id(v)], nest))
        return result, tuple(gradients)

    return differentiated


def scalars(losses: Any, count: int) -> tuple[Any, ...]:
    """What a function with several losses returns, if they are as many as there should be."""
    are_some = isinstance(losses, tuple | list) and jax.tree_util.all_leaves(losses)
    listed = tuple(jnp.asarray(x) for x in losses) if are_some else ()
    if len(listed) != count or any(x.shape for x in listed):
        raise InvalidTypeError(
            f"fn must return {count} scalars, one for each nest of variables. Received: {shown(losses)}"
        )
    return listed


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

    >>> from phalanx.core.variables.variable import Variable
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
