"""Numbers of a checkpoint for numbers and for arrays without dimensions.

Programs use one for the other: a step that is 0 at the beginning is an array after the first jitted
step. So either takes what the other has saved, if both are booleans, integers or floats, and no value
is lost.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["Number", "as_array", "fits", "is_number", "kind_of", "like"]

Number = bool | int | float


def is_number(x: Any) -> bool:
    """Whether something is a number of Python."""
    return isinstance(x, Number)


def kind_of(x: Any) -> str:
    """Of a number or a dtype: "bool", "int", "float", or "" for what is none of them.

    >>> kind_of(True), kind_of(3), kind_of(jnp.bfloat16), kind_of(np.complex64)
    ('bool', 'int', 'float', '')
    """
    if is_number(x):
        return "bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float"
    kinds = {"bool": np.bool_, "int": np.integer, "float": np.floating}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(x, kind)), "")


def fits(present: Number, saved: Number) -> bool:
    """Whether one number may take the place of another: a boolean is none of the others.

    >>> fits(0, 0.37), fits(True, 1)
    (True, False)
    """
    return isinstance(present, bool) == isinstance(saved, bool)


def like(present: Number, saved: Number) -> Number:
    """A saved number in the place of another: always equal to what was saved.

    An integer becomes a float in the place of a float, if that is equal. A float stays one.

    >>> like(0.5, 3), like(0, 0.37), like(0.5, 2**53 + 1)
    (3.0, 0.37, 9007199254740993)
    """
    if isinstance(saved, float | type(present)):
        return saved
    try:
        converted = type(present)(saved)
    except (ValueError, OverflowError):  # not a member of an enumeration, or too large
        return saved
    return converted if converted == saved else saved


def as_array(saved: Number, dtype: Any) -> np.ndarray[Any, Any] | None:
    """A saved number as an array of a dtype; None if it is of another kind, or would be changed.

    >>> as_array(3, np.dtype("int8")), as_array(300, np.dtype("int8"))
    (array(3, dtype=int8), None)
    """
    if kind_of(saved) != kind_of(dtype):
        return None
    try:
        with np.errstate(over="ignore"):
            array = np.array(saved, dtype)
    except OverflowError:
        return None
    return array if array.item() == saved or np.isnan(saved) else None
