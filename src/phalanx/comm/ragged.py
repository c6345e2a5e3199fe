"""Arrays of different shapes in programs that need one shape: flatten, pad, move, cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Shape = tuple[int, ...]
Run = Callable[..., Any]
"""Runs a program, as `programs.run` does, for one group."""


def concatenated(xs: Sequence[Any]) -> Any:
    """Arrays of one dtype as one flat array."""
    if all(isinstance(x, np.ndarray) for x in xs):
        return np.concatenate([x.reshape(-1) for x in xs])
    with jax.enable_x64(True):
        return jnp.concatenate([jnp.ravel(x) for x in xs])


def cut(flat: Any, shapes: Sequence[Shape]) -> list[Any]:
    """The arrays that stand one after another in a flat array."""
    parts, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(flat[start : start + size].reshape(shape))
        start += size
    return parts


def padded_rows(xs: Sequence[Any], length: int | None = None) -> Any:
    """Arrays as rows of one length, flat and padded with zeros."""
    most = max(x.size for x in xs) if length is None else length
    with jax.enable_x64(True):
        library: Any = np if all(isinstance(x, np.ndarray) for x in xs) else jnp
        flat = [library.reshape(x, (-1,)) for x in xs]
        return library.stack([library.pad(f, (0, most - f.shape[0])) for f in flat])


def gather(run: Run, x: Any, shapes: Sequence[Shape]) -> list[jax.Array]:
    """The arrays of all members, whose shapes are known."""
    if len(set(shapes)) == 1:
        rows = run("gather", x)
        return [rows[i] for i in range(len(shapes))]
    most = max(math.prod(s) for s in shapes)
    rows = run("gather", padded_rows([x], most)[0])
    return [cut(rows[i], [s])[0] for i, s in enumerate(shapes)]


def scatter(
    run: Run, xs: Sequence[Any] | None, dtype: str, shapes: Sequence[Shape], me: int, place: int
) -> jax.Array:
    """The array for member `me` of the list that member `place` has."""
    most = max(math.prod(s) for s in shapes)
    nothing = np.zeros((len(shapes), most), jnp.dtype(dtype))
    rows = nothing if xs is None else padded_rows(xs, most)
    return cut(run("exchange", rows)[place], [shapes[me]])[0]


def exchange(run: Run, xs: Sequence[Any], shapes: Sequence[Sequence[Any]], me: int) -> list[jax.Array]:
    """Send array i to member i; `shapes` has, for each member, the shapes of what it sends."""
    most = max(math.prod(s) for sent in shapes for s in sent)
    rows = run("exchange", padded_rows(xs, most))
    return [cut(rows[i], [tuple(sent[me])])[0] for i, sent in enumerate(shapes)]


def rejoined(parts: Sequence[Any], rest: Sequence[int]) -> Any:
    """Parts joined along the first dimension."""
    whole = [p.reshape((p.shape[0], *rest)) for p in parts]
    if all(isinstance(p, np.ndarray) for p in parts):
        return np.concatenate(whole)
    with jax.enable_x64(True):
        return jnp.concatenate(whole)
