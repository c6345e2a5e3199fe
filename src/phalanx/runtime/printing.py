"""How distributed values and variables are printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from phalanx.runtime import compat
from phalanx.runtime.formatting import html_table


def format_components(name: str, components: Sequence[str]) -> str:
    """Print a value that has a component for each replica."""
    body = ",\n".join(f"  {i}: {text}" for i, text in enumerate(components))
    return f"{name}:{{\n{body}\n}}"


def format_component(x: Any, how: Callable[[Any], str]) -> str:
    """Print a component the way TensorFlow prints tensors: value, shape and dtype."""
    if not isinstance(x, jax.Array) or compat.is_tracer(x):
        return how(x)
    if compat.is_key_array(x):
        return repr(x)
    if how is str:
        return f"Array({_own_lines(str(np.asarray(x)))}, shape={x.shape}, dtype={x.dtype})"
    return f"<Array: shape={x.shape}, dtype={x.dtype}, numpy={describe_numpy(x)}>"


def components_html(value: Any) -> str:
    """A value that has a component for each replica, as a table for notebooks."""
    rows = [(str(i), format_component(v, repr)) for i, v in enumerate(value.values)]
    return html_table(("replica", type(value).__name__), rows)


def describe_numpy(x: jax.Array) -> str:
    """The value of an array, as in ``numpy=…`` of a printed tensor or variable."""
    if compat.is_tracer(x):
        return "<traced>"
    if compat.is_key_array(x):
        return repr(x)
    host = np.asarray(x)
    return repr(host.item()) if host.ndim == 0 else _own_lines(repr(host))


def _own_lines(text: str) -> str:
    """A text that begins on a line of its own if it has several."""
    return f"\n{text}" if "\n" in text else text
