"""MindSpore's strategy files, and files with the figures of hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import phalanx as px

FILE: dict[str, Any] = {
    "current_stage": 1,
    "parallel_strategy_item": {
        "MatMul_up": {"stage": 0, "parallel_strategy": [[2, 1], [1, 4]]},
        "BiasAdd_bias": {"stage": 0, "parallel_strategy": [[2, 4], [4]]},
    },
    "parallel_layout_item": {
        "up": {"dev_matrix": [2, 1, 4], "tensor_map": [1, 0], "tensor_shape": [256, 1024]},
        "down": {"dev_matrix": [2, 4], "tensor_map": [[1, 0], -1], "tensor_shape": [1024, 256]},
        "scale": {"dev_matrix": [8], "tensor_map": [0], "tensor_shape": [64]},
        "bias": {"dev_matrix": [2, 4], "tensor_map": [-1], "tensor_shape": [64]},
        "odd": {"dev_matrix": [4, 2], "tensor_map": [0, -1], "tensor_shape": [64, 2]},
    },
}


def test_layouts_and_operators_are_read() -> None:
    read = px.parallel.read_mindspore_strategy(json.dumps(FILE))
    assert (read.sizes, read.names) == ((2, 4), ("x", "y"))
    assert read.parameters == {
        "up": P(None, "y"),
        "down": P(("x", "y"), None),
        "scale": P(("x", "y")),
        "bias": P(None),
    }
    assert read.operators["MatMul_up"] == ((2, 1), (1, 4))
    assert read.notes == ("odd: its devices [4, 2] do not fit [2, 4], so it is left out",)


def test_a_plan_is_searched_around_them(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(json.dumps(FILE))
    read = px.parallel.load_mindspore_strategy(path)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ params["up"]) @ params["down"])

    args = (
        {"up": jnp.zeros((256, 1024)), "down": jnp.zeros((1024, 256))},
        jax.ShapeDtypeStruct((8, 256), jnp.float32),
    )
    mesh = px.parallel.mesh_of(px.parallel.profile("A100").topology(8), read.sizes, read.names)
    pins = {name: read.parameters[name] for name in ("up", "down")}
    plan = px.parallel.search(loss, args, devices=mesh, hardware="A100", pins=pins)
    assert tuple(plan.parameters["up"].spec) == (None, "y")
    assert tuple(plan.parameters["down"].spec) == (("x", "y"),)


def test_what_is_no_strategy_file() -> None:
    for text in ("{", "[]", '{"parallel_layout_item": {"w": {}}}'):
        with pytest.raises(px.errors.InvalidValueError, match="no strategy file"):
            px.parallel.read_mindspore_strategy(text)
    with pytest.raises(px.errors.NotFoundError, match="no strategy file"):
        px.parallel.load_mindspore_strategy("/no/such/file.json")


def test_hardware_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    for name in ("A100", "CPU"):
        hardware = px.parallel.profile(name)
        px.parallel.save_hardware(hardware, path)
        assert px.parallel.load_hardware(path) == hardware
    path.write_text("{}")
    with pytest.raises(px.errors.InvalidValueError, match="no figures"):
        px.parallel.load_hardware(path)
    with pytest.raises(px.errors.NotFoundError, match="no file"):
        px.parallel.load_hardware(tmp_path / "other.json")
