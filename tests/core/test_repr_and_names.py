"""What objects say of themselves, and what the package says about names that it does not have."""

from __future__ import annotations

import copy
import pickle

import cloudpickle
import numpy as np
import optax
import pytest

import phalanx as px


def strategies() -> list[px.Strategy]:
    return [
        px.get_strategy(),
        px.OneDeviceStrategy("CPU:1"),
        px.MirroredStrategy(["CPU:0", "CPU:1"]),
        px.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"]),
    ]


def test_strategies_show_their_devices() -> None:
    assert [repr(s) for s in strategies()] == [
        "<DefaultStrategy: 1 replica>",
        "<OneDeviceStrategy: 1 replica, on CPU:1>",
        "<MirroredStrategy: 2 replicas, on CPU:0, CPU:1>",
        "<CentralStorageStrategy: 2 replicas, on CPU:0, CPU:1>",
    ]


def test_nothing_that_users_hold_shows_its_address() -> None:
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = px.data.Dataset.range(4).batch(2)
    with s.scope():
        optimizer, mean = px.train.Optimizer(optax.adam(0.1)), px.train.Mean("loss")
        optimizer.build([px.Variable(1.0)])
    held = [
        s,
        optimizer,
        mean,
        px.train.Accuracy(),
        iter(dataset),
        iter(s.experimental_distribute_dataset(dataset)),
        px.get_replica_context(),
        px.InputContext(),
        px.cluster_resolver.SimpleClusterResolver(px.train.ClusterSpec({"worker": ["a:1"]})),
        px.train.loop(px.function(lambda x: x), dataset, steps=2),
    ]
    for x in held:
        assert " at 0x" not in repr(x), repr(x)
    shown: list[str] = []
    s.run(lambda: shown.append(repr(px.get_replica_context())))
    px.function(lambda: s.run(lambda: shown.append(repr(px.get_replica_context()))))()
    assert shown == [
        f"<px.ReplicaContext of {which} of {s!r}>"
        for which in ("replica 0", "replica 1", "each replica")
    ]


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
def test_what_stays_in_its_process_says_so(dumps) -> None:
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with s.scope():
        v = px.Variable(1.0, name="v")
    for x, instead in (
        (s, "Make a strategy in each process"),
        (v, "v.numpy()"),
        (px.Variable(1.0), ""),
    ):
        with pytest.raises(px.errors.InvalidTypeError, match="cannot be pickled") as caught:
            dumps(x)
        assert instead in str(caught.value)
    assert float(copy.copy(v)) == float(copy.deepcopy(v)) == 1.0


@pytest.mark.parametrize("module", [px, px.data, px.comm, px.train, px.testing])
def test_modules_list_what_is_public(module) -> None:
    assert set(dir(module)) == set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("GradientTape", "px.value_and_grad"),
        ("MirorredStrategy", "Did you mean px.MirroredStrategy?"),
        ("Optimizer", "px.train"),
        ("qwertz", "px has no 'qwertz'."),
    ],
)
def test_names_from_elsewhere_have_answers(name: str, answer: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(px, name)
    assert answer in str(caught.value)
    assert not hasattr(px, name)


# -- optimizers, keys and policies -------------------------------------------------------------------


def test_slots_are_named_after_their_variables() -> None:
    variables = [px.Variable(np.ones(3), name="w"), px.Variable(0.0, name="b")]
    optimizer = px.train.Optimizer(optax.adam(0.1))
    optimizer.build(variables)
    names = [v.name for v in optimizer.variables]
    assert names == [
        "iterations:0",
        "optimizer/count:0",
        *("w/mu:0", "b/mu:0"),
        *("w/nu:0", "b/nu:0"),
    ]


def test_optimizers_say_where_they_work() -> None:
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with s.scope():
        v = px.Variable(1.0)
        optimizer = px.train.Optimizer(optax.sgd(0.1))
    with pytest.raises(px.errors.ContextError, match=r"function that is given to strategy\.run"):
        optimizer.apply_gradients([(1.0, v)])
    with pytest.raises(px.errors.InvalidTypeError, match="a function that computes the loss"):
        optimizer.minimize(np.float32(1.0), [v])


def test_policies_have_the_names_of_tensorflow() -> None:
    assert px.train.Policy("mixed_bfloat16") == px.train.Policy("bfloat16")
    assert px.train.Policy("mixed_float16") == px.train.Policy("float16")
    with pytest.raises(px.errors.InvalidValueError):
        px.train.Policy("mixed_float31")


# -- devices to try things on ------------------------------------------------------------------------


def test_enough_cpu_devices() -> None:
    px.config.ensure_cpu_devices(2)  # there are more already
    with pytest.raises(px.errors.FrozenDevicesError, match="JAX has already started"):
        px.config.ensure_cpu_devices(1000)
    for wrong in (0, -1, "two", None, 10**9):
        with pytest.raises(px.errors.PhalanxError, match="count"):
            px.config.ensure_cpu_devices(wrong)  # type: ignore[arg-type]


def test_gathered_objects_are_returned() -> None:
    with pytest.raises(px.errors.InvalidTypeError, match=r"objects = px\.comm\.all_gather_object"):
        px.comm.all_gather_object([None], {"loss": 0.5})  # type: ignore[arg-type]
