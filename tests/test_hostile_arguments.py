"""Public functions, given what nobody means: they work, or end in an error of ours."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import phalanx as px
from tests import hostile

CPU = px.config.list_physical_devices("CPU")[0]


w = px.Variable(jnp.ones(2))
NOTHING = px.function(lambda: None)
CALLS: dict[str, Callable[[Any], Any]] = {
    "Server": lambda x: px.Server(x, start=False),
    "Server job": lambda x: px.Server({"a": ["localhost:0"]}, x, start=False),
    "Server index": lambda x: px.Server({"a": ["localhost:0"]}, "a", x, start=False),
    "Server protocol": lambda x: px.Server({"a": ["localhost:0"]}, protocol=x, start=False),
    "rpc.Server": lambda x: px.rpc.Server.create("grpc", x),
    "rpc.Server layer": lambda x: px.rpc.Server.create(x, "localhost:0"),
    "rpc.Server.register": lambda x: px.rpc.Server("localhost:0").register("name", x),
    "rpc.Server.register name": lambda x: px.rpc.Server("localhost:0").register(x, NOTHING),
    "Checkpoint": lambda x: px.train.Checkpoint(x=x),
    "Checkpoint.restore": lambda x: px.train.Checkpoint(w=w).restore(x),
    "CheckpointManager": lambda x: px.train.CheckpointManager(x, "/nowhere", 1),
    "SidecarEvaluator": lambda x: px.coordinator.SidecarEvaluator(x, print, "/nowhere"),
    "RayClusterResolver": px.cluster_resolver.RayClusterResolver,
    "MirroredStrategy": px.MirroredStrategy,
    "MirroredStrategy of one": lambda x: px.MirroredStrategy([x]),
    "MirroredStrategy ops": lambda x: px.MirroredStrategy(["CPU:0"], x),
    "MirroredStrategy of an iterator": lambda x: px.MirroredStrategy(iter([])),
    "OneDeviceStrategy": px.OneDeviceStrategy,
    "CentralStorageStrategy": px.CentralStorageStrategy,
    "CentralStorageStrategy parameters": lambda x: px.CentralStorageStrategy(["CPU:0"], x),
    "TPUStrategy": lambda x: px.TPUStrategy(None, x),
    "TPUStrategy partitioning": lambda x: px.TPUStrategy(None, None, x),
    "a long device": lambda x: px.OneDeviceStrategy("CPU:" + "9" * 5000),
    "a long task": lambda x: px.OneDeviceStrategy("/job:localhost/task:" + "9" * 5000 + "/CPU:0"),
    "list_physical_devices": px.config.list_physical_devices,
    "list_logical_devices": px.config.list_logical_devices,
    "set_logical_device_configuration": lambda x: px.config.set_logical_device_configuration(x, None),
    "logical devices": lambda x: px.config.set_logical_device_configuration(CPU, x),
    "get_logical_device_configuration": px.config.get_logical_device_configuration,
    "compute_average_loss": px.nn.compute_average_loss,
    "sample_weight": lambda x: px.nn.compute_average_loss(jnp.ones(2), sample_weight=x),
    "global_batch_size": lambda x: px.nn.compute_average_loss(jnp.ones(2), global_batch_size=x),
    "scale_regularization_loss": px.nn.scale_regularization_loss,
    "Sum": lambda x: px.train.Sum().update_state(x),
    "Mean": lambda x: px.train.Mean().update_state(x),
    "Mean weight": lambda x: px.train.Mean().update_state(jnp.ones(2), x),
    "Accuracy": lambda x: px.train.Accuracy().update_state(x, jnp.ones(2)),
    "Accuracy predictions": lambda x: px.train.Accuracy().update_state(jnp.ones(2), x),
    "Metric name": px.train.Mean,
    "accumulate count": lambda x: px.train.accumulate_gradients(
        lambda a: (w * a).sum(), w, jnp.ones(2), x
    ),
    "accumulate batch": lambda x: px.train.accumulate_gradients(lambda a: (w * 1.0).sum(), w, x, 1),
    "accumulate variables": lambda x: px.train.accumulate_gradients(lambda a: 1.0, x, jnp.ones(2), 1),
    "accumulate function": lambda x: callable(x) or px.train.accumulate_gradients(x, w, jnp.ones(2), 1),
    "loop": lambda x: px.train.loop(x, iter([]), 1),
    "loop iterator": lambda x: px.train.loop(px.function(lambda a: 0), x, 1),
    "loop steps": lambda x: px.train.loop(px.function(lambda a: 0), iter([]), x),
    "Optimizer": px.train.Optimizer,
    "Optimizer aggregate": lambda x: px.train.Optimizer(optax.sgd(0.1), x),
    "Optimizer scale": lambda x: px.train.Optimizer(optax.sgd(0.1), "sum", x),
    "Optimizer build": lambda x: px.train.Optimizer(optax.sgd(0.1)).build(x),
    "apply_gradients": lambda x: px.train.Optimizer(optax.sgd(0.1)).apply_gradients(x),
    "a gradient": lambda x: px.train.Optimizer(optax.sgd(0.1)).apply_gradients([(x, px.Variable(1.0))]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_arguments(call: str) -> None:
    problems = []
    for name, value in hostile.VALUES.items():
        try:
            CALLS[call](value)
        except px.PhalanxError as error:
            if len(str(error)) > 5000:
                problems.append(f"{name}: a message of {len(str(error))} characters")
        except Exception as error:  # noqa: BLE001 - what is looked for
            problems.append(f"{name}: {type(error).__name__}: {str(error)[:100]}")
    assert not problems


def test_strategies_of_no_devices() -> None:
    for make in (px.MirroredStrategy, px.CentralStorageStrategy):
        for nothing in (iter([]), {}, set(), 0, "", False):
            with pytest.raises(px.PhalanxError, match="Received"):
                make(nothing)  # type: ignore[operator]
        assert make([]).num_replicas_in_sync == make().num_replicas_in_sync  # type: ignore[operator]
