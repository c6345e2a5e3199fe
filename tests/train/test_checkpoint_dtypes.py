"""Arrays of any dtype in checkpoints and files of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


class State:
    """An object whose state is any value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state(self) -> Any:
        return self.value

    def restore(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("format", ["phalanx", "orbax"])
def test_arrays_of_the_other_byte_order(format: str, tmp_path: Path) -> None:
    value = np.array([1.0, 2.0], ">f4")
    checkpoint = px.train.Checkpoint(a=value, state=State({"n": np.array([7], ">i8")}), n=value[:1])
    path = checkpoint.write(str(tmp_path / "x"), px.train.CheckpointOptions(format=format))
    native = px.train.Checkpoint(a=np.zeros(2, np.float32), state=State(0), n=np.zeros(1, ">f4"))
    native.restore(path).assert_consumed()
    assert native.a.tolist() == [1.0, 2.0]
    assert native.state.value["n"].tolist() == [7]
    assert (native.n.dtype.str, native.n.tolist()) == (">f4", [1.0])
    px.train.load_checkpoint(path).verify()


STRANGE = [
    np.array(["ab", "c"]),
    np.array([b"ab"]),
    np.array([("x", 1.0)], [("n", "U3"), ("v", "f4")]),
    np.array([{}], object),
    np.array([""], "U0"),
]


@pytest.mark.parametrize("array", STRANGE)
def test_arrays_that_cannot_be_saved_are_named_at_once(array: Any, tmp_path: Path) -> None:
    with pytest.raises(px.errors.InvalidTypeError, match="tree/deep/0, an array of"):
        px.train.Checkpoint(tree={"deep": [array]})
    with pytest.raises(px.errors.InvalidTypeError, match="deep, an array of"):
        px.train.export_weights(str(tmp_path / "x"), {"deep": array})
    checkpoint = px.train.Checkpoint(thing=State({"deep": array}))
    with pytest.raises(px.errors.InvalidTypeError, match="thing/deep, an array of"):
        checkpoint.write(str(tmp_path / "x"))


def test_texts_of_numpy_are_texts(tmp_path: Path) -> None:
    thing = State({"name": np.str_("adam")})
    path = px.train.Checkpoint(thing=thing, tree={"a": np.str_("x"), "b": 1}).write(str(tmp_path / "x"))
    thing.value = None
    px.train.Checkpoint(thing=thing, tree={"b": 0}).restore(path).assert_consumed()
    assert thing.value == {"name": "adam"}


def test_moments_in_time_come_back(tmp_path: Path) -> None:
    path = px.train.Checkpoint(a=np.array(["2020-01-01"], "M8[D]")).write(str(tmp_path / "x"))
    checkpoint = px.train.Checkpoint(a=np.zeros(1, "M8[D]"))
    checkpoint.restore(path)
    assert str(checkpoint.a[0]) == "2020-01-01"


FLOAT8 = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_weights_of_eight_bits(dtype: str, tmp_path: Path) -> None:
    path, values = str(tmp_path / "x"), [0.5, 1.0, 2.0]
    model = {"a": jnp.array(values, dtype), "b": jnp.ones((2, 0, 3), dtype), "w": px.Variable(3.0)}
    px.train.export_weights(path, {**model, "c": jnp.array(2.0, dtype)})
    other = {"a": jnp.ones(3, dtype), "b": model["b"], "c": jnp.ones((), dtype), "w": px.Variable(0.0)}
    px.train.load_weights(path, other)
    assert (other["a"].dtype.name, other["a"].astype("float32").tolist()) == (dtype, values)
    assert (float(other["c"]), float(other["w"])) == (2.0, 3.0)
    data = bytearray(Path(path).read_bytes())
    data[data.index(np.array(values, jnp.dtype(dtype)).tobytes())] ^= 1
    Path(path).write_bytes(data)
    with pytest.raises(px.errors.DataLossError, match="'a' of a file is damaged"):
        px.train.load_weights(path, other)


def test_weights_of_the_other_byte_order(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    px.train.export_weights(path, {"a": np.array([1.0, 2.0], ">f4")})
    other = {"a": np.zeros(2, np.float32)}
    px.train.load_weights(path, other)
    assert other["a"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", ["int4", "float8_e3m4", "float4_e2m1fn", "complex128", "M8[D]"])
def test_weights_that_the_format_has_no_type_for(dtype: str, tmp_path: Path) -> None:
    model = {"fine": np.ones(1), "a": {"b": np.zeros(3).astype(jnp.dtype(dtype))}}
    with pytest.raises(px.errors.InvalidTypeError, match=r"safetensors has no type for .*'a\.b'"):
        px.train.export_weights(str(tmp_path / "x"), model)
    assert not list(tmp_path.iterdir())
