"""Input signatures: which arguments a function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from phalanx.core.structure import merge_nests
from phalanx.core.tensor_spec import TensorSpec
from phalanx.errors import InvalidTypeError, StructureMismatchError
from phalanx.runtime.formatting import shown


def fitted(
    fn: Callable[..., Any],
    name: str,
    signature: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that fit a signature: Python numbers become arrays, and what does not fit is refused.

    Args:
        fn: the function.
        name: what it is called.
        signature: a nest of `TensorSpec` for each argument.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    def fit(pair: tuple[Any, Any]) -> Any:
        spec, x = pair
        if not isinstance(spec, TensorSpec):
            return x
        array = jnp.asarray(x, spec.dtype) if _converts(x, spec) else x
        if not spec.accepts(array):
            raise InvalidTypeError(
                f"An argument of {name} does not fit its input_signature {spec}. Received: {shown(x)}"
            )
        return array

    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidTypeError(str(error)) from None
    if len(bound.arguments) != len(signature):
        raise InvalidTypeError(
            f"{name} has an input_signature of {len(signature)} arguments. "
            f"Received: {len(bound.arguments)} arguments"
        )
    for spec, (parameter, x) in zip(signature, list(bound.arguments.items()), strict=True):
        try:
            bound.arguments[parameter] = merge_nests([spec, x], fit)
        except StructureMismatchError:
            raise InvalidTypeError(
                f"The argument {parameter} of {name} does not have the structure that its "
                f"input_signature gives: {shown(spec)}. Received: {shown(x)}"
            ) from None
    return bound.args, bound.kwargs


def _converts(x: Any, spec: TensorSpec) -> bool:
    """Whether a Python number can be what is asked for."""
    if isinstance(x, bool):
        return jnp.issubdtype(spec.dtype, jnp.bool_)
    if isinstance(x, int):
        return not jnp.issubdtype(spec.dtype, jnp.bool_)
    return isinstance(x, float) and jnp.issubdtype(spec.dtype, jnp.inexact)
