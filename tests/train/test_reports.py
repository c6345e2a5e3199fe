"""Loggers, the bar, tables of variables, and functions that run on several workers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from tests.train.test_summaries import scalars

import phalanx as px


def test_loggers_write_what_they_are_given(tmp_path: Path) -> None:
    mean = px.metrics.Mean()
    mean.update_state([1.0, 3.0])
    table, lines = tmp_path / "a" / "log.csv", tmp_path / "log.jsonl"
    loggers = [
        px.train.CSVLogger(table),
        px.train.JSONLinesLogger(lines),
        px.train.TensorBoardLogger(tmp_path / "tb"),
    ]
    for log in loggers:
        with log:
            log.log(jnp.int32(1), {"loss": mean}, rate=jnp.float32(0.5))
            log.log(2, loss=float("nan") if log is loggers[1] else 4.0, rate=0.25)
    assert table.read_text().splitlines() == ["step,loss,rate", "1,2.0,0.5", "2,4.0,0.25"]
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [
        {"step": 1, "loss": 2.0, "rate": 0.5},
        {"step": 2, "loss": None, "rate": 0.25},
    ]
    assert scalars(tmp_path / "tb") == [
        (1, "loss", 2.0),
        (1, "rate", 0.5),
        (2, "loss", 4.0),
        (2, "rate", 0.25),
    ]
    more = px.train.CSVLogger(table)
    more.log(3, loss=5.0, rate=0.1)
    assert table.read_text().splitlines()[-1] == "3,5.0,0.1"
    with pytest.raises(ValueError, match="same columns"):
        more.log(4, loss=1.0)
    with pytest.raises(ValueError, match="has the columns"):
        px.train.CSVLogger(table).log(4, other=1.0)
    with pytest.raises(ValueError, match="single numbers"):
        more.log(4, loss=[1.0, 2.0])


def test_the_bar_shows_numbers() -> None:
    out, times = io.StringIO(), iter(range(100))
    console = Console(file=out, width=120, force_terminal=False)
    with px.train.Progress(
        4, batch_size=10, every=2, console=console, clock=lambda: next(times)
    ) as bar:
        for step in range(4):
            bar.update(loss=jnp.float32(8.0 - step))
            if step == 1:
                assert bar.text == "loss 7, 20 examples/s"
    assert (bar.step, bar.text) == (4, "loss 5, 20 examples/s")
    assert "training" in out.getvalue()
    assert "4/4" in out.getvalue()
    with pytest.raises(ValueError, match="every"):
        px.train.Progress(every=0)


def test_tables_and_pictures() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = px.Variable(jnp.zeros((2, 3)), name="<w>")
    table = px.train.summary(strategy, {"w": w})
    assert table.rows == (("<w>:0", "[2, 3]", "float32", "CPU:0, CPU:1", "24"),)
    assert "&lt;w&gt;" in table._repr_html_()
    assert px.show(w).rows == (("CPU:0", "copy 0", "float32[2,3]"), ("CPU:1", "copy 1", "float32[2,3]"))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    cut = jax.device_put(jnp.zeros((4, 3)), NamedSharding(mesh, PartitionSpec("x")))
    assert px.show(cut).rows == (
        ("CPU:0", "[0:2, :]", "float32[2,3]"),
        ("CPU:1", "[2:4, :]", "float32[2,3]"),
    )
    assert px.show(cut).picture == (("CPU:0",), ("CPU:1",))
    assert "hsl(" in px.show(cut)._repr_html_()
    square = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    both = jax.device_put(jnp.zeros((4, 4)), NamedSharding(square, PartitionSpec("y", "x")))
    assert px.show(both).picture == (("CPU:0", "CPU:2"), ("CPU:1", "CPU:3"))
    halves = jax.device_put(jnp.zeros((4, 4)), NamedSharding(square, PartitionSpec(None, "x")))
    assert px.show(halves).picture == (("CPU:0, CPU:1", "CPU:2, CPU:3"),)
    assert px.show(halves).__str__().endswith("└──────────────┴──────────────┘")
    for value, words in (
        (strategy, ["CPU:1", "MirroredStrategy"]),
        (strategy.run(lambda: jnp.ones(2)), ["replica", "float32"]),
        (px.data.Dataset.range(5).batch(2), ["int64", "3 elements"]),
        (strategy.experimental_distribute_dataset(px.data.Dataset.range(4).batch(2)), ["policy"]),
    ):
        assert all(word in value._repr_html_() for word in words)
    with pytest.raises(TypeError, match="show needs"):
        px.show("text")
    with pytest.raises(TypeError, match="variables"):
        px.train.summary(strategy, [1.0])


NOTEBOOK = """
import phalanx as px, jax.numpy as jnp
SCALE = 10
def train(x):
    strategy = px.MultiWorkerMirroredStrategy()
    print("worker", strategy.cluster_resolver.task_id)
    total = strategy.run(lambda: px.get_replica_context().all_reduce('sum', jnp.float32(x)))
    return SCALE * float(strategy.experimental_local_results(total)[0])
if __name__ == "__main__":
    print(px.launch(train, 2.0, workers=2))
"""


def test_functions_of_a_notebook_run_on_workers() -> None:
    """The program comes from the standard input, so its functions are in no file, as in a notebook."""
    done = subprocess.run(
        [sys.executable, "-"], input=NOTEBOOK, capture_output=True, text=True, timeout=200, check=False
    )
    shown = ["[worker 0] worker 0", "[worker 1] worker 1", "[40.0, 40.0]"]
    assert done.stdout.splitlines() == shown, done.stderr
