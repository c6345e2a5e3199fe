"""`phalanx port`: programs run after it, every name of TensorFlow is known, and no file is lost."""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.cli import main
from phalanx.cli.porting import port
from phalanx.cli.porting_names import NAMES, PREFIXES, counterpart, table, tensorflow_names

CORPUS = Path(__file__).parent / "corpus"
PRINTED = {
    "linear_regression": ["steps 40", "w [1.0, -2.0, 3.0]"],
    "classifier_with_metrics": ["accuracy above 0.9 True"],
    "module_and_checkpoint": ["out [[6.0, 6.0]]", "variables ['dense/b:0', 'dense/w:0']"],
    "summaries": ["files 1"],
    "gathering": ["total [3.0]", "gathered [0.0, 1.0, 2.0]", "mean id 1.0"],
    "schedule": ["before 0", "v 0.8 after 3"],
    "input_functions": ["total 240"],
    "central_storage": ["total 6.0 seen 4.0"],
    "generator_network": ["finite True True"],
    "cannot": ["x 3.0"],
    "keras_fit": [
        "Number of devices: 2",
        "rates [0.05, 0.05, 0.01] files 3",
        "same after loading True",
    ],
    "custom_loop_with_keras": ["loss falls True accuracy above 80 True", "restored True"],
    "dcgan": ["moved True finite True", "pictures (2, 4, 4, 1) steps 4"],
    "contrastive": ["steps 20 files 1", "loss falls True"],
    "multi_worker": ["loss 0.00010", "metric 0.15648 saved True"],
    "parameter_server": ["steps 300", "loss below 1 True shards 2"],
    "training_checkpoints": ["from scratch", "restored at 30", "goes on with [8.0, 0.0, 2.0]"],
}
MARKED = {"cannot": ["tf.GradientTape: an unwatched", "tf.device: strategies place things"]}


@pytest.mark.parametrize("name", PRINTED)
def test_programs_run_after_porting(name: str, tmp_path: Path) -> None:
    source = (CORPUS / f"{name}.py").read_text()
    done = port(source)
    assert [
        str(mark)[: len(want)] for mark, want in zip(done.marks, MARKED.get(name, []), strict=True)
    ] == MARKED.get(name, [])
    assert sum("# PORT: " in line for line in done.text.splitlines()) == len(done.marks)
    text = done.text
    if done.marks:  # the import stays for what could not be rewritten, and TensorFlow is not here
        assert "import tensorflow as tf\n" in text
        text = text.replace("import tensorflow as tf\n", "")
    else:
        assert "tf." not in text.partition('"""\n')[2]
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    try:
        printed = run_program(str(path))
    finally:
        px.random.set_seed(None)
    assert printed.splitlines() == PRINTED[name]


def test_every_program_is_run() -> None:
    assert {path.stem for path in CORPUS.glob("*.py")} == set(PRINTED)
    assert len(PRINTED) >= 10


def run_program(path: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def test_two_workers_learn_what_one_learns(tmp_path: Path) -> None:
    path = tmp_path / "multi_worker.py"
    path.write_text(port((CORPUS / "multi_worker.py").read_text()).text)
    with px.testing.MultiProcess(
        workers=2, preload=["phalanx"], env={"CKPT_DIR": str(tmp_path / "saved")}
    ) as cluster:
        first, second = cluster.run(run_program, str(path), timeout=120)
    assert first.splitlines() == PRINTED["multi_worker"]
    assert second == ""


ROOTS = {"px": px, "jnp": jnp, "jax": jax, "np": np, "optax": optax}
MADE = {
    px.data.Options: px.data.Options(),
    px.data.experimental.DistributeOptions: px.data.experimental.DistributeOptions(),
    px.data.DatasetSpec: px.data.DatasetSpec(px.TensorSpec((), "float32")),
}


def member(owner: Any, name: str) -> Any:
    """An attribute; of classes whose instances alone have it, that of an instance."""
    return getattr(MADE.get(owner, owner) if isinstance(owner, type) else owner, name)


def resolve(ours: str) -> Any:
    first, *rest = ours.split(".")
    return functools.reduce(member, rest, ROOTS[first])


def test_every_counterpart_exists() -> None:
    for ours in [*(name.ours for name in NAMES if name.ours), *PREFIXES.values()]:
        resolve(ours)
    assert len({name.theirs for name in NAMES}) == len(NAMES)
    assert all(name.note for name in NAMES if name.ours is None)


def test_every_name_of_tensorflow_is_known() -> None:
    """Names of tf.distribute, tf.data and tf.function, members of classes included."""
    names = tensorflow_names()
    assert len(names) > 900
    for theirs in names:
        known, rest = counterpart(theirs)
        assert known is not None, theirs
        if known.ours is not None:
            resolve(known.ours + rest)
    listed = set(names)
    ours = [n.theirs for n in NAMES if n.theirs.startswith(("tf.distribute.", "tf.data."))]
    strangers = [
        name
        for name in ours
        if name not in listed and not any(other.startswith(name + ".") for other in names)
    ]
    assert strangers == ["tf.distribute.experimental.WatchDog"]  # which is not exported


def test_the_page_is_what_the_command_prints() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "tensorflow_names.md"
    assert page.read_text() == table()


def test_keras_keeps_its_names_where_it_fits() -> None:
    text = (
        "import tensorflow as tf\nfrom tensorflow.keras import layers\n"
        "model = tf.keras.Sequential([layers.Dense(1)])\n"
        "model.compile(optimizer=tf.keras.optimizers.SGD(), loss=tf.keras.losses.MeanSquaredError())\n"
    )
    done = port(text)
    assert done.text.splitlines() == [
        "import os",
        'os.environ.setdefault("KERAS_BACKEND", "jax")',
        "import keras",
        "model = keras.Sequential([keras.layers.Dense(1)])",
        "model.compile(optimizer=keras.optimizers.SGD(), loss=keras.losses.MeanSquaredError())",
    ]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("    x = x + 1\n    loss = x\ng = t.gradient(loss, v)\n", "x is read and then written"),
        ("    loss = x\ng = t.gradient(loss, v)\nuse(t.watched_variables())\n", "used otherwise"),
        ("    loss = x\n    return loss\ng = t.gradient(loss, v)\n", "leaves it"),
        ("    t.watch(x)\n    loss = x\ng = t.gradient(loss, v)\n", "while it records"),
        ("    y = x\ng = t.gradient(loss, v)\n", "not computed in the block"),
        ("    loss = x\nreturned(t.gradient(loss, v))\n", "not that of a named loss"),
    ],
)
def test_tapes_that_are_left_alone(block: str, reason: str) -> None:
    done = port(f"import tensorflow as tf\nwith tf.GradientTape() as t:\n{block}")
    assert any(reason in mark.reason for mark in done.marks)
    assert "with px.value_and_grad() as t" in done.text or "tf.GradientTape() as t" in done.text


def test_several_tapes_and_names_that_are_taken() -> None:
    done = port(
        "import tensorflow as tf\ncompute_a = 1\n"
        "with tf.GradientTape(persistent=True) as t:\n    a = f(v)\n    b = a + w\n"
        "ga = t.gradient(a, v)\nlisted = [v, w]\ngb = t.gradient(b, listed)\ndel t\n"
        "with tf.GradientTape() as t:\n    a = f(v)\ng = t.gradient(a, v)\n"
        "tf.print('a {}', a, 'is', g, summarize=-1)\n"
    )
    assert done.text.splitlines() == [
        "import jax",
        "import phalanx as px",
        "compute_a = 1",
        "listed = [v, w]",
        "def compute_a_and_b():",
        "    a = f(v)",
        "    b = a + w",
        "    return (a, b)",
        "(a, b), (ga, gb) = px.values_and_grads(compute_a_and_b, [v, listed])()",
        "def compute_a_here():",
        "    a = f(v)",
        "    return a",
        "a, g = px.value_and_grad(compute_a_here, v)()",
        "jax.debug.print('a {{}} {} is {}', a, g)",
    ]
    assert (done.tapes, done.marks) == (2, [])


def test_models_are_lifted_where_they_are_whole() -> None:
    text = (
        "import tensorflow as tf\nmodel = tf.keras.Sequential()\nmodel.add(layer)\n"
        "def step(x):\n    with tf.GradientTape() as t:\n        loss = model(x)\n"
        "    g = t.gradient(loss, model.trainable_variables)\n    return g\n"
        "class Own(tf.keras.Model):\n    def train_step(self, data):\n"
        "        with tf.GradientTape() as t:\n            loss = self(data)\n"
        "        return t.gradient(loss, self.trainable_variables)\n"
    )
    done = port(text)
    assert "model.add(layer)\nmodel = px.keras.lift(model)\ndef step" in done.text
    assert [str(mark) for mark in done.marks] == [
        "tf.GradientTape: Keras on JAX computes gradients itself: override compute_loss, not train_step"
    ]
    assert [line for line, _ in done.places] == [
        1
        + done.text.splitlines().index(
            "        # PORT: tf.GradientTape: Keras on JAX computes gradients itself: override "
            "compute_loss, not train_step"
        )
    ]


def test_no_file_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import tensorflow as tf\nx = tf.ones([2])\n")
    assert main(["port", str(script)]) == 0
    made = tmp_path / "train_px.py"
    assert made.read_text() == "import jax.numpy as jnp\nx = jnp.ones([2])\n"
    assert "1 names and 0 gradient tapes rewritten, 0 things" in capsys.readouterr().err
    made.write_text("mine")
    assert main(["port", str(script)]) == 2
    assert main(["port", str(script), "-o", str(made)]) == 2
    assert made.read_text() == "mine"
    assert main(["port", str(script), "--in-place"]) == 0
    assert (tmp_path / "train.py.orig").read_text().startswith("import tensorflow")
    assert script.read_text().startswith("import jax")
    assert main(["port", str(script), "--in-place"]) == 2
    assert main(["port", str(tmp_path / "nothing.py")]) == 2
    bad = tmp_path / "bad.py"
    bad.write_text("def (:")
    assert main(["port", str(bad)]) == 2
    assert main(["port", "--table"]) == 0
    assert capsys.readouterr().out == table()
