"""What objects are made of: slots, frozen objects, mappings, and objects in two places."""

from __future__ import annotations

import types
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px


class Holder:
    """An object with any attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slots:
    __slots__ = ("__hidden", "unset", "w")

    def __init__(self, w: Any, hidden: Any = None) -> None:
        self.w, self.__hidden = w, hidden

    @property
    def hidden(self) -> Any:
        return self.__hidden


class MoreSlots(Slots):
    __slots__ = ("b",)

    def __init__(self, w: Any, b: Any) -> None:
        super().__init__(w, w * 2)
        self.b = b


@dataclass(slots=True)
class Data:
    w: Any


def saved_to(folder: Path, **objects: Any) -> str:
    return px.train.Checkpoint(**objects).write(str(folder / "x"))


def test_objects_with_slots(tmp_path: Path) -> None:
    def make(x: float) -> Holder:
        return Holder(deep=MoreSlots(jnp.full(2, x), px.Variable(x)), data=Data(jnp.full(1, x)))

    path = saved_to(tmp_path, model=make(3.0), top=Data(px.Variable(4.0)))
    checkpoint = px.train.Checkpoint(model=make(0.0), top=Data(px.Variable(0.0)))
    checkpoint.restore(path).assert_consumed()
    model = checkpoint.model
    assert (model.deep.w.tolist(), float(model.deep.b), model.deep.hidden.tolist()) == (
        [3, 3],
        3,
        [6, 6],
    )
    assert (model.data.w.tolist(), float(checkpoint.top.w)) == ([3.0], 4.0)


def test_mappings_that_cannot_be_changed_and_deques(tmp_path: Path) -> None:
    def make(x: float) -> dict[str, Any]:
        return {
            "proxy": types.MappingProxyType({"v": px.Variable(x), "a": jnp.full(1, x), "n": int(x)}),
            "model": Holder(layers=deque([px.Variable(x), np.full(1, x)], maxlen=2)),
        }

    path = saved_to(tmp_path, **make(3.0))
    checkpoint = px.train.Checkpoint(**make(0.0))
    variable, layers = checkpoint.proxy["v"], checkpoint.model.layers
    checkpoint.restore(path).assert_consumed()
    proxy = checkpoint.proxy
    assert isinstance(proxy, types.MappingProxyType)
    assert (float(variable), proxy["v"] is variable) == (3.0, True)
    assert (proxy["a"].tolist(), proxy["n"]) == ([3.0], 3)
    assert (checkpoint.model.layers is layers, layers.maxlen) == (True, 2)
    assert (float(layers[0]), layers[1].tolist()) == (3.0, [3.0])
    assert px.train.Checkpoint(empty=deque()).things().keys() == {"save_counter"}


def test_a_module_of_flax_that_holds_no_values(tmp_path: Path) -> None:
    model = nn.Dense(2)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))
    trainer = Holder(model=model, params=params)
    names = px.train.Checkpoint(trainer=trainer).things()
    assert set(names) == {"trainer/params/params/kernel", "trainer/params/params/bias", "save_counter"}
    with pytest.raises(TypeError, match="Received: model=Dense"):
        px.train.Checkpoint(model=model)


@dataclass(frozen=True)
class Frozen:
    w: Any
    name: str = "frozen"
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.w * 2)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    w: Any
    v: Any


class Table(nn.Module):
    """A module of flax with an array, which is frozen although it is no frozen dataclass."""

    table: Any


class Immutable:
    """An object that takes no attributes, as some write it."""

    __slots__ = ("w",)

    def __init__(self, w: Any) -> None:
        object.__setattr__(self, "w", w)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError("It is immutable.")


def test_frozen_objects_are_made_anew(tmp_path: Path) -> None:
    def make(x: float) -> dict[str, Any]:
        frozen = Frozen(jnp.full(1, x))
        inner = FrozenSlots(Immutable(np.full(1, x)), px.Variable(x))
        model = Holder(inner=inner, same=frozen, table=Table(jnp.full(1, x)))
        return {"f": frozen, "model": model, "v": px.Variable(x)}

    path = saved_to(tmp_path, **make(3.0))
    checkpoint = px.train.Checkpoint(**make(0.0))
    variable, before = checkpoint.model.inner.v, checkpoint.f
    checkpoint.restore(path).assert_consumed()
    assert (checkpoint.f.w.tolist(), checkpoint.f.twice.tolist(), checkpoint.f.name) == (
        [3],
        [6],
        "frozen",
    )
    assert before.w.tolist() == [0.0]
    assert checkpoint.model.table.table.tolist() == [3.0]
    assert checkpoint.model.same is checkpoint.f  # it stays one object
    inner = checkpoint.model.inner
    assert (inner.w.w.tolist(), inner.v is variable, float(variable)) == ([3.0], True, 3.0)
    assert (type(inner.w), float(checkpoint.v)) == (Immutable, 3.0)


def test_a_module_in_two_places_stays_one(tmp_path: Path) -> None:
    saved = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    path = saved_to(tmp_path, a=saved, b=[saved])
    other = eqx.nn.Linear(1, 1, key=jax.random.key(1))
    checkpoint = px.train.Checkpoint(a=other, b=[other])
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.b[0] is checkpoint.a
    np.testing.assert_array_equal(checkpoint.a.weight, saved.weight)


# -- several names -------------------------------------------------------------------------------


def model_of(x: float) -> Holder:
    """A model with a head, which has its model: a ring."""
    head = Holder(w=px.Variable(x), array=jnp.full(1, x), count=Holder(deep=px.Variable(int(x))))
    head.model = Holder(head=head, body=px.Variable(x))
    return head.model


def test_the_order_of_objects_does_not_matter(tmp_path: Path) -> None:
    def ways(x: float) -> list[dict[str, Any]]:
        model, other, third = model_of(x), model_of(x), model_of(x)
        return [
            {"model": model, "head": model.head},
            {"head": other.head, "model": other},
            {"deep": [third.head.count, third.head], "more": {"model": third, "head": third.head}},
        ]

    for i in (0, 1):
        path = px.train.Checkpoint(**ways(3.0)[i]).write(str(tmp_path / str(i)))
        objects = ways(0.0)[1 - i]
        checkpoint = px.train.Checkpoint(**objects)
        status = checkpoint.restore(path).assert_consumed()
        assert (status.missing, status.unused) == ([], [])
        model = objects["model"]
        assert (float(model.head.w), float(model.body), int(model.head.count.deep)) == (3.0, 3.0, 3)
        assert model.head.array.tolist() == [3.0]

    objects = ways(0.0)[2]
    path = px.train.Checkpoint(more={"head": model_of(4.0).head}).write(str(tmp_path / "part"))
    status = px.train.Checkpoint(**objects).restore(path)
    assert (status.missing, status.unused) == ([], [])
    assert int(objects["deep"][0].deep) == 4
    assert objects["more"]["model"].head.array.tolist() == [4.0]


def test_what_was_apart_when_it_was_saved_is_not_used_twice(tmp_path: Path) -> None:
    path = saved_to(tmp_path, a=px.Variable(1.0), b=px.Variable(2.0))
    v = px.Variable(0.0)
    status = px.train.Checkpoint(a=v, b=v).restore(path)
    assert (float(v), status.missing, status.unused) == (1.0, [], ["b"])


def test_an_optimizer_without_variables_is_known_by_any_name(tmp_path: Path) -> None:
    def make() -> tuple[px.Variable, Any, Any]:
        w, optimizer = px.Variable(jnp.ones(2)), px.train.Optimizer(optax.adam(0.1))
        return w, optimizer, Holder(w=w, optimizer=optimizer)

    w, optimizer, trainer = make()
    optimizer.apply_gradients([(jnp.ones(2), w)])
    path = saved_to(tmp_path, trainer=trainer, optimizer=optimizer)
    again, other, trainer = make()
    status = px.train.Checkpoint(optimizer=other, trainer=trainer).restore(path)
    other.build([again])
    status.assert_consumed()
    for x, y in zip((w, *optimizer.variables), (again, *other.variables), strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_numbers_of_a_pytree_count_in_any_order(tmp_path: Path) -> None:
    """Also those of one that an attribute leads to first; they are restored by either name."""

    def make(x: int) -> tuple[Holder, dict[str, Any]]:
        frozen = eqx.nn.Dropout(x / 10)
        progress = {"step": x, "more": [x, (x, {"best": x})], "w": jnp.full(1, x), "frozen": frozen}
        model = Holder(size=x, v=px.Variable(x), progress=progress, pair=(x,))
        return model, progress

    for is_model_first in (True, False):
        model, progress = make(3)
        order = {"model": model, "progress": progress}
        if not is_model_first:
            order = dict(reversed(order.items()))
        saved = px.train.Checkpoint(**order)
        path = saved.write(str(tmp_path / "x"))
        assert sorted(name.partition("progress/")[2] for name in saved.things()) == [
            *("", ""),  # the variable and the counter
            "frozen/inference",
            "frozen/p",
            "more/0",
            "more/1/0",
            "more/1/1/best",
            "step",
            "w",
        ]
        for is_same_order in (True, False):
            other, progress = make(0)
            order = {"model": other, "progress": progress}
            if is_model_first != is_same_order:
                order = dict(reversed(order.items()))
            checkpoint = px.train.Checkpoint(**order)
            checkpoint.restore(path).assert_consumed().assert_existing_objects_matched()
            assert checkpoint.progress is other.progress
            assert other.progress["step"] == 3
            assert other.progress["more"] == [3, (3, {"best": 3})]
            assert other.progress["frozen"].p == 0.3
            assert (other.size, other.pair) == (0, (0,))
