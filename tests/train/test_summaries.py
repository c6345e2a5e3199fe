"""Event files: what is in them, who writes them, and when."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tests.contract.conftest import EXECUTORS, STRATEGIES

import phalanx as px
from phalanx.runtime.protobuf_wire import values
from phalanx.train.event_files import png


def events(folder: Path) -> list[tuple[int, str, str, Any]]:
    """The step, tag, plugin and tensor of each value in the event files of a folder, sorted."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        records = [dict(values(bytes(record))) for record in px.data.TFRecordDataset(str(path))]
        assert records[0][3] == b"brain.Event:2"
        for record in records[1:]:
            assert struct.unpack("<d", record[1])[0] > 1e9
            for number, value in values(record[5]):
                fields = dict(values(value))
                plugin = dict(values(dict(values(fields[9]))[1]))[1].decode()
                assert number == 1
                found.append((record.get(2, 0), fields[1].decode(), plugin, fields[8]))
    return sorted(found)


def number(tensor: bytes) -> float:
    return float(struct.unpack("<f", dict(values(tensor))[5])[0])


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    return [(step, tag, number(t)) for step, tag, plugin, t in events(folder) if plugin == "scalars"]


def test_every_kind_of_summary(tmp_path: Path) -> None:
    pixels = np.linspace(0, 1, 2 * 3 * 4 * 3).reshape(2, 3, 4, 3)
    with px.summary.create_file_writer(tmp_path).as_default(step=7) as writer:
        assert px.summary.scalar("loss", jnp.float32(0.25))
        px.summary.text("note", "**bold**", step=8)
        px.summary.histogram("weights", np.arange(10.0), buckets=5, step=9)
        px.summary.image("picture", pixels, step=10, max_outputs=1)
        with px.name_scope("inner"):
            px.summary.scalar("count", 3, description="how many")
        with px.summary.record_if(False):
            assert not px.summary.scalar("never", 1.0)
        with px.summary.record_if(lambda: True):
            assert px.summary.should_record_summaries()
    assert not px.summary.scalar("nowhere", 1.0, step=1)
    found = events(tmp_path)
    assert [(step, tag, plugin) for step, tag, plugin, _ in found] == [
        (7, "inner/count", "scalars"),
        (7, "loss", "scalars"),
        (8, "note", "text"),
        (9, "weights", "histograms"),
        (10, "picture", "images"),
    ]
    assert scalars(tmp_path) == [(7, "inner/count", 3.0), (7, "loss", 0.25)]
    assert dict(values(found[2][3]))[8] == b"**bold**"
    table = np.frombuffer(dict(values(found[3][3]))[4], "<f8").reshape(5, 3)
    np.testing.assert_allclose(table[:, 2], 2.0)
    width, height, image = [x for field, x in values(found[4][3]) if field == 8]
    expected = png((pixels[0] * 255 + 0.5).astype(np.uint8))
    assert (width, height, image) == (b"4", b"3", expected)
    writer.close()
    with pytest.raises(px.PhalanxError, match="closed"), writer.as_default(step=1):
        px.summary.scalar("late", 1.0)


def test_a_png_has_the_pixels() -> None:
    image = np.random.default_rng(0).integers(0, 256, (5, 4, 3)).astype(np.uint8)
    data = png(image)
    at, packed = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0] == zlib.crc32(
            kind + body
        )
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(5, 13)
    np.testing.assert_array_equal(rows[:, 1:].reshape(5, 4, 3), image)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["default", "mirrored_3", "central_storage_3", "auto_parallel_4"])
def test_one_replica_writes(name: str, executor: str, tmp_path: Path) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        step = px.Variable(0, name="step", aggregation=px.VariableAggregation.ONLY_FIRST_REPLICA)
    writer = px.summary.create_file_writer(tmp_path)

    def on_replica(x: Any) -> None:
        px.summary.scalar("x", x * 2, step=step)
        with px.summary.record_if(x > 100):
            px.summary.scalar("rare", x, step=step)
        step.assign_add(1)

    values_of = [
        strategy.experimental_distribute_values_from_function(lambda _, i=i: jnp.float32(i))
        for i in (1, 300)
    ]
    with writer.as_default():
        for x in values_of:
            EXECUTORS[executor]().run(strategy, on_replica, (x,))
    expected = [(0, "x", 2.0), (1, "rare", 300.0), (1, "x", 600.0)]
    assert scalars(tmp_path) == expected


def test_compiled_code_writes_when_it_runs(tmp_path: Path) -> None:
    writer = px.summary.create_file_writer(tmp_path, max_queue=1)

    @px.function
    def step(x: Any, i: Any) -> Any:
        px.summary.scalar("x", x, step=i)
        return x + 1

    with writer.as_default():
        for i in range(3):
            step(jnp.float32(i), jnp.int32(i))
    assert scalars(tmp_path) == [(0, "x", 0.0), (1, "x", 1.0), (2, "x", 2.0)]


def test_mistakes() -> None:
    with px.summary.create_noop_writer().as_default():
        with pytest.raises(ValueError, match="needs a step"):
            px.summary.scalar("x", 1.0)
        px.summary.set_step(4)
        assert px.summary.get_step() == 4
        px.summary.set_step(None)
    with pytest.raises(TypeError, match="path"):
        px.summary.create_file_writer(3)
    with px.summary.create_noop_writer().as_default(step=1):
        for call in (
            lambda: px.summary.scalar("x", [1.0, 2.0]),
            lambda: px.summary.image("x", np.zeros((2, 2))),
            lambda: px.summary.text("x", 3),
        ):
            with pytest.raises((ValueError, TypeError)):
                call()
