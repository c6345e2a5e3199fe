"""`phalanx port`: programs run after it, every name of TensorFlow is known, and no file is lost."""

from __future__ import annotations

import builtins
import contextlib
import functools
import glob
import importlib
import inspect
import io
import os
import runpy
import shutil
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
from phalanx.cli.porting_arguments import _KEYWORDS
from phalanx.cli.porting_names import NAMES, PREFIXES, counterpart, table, tensorflow_names
from phalanx.job.launch.ports import PortReservation

CORPUS = Path(__file__).parent / "corpus"
PRINTED = {
    "linear_regression": ["steps 40", "w [1.0, -2.0, 3.0]"],
    "classifier_with_metrics": ["accuracy above 0.9 True"],
    "module_and_checkpoint": ["out [[6.0, 6.0]]", "variables ['dense/b:0', 'dense/w:0']"],
    "summaries": ["files 1"],
    "gathering": ["total [3.0]", "gathered [0.0, 1.0, 2.0]", "mean id 1.0"],
    "trainer_class": ["Epoch: 3 loss falls True"],
    "multi_worker_keras": [
        "Reshape []",
        "Conv2D [(3, 3, 1, 4), (4,)]",
        "Flatten []",
        "Dense [(144, 16), (16,)]",
        "Dense [(16, 4), (4,)]",
        "restored True chief True",
    ],
    "schedule": ["before 0", "v 0.8 after 3"],
    "input_functions": ["total 240"],
    "central_storage": ["total 6.0 seen 4.0"],
    "generator_network": ["finite True True"],
    "cannot": ["x 3.0"],
    "keras_fit": [
        "Number of devices: 2",
        "layers ['Flatten', 'Dense', 'Dense']",
        "rates [0.05, 0.05, 0.01] files 3",
        "same after loading True",
    ],
    "custom_loop_with_keras": [
        "TensorFlow True",
        "loss falls True accuracy above 80 True",
        "restored True",
    ],
    "convnet_fit": [
        "loss falls True",
        "accuracy above 0.8 True top 2 above True",
        "predictions (20, 3) class True",
    ],
    "transformer_fit": ["loss falls True", "accuracy above 0.8 True steps 60"],
    "distributed_gan": ["finite True steps 9", "means True True", "sample (3, 2)"],
    "dcgan": ["moved True finite True", "pictures (2, 4, 4, 1) steps 4"],
    "custom_train_step": [
        "{'mae': [0.2677, 0.2655, 0.2641], 'loss': [0.1045, 0.1019, 0.1001]}",  # TensorFlow's
        "{'mae': [0.2627], 'loss': [0.0552]}",
        "[0.0923, 0.262]",
    ],
    "gan_train_step": ["['d_loss', 'g_loss'] True", "iterations 6 6"],
    "contrastive": ["steps 20 files 1", "loss falls True"],
    "multi_worker": ["loss 0.00010", "metric 0.15648 saved True"],
    "parameter_server": ["steps 300", "loss below 1 True shards 2"],
    "vae": ["loss falls True", "loss falls True", "samples differ True True"],
    "loop_beside_fit": ["fitted True", "seen 1.425 w 0.800"],
    "keras_guide": ["better True", "batches 10 rate 0.15"],
    "training_checkpoints": ["from scratch", "restored at 30", "goes on with [8.0, 0.0, 2.0]"],
}
MARKED = {"cannot": ["tf.GradientTape: an unwatched", "tf.device: strategies place things"]}


SLOW = (
    "convnet_fit",
    "transformer_fit",
    "multi_worker_keras",
    "trainer_class",
    "contrastive",
    "dcgan",
    "gan_train_step",
    "vae",
)  # which compile for seconds


@pytest.mark.filterwarnings("ignore:Do not pass an `input_shape`")  # Keras, which takes it
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in SLOW)) for name in PRINTED]
)
def test_programs_run_after_porting(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        with PortReservation(4) as reservation:  # for programs that make a cluster
            monkeypatch.setenv("PORTS", ",".join(map(str, reservation.ports)))
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


ROOTS = vars(builtins) | {"px": px, "jnp": jnp, "jax": jax, "np": np, "optax": optax, "os": os}
ROOTS |= {"shutil": shutil, "glob": glob}
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
    if first == "keras":
        ROOTS["keras"] = importlib.import_module("keras")
    return functools.reduce(member, rest, ROOTS[first])


def test_every_counterpart_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
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
        ("    loss = x\nreturned(t.gradient(loss + 1, v))\n", "not that of a named loss"),
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


def test_gradients_that_are_asked_for_inside() -> None:
    done = port(
        "import tensorflow as tf\nwith tf.GradientTape() as t:\n    loss = f(v)\n"
        "    g = t.gradient(loss, v)\n    use(g)\nuse(loss)\n"
    )
    assert done.text.splitlines()[1:] == [
        "def compute_loss():",
        "    loss = f(v)",
        "    return loss",
        "loss, g = px.value_and_grad(compute_loss, v)()",
        "use(g)",
        "use(loss)",
    ]
    done = port(
        "import tensorflow as tf\ndef grad(x):\n    with tf.GradientTape() as tape:\n"
        "        loss = f(x)\n    # both\n    return loss, tape.gradient(loss, v)\n"
    )
    assert done.text.splitlines()[2:] == [
        "    def compute_loss():",
        "        loss = f(x)",
        "        return loss",
        "    # both",
        "    loss, gradients = px.value_and_grad(compute_loss, v)()",
        "    return loss, gradients",
    ]
    left = port("import tensorflow as tf\nwith tf.GradientTape() as t:\n    g = t.gradient(loss, v)\n")
    assert "    g = t.gradient(loss, v)" in left.text
    assert len(left.marks) == 1


def test_old_spellings_of_keras() -> None:
    done = port(
        "import tensorflow as tf\nfrom tensorflow.keras import backend as K\n"
        "model.compile(optimizer=tf.keras.optimizers.Adam(lr=0.1, beta_1=0.5))\n"
        "K.set_value(model.optimizer.lr, K.get_value(model.optimizer.lr) * 0.5)\n"
        "print(gen_optimizer.lr, schedule.lr)\n"
    )
    assert done.text.splitlines()[-3:] == [
        "model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.1, beta_1=0.5))",
        "model.optimizer.learning_rate.assign(model.optimizer.learning_rate.numpy() * 0.5)",
        "print(gen_optimizer.learning_rate, schedule.lr)",
    ]
    assert done.marks == []


def test_names_that_only_look_like_tensorflow() -> None:
    """Keywords, attributes, parameters and what functions define themselves."""
    done = port(
        "from tensorflow.keras import layers, metrics, optimizers\n"
        "def made(optimizers, *, metrics=None):\n"
        "    losses = [layers.Dense(1)]\n"
        "    return optimizers.first, metrics\n"
        "model.compile(optimizers.SGD(), metrics=[metrics.AUC()])\n"
        "names = [x.name for x in model.layers] + model.metrics\n"
        "first = lambda layers: layers[0]\n"
    )
    assert done.text.splitlines()[3:] == [
        "def made(optimizers, *, metrics=None):",
        "    losses = [keras.layers.Dense(1)]",
        "    return optimizers.first, metrics",
        "model.compile(keras.optimizers.SGD(), metrics=[keras.metrics.AUC()])",
        "names = [x.name for x in model.layers] + model.metrics",
        "first = lambda layers: layers[0]",
    ]
    assert done.marks == []
    done = port("from tensorflow.keras import metrics\nmetrics = [metrics.AUC()]\nuse(metrics)\n")
    assert "metrics = [px.metrics.AUC()]" in done.text
    assert {mark.what for mark in done.marks} == {"metrics"}


def test_imports_wherever_they_stand() -> None:
    done = port(
        '"""Doc."""\nfrom __future__ import annotations\n\n'
        "# TensorFlow\nimport json, tensorflow as tf\n# more\nimport tensorflow.compat.v2 as tf2\n"
        "import tensorflow_datasets as tfds\nimport os\n"
        'os.environ["KERAS_BACKEND"] = "tensorflow"\n'
        "try:\n    import tensorflow as tf\nexcept ImportError:\n    tf = None\n"
        "def f():\n    from tensorflow import keras\n"
        "    return keras.Sequential(), tf2.add_n(x).numpy()\n"
    )
    assert done.text.splitlines() == [
        '"""Doc."""',
        "from __future__ import annotations",
        "",
        "# TensorFlow",
        "import os",
        'os.environ.setdefault("KERAS_BACKEND", "jax")',
        "import keras",
        "import numpy as np",
        "import json",
        "# more",
        "# PORT: tensorflow_datasets: a library for TensorFlow: it stays, and needs TensorFlow",
        "import tensorflow_datasets as tfds",
        "import os",
        'os.environ["KERAS_BACKEND"] = "jax"',
        "try:",
        "    pass",
        "except ImportError:",
        "    tf = None",
        "def f():",
        "    return keras.Sequential(), np.asarray(sum(x))",
    ]
    assert len(done.marks) == 1
    done = port("from tensorflow.keras.layers import *\nDense(1)\n")
    assert done.text.splitlines()[1:] == ["from tensorflow.keras.layers import *", "Dense(1)"]
    assert [mark.what for mark in done.marks] == ["tensorflow.keras.layers.*"]
    assert port('"""Doc."""\nfrom __future__ import annotations\nx.numpy()\n').text.splitlines() == [
        '"""Doc."""',
        "from __future__ import annotations",
        "import numpy as np",
        "np.asarray(x)",
    ]


def test_metrics_that_count_in_fit_only_are_marked() -> None:
    text = "import tensorflow as tf\nm = tf.keras.metrics.F1Score()\n"
    assert [mark.what for mark in port(text).marks] == ["tf.keras.metrics.F1Score"]
    assert port(text + "model.fit(x)\n").marks == []


def test_every_mark_is_written() -> None:
    done = port(
        "import tensorflow as tf\nif a: tf.raw_ops.A()\nelif b:\n    c()\n"
        "class D:\n    if a: e = tf.raw_ops.B\nfor f in tf.raw_ops.C(): pass\n"
        "while tf.raw_ops.D(): g()\n"
    )
    assert [str(mark)[:12] for mark in done.marks] == [f"tf.raw_ops.{x}" for x in "ABCD"]
    assert len(done.places) == 4


def test_files_and_losses_of_tensorflow() -> None:
    done = port(
        "import tensorflow as tf\ntf.io.gfile.makedirs(d)\nwith tf.io.gfile.GFile(d, 'w') as f: pass\n"
        "a = tf.nn.sparse_softmax_cross_entropy_with_logits(y, x, name='a')\n"
        "a = tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=x)\n"
        "b = tf.nn.leaky_relu(x) + tf.nn.leaky_relu(x, alpha=0.3) + tf.nn.leaky_relu(x, 0.1)\n"
        "c = tf.nn.gelu(x) + tf.nn.gelu(x, True) + tf.add_n([x])\nd = tf.TensorShape([2])\n"
    )
    assert done.text.splitlines()[3:] == [
        "os.makedirs(d, exist_ok=True)",
        "with open(d, 'w') as f: pass",
        "a = optax.softmax_cross_entropy_with_integer_labels(labels=y, logits=x)",
        "a = optax.softmax_cross_entropy(labels=y, logits=x)",
        (
            "b = jax.nn.leaky_relu(x, negative_slope=0.2) + jax.nn.leaky_relu(x, negative_slope=0.3) + "
            "jax.nn.leaky_relu(x, 0.1)"
        ),
        "c = jax.nn.gelu(x, approximate=False) + jax.nn.gelu(x, True) + sum([x])",
        "d = tuple([2])",
    ]
    assert done.marks == []


def test_arguments_of_array_functions() -> None:
    done = port(
        "import tensorflow as tf\n"
        "a = tf.range(start=0, limit=n, delta=2, name='a')\n"
        "b = tf.argmax(x) + tf.argmax(x, 1) + tf.argmax(input=x, axis=-1, output_type=tf.int32)\n"
        "b += tf.cumsum(x)\n"
        "c = tf.concat(values=[x, y], axis=0) + tf.reshape(tensor=x, shape=[2])\n"
        "d = tf.reduce_sum(input_tensor=tf.one_hot(indices=i, depth=3), axis=1, keepdims=True)\n"
        "e = tf.math.rsqrt(tf.cast(x=x, dtype=tf.float32)) + tf.clip_by_value(x, clip_value_min=0,\n"
        "    clip_value_max=1)\n"
        "f = tf.matmul(x, y, transpose_b=True)\n"
    )
    assert done.text.splitlines() == [
        "import jax",
        "import jax.numpy as jnp",
        "a = jnp.arange(start=0, stop=n, step=2)",
        "b = jnp.argmax(x, axis=0) + jnp.argmax(x, 1) + jnp.argmax(a=x, axis=-1)",
        "b += jnp.cumsum(x, axis=0)",
        "c = jnp.concatenate(arrays=[x, y], axis=0) + jnp.reshape(a=x, shape=[2])",
        "d = jnp.sum(a=jax.nn.one_hot(x=i, num_classes=3), axis=1, keepdims=True)",
        "e = jax.lax.rsqrt(jnp.asarray(a=x, dtype=jnp.float32)) + jnp.clip(x, min=0,",
        "    max=1)",
        "# PORT: tf.matmul: the counterpart has no argument transpose_b",
        "f = jnp.matmul(x, y, transpose_b=True)",
    ]
    for name, pairs in _KEYWORDS.items():
        found, rest = counterpart(f"tf.{name}")
        found, rest = (found, rest) if found else counterpart(f"tf.math.{name}")
        found, rest = (found, rest) if found else counterpart(f"tf.nn.{name}")
        found, rest = (found, rest) if found else counterpart(f"tf.io.gfile.{name}")
        assert found is not None, name
        assert found.ours is not None
        taken = inspect.signature(resolve(found.ours + rest)).parameters
        assert set(pairs.values()) <= set(taken), name


def test_models_are_lifted_where_they_are_whole() -> None:
    text = (
        "import tensorflow as tf\nmodel = tf.keras.Sequential()\nmodel.add(layer)\n"
        "def step(x):\n    with tf.GradientTape() as t:\n        loss = model(x)\n"
        "    g = t.gradient(loss, model.trainable_variables)\n    return g\n"
        "class Own(tf.keras.Model):\n    def train_step(self, data):\n"
        "        with tf.GradientTape() as t:\n            loss = self(data)\n"
        "        return t.gradient(loss, self.trainable_variables)\n"
        "Own().train_step(x)\n"
    )
    done = port(text)
    assert "model.add(layer)\nmodel = px.keras.lift(model)\ndef step" in done.text
    assert [str(mark) for mark in done.marks] == [
        "tf.GradientTape: Keras on JAX has other steps: see px.keras.stateful, or override compute_loss"
    ]
    assert [line for line, _ in done.places] == [
        1
        + done.text.splitlines().index(
            "        # PORT: tf.GradientTape: Keras on JAX has other steps: see px.keras.stateful, or "
            "override compute_loss"
        )
    ]


def test_steps_of_keras_models_get_their_state() -> None:
    text = (
        "import tensorflow as tf\nclass Own(tf.keras.Model):\n"
        "    @tf.function\n    def train_step(self, data):\n        return self._update(data)\n"
        "    def _update(self, data):\n        with tf.GradientTape() as t:\n"
        "            loss = self(data)\n"
        "        g = t.gradient(loss, self.trainable_variables)\n        return g\n"
        "    def test_step(self, state, data):\n        return {}, state\n"
    )
    done = port(text)
    assert done.marks == []
    assert "    @px.keras.stateful\n    def train_step(self, data):" in done.text
    assert "loss, g = px.keras.value_and_grad(compute_loss, self.trainable_variables)()" in done.text
    assert done.text.count("stateful") == 1
    assert "px.function" not in done.text
    # A loop that calls the step has no state to give, and neither has a step that calls Keras's.
    done = port(text.replace("self._update(data)", "super().train_step(data)"))
    assert "stateful" not in done.text


def test_parts_of_keras_that_tensorflow_has_too() -> None:
    done = port(
        "import tensorflow as tf\nfrom tensorflow import losses, device\n"
        "from tensorflow.keras import layers\nmodel.fit(x)\nwith device('CPU:0'):\n    pass\n"
        "a = tf.metrics.Mean(), losses.Hinge(), tf.optimizers.SGD(), tf.dtypes.int64\n"
        "b = tf.gather(x, i), tf.gather(params=x, indices=i), tf.gather(x, i, axis=1)\n"
    )
    assert done.text.splitlines()[-2:] == [
        "a = keras.metrics.Mean(), keras.losses.Hinge(), keras.optimizers.SGD(), jnp.int64",
        "b = jnp.take(x, i, axis=0), jnp.take(a=x, indices=i, axis=0), jnp.take(x, i, axis=1)",
    ]
    assert "from tensorflow import device\n" in done.text
    assert "tensorflow.keras" not in done.text


def test_loops_count_with_their_own_metrics_beside_fit() -> None:
    """Keras's metrics and optimizers work in `fit` only: what `compile` gets is Keras's."""
    start = (
        "import tensorflow as tf\nstrategy = tf.distribute.MirroredStrategy()\n"
        "mean, sgd = tf.keras.metrics.Mean(), tf.keras.optimizers.SGD()\n"
        "model.compile(tf.keras.optimizers.SGD(), metrics=[tf.keras.metrics.AUC()])\nmodel.fit(x)\n"
    )
    kept = "mean, sgd = keras.metrics.Mean(), keras.optimizers.SGD()"
    assert kept in port(start + "subprocess.run(x)\n").text
    schedules = (
        "c = tf.distribute.coordinator.ClusterCoordinator(strategy)\nc.schedule(f)",
        "self.strategy.run(f)",
        "tower.experimental_run_v2(f)",
    )
    for loop in schedules:
        done = port(f"{start}{loop}\n")
        assert "mean, sgd = px.metrics.Mean(), px.optimizers.SGD()" in done.text
        assert "model.compile(keras.optimizers.SGD(), metrics=[keras.metrics.AUC()])" in done.text
        assert done.marks == []
        shared = port(f"{start}{loop}\nmodel.compile(sgd)\n")
        assert [mark.what for mark in shared.marks] == ["model.compile"]


def test_layers_that_draw_random_numbers_get_a_seed() -> None:
    done = port(
        "from tensorflow.keras import layers, backend as K\nimport tensorflow as tf\n"
        "class Noise(layers.Layer):\n    def __init__(self, size):\n"
        "        super(Noise, self).__init__()\n        self.size = size\n"
        "    def call(self, x):\n        return x + self.draw(x)\n    def draw(self, x):\n"
        "        return K.random_normal(K.shape(x), stddev=self.size, seed=3)\n"
        "    def other(self):\n        return tf.random.normal([2])\n"
        "class More(Noise):\n    def call(self, x):\n"
        "        return tf.random.uniform(tf.shape(x), 0.0, 1.0, tf.float32, 4, name='a')\n"
        "def draw(x):\n    return tf.random.normal([2])\nlayers.Lambda(draw)\n"
    )
    lines = [line.strip() for line in done.text.splitlines()]
    seed = "self.seed_generator = keras.random.SeedGenerator()"
    assert lines[lines.index("super(Noise, self).__init__()") + 1] == seed
    assert lines[lines.index("super().__init__(*args, **kwargs)") + 1] == seed
    wanted = "keras.random.normal(keras.backend.shape(x), stddev=self.size, seed=self.seed_generator)"
    assert f"return {wanted}" in lines
    wanted = "keras.random.uniform(jnp.shape(x), 0.0, 1.0, jnp.float32, seed=self.seed_generator)"
    assert f"return {wanted}" in lines
    assert lines.count("return jax.random.normal(px.random.next_key(), [2])") == 2
    assert [mark.what for mark in done.marks] == ["tf.keras.layers.Lambda"]


def test_parts_of_models_that_keras_3_does_not_have_are_marked() -> None:
    done = port(
        "import tensorflow as tf\nclass Own(tf.keras.Model):\n    def train_step(self, data):\n"
        "        loss = self.compiled_loss(y, y_pred)\n"
        "        self.compiled_metrics.update_state(y, y_pred)\n"
    )
    assert [mark.what for mark in done.marks] == ["compiled_loss", "compiled_metrics"]


def test_models_that_objects_have_are_lifted() -> None:
    """A method named train_step belongs to Keras in its models only."""
    step = (
        "    def train_step(self, x):\n"
        "        with tf.GradientTape() as t:\n            loss = self.net(self.other(x))\n"
        "        g = t.gradient(loss, self.net.trainable_variables)\n"
    )
    done = port(
        "import tensorflow as tf\nclass Net(tf.keras.Model):\n    pass\nclass Sub(Net):\n"
        + step
        + "class Trainer(object):\n    def __init__(self, net):\n        self.net = net\n"
        "        self.other = Sub()\n" + step
    )
    lines = [line.strip() for line in done.text.splitlines()]
    assert done.marks == []
    assert lines[lines.index("class Sub(Net):") + 1] == "@px.keras.stateful"
    assert lines.count("@px.keras.stateful") == 1
    assert lines[lines.index("self.net = net") + 1] == "self.net = px.keras.lift(self.net)"
    assert lines[-1] == "loss, g = px.value_and_grad(compute_loss, self.net.trainable_variables)()"


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
    assert main(["port", str(script), "-o", str(tmp_path / "none" / "a.py")]) == 2
    assert main(["port", "--table"]) == 0
    assert capsys.readouterr().out == table()


def test_links_line_ends_and_encodings_stay(tmp_path: Path) -> None:
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    old = b"# coding: latin-1\r\nimport tensorflow as tf\r\nx = tf.ones([2])  # \xe9\r\n"
    script.write_bytes(old)
    link.symlink_to(script)
    assert main(["port", str(link), "--in-place"]) == 0
    new = old.replace(b"tensorflow as tf", b"jax.numpy as jnp").replace(b"tf.ones", b"jnp.ones")
    assert script.read_bytes() == new
    assert link.is_symlink()
    assert (tmp_path / "train.py.orig").read_bytes() == old
    (tmp_path / "train.py.orig").unlink()
    (tmp_path / "train.py.partial").write_text("mine")
    assert main(["port", str(link), "--in-place"]) == 2
    assert not (tmp_path / "train.py.orig").exists()
