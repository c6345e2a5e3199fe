"""Tables and pictures of variables and arrays: what they are, and where they live."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.core.strategy import Strategy
from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError
from phalanx.runtime.devices import short_name
from phalanx.runtime.formatting import array_text, html_table, shown

__all__ = ["Overview", "show", "summary"]


@dataclass(frozen=True)
class Overview:
    """Rows of a table, and perhaps a picture; prints as text, and as HTML in notebooks."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    footer: str = ""
    picture: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        lines = [self.heads, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.heads))]
        texts = [
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        below = [self.footer, _boxes(self.picture) if self.picture else ""]
        return "\n".join([texts[0], "  ".join("-" * w for w in widths), *texts[1:], *below]).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        names = sorted({cell for line in self.picture for cell in line})
        return html_table(self.heads, self.rows, self.footer) + _coloured(self.picture, names)


def _boxes(cells: Sequence[Sequence[str]]) -> str:
    """Cells as boxes of lines.

    >>> print(_boxes([["a", "b"], ["c", "d"]]))
    ┌───┬───┐
    │ a │ b │
    ├───┼───┤
    │ c │ d │
    └───┴───┘
    """
    width = max(len(cell) for line in cells for cell in line) + 2
    bars = ["─" * width] * len(cells[0])
    lines = ["│" + "│".join(cell.center(width) for cell in line) + "│" for line in cells]
    between = "├" + "┼".join(bars) + "┤"
    middle = [part for line in lines for part in (line, between)][:-1]
    return "\n".join(["┌" + "┬".join(bars) + "┐", *middle, "└" + "┴".join(bars) + "┘"])


def _coloured(cells: Sequence[Sequence[str]], names: Sequence[str]) -> str:
    """Cells as a table for notebooks, with a colour for each name."""
    if not cells:
        return ""

    def cell(name: str) -> str:
        hue = 360 * names.index(name) // len(names)
        style = f"background: hsl({hue} 60% 80%); color: black; padding: 1em; text-align: center"
        return f'<td style="{style}">{html.escape(name)}</td>'

    body = "".join("<tr>" + "".join(map(cell, line)) + "</tr>" for line in cells)
    return f"<table>{body}</table>"


def summary(strategy: Strategy, variables: Any) -> Overview:
    """A table of variables: name, shape, dtype, where they live, and bytes on each device.

    Args:
        strategy: the strategy that made them.
        variables: a nest of variables, or something that has `variables`.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w = px.Variable(jnp.zeros((2, 3)), name="w")
        >>> px.train.summary(strategy, [w])
        name  shape   dtype    lives on      bytes
        ----  ------  -------  ------------  -----
        w:0   [2, 3]  float32  CPU:0, CPU:1  24
        1 variables, 6 numbers, 48 bytes in 2 replicas
    """
    listed = (
        list(variables.variables) if hasattr(variables, "variables") else jax.tree.leaves(variables)
    )
    if not all(isinstance(v, Variable) for v in listed):
        raise InvalidTypeError(f"summary needs variables. Received: {shown(variables)}")
    rows, numbers, total = [], 0, 0
    for v in listed:
        count = int(np.prod(v.shape, dtype=np.int64))
        size = count * np.dtype(v.dtype).itemsize
        places = _places(v)
        numbers, total = numbers + count, total + size * max(len(places), 1)
        where = ", ".join(places) or "parameter servers"
        rows.append((v.name, str(list(v.shape)), np.dtype(v.dtype).name, where, str(size)))
    footer = (
        f"{len(listed)} variables, {numbers} numbers, {total} bytes in "
        f"{strategy.num_replicas_in_sync} replicas"
    )
    return Overview(("name", "shape", "dtype", "lives on", "bytes"), tuple(rows), footer)


def _places(variable: Variable) -> list[str]:
    if variable.home is not None:
        return []
    held = getattr(variable, "values", None) or [variable]
    found: dict[str, None] = {}
    for copy in held:
        found |= dict.fromkeys(
            short_name(d) for d in sorted(copy.value().devices(), key=lambda d: d.id)
        )
    return list(found)


def show(value: Any) -> Overview:
    """A picture of where the parts of a value are: a row per device, with the slice it holds.

    An array that is cut also gets a picture: a box for each part, with the devices that hold it. Of
    more than two dimensions that are cut, it shows the first two.

    Args:
        value: an array, a variable, or a distributed value.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> px.show(strategy.run(lambda: jnp.ones(3)))
        device  part       array
        ------  ---------  ----------
        CPU:0   replica 0  float32[3]
        CPU:1   replica 1  float32[3]
        >>> mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
        >>> cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        >>> px.show(jax.device_put(jnp.arange(4.0), cut))
        device  part   array
        ------  -----  ----------
        CPU:0   [0:2]  float32[2]
        CPU:1   [2:4]  float32[2]
        ┌───────┬───────┐
        │ CPU:0 │ CPU:1 │
        └───────┴───────┘
    """
    heads = ("device", "part", "array")
    if isinstance(value, Variable):
        value = getattr(value, "values", None) or [value]
        arrays = [(f"copy {i}", copy.value()) for i, copy in enumerate(value)]
    elif isinstance(value, DistributedValues):
        arrays = [(f"replica {i}", x) for i, x in enumerate(value.values)]
    elif isinstance(value, jax.Array | np.ndarray):
        arrays = [("", jax.numpy.asarray(value))]
    else:
        raise InvalidTypeError(
            f"show needs an array, a variable or a distributed value. Received: {shown(value)}"
        )
    rows = []
    for part, array in arrays:
        for shard in array.addressable_shards:
            cut = ", ".join(_slice(s, n) for s, n in zip(shard.index, array.shape, strict=True))
            label = part if len(array.addressable_shards) == 1 and part else f"{part} [{cut}]".strip()
            text = array_text(array.dtype, shard.data.shape)
            rows.append((short_name(shard.device), label, text))
    return Overview(heads, tuple(rows), picture=_picture(arrays[0][1]) if len(arrays) == 1 else ())


def _picture(array: jax.Array) -> tuple[tuple[str, ...], ...]:
    """For each part of an array that is cut, who holds it: rows and columns of names."""
    held: dict[tuple[tuple[int, int], ...], list[str]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        cuts = [cut.indices(n)[:2] for cut, n in zip(index, array.shape, strict=True)]
        held.setdefault(tuple(cuts), []).append(short_name(device))
    marks = [sorted({part[d] for part in held}) for d in range(array.ndim)]
    cut = [d for d in range(array.ndim) if len(marks[d]) > 1][:2]
    if not cut:
        return ()
    down, across = cut if len(cut) == 2 else (None, cut[0])

    def holders(row: Any, column: Any) -> str:
        names = [
            name
            for part, found in held.items()
            if part[across] == column and (down is None or part[down] == row)
            for name in found
        ]
        return ", ".join(dict.fromkeys(names))

    rows = [None] if down is None else marks[down]
    if array.ndim > 1 and down is None and across == 0:  # rows are cut, so boxes stand on each other
        return tuple((holders(None, column),) for column in marks[across])
    return tuple(tuple(holders(row, column) for column in marks[across]) for row in rows)


def _slice(cut: slice, size: int) -> str:
    start, stop, _ = cut.indices(size)
    return ":" if (start, stop) == (0, size) else f"{start}:{stop}"
