"""Modules find their variables; name scopes name them; the global seed fixes what is random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import phalanx as px


class Dense(px.Module):
    def __init__(self, size: int, name: str | None = None) -> None:
        super().__init__(name=name)
        with self.name_scope:
            self.w = px.Variable(jnp.ones(size), name="w")
            self.b = px.Variable(0.0, name="b", trainable=False)

    @px.Module.with_name_scope
    def late(self) -> px.Variable:
        self.extra = px.Variable(1.0, name="extra")
        return self.extra


class Model(px.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [Dense(2), Dense(3, name="second")]
        self.by_name = {"again": self.layers[0]}
        self.scale = px.Variable(1.0, name="scale")
        self.note = "not a variable"


def test_modules_find_what_they_are_made_of() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = Model()
    names = ["scale:0", "dense/b:0", "dense/w:0", "second/b:0", "second/w:0"]
    assert [v.name for v in model.variables] == names
    assert [v.name for v in model.trainable_variables] == [n for n in names if "/b" not in n]
    assert [v.name for v in model.non_trainable_variables] == ["dense/b:0", "second/b:0"]
    assert model.submodules == tuple(model.layers)
    assert (model.name, model.layers[1].name) == ("model", "second")
    with strategy.scope():
        assert model.layers[1].late().name == "second/extra:0"
    loss, gradients = px.value_and_grad(
        lambda: sum(jnp.sum(v * v) for v in model.trainable_variables), list(model.trainable_variables)
    )()
    assert float(loss) == 1 + 2 + 3 + 1
    assert len(gradients) == 4
    with pytest.raises(TypeError, match="name"):
        px.Module(name=3)


def test_scopes_nest_and_end() -> None:
    with px.name_scope("a"):
        with px.name_scope("b") as name:
            assert name == "a/b/"
        with px.name_scope("c/"):
            assert px.Variable(1.0, name="v").name == "c/v:0"
        assert px.Variable(1.0).name == "a/Variable:0"
    assert px.Variable(1.0, name="v").name == "v:0"
    with pytest.raises(TypeError, match="name"):
        px.name_scope("")


def test_the_global_seed() -> None:
    def draw() -> tuple[list[int], float]:
        px.random.set_seed(5)
        order = [int(x) for x in px.data.Dataset.range(20).shuffle(20)]
        return order, float(jax.random.normal(px.random.next_key()))

    first = draw()
    assert draw() == first
    other = [int(x) for x in px.data.Dataset.range(20).shuffle(20)]
    assert other != first[0]
    px.random.set_seed(None)
    with pytest.raises(TypeError, match="seed"):
        px.random.set_seed("5")
    with pytest.raises(RuntimeError, match=r"px\.function"):
        jax.jit(lambda: jax.random.normal(px.random.next_key()))()


def test_keys_in_steps_differ_between_calls_and_replicas() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])

    def draw() -> list[float]:
        values = strategy.run(lambda: jax.random.normal(px.random.next_key()))
        return [float(x) for x in values.values]

    step = px.function(lambda: strategy.run(lambda: jax.random.normal(px.random.next_key())))
    px.random.set_seed(7)
    eager = [*draw(), *draw()]
    px.random.set_seed(7)
    compiled = [float(x) for _ in range(2) for x in step().values]
    px.random.set_seed(None)
    assert eager == compiled
    assert len(set(eager)) == 4
