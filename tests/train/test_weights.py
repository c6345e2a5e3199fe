"""Weights for other tools: files of safetensors, and checkpoints of Orbax."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import phalanx as px
from phalanx.train.checkpoints import directories


def test_weights_go_out_and_come_back(tmp_path: Path) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = px.Variable(jnp.arange(6.0).reshape(3, 2), name="w")
    optimizer = px.train.Optimizer(
        optax.adam(0.1), shard=px.train.OptimizerSharding("parameters", threshold=0)
    )
    optimizer.build([w])  # from now on it is in slices
    model = {
        "layers": [{"w": w, "half": jnp.ones(2, jnp.bfloat16)}, (np.arange(3),)],
        "key": jax.random.key(0),
    }
    path = str(tmp_path / "sub" / "model.safetensors")
    left = f".model.safetensors@{directories.machine()}@999999999@ab.partial"  # of a dead process
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / left).touch()
    (tmp_path / "sub" / ".data.removed").mkdir()  # of somebody else
    names = px.train.export_weights(path, model, metadata={"made by": "a test"})
    assert names == ["layers.0.w", "layers.0.half", "layers.1.0"]
    there = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(there["layers.0.w"], np.arange(6.0).reshape(3, 2))
    there_now = sorted(p.name for p in Path(path).parent.iterdir())
    assert there_now == [".data.removed", "model.safetensors"]
    other = {
        "layers": [
            {"w": px.Variable(jnp.zeros((3, 2))), "half": jnp.zeros(2, jnp.bfloat16)},
            (np.zeros(3, int),),
        ]
    }
    assert px.train.load_weights(path, other) is other
    assert other["layers"][0]["w"].numpy()[2].tolist() == [4.0, 5.0]  # type: ignore[call-overload, index]
    assert other["layers"][0]["half"].dtype == jnp.bfloat16  # type: ignore[call-overload, index]
    assert other["layers"][1][0].tolist() == [0, 1, 2]  # type: ignore[index]


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    px.train.export_weights(path, {"a": px.Variable([1.0]), "b": px.Variable(1)})
    wrong = {"a": px.Variable([1.0, 2.0]), "c": px.Variable(0)}
    with pytest.raises(ValueError, match="do not fit") as caught:
        px.train.load_weights(path, wrong)
    for text in ("no 'c'", "no variable takes 'b'", "'a' is float32[2], and float32[1] in the file"):
        assert text in str(caught.value)
    part = {"b": px.Variable(0)}
    px.train.load_weights(path, part, strict=False)
    assert int(part["b"]) == 1
    Path(path).write_bytes(b"x")
    with pytest.raises(px.errors.DataLossError, match="safetensors"):
        px.train.load_weights(path, part)
    with pytest.raises(px.errors.NotFoundError):
        px.train.load_weights(str(tmp_path / "none"), part)
    with pytest.raises(TypeError, match="no variables"):
        px.train.export_weights(path, [])


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'a\.b' twice"):  # one of them would be lost
        px.train.export_weights(str(tmp_path / "x"), {"a.b": jnp.ones(1), "a": {"b": jnp.zeros(1)}})
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        px.train.export_weights(str(tmp_path / "folder"), {"a": jnp.ones(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_checkpoints_of_orbax(tmp_path: Path) -> None:
    """Orbax reads what we write, and we read what Orbax writes."""
    data = iter(px.data.Dataset.range(9))
    next(data)
    w = px.Variable([1.0, 2.0])
    checkpoint = px.train.Checkpoint(model={"w": w}, data=data, key=jax.random.key(4))
    options = px.train.CheckpointOptions(format="orbax")
    path = checkpoint.save(str(tmp_path / "ckpt"), options)
    tree = ocp.PyTreeCheckpointer().restore(f"{path}/default")
    np.testing.assert_array_equal(tree["model"]["w"], [1.0, 2.0])
    w.assign([0.0, 0.0])
    next(data)
    checkpoint.key = jax.random.key(0)
    checkpoint.restore(px.train.latest_checkpoint(str(tmp_path))).assert_consumed()
    assert w.numpy().tolist() == [1.0, 2.0]
    assert int(next(data)) == 1
    assert jax.random.key_data(checkpoint.key).tolist() == [0, 4]

    foreign = tmp_path / "foreign"
    with ocp.StandardCheckpointer() as writer:
        writer.save(foreign, {"model": {"w": np.array([7.0, 8.0], np.float32)}})
    status = checkpoint.restore(str(foreign))
    assert status.missing == ["data", "key"]
    assert w.numpy().tolist() == [7.0, 8.0]

    px.train.convert_checkpoint(path, str(tmp_path / "back"), "phalanx")
    checkpoint.restore(str(tmp_path / "back")).assert_consumed()
    assert w.numpy().tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="format"):
        px.train.convert_checkpoint(path, str(tmp_path / "x"), "zip")


def test_what_orbax_does_not_take(tmp_path: Path) -> None:
    """Arrays without elements stand beside; those of types that it does not have are refused."""
    options = px.train.CheckpointOptions(format="orbax")
    state = {"none": jnp.zeros((0, 4), jnp.bfloat16), "some": jnp.ones(2)}
    checkpoint = px.train.Checkpoint(state=state)
    path = checkpoint.write(str(tmp_path / "a"), options)
    checkpoint.state = {"none": state["none"], "some": jnp.zeros(2)}
    checkpoint.read(path).assert_consumed()
    assert checkpoint.state["some"].tolist() == [1.0, 1.0]
    assert px.train.load_variable(path, "state/none").shape == (0, 4)
    strange = px.train.Checkpoint(state={"w": jnp.ones(3, jnp.uint4)})
    with pytest.raises(TypeError, match=r"usual format has.*'state/w', which is uint4\[3\]"):
        strange.write(str(tmp_path / "b"), options)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a"]


def test_items_of_orbax_have_their_names(tmp_path: Path) -> None:
    items = {
        name: ocp.args.StandardSave({"w": np.full(2, i, np.float32)}) for i, name in enumerate("ab")
    }
    for names in ("ab", "b"):
        chosen = {name: items[name] for name in names}
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
            writer.save(tmp_path / names, args=ocp.args.Composite(**chosen))
        checkpoint = px.train.Checkpoint(b={"w": jnp.zeros(2)})
        status = checkpoint.restore(str(tmp_path / names))
        assert checkpoint.b["w"].tolist() == [1.0, 1.0]
        assert list(status.lost) == (["a/w"] if names == "ab" else [])
