"""Variables: creation, description, and what only some kinds do."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx import VariableAggregation as A, VariableSynchronization as S


def two() -> px.MirroredStrategy:
    return px.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (px.get_strategy, "ResourceVariable"),
        (lambda: px.OneDeviceStrategy("CPU:1"), "ResourceVariable"),
        (two, "MirroredVariable"),
        (lambda: px.CentralStorageStrategy(["CPU:0", "CPU:1"]), "AggregatingVariable"),
        (lambda: px.CentralStorageStrategy(["CPU:0"]), "ResourceVariable"),
    ],
)
def test_kinds(make: Any, kind: str) -> None:
    with make().scope():
        v = px.Variable(1.0)
    assert type(v).__name__ == kind
    assert isinstance(v, px.Variable)


@pytest.mark.parametrize("aggregation", list(A))
@pytest.mark.parametrize("synchronization", [S.AUTO, S.ON_WRITE, S.ON_READ])
def test_effective_synchronization(synchronization: S, aggregation: A) -> None:
    with two().scope():
        v = px.Variable(1.0, synchronization=synchronization, aggregation=aggregation)
    assert v.aggregation is aggregation
    assert v.synchronization is (S.ON_READ if synchronization is S.ON_READ else S.ON_WRITE)
    assert v.trainable is (synchronization is not S.ON_READ)
    assert isinstance(v, px.DistributedValues)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"synchronization": S.NONE}, "ON_WRITE or"),
        ({"synchronization": "ON_READ"}, "VariableSynchronization"),
        ({"aggregation": "SUM"}, "VariableAggregation"),
        ({"initial_value": 1, "aggregation": A.MEAN}, "integer type"),
        ({"initial_value": 1, "aggregation": A.MEAN, "synchronization": S.ON_READ}, "integer type"),
        ({"initial_value": None}, "initial value"),
        ({"initial_value": "text"}, "text"),
        ({"initial_value": [1.0, 2.0], "shape": (3,)}, "shape"),
    ],
)
def test_variables_that_cannot_be(kwargs: dict[str, Any], text: str) -> None:
    with two().scope(), pytest.raises(ValueError, match=text):
        px.Variable(**({"initial_value": 1.0} | kwargs))


def test_bad_names() -> None:
    for bad in (3, ""):
        with pytest.raises(TypeError, match="name"):
            px.Variable(1.0, name=bad)  # type: ignore[arg-type]


def test_description() -> None:
    with two().scope():
        v = px.Variable(np.ones((2, 3)), name="w", dtype=jnp.bfloat16)
    assert (v.name, v.shape, v.ndim, v.size) == ("w:0", (2, 3), 2, 6)
    assert v.dtype == jnp.bfloat16
    assert [c.name for c in v.values] == ["w:0", "w/replica_1:0"]
    assert [c.device[-5:] for c in v.values] == ["CPU:0", "CPU:1"]
    assert v.is_initialized()
    assert "MirroredVariable:{" in str(v)


def test_weak_types_do_not_stick() -> None:
    v = px.Variable(1.0)
    assert not v.read_value().weak_type
    v.assign_add(jnp.bfloat16(1.0))
    assert v.dtype == jnp.float32


def test_dictionaries_of_variables() -> None:
    a, b = px.Variable(1.0), px.Variable(1.0)
    slots = {a: "a", b: "b"}
    assert slots[a] == "a"
    assert slots[b] == "b"
    refs = collections.Counter([a.ref(), a.ref(), b.ref()])
    assert refs[a.ref()] == 2
    assert a.ref().deref() is a
    assert bool(a == b)


def test_variables_stay_whole_in_trees() -> None:
    a, b = px.Variable([1.0]), px.Variable([2.0])
    jax.tree.map(lambda v, g: v.assign_sub(g), [a, b], [jnp.ones(1), jnp.ones(1)])
    assert (float(a[0]), float(b[0])) == (0.0, 1.0)
    assert jax.tree.leaves({"a": a})[0] is a


def test_gradients_with_respect_to_variables() -> None:
    v = px.Variable([1.0, 2.0])
    assert jax.grad(lambda x: jnp.sum(x * x))(v).tolist() == [2.0, 4.0]
    assert jax.grad(lambda x: jnp.sum(x * v))(jnp.ones(2)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("scatter_add", [6.0, 2.0, 5.0]),
        ("scatter_sub", [-4.0, 2.0, 1.0]),
        ("scatter_mul", [5.0, 2.0, 6.0]),
        ("scatter_div", [0.2, 2.0, 1.5]),
        ("scatter_min", [1.0, 2.0, 2.0]),
        ("scatter_max", [5.0, 2.0, 3.0]),
        ("scatter_update", [5.0, 2.0, 2.0]),
    ],
)
def test_scatter(method: str, expected: list[float]) -> None:
    rows = px.IndexedSlices(values=jnp.array([5.0, 2.0]), indices=jnp.array([0, 2]))
    for strategy in (px.get_strategy(), two()):
        with strategy.scope():
            v = px.Variable([1.0, 2.0, 3.0])
            getattr(v, method)(rows)
        for copy in v.values:
            np.testing.assert_allclose(copy.numpy(), expected)


def test_scatter_refuses_what_does_not_fit() -> None:
    v = px.Variable(jnp.zeros((3, 2)))
    for bad in (
        jnp.ones(2),
        px.IndexedSlices(jnp.ones((2, 3)), jnp.array([0, 1])),
        px.IndexedSlices(jnp.ones((2, 2)), jnp.array([0.0, 1.0])),
        px.IndexedSlices(jnp.ones((2, 2)), jnp.array([0])),
    ):
        with pytest.raises(ValueError, match="Received"):
            v.scatter_add(bad)
    with two().scope():
        on_read = px.Variable([0.0], synchronization=S.ON_READ, aggregation=A.SUM)
    with pytest.raises(NotImplementedError):
        on_read.scatter_add(px.IndexedSlices(jnp.ones(1), jnp.array([0])))


def test_handles() -> None:
    s = two()
    with s.scope():
        v = px.Variable(1.0)
        with pytest.raises(ValueError, match="handle"):
            _ = v.handle
    assert s.run(lambda: v.handle) is v


def test_cross_replica_assignment_of_distributed_values() -> None:
    s = two()
    with s.scope():
        v = px.Variable(0.0)
    equal = s.run(lambda: jnp.float32(3.0) + 0)
    v.assign(equal)
    assert float(v) == 3.0
    different = s.run(lambda: px.get_replica_context().replica_id_in_sync_group + 0.0)  # type: ignore[union-attr]
    with pytest.raises(px.errors.DivergenceError):
        v.assign(different)
    with pytest.raises(px.errors.DivergenceError):
        s.extended.update(v, lambda c, x: c.assign(x), args=(different,))
    assert [float(c) for c in v.values] == [3.0, 3.0]


def test_plain_variables_take_every_replicas_write() -> None:
    v = px.Variable(10.0)
    two().run(lambda: v.assign_add(1.0))
    assert float(v) == 12.0
    assert v.device.endswith("CPU:0")


def test_unknown_arguments_of_assign() -> None:
    v = px.Variable(1.0)
    v.assign(2.0, use_locking=True, name="n", read_value=False)
    with pytest.raises(TypeError, match="lock"):
        v.assign(2.0, lock=True)


def test_mirrored_arguments_of_update() -> None:
    s = two()
    with s.scope():
        v = px.Variable(5.0)
    value = s.run(lambda: px.get_replica_context().replica_id_in_sync_group + 1.0)  # type: ignore[union-attr]
    total = s.extended.reduce_to("sum", value, destinations=v)
    s.extended.update(v, lambda c, x: c.assign_add(x), args=(total,))
    assert [float(c) for c in v.values] == [8.0, 8.0]


def test_slots_are_written_once_per_device() -> None:
    s = two()
    with s.scope():
        v, slot = px.Variable(1.0), px.Variable(0.0)

    def step(copy: px.Variable) -> None:
        slot.assign_add(2.0)
        copy.assign_sub(slot * 0.25)

    s.extended.update(v, step)
    assert [float(c) for c in slot.values] == [2.0, 2.0]
    assert [float(c) for c in v.values] == [0.5, 0.5]


def test_non_slot_updates() -> None:
    s = two()
    with s.scope():
        v = px.Variable(0.0)
    devices = s.extended.non_slot_devices([v])
    assert [d[-5:] for d in devices] == ["CPU:0", "CPU:1"]
    results = s.extended.update_non_slot(devices, lambda: jnp.ones(()) + 0, group=False)
    assert [next(iter(x.devices())).id for x in results] == [0, 1]
