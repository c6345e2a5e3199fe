"""What is particular to single strategies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import phalanx as px


def test_one_device() -> None:
    s = px.OneDeviceStrategy("/cpu:2")
    assert s.extended.worker_devices == ("/job:localhost/replica:0/task:0/device:CPU:2",)
    assert s.num_replicas_in_sync == 1
    assert s.run(lambda x: x, args=("plain",)) == "plain"
    with s.scope():
        v = px.Variable(1.0, synchronization=px.VariableSynchronization.NONE)
    assert v.device.endswith("CPU:2")
    assert s.run(lambda: jnp.ones(2)).devices() == {jax.local_devices()[2]}


def test_one_replica_of_a_mirrored_strategy_gives_plain_results() -> None:
    s = px.MirroredStrategy(["CPU:0"])
    assert isinstance(s.run(lambda: jnp.ones(())), jax.Array)
    with s.scope():
        assert len(px.Variable(1.0).values) == 1


def test_central_storage_places_variables() -> None:
    s = px.CentralStorageStrategy(["CPU:0", "CPU:1"], parameter_device="CPU:3")
    assert s.extended.parameter_devices == ("/job:localhost/replica:0/task:0/device:CPU:3",)
    assert len(s.extended.worker_devices) == 2
    with s.scope():
        v = px.Variable(1.0, synchronization=px.VariableSynchronization.ON_READ)
    assert v.device.endswith("CPU:3")
    places = s.run(lambda: next(iter(v.read_value().devices())).id)
    assert places.values == (0, 1)
    assert s.extended.non_slot_devices([v]) is v
    assert str(v) == "<px.Variable 'Variable:0' shape=() dtype=float32, numpy=1.0>"


def test_central_storage_defaults() -> None:
    s = px.experimental.CentralStorageStrategy()
    assert s.num_replicas_in_sync == 1
    assert s.extended.parameter_devices == ("/job:localhost/replica:0/task:0/device:CPU:0",)


def test_flags() -> None:
    mirrored = px.MirroredStrategy(["CPU:0", "CPU:1"]).extended
    assert mirrored.experimental_enable_get_next_as_optional
    mirrored.experimental_enable_get_next_as_optional = False
    assert not mirrored.experimental_enable_get_next_as_optional
    assert not mirrored.experimental_require_static_shapes
    flags = (
        mirrored.experimental_between_graph,
        mirrored.experimental_should_init,
        mirrored.should_checkpoint,
        mirrored.should_save_summary,
    )
    assert flags == (False, True, True, True)
    assert px.CentralStorageStrategy(["CPU:0"]).extended.experimental_between_graph


def test_tpu_strategy_needs_a_tpu() -> None:
    with pytest.raises(IndexError, match="no TPU"):
        px.TPUStrategy()
    with pytest.raises(NotImplementedError, match="one replica per core"):
        px.TPUStrategy(experimental_spmd_xla_partitioning=True)


def test_cross_device_ops_are_checked() -> None:
    with pytest.raises(TypeError, match="NcclAllReduce"):
        px.MirroredStrategy(["CPU:0"], cross_device_ops="nccl")  # type: ignore[arg-type]


def test_options() -> None:
    options = px.experimental.CommunicationOptions
    a = options(bytes_per_pack=5, timeout_seconds=1.5, implementation="ring")
    merged = options().merge(a)
    assert merged == a
    assert a.merge(options()) == a
    assert hash(merged) == hash(a)
    assert isinstance(px.experimental.CollectiveHints(bytes_per_pack=3), options)
    assert px.experimental.CollectiveCommunication is px.experimental.CommunicationImplementation
    with pytest.raises(ValueError, match="-1"):
        options(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="mpi"):
        options(implementation="mpi")
    with pytest.raises(ValueError, match="timeout"):
        options(timeout_seconds=0)
    with pytest.raises(AttributeError):
        a.bytes_per_pack = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="CommunicationOptions"):
        px.MirroredStrategy(["CPU:0"]).extended.reduce_to("sum", 1.0, "CPU:0", options=3)  # type: ignore[arg-type]


def test_reading_and_placing_variables_through_the_strategy() -> None:
    s = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with s.scope():
        v = px.Variable(2.0)
        total = px.Variable(
            1.0,
            synchronization=px.VariableSynchronization.ON_READ,
            aggregation=px.VariableAggregation.SUM,
        )
        with s.colocate_vars_with(v):
            w = px.Variable(3.0)
    assert float(s.extended.read_var(v)) == 2.0
    assert float(s.extended.read_var(total)) == 2.0
    assert s.run(lambda: s.extended.read_var(total) + 0.0).values[1] == 1.0
    assert [c.device for c in w.values] == [c.device for c in v.values]


def test_input_descriptions() -> None:
    modes = px.InputReplicationMode
    assert modes("per_replica") is modes.PER_REPLICA
    assert px.InputOptions().experimental_replication_mode is modes.PER_WORKER
    context = px.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(8) == 2
    with pytest.raises(ValueError, match="6"):
        context.get_per_replica_batch_size(6)


def test_values_of_another_number_of_replicas_are_refused() -> None:
    def mirrored(n: int) -> px.MirroredStrategy:
        return px.MirroredStrategy([f"CPU:{i}" for i in range(n)])

    value = mirrored(2).experimental_distribute_values_from_function(lambda _: jnp.ones(2))
    for other in (mirrored(3), mirrored(1), px.OneDeviceStrategy("CPU:0")):
        for call in (
            lambda s=other: s.run(lambda x: x, args=([value],)),
            lambda s=other: px.function(lambda x: s.run(lambda x: x, args=(x,)))(value),
            lambda s=other: s.reduce("sum", value, axis=None),
            lambda s=other: s.reduce("mean", value, axis=0),
            lambda s=other: s.gather(value, axis=0),
            lambda s=other: s.extended.reduce_to("sum", value, "CPU:0"),
            lambda s=other: s.extended.batch_reduce_to("sum", [(value, "CPU:0")]),
        ):
            with pytest.raises(ValueError, match="another strategy"):
                call()
