"""Numbers of a checkpoint: they come back as they were, also in the place of arrays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

import phalanx as px
from phalanx.train.checkpoints import files


def restored(saved: Any, present: Any, folder: Path) -> Any:
    path = px.train.Checkpoint(tree={"x": saved}).write(str(folder / "x"))
    checkpoint = px.train.Checkpoint(tree={"x": present})
    checkpoint.restore(path).assert_consumed()
    return checkpoint.tree["x"]


def test_a_train_state_goes_on_in_a_new_process(tmp_path: Path) -> None:
    model = nn.Dense(2)

    def make() -> TrainState:
        params = model.init(jax.random.key(0), jnp.ones((1, 2)))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.5))

    step = jax.jit(lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)))
    checkpoint = px.train.Checkpoint(state=step(make()))
    path = checkpoint.write(str(tmp_path / "x"))
    again = px.train.Checkpoint(state=make())
    again.restore(path).assert_consumed()
    assert (type(again.state.step), again.state.step) == (int, 1)
    jax.tree.map(np.testing.assert_array_equal, again.state.params, checkpoint.state.params)

    path = px.train.Checkpoint(state=make()).write(str(tmp_path / "new"))  # and back to the beginning
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.state.step.dtype, int(checkpoint.state.step)) == (jnp.int32, 0)


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [
        (0.37, 0, 0.37),
        (3, 0.5, 3.0),
        (2**53 + 1, 0.5, 2**53 + 1),  # no float is equal
        (True, False, True),
        (jnp.int32(3), 0, 3),
        (np.float64(0.1), 0.5, 0.1),
        (np.array(True), False, True),
        (px.Variable(4), 0, 4),
        (3, jnp.int32(0), np.int32(3)),
        (3, np.uint8(0), np.uint8(3)),
        (0.5, jnp.bfloat16(0), jnp.bfloat16(0.5)),
        (True, np.array(False), np.bool_(True)),
    ],
)
def test_a_number_comes_back_as_it_was(saved: Any, present: Any, expected: Any, tmp_path: Path) -> None:
    result = restored(saved, present, tmp_path)
    assert result == expected
    number = isinstance(expected, bool | int | float) and not isinstance(expected, np.generic)
    assert type(result) is (type(expected) if number else type(present))
    assert number or result.dtype == expected.dtype


def test_a_number_in_the_place_of_a_variable_and_of_an_array_on_a_device(tmp_path: Path) -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = px.Variable(0)
    restored(7, variable, tmp_path)
    assert int(variable) == 7
    there = jax.device_put(jnp.int32(0), jax.devices()[1])
    result = restored(7, there, tmp_path)
    assert (int(result), result.sharding) == (7, there.sharding)


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        (0.37, False, "'tree/x' is the number False, and the number 0.37 in the checkpoint"),
        (True, 0, "'tree/x' is the number 0, and the number True in the checkpoint"),
        (300, np.int8(0), "'tree/x' is int8[], and the number 300 in the checkpoint"),
        (0.1, jnp.float32(0), "'tree/x' is float32[], and the number 0.1 in the checkpoint"),
        (1, jnp.float32(0), "'tree/x' is float32[], and the number 1 in the checkpoint"),
        (1, jnp.zeros(1, int), "'tree/x' is int32[1], and the number 1 in the checkpoint"),
        (1, jax.random.key(0), "'tree/x' is uint32[2] of keys (fry), and the number 1"),
        (jnp.float32(1), 1, "'tree/x' is the number 1, and float32[] in the checkpoint"),
        (jnp.zeros(1, int), 1, "'tree/x' is the number 1, and int32[1] in the checkpoint"),
    ],
)
def test_what_would_be_another_value_is_named(
    saved: Any, present: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="does not fit") as caught:
        restored(saved, present, tmp_path)
    assert message in str(caught.value).replace("threefry2x32", "fry")


def test_numbers_that_orbax_wrote(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "x", {"w": jnp.ones(2), "step": 3, "rate": 0.1})
    tree = {"w": jnp.zeros(2), "step": 0, "rate": 0.0}
    px.train.Checkpoint(tree).restore(str(tmp_path / "x")).assert_consumed()
    assert tree["w"].tolist() == [1.0, 1.0]  # type: ignore[attr-defined]
    assert (tree["step"], tree["rate"]) == (3, pytest.approx(0.1))


def test_a_number_that_is_nan_comes_back(tmp_path: Path) -> None:
    checkpoint = px.train.Checkpoint(best={"loss": math.nan})
    path = checkpoint.write(str(tmp_path / "x"))
    checkpoint.best["loss"] = 3.0
    checkpoint.restore(path).assert_consumed()
    assert math.isnan(checkpoint.best["loss"])


def test_equal_values_of_workers_are_one() -> None:
    """And equal numbers of different types are two: each worker gets its own back."""
    for first, second, is_one in (
        ({"a": [math.nan, 1], "b": None}, {"b": None, "a": [math.nan, 1]}, True),
        (1, 1.0, False),
        (1, True, False),
    ):
        merged = files._merged([{"x": first}, {"x": second}])
        assert set(merged["x"]) == {"same" if is_one else "workers"}
