"""Device strings, and the start of the backend."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import pytest

import phalanx as px
from phalanx.runtime.devices import DeviceSpec, device_name, parse_device, resolve_device


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("CPU:1", DeviceSpec(None, None, "CPU", 1)),
        ("/gpu:0", DeviceSpec(None, None, "GPU", 0)),
        ("cpu", DeviceSpec(None, None, "CPU", None)),
        ("/device:TPU:3", DeviceSpec(None, None, "TPU", 3)),
        ("/job:worker/replica:0/task:2/device:GPU:1", DeviceSpec("worker", 2, "GPU", 1)),
        ("/job:localhost/replica:0/task:0/device:CPU:0", DeviceSpec("localhost", 0, "CPU", 0)),
        ("/job:worker/task:1", DeviceSpec("worker", 1, None, None)),
    ],
)
def test_device_strings(text: str, spec: DeviceSpec) -> None:
    assert parse_device(text) == spec


@pytest.mark.parametrize("text", ["", "CPU:x", "CPU:0:1", "/job:", "a b"])
def test_what_is_no_device_string(text: str) -> None:
    with pytest.raises(ValueError, match="Received"):
        parse_device(text)


def test_names_and_devices_are_inverse() -> None:
    for device in jax.local_devices():
        assert resolve_device(device_name(device)) is device
        assert resolve_device(device) is device
    assert resolve_device(px.config.list_logical_devices("CPU")[3]).id == 3


def test_unknown_devices_list_what_exists() -> None:
    for make in (
        lambda: px.MirroredStrategy(["CPU:0", "CPU:99"]),
        lambda: px.OneDeviceStrategy("GPU:0"),
        lambda: px.CentralStorageStrategy(["CPU:0"], "CPU:99"),
    ):
        with pytest.raises(ValueError, match=r"CPU:0, CPU:1.*Received"):
            make()


def test_repeated_and_remote_devices() -> None:
    with pytest.raises(AssertionError, match="CPU:1"):
        px.MirroredStrategy(["CPU:1", "/cpu:1"])
    with pytest.raises(RuntimeError, match="other tasks"):
        px.MirroredStrategy(["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"])
    with pytest.raises(ValueError, match="mixed"):
        px.MirroredStrategy(["CPU:0", "/job:worker/task:1/device:CPU:0"])


@pytest.mark.parametrize("bad", ["CPU:0", 3, [3], [None]])
def test_devices_of_the_wrong_type(bad: Any) -> None:
    with pytest.raises(TypeError, match="Received"):
        px.MirroredStrategy(bad)


def test_no_devices_means_all_of_them() -> None:
    count = len(jax.local_devices())
    assert px.MirroredStrategy().num_replicas_in_sync == count
    assert px.MirroredStrategy([]).num_replicas_in_sync == count


def test_asking_for_the_number_that_exists_is_fine() -> None:
    cpu = px.config.list_physical_devices("CPU")[0]
    one = px.config.LogicalDeviceConfiguration()
    px.config.set_logical_device_configuration(cpu, [one] * len(jax.local_devices()))
    with pytest.raises(RuntimeError, match="already started"):
        px.config.set_logical_device_configuration(cpu, [one] * 3)
    assert px.config.get_logical_device_configuration(cpu) == [one] * len(jax.local_devices())


@pytest.mark.parametrize(
    ("device", "configs", "error"),
    [
        ("CPU:0", [], TypeError),
        (px.config.PhysicalDevice("/physical_device:CPU:0", "CPU"), [], ValueError),
        (px.config.PhysicalDevice("/physical_device:GPU:0", "GPU"), None, ValueError),
        (
            px.config.PhysicalDevice("/physical_device:CPU:0", "CPU"),
            [px.config.LogicalDeviceConfiguration(memory_limit=1)],
            ValueError,
        ),
    ],
)
def test_bad_configurations(device: Any, configs: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="Received"):
        px.config.set_logical_device_configuration(device, configs)


def test_kinds_of_devices() -> None:
    assert px.config.list_physical_devices("GPU") == []
    assert len(px.config.list_logical_devices()) == len(jax.local_devices())
    with pytest.raises(ValueError, match="CPU, GPU, TPU"):
        px.config.list_physical_devices("XPU")


def run_python(code: str, **env: str) -> str:
    import os

    ours = ("XLA_FLAGS", "PJRT_NPROC", "PHALANX_CHOSEN_PJRT_NPROC")
    clean = {k: v for k, v in os.environ.items() if k not in ours}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean | env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_looking_does_not_start_jax_and_the_pool_is_sized() -> None:
    code = """
import os, phalanx as px
from phalanx.runtime import compat
cpu = px.config.list_physical_devices()[0]
assert not compat.backends_are_initialized()
px.config.set_logical_device_configuration(cpu, [px.config.LogicalDeviceConfiguration()] * 5)
assert not compat.backends_are_initialized()
print(px.MirroredStrategy().num_replicas_in_sync, int(os.environ["PJRT_NPROC"]) >= 10)
"""
    assert run_python(code) == "5 True"


def test_an_inherited_pool_size_is_chosen_again_but_a_given_one_is_kept() -> None:
    code = """
import os, phalanx as px
px.config.set_logical_device_configuration(
    px.config.list_physical_devices("CPU")[0], [px.config.LogicalDeviceConfiguration()] * 5
)
px.MirroredStrategy()
print(os.environ["PJRT_NPROC"])
"""
    assert int(run_python(code, PJRT_NPROC="4", PHALANX_CHOSEN_PJRT_NPROC="4")) >= 10
    assert int(run_python(code, PHALANX_CHOSEN_PJRT_NPROC="4")) >= 10
    assert run_python(code, PJRT_NPROC="4") == "4"


def test_flags_of_the_environment_are_respected() -> None:
    code = """
import phalanx as px
cpu = px.config.list_physical_devices("CPU")[0]
one = px.config.LogicalDeviceConfiguration()
try:
    px.config.set_logical_device_configuration(cpu, [one] * 2)
except RuntimeError as error:
    assert "XLA_FLAGS" in str(error)
px.config.set_logical_device_configuration(cpu, [one] * 3)
print(px.MirroredStrategy().num_replicas_in_sync)
"""
    assert run_python(code, XLA_FLAGS="--xla_force_host_platform_device_count=3") == "3"
