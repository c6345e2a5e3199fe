"""Plans as values: printed, saved, compared, explained."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tests.parallel.gpt import array

import phalanx as px
from phalanx.parallel import Device, DeviceMesh, Link, Plan, Topology, mesh_of, profile, search
from phalanx.parallel.plan_text import seconds_text

SLOW = profile("A100").replace(device=Device({"float32": 1e12}, 1e11, 80e9))


def flat(*sizes: int) -> DeviceMesh:
    link = Link(1e-7, 1e-10)
    return mesh_of(Topology(1, int(np.prod(sizes)), link, link), sizes)


def loss(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ params["layer"]["kernel"] + params["layer"]["bias"])
    return jnp.mean((h @ params["head"] - batch["y"]) ** 2)


def arguments(batch: int = 256, width: int = 64) -> Any:
    layer = {"kernel": array(width, 4 * width), "bias": array(4 * width)}
    x = array(batch, width)
    return {"layer": layer, "head": array(4 * width, width)}, {"x": x, "y": x}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search(loss, arguments(), flat(2, 4), SLOW)


def test_tables(plan: Plan) -> None:
    text = str(plan)
    assert text.startswith("Plan for x=2 × y=4 of A100: ")
    assert "optimal (exact)" in text
    for name in ("layer/kernel", "batch/x", "output", "next best: "):
        assert name in text
    assert max(map(len, text.splitlines())) < 240
    assert plan.cost == pytest.approx(plan.compute + plan.communication, rel=1e-3)


def test_plans_survive_files(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    again = Plan.load(file)
    assert again == plan
    assert again.digest() == plan.digest()
    assert again.to_json() == file.read_text().rstrip()
    data = json.loads(file.read_text())
    assert data["parameters"]["layer/kernel"]["shape"] == [64, 256]
    assert data["operators"]["dot_general"]["primitive"] == "dot_general"


@settings(max_examples=10)
@given(st.sampled_from([8, 24, 96]), st.sampled_from([2, 4, 6, 8]), st.integers(0, 10**12))
def test_any_plan_survives_files(batch: int, devices: int, memory: int) -> None:
    hardware = SLOW.replace(devices_per_host=None)
    plan = search(loss, arguments(batch, 24), devices, hardware, memory=10**9 + memory)
    data = json.loads(plan.to_json())
    assert Plan.from_json(json.dumps(data)) == plan


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (None, px.errors.NotFoundError, "There is no file"),
        ("{", px.errors.InvalidValueError, "is no plan"),
        ("[]", px.errors.InvalidValueError, "version 1 is needed"),
        ('{"version": 9}', px.errors.InvalidValueError, "Received: 9"),
        ('{"version": 1}', px.errors.InvalidValueError, "not complete"),
    ],
)
def test_bad_files(text: str | None, error: type[Exception], words: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(error, match=words):
        Plan.load(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["parameters"]["head"].update(spec=["z"]), "'head' that does not fit.*'z'"),
        (lambda d: d["parameters"]["head"].update(spec=["y"], shape=[3, 3]), "'head'.*divisible"),
        (lambda d: d["parameters"]["head"].update(spec="x"), "not complete, or was changed.*not 'x'"),
        (
            lambda d: d["parameters"]["head"].update(spec=[3]),
            r"or was changed.*not \[3\]",
        ),
        (lambda d: d["mesh"].update(sizes=[2]), "not complete, or was changed.*a size and a link"),
        (lambda d: d["predicted"].update(cost="1"), "not complete, or was changed.*is no number"),
        (
            lambda d: d["operators"]["dot_general"].update(results=[["z"]]),
            "cuts 'dot_general' along axes that its mesh.*'z'",
        ),
    ],
)
def test_files_that_were_changed(plan: Plan, change: Any, words: str) -> None:
    data = json.loads(plan.to_json())
    change(data)
    with pytest.raises(px.errors.InvalidValueError, match=f"(?s){words}"):
        Plan.from_json(json.dumps(data))


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "picture"):
        with pytest.raises(px.errors.InvalidValueError, match="This is no plan"):
            Plan.load(path)


def test_differences(plan: Plan) -> None:
    assert plan.diff(plan) == []
    pins = plan.pin("layer/kernel", P("y", "x"))
    assert pins == {"layer/kernel": P("y", "x")}
    other = search(loss, arguments(), plan.mesh, SLOW, pins=pins)
    lines = plan.diff(other)
    assert [line for line in lines if line.startswith("layer/kernel: ")]
    assert other.pin("head", P()) == {"layer/kernel": P("y", "x"), "head": P()}
    smaller = search(loss, arguments(128), flat(4), SLOW)
    assert plan.diff(smaller)[0] == "mesh: x=2 × y=4 -> x=4"
    with pytest.raises(px.errors.NotFoundError, match="Received: 'nothing'"):
        plan.pin("nothing", P())
    with pytest.raises(px.errors.NotFoundError, match="Did you mean 'head'"):
        plan.pin("heads", P())
    with pytest.raises(px.errors.InvalidTypeError, match="Received: 'xy' for 'head'"):
        plan.pin("head", "xy")
    with pytest.raises(px.errors.InvalidTypeError, match="diff compares plans"):
        plan.diff({})  # type: ignore[arg-type]


def test_explanations_are_what_the_search_says(plan: Plan) -> None:
    text = plan.explain("layer/kernel")
    assert text.startswith("layer/kernel float32[64, 256] is ")
    other = plan.parameters["layer/kernel"].alternatives[0]
    pinned = search(loss, arguments(), plan.mesh, SLOW, pins={"layer/kernel": other.spec})
    assert pinned.cost == other.cost >= plan.cost  # exactly what it was said to cost
    assert "this layout was given" in pinned.explain("layer/kernel")
    assert plan.explain("dot_general").startswith("dot_general (dot_general) reads ")
    with pytest.raises(px.errors.NotFoundError, match="Received: 'nothing'"):
        plan.explain("nothing")


def test_runner_up_is_the_best_other_plan(plan: Plan) -> None:
    assert plan.runner_up is not None
    others = [
        a.cost for t in (*plan.parameters.values(), *plan.inputs.values()) for a in t.alternatives
    ]
    assert plan.runner_up.cost == min(others)


def test_shardings(plan: Plan) -> None:
    mesh = plan.device_mesh()
    assert dict(mesh.shape) == {"x": 2, "y": 4}
    shardings = plan.shardings(mesh)
    args = arguments()
    nest = shardings.arguments(args)
    assert jax.tree.structure(nest) == jax.tree.structure(args)
    assert nest[0]["layer"]["kernel"] == NamedSharding(mesh, plan.parameters["layer/kernel"].spec)
    assert nest[1]["x"] == shardings.inputs["batch/x"]
    assert shardings.results(0.0) == shardings.outputs["output"]
    assert plan.shardings() == shardings
    pieces = jax.device_put(np.zeros((64, 256), np.float32), nest[0]["layer"]["kernel"])
    assert pieces.addressable_shards[0].data.nbytes == plan.parameters["layer/kernel"].bytes
    with pytest.raises(px.errors.InvalidValueError, match="The plan is for the mesh"):
        plan.shardings(Mesh(np.asarray(jax.devices()[:8]), ("x",)))
    with pytest.raises(px.errors.InvalidValueError, match="The plan needs 8 devices"):
        plan.device_mesh(jax.devices()[:2])
    with pytest.raises(px.errors.InvalidValueError, match="for 5 arrays"):
        shardings.arguments([1])


def test_what_is_not_proven_is_said(plan: Plan) -> None:
    """As a part of what the plan itself takes: half of that is 50 % cheaper, not 100 %."""
    half = dataclasses.replace(plan, lower_bound=plan.cost / 2)
    assert (half.proven, half.gap) == (False, 0.5)
    text = "not proven, another plan may be up to 50.0% cheaper"
    assert text in str(half).splitlines()[0]
    assert f"{text}, and none takes less than {seconds_text(plan.cost / 2)}" in half.to_html()
    assert "optimal" in str(plan).splitlines()[0]


def test_plans_are_frozen(plan: Plan) -> None:
    with pytest.raises(AttributeError):
        plan.cost = 0.0  # type: ignore[misc]
    assert plan.gap == 0
    assert plan.proven
