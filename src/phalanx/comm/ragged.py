"""Arrays of different shapes in programs that need one shape: flatten, pad, move, cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.comm import groups
from phalanx.comm.calls import Call

Shape = tuple[int, ...]


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


def gather(call: Call, x: Any, shapes: Sequence[Shape]) -> list[jax.Array]:
    """The arrays of all members, whose shapes are known."""
    if len(set(shapes)) == 1:
        rows = call.run("gather", x)
        return [rows[i] for i in range(len(shapes))]
    most = max(math.prod(s) for s in shapes)
    rows = call.run("gather", padded_rows([x], most)[0])
    return [cut(rows[i], [s])[0] for i, s in enumerate(shapes)]


def scatter(
    call: Call, xs: Sequence[Any] | None, dtype: str, shapes: Sequence[Shape], place: int
) -> jax.Array:
    """This member's array of the list that one member has."""
    most = max(math.prod(s) for s in shapes)
    nothing = np.zeros((len(shapes), most), jnp.dtype(dtype))
    rows = nothing if xs is None else padded_rows(xs, most)
    return cut(call.run("exchange", rows)[place], [shapes[call.me]])[0]


def exchange(call: Call, xs: Sequence[Any], shapes: Sequence[Sequence[Any]]) -> list[jax.Array]:
    """Send array i to member i; `shapes` has, for each member, the shapes of what it sends."""
    most = max(math.prod(s) for sent in shapes for s in sent)
    rows = call.run("exchange", padded_rows(xs, most))
    return [cut(rows[i], [tuple(sent[call.me])])[0] for i, sent in enumerate(shapes)]


def rejoined(parts: Sequence[Any], rest: Sequence[int]) -> Any:
    """Parts joined along the first dimension."""
    whole = [p.reshape((p.shape[0], *rest)) for p in parts]
    if all(isinstance(p, np.ndarray) for p in parts):
        return np.concatenate(whole)
    with jax.enable_x64(True):
        return jnp.concatenate(whole)


def check_splits(call: Call, values: Sequence[Any]) -> None:
    """Require that every member expects what the others send to it; all members find the same."""
    for place, (_, expected) in enumerate(values):
        comes = [sent[place] for sent, _ in values]
        if expected is not None and expected != comes:
            ranks = call.group.ranks
            text = (
                f"all_to_all_single at {call.site}: rank {ranks[place]} expects parts of the sizes "
                f"{expected} from the ranks {list(ranks)}, but they send {comes}."
            )
            raise groups.world().fail("mismatch", text)
