"""MindSpore's strategy files: the layouts of parameters, and how operators were cut.

MindSpore describes devices as a matrix, and a layout by the number of the matrix's dim that cuts each
dim of a tensor, counted from the right; -1 cuts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from jax.sharding import PartitionSpec

from phalanx.errors import InvalidValueError, NotFoundError
from phalanx.parallel.strategy_messages import decoded
from phalanx.runtime.protobuf_wire import Malformed


@dataclass(frozen=True)
class MindSporeStrategy:
    """What a strategy file of MindSpore says.

    Args:
        sizes: the axes of the mesh, from the outermost to the innermost.
        names: their names.
        parameters: the layouts of parameters, by MindSpore's names; to be given to `search` as `pins`.
        operators: into how many pieces each dim of each input of an operator is cut, by its name.
        notes: what could not be read.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    parameters: Mapping[str, PartitionSpec]
    operators: Mapping[str, tuple[tuple[int, ...], ...]]
    notes: tuple[str, ...] = ()


def load_mindspore_strategy(path: str | Path) -> MindSporeStrategy:
    """Read a file that MindSpore's `strategy_ckpt_save_file` has written: JSON, or protobuf."""
    try:
        return _read(strategy_data(Path(path).read_bytes(), str(path))[0], str(path))
    except FileNotFoundError:
        raise NotFoundError(f"There is no strategy file. Received: {str(path)!r}.") from None


def strategy_data(content: bytes, source: str) -> tuple[Any, str | None]:
    """What a strategy file has, as data of JSON, and the JSON of the plan in it if it is protobuf.

    Args:
        content: of the file.
        source: where it comes from, for errors.
    """
    try:
        if content.lstrip()[:1] in (b"{", b"["):
            return json.loads(content), None
        return decoded(content)
    except (ValueError, Malformed) as error:
        raise InvalidValueError(
            f"This is no strategy file of MindSpore, neither in JSON nor in protobuf: {error}. "
            f"Received: {source!r}."
        ) from error


def read_mindspore_strategy(text: str, source: str = "text") -> MindSporeStrategy:
    """What the text of a strategy file says.

    Args:
        text: the JSON.
        source: where it comes from, for errors.

    >>> layout = {"dev_matrix": [2, 4], "tensor_map": [-1, 0], "tensor_shape": [8, 16]}
    >>> read = read_mindspore_strategy(json.dumps({"parallel_layout_item": {"w": layout}}))
    >>> read.sizes, tuple(read.parameters["w"])
    ((2, 4), (None, 'y'))
    """
    return _read(strategy_data(text.encode(), source)[0], source)


def _read(data: Any, source: str) -> MindSporeStrategy:
    try:
        layouts: Mapping[str, Any] = data.get("parallel_layout_item") or {}
        operators = {
            name: tuple(tuple(int(n) for n in cuts) for cuts in item["parallel_strategy"])
            for name, item in (data.get("parallel_strategy_item") or {}).items()
        }
        matrices = [tuple(int(n) for n in item["dev_matrix"]) for item in layouts.values()]
        maps = [item["tensor_map"] for item in layouts.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidValueError(
            f"This is no strategy file of MindSpore: {error!r}. Received: {source!r}."
        ) from error
    finest = max(([n for n in matrix if n > 1] for matrix in matrices), key=len, default=[])
    names = tuple("xyz"[: len(finest)] if len(finest) <= 3 else (f"d{i}" for i in range(len(finest))))
    parameters: dict[str, PartitionSpec] = {}
    notes = []
    for name, matrix, tensor_map in zip(layouts, matrices, maps, strict=True):
        axes = _axes_of(matrix, finest, names)
        if axes is None:
            notes.append(f"{name}: its devices {list(matrix)} do not fit {finest}, so it is left out")
        else:
            parameters[name] = PartitionSpec(*(_cut_by(entry, axes) for entry in tensor_map))
    return MindSporeStrategy(tuple(finest), names, parameters, operators, tuple(notes))


def _axes_of(
    matrix: Sequence[int], sizes: Sequence[int], names: Sequence[str]
) -> list[tuple[str, ...]] | None:
    """The mesh axes behind each dim of a device matrix; None if it does not fit the mesh."""
    if prod(matrix) != prod(sizes):
        return None
    remaining = list(zip(sizes, names, strict=True))
    found: list[tuple[str, ...]] = []
    for wanted in matrix:
        taken: list[str] = []
        have = 1
        while have < wanted and remaining:
            size, name = remaining.pop(0)
            have *= size
            taken.append(name)
        if have != wanted:
            return None
        found.append(tuple(taken))
    return found


def _cut_by(entry: Any, axes: Sequence[tuple[str, ...]]) -> Any:
    """The axes that cut one dim, given the numbers of dims of the device matrix from the right."""
    numbers = entry if isinstance(entry, list) else [entry]
    chosen = tuple(axis for n in numbers if n >= 0 for axis in axes[len(axes) - 1 - n])
    return None if not chosen else chosen[0] if len(chosen) == 1 else chosen
