"""Datasets in files: `save` writes all elements, `load` reads them back.

A saved dataset is a directory with a cache of the elements, and a description that names it. Saving
again writes another cache first, so a reader never sees half of one.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.ops.cache_files import FileStore
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import RaggedSpec
from phalanx.data.plan.nodes import PlanNode, Rows
from phalanx.data.plan.opening import open_plan
from phalanx.errors import DataLossError, InvalidTypeError, NotFoundError
from phalanx.runtime.formatting import shown

_DESCRIPTION = "dataset.json"


@dataclass(frozen=True, eq=False)
class SavedElements(PlanNode):
    """The elements of a saved dataset."""

    store: FileStore
    count: int
    saved_spec: Any

    def spec(self, *inputs: Any) -> Any:
        """What was saved."""
        return self.saved_spec

    def size(self, *inputs: int) -> int:
        """How many were saved."""
        return self.count

    def rows(self) -> Rows | None:
        """The columns, if all are plain numbers."""
        return self.store.rows()

    def open(self, run: Run) -> Cursor:
        """Read from the beginning."""
        cursor = self.store.open()
        if cursor is None:
            raise DataLossError("The elements of a saved dataset are missing; save it again.")
        return cursor


def save(node: PlanNode, path: str | os.PathLike[str]) -> None:
    """Write all elements of a plan to a directory."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    spec = _written(node.element_spec)
    name = f"elements-{secrets.token_hex(6)}"
    writer = FileStore(str(folder / name)).writer()
    cursor, count = open_plan(node, Run()), 0
    try:
        while (chunk := cursor.read(1024)) is not None:
            writer.add(chunk)
            count += chunk.count
        writer.commit()
    finally:
        writer.abort()
        cursor.close()
    before = _description(folder)
    partial = folder / f"{_DESCRIPTION}.{secrets.token_hex(4)}"
    partial.write_text(json.dumps({"version": 1, "elements": name, "count": count, "spec": spec}))
    partial.replace(folder / _DESCRIPTION)
    if before is not None:
        shutil.rmtree(folder / f"{before['elements']}.cache", ignore_errors=True)


def load(path: str | os.PathLike[str]) -> SavedElements:
    """The plan that reads a saved dataset."""
    folder = Path(path)
    found = _description(folder)
    if found is None:
        raise NotFoundError(f"There is no saved dataset. Received: {shown(os.fspath(path))}")
    return SavedElements(
        (), FileStore(str(folder / found["elements"])), found["count"], _read(found["spec"])
    )


def _description(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / _DESCRIPTION).read_text())
        name = found["elements"]
        if os.path.basename(name) != name or not isinstance(found["count"], int):
            raise ValueError(name)
        _read(found["spec"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise DataLossError(
            f"The description of a saved dataset is damaged. Received: {shown(str(folder))}"
        ) from error
    return found


def _written(spec: Any) -> Any:
    """A nest of specs as JSON holds it."""
    if isinstance(spec, TensorSpec | RaggedSpec):
        kind = "ragged" if isinstance(spec, RaggedSpec) else "tensor"
        return {"kind": kind, "shape": list(spec.shape), "dtype": np.dtype(spec.dtype).name}
    if isinstance(spec, dict):
        return {"kind": "dict", "keys": list(spec), "parts": [_written(x) for x in spec.values()]}
    if type(spec) in (tuple, list):
        return {"kind": type(spec).__name__, "parts": [_written(x) for x in spec]}
    raise InvalidTypeError(
        "Only datasets of arrays, ragged values, and tuples, lists and dicts of them can be saved. "
        f"Received: elements of {shown(spec)}"
    )


def _read(spec: Any) -> Any:
    kind = spec["kind"]
    if kind in ("tensor", "ragged"):
        made = TensorSpec if kind == "tensor" else RaggedSpec
        return made(tuple(spec["shape"]), np.dtype(spec["dtype"]))
    parts = [_read(x) for x in spec["parts"]]
    if kind == "dict":
        return dict(zip(spec["keys"], parts, strict=True))
    return tuple(parts) if kind == "tuple" else parts


def same_spec(a: Any, b: Any) -> bool:
    """Whether two nests of specs have the same structure and dtypes."""
    s: Any = tree_util.tree_structure(a)
    xs, ys = tree_util.tree_leaves(a), tree_util.tree_leaves(b)
    return s == tree_util.tree_structure(b) and all(
        np.dtype(x.dtype) == np.dtype(y.dtype) for x, y in zip(xs, ys, strict=True)
    )
