"""Strategy files: layouts that are written when they are known, and kept when they are read.

They are MindSpore's strategy files: JSON if the name of the file ends with .json, else protobuf. A file
that was written in `auto_parallel` has the whole plan in it as well.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from phalanx.errors import InvalidValueError, NotFoundError
from phalanx.parallel.mindspore_files import strategy_data
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.plan import Plan
from phalanx.parallel.plan_files import from_data, to_data
from phalanx.parallel.strategy_messages import encoded, encoded_groups

__all__ = ["load", "save", "save_groups", "write"]

Layouts = Mapping[str, tuple[tuple[int, ...], PartitionSpec]]


def load(path: str) -> tuple[Plan | None, dict[str, tuple[int, ...]]]:
    """The plan of a file, or the numbers of parts of each dim of each parameter."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"CheckPoint file is not found. Received: {path!r}") from None
    try:
        data, plan = strategy_data(content, path)
        if plan is not None:
            return from_data(json.loads(plan), path), {}
    except ValueError as error:
        raise InvalidValueError(f"Load strategy checkpoint failed: {error}") from error
    if isinstance(data, dict) and "plan" in data:
        return from_data(data["plan"], path), {}
    if not isinstance(data, dict) or "parallel_layout_item" not in data:
        return from_data(data, path), {}
    try:
        items = data["parallel_layout_item"].items()
        return None, {name: _parts(item) for name, item in items}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidValueError(
            f"Load strategy checkpoint failed: {error!r}. Received: {path!r}"
        ) from error


def _parts(item: Mapping[str, Any]) -> tuple[int, ...]:
    """Into how many parts each dim is cut. MindSpore counts the axes of its matrix from the right."""
    sizes = item["dev_matrix"]
    listed = ([axes] if isinstance(axes, int) else axes for axes in item["tensor_map"])
    return tuple(prod(sizes[-1 - axis] for axis in axes if axis >= 0) for axes in listed)


def write(
    options: ParallelOptions, mesh: Mesh, known: Layouts, inputs: Layouts, plan: Plan | None
) -> None:
    """Write the files that options ask for, from the first process.

    Args:
        options: that are in force.
        mesh: the devices.
        known: the layouts of parameters.
        inputs: those of other arguments.
        plan: if there is one.
    """
    if jax.process_index() or not known:
        return
    if options.strategy_ckpt_save_file:
        listed = known if options.only_trainable_params else {**known, **inputs}
        save(options.strategy_ckpt_save_file, mesh, listed, plan)
    if options.group_ckpt_save_file:
        save_groups(options.group_ckpt_save_file, mesh, known, options.global_rank)


def save(path: str, mesh: Mesh, layouts: Layouts, plan: Plan | None) -> None:
    """Write layouts, and the plan if there is one."""
    operators = () if plan is None else plan.operators
    data: dict[str, Any] = {
        "current_stage": 0,
        "parallel_strategy_item": {
            o.key: {"stage": 0, "parallel_strategy": [list(cuts) for cuts in o.strategy]}
            for o in operators
        },
        "parallel_layout_item": {
            name: _item(mesh, shape, spec) for name, (shape, spec) in layouts.items()
        },
    }
    found = None if plan is None else to_data(plan)
    if not path.endswith(".json"):
        _check_maps(data["parallel_layout_item"], path)
        _write(path, encoded(data, None if found is None else json.dumps(found, sort_keys=True)))
        return
    if found is not None:
        data["plan"] = found
    _write(path, _json(data))


def _item(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec) -> dict[str, Any]:
    names = list(mesh.shape)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    listed = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    # MindSpore cuts a dim along one axis of its matrix, so axes that cut a dim together are made one.
    first = {axes[0]: axes for axes in listed if axes}
    inner = {axis for axes in first.values() for axis in axes[1:]}
    rows = [first.get(name, (name,)) for name in names if name not in inner]
    if [axis for row in rows for axis in row] != names:  # which only a list can say
        rows = [(name,) for name in names]
    numbers = {row: len(rows) - 1 - i for i, row in enumerate(rows)}
    return {
        "dev_matrix": [prod(mesh.shape[axis] for axis in row) for row in rows],
        "tensor_map": [
            -1 if not axes else numbers[axes] if axes in numbers else [numbers[(a,)] for a in axes]
            for axes in listed
        ],
        "tensor_shape": list(shape),
        "field": 0,
        "opt_weight_shard_step": 0,
        "opt_weight_shard_size": 0,
    }


def _check_maps(items: Mapping[str, Any], path: str) -> None:
    for name, item in items.items():
        if any(isinstance(axes, list) for axes in item["tensor_map"]):
            raise InvalidValueError(
                "A strategy file in protobuf cannot say that a dim is cut along axes that are not "
                f"neighbours in the mesh. Give a path that ends with .json. Received: {path!r}, in "
                f"which {name} would have the tensor_map {item['tensor_map']}"
            )


def save_groups(path: str, mesh: Mesh, layouts: Layouts, rank: int) -> None:
    """Write which devices hold the same parts of parameters.

    Args:
        path: of the file.
        mesh: the devices.
        layouts: of the parameters.
        rank: the device whose parts others may have too.
    """
    groups = {name: _groups(mesh, shape, spec) for name, (shape, spec) in layouts.items()}
    with_rank = [set(next(g for g in found if rank in g)) for found in groups.values()]
    restored = sorted(set.intersection(*with_rank))
    if path.endswith(".json"):
        _write(path, _json({"parameter_groups": groups, "restore_rank_list": restored}))
        return
    ranks = {tuple(group) for found in groups.values() for group in found}
    named = {"-".join(map(str, group)): list(group) for group in sorted(ranks)}
    _write(path, encoded_groups(named, restored))


def _groups(mesh: Mesh, shape: tuple[int, ...], spec: PartitionSpec) -> list[list[int]]:
    """The numbers of the devices that hold the same part, for each part."""
    ranks = {device: i for i, device in enumerate(np.ravel(mesh.devices))}
    held = NamedSharding(mesh, spec).devices_indices_map(shape)

    def key(item: Any) -> Any:
        return [(part.start or 0, part.stop or 0) for part in item[1]]

    ordered = sorted(held.items(), key=key)
    parts = itertools.groupby(ordered, key)
    return [sorted(ranks[device] for device, _ in same) for _, same in parts]


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def _write(path: str, content: bytes) -> None:
    """Write a file that the user alone can read, in a folder that is made if there is none."""
    target = Path(path)
    if str(target.parent):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
