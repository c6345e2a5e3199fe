"""`phalanx port`: ten programs run after it, names exist, and no file is lost."""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.cli import main
from phalanx.cli.porting import port
from phalanx.cli.porting_names import NAMES, PREFIXES, table

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
}
MARKED = {"cannot": ["tf.GradientTape: a persistent", "tf.print: use jax.debug.print"]}


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
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    px.random.set_seed(None)
    assert printed.getvalue().splitlines() == PRINTED[name]


def test_there_are_ten_programs() -> None:
    assert {path.stem for path in CORPUS.glob("*.py")} == set(PRINTED)
    assert len(PRINTED) == 10


def test_every_counterpart_exists() -> None:
    roots = {"px": px, "jnp": jnp, "jax": jax, "np": np, "optax": optax}
    for ours in [*(name.ours for name in NAMES if name.ours), *PREFIXES.values()]:
        first, *rest = ours.split(".")
        functools.reduce(getattr, rest, roots[first])
    assert len({name.theirs for name in NAMES}) == len(NAMES)
    assert all(name.note for name in NAMES if name.ours is None)


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
        ("    loss = x\ng = t.gradient(loss, v)\nh = t.gradient(loss, w)\n", "2 times"),
        ("    t.watch(x)\n    loss = x\ng = t.gradient(loss, v)\n", "while it records"),
        ("    y = x\ng = t.gradient(loss, v)\n", "not computed in the block"),
        ("    loss = x\nreturned(t.gradient(loss, v))\n", "not that of a named loss"),
    ],
)
def test_tapes_that_are_left_alone(block: str, reason: str) -> None:
    done = port(f"import tensorflow as tf\nwith tf.GradientTape() as t:\n{block}")
    assert any(reason in mark.reason for mark in done.marks)
    assert "with px.value_and_grad() as t" in done.text or "tf.GradientTape() as t" in done.text


def test_no_file_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import tensorflow as tf\nx = tf.ones([2])\n")
    assert main(["port", str(script)]) == 0
    made = tmp_path / "train_px.py"
    assert made.read_text() == "import jax.numpy as jnp\nx = jnp.ones([2])\n"
    assert "1 names and 0 gradient tapes" in capsys.readouterr().err
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
