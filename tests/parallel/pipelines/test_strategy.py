"""Strategies whose variables live in stages."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from tests.parallel.pipelines import models
from tests.parallel.pipelines.test_pipelining import DEVICES, assert_close

import phalanx as px
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.parallel.pipelines.strategy import PipelineStrategy

CLIPPED = optax.chain(optax.clip_by_global_norm(0.01), optax.adam(1e-2))


def variables_of(strategy: PipelineStrategy, model: models.Model) -> list[Any]:
    found = []
    for i, nest in enumerate(model.params):
        with strategy.stage(i):
            found.append({n: px.Variable(np.asarray(x), name=f"{i}_{n}") for n, x in nest.items()})
    return found


@pytest.mark.parametrize("shard", [None, "states"])
def test_steps_under_a_strategy_are_those_of_the_whole_model(shard: str | None) -> None:
    model = models.language(2)
    strategy = PipelineStrategy(2, devices=DEVICES, shard=shard)  # two devices for each stage
    with strategy.scope():
        variables = variables_of(strategy, model)
        pipe = px.parallel.pipeline(model.parts, "1f1b", 2, shared=model.shared)
        optimizer = px.train.Optimizer(CLIPPED)
    assert pipe.meshes == strategy.meshes

    def step(x: Any, target: Any) -> Any:
        value, gradients = pipe.value_and_grad(variables, x, target)
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(variables), strict=True)
        optimizer.apply_gradients(pairs)
        return value

    x, target = model.batch(11)
    data = px.data.Dataset.from_tensor_slices((x, target)).batch(4)  # 4, 4 and 3 rows
    params, state = model.params, CLIPPED.init(model.params)
    for i, batch in enumerate(strategy.experimental_distribute_dataset(data)):
        rows = slice(4 * i, 4 * i + 4)
        expected, gradients = jax.value_and_grad(model.whole)(params, x[rows], target[rows])
        updates, state = CLIPPED.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(strategy.run(step, batch), expected, rtol=1e-4)
    found = [{name: v.value() for name, v in nest.items()} for nest in variables]
    assert_close(found, params, 1e-4)
    for v in jax.tree.leaves(variables):
        assert v.sharding.mesh == strategy.meshes[int(v.name[0])]
    slots = [v for v in optimizer.variables if v.name.startswith("1_scale")]
    assert {v.sharding.mesh for v in slots} == {strategy.meshes[1]}
    embedding = next(v for v in optimizer.variables if v.name == "0_place/mu:0")
    whole = embedding.shape
    assert embedding.sharding.shard_shape(whole)[0] == whole[0] // (1 if shard is None else 2)


def test_variables_of_stages_are_saved_and_restored(tmp_path: Any) -> None:
    strategy = PipelineStrategy(2, devices=DEVICES[:2])
    with strategy.scope():
        variables = variables_of(strategy, models.equal(2))
    checkpoint = px.train.Checkpoint(v=variables[1]["w"])
    path = checkpoint.save(str(tmp_path / "c"))
    expected = variables[1]["w"].numpy()
    variables[1]["w"].assign(0 * expected)
    checkpoint.restore(path)
    np.testing.assert_array_equal(variables[1]["w"].numpy(), expected)
    assert {d.id for d in variables[1]["w"].value().devices()} == {1}


def test_wrong_stages_are_refused() -> None:
    strategy = PipelineStrategy(2, devices=DEVICES[:2])
    with pytest.raises(ContextError, match="outside of the scope"), strategy.stage(0):
        pass
    with strategy.scope():
        with pytest.raises(InvalidValueError, match="numbers 0 to 1"), strategy.stage(2):
            pass
        with pytest.raises(InvalidValueError, match="Received: a pipeline of 3"):
            px.parallel.pipeline([models.layer] * 3, "1f1b", 2)
    with pytest.raises(InvalidTypeError, match="positive number"):
        PipelineStrategy(0)
