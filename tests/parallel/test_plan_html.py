"""Plans as web pages."""

from __future__ import annotations

import html.parser
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import phalanx as px
from phalanx.parallel.plan_html import holders

VOID = {"meta"}


class Reader(html.parser.HTMLParser):
    """Checks that tags match, and collects what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def planned(devices: int = 4) -> px.parallel.Plan:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ params["<up>"]) @ params["down"])

    shapes = {"<up>": (256, 1024), "down": (1024, 256)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    args = params, jax.ShapeDtypeStruct((8, 256), jnp.float32)
    mesh = px.parallel.mesh_of(px.parallel.profile("A100").topology(devices), (devices,))
    pins = {"down": P("x"), "<up>": P(None, "x")}
    return px.parallel.search(loss, args, devices=mesh, hardware="A100", pins=pins)


def test_a_page_is_whole_and_needs_nothing_else() -> None:
    plan = planned()
    reader = Reader()
    text = plan.to_html("A <small> model")
    reader.feed(text)
    reader.close()
    assert reader.open == []
    assert reader.links == []
    assert "script" not in reader.counts
    assert "A <small> model" in reader.texts
    assert "<up>" in reader.texts  # escaped, so that it is text
    for tensor in (*plan.parameters.values(), *plan.inputs.values()):
        assert f"who holds which slice of {tensor.name}".replace("<", "&lt;")[:20] in text
    # One box for each device in the mesh, and in the picture of each tensor.
    tensors = len(plan.parameters) + len(plan.inputs) + len(plan.outputs)
    assert reader.counts["rect"] == 4 * (1 + tensors)
    assert "Communication per step" in reader.texts


def test_who_holds_which_slice() -> None:
    plan = planned()
    slices = {name: holders(plan, t) for name, t in plan.parameters.items()}
    assert slices["down"] == [(0,), (1,), (2,), (3,)]
    assert slices["<up>"] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_many_devices_are_not_drawn() -> None:
    assert "128 devices, which are too many to draw" in planned(128).to_html()
