"""Device strings, logical devices, and the start of the backend.

TensorFlow's device strings and `jax.Device`s are both accepted everywhere. The canonical string of a
device is ``/job:localhost/replica:0/task:0/device:CPU:0``, as in TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx.errors import (
    DuplicateDeviceError,
    FrozenDevicesError,
    InvalidTypeError,
    InvalidValueError,
    RemoteDeviceError,
)
from phalanx.runtime import compat, cpu_pool
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_integer, parse_digits

DeviceLike = Any
"""What may be written for a device: a device string, a `jax.Device` or a `LogicalDevice`."""


_DEVICE = re.compile(
    r"^/?(?:job:(?P<job>[a-zA-Z0-9_]+)/?)?"
    r"(?:replica:(?P<replica>[0-9]+)/?)?"
    r"(?:task:(?P<task>[0-9]+)/?)?"
    r"(?:device:)?(?:(?P<kind>[a-zA-Z]+)(?::(?P<index>[0-9]+|\*))?)?$"
)

_KIND_TO_PLATFORM = {"CPU": "cpu", "GPU": "gpu", "TPU": "tpu"}
_PLATFORM_TO_KIND = {"cpu": "CPU", "gpu": "GPU", "cuda": "GPU", "rocm": "GPU", "tpu": "TPU"}


@dataclass(frozen=True)
class DeviceSpec:
    """The parts of a device string; parts that were not written are None.

    Examples:
        >>> from phalanx.runtime.devices import parse_device
        >>> parse_device("/job:worker/replica:0/task:1/device:GPU:0")
        DeviceSpec(job='worker', task=1, kind='GPU', index=0)
        >>> parse_device("cpu:1")
        DeviceSpec(job=None, task=None, kind='CPU', index=1)
    """

    job: str | None
    task: int | None
    kind: str | None
    index: int | None

    @property
    def is_remote(self) -> bool:
        """Whether the string names a task of a cluster rather than this process."""
        local = self.job in (None, "localhost") and self.task in (None, 0)
        return not local and (self.job, self.task) not in ((_here.job, _here.task), (_here.job, None))


def parse_device(text: str) -> DeviceSpec:
    """Split a device string into its parts; a string that is none raises `InvalidValueError`."""
    match = _DEVICE.match(text.strip())
    if match is None or not text.strip():
        raise InvalidValueError(
            "This is not a device string. Write 'CPU:0', '/gpu:1' or "
            f"'/job:worker/replica:0/task:0/device:GPU:0'. Received: {shown(text)}"
        )
    parts = match.groupdict()
    return DeviceSpec(
        job=parts["job"],
        task=_number(parts["task"], text),
        kind=None if parts["kind"] is None else parts["kind"].upper(),
        index=None if parts["index"] == "*" else _number(parts["index"], text),
    )


def _number(digits: str | None, text: str) -> int | None:
    number = None if digits is None else parse_digits(digits)
    if number is None and digits is not None:
        raise InvalidValueError(f"A number in a device string is too long. Received: {shown(text)}")
    return number


def device_kind(device: jax.Device) -> str:
    """TensorFlow's name for the kind of a device: CPU, GPU or TPU."""
    return _PLATFORM_TO_KIND.get(device.platform, device.platform.upper())


def device_index(device: jax.Device) -> int:
    """The position of a device among the local devices of its kind."""
    return local_devices(device_kind(device)).index(device)


class _Here:
    """Which task this process is, for the names of its devices."""

    job, task = "localhost", 0


_here = _Here()


def name_task(job: str, task: int) -> None:
    """This process is a task of a cluster."""
    _here.job, _here.task = job, task


def device_name(device: jax.Device) -> str:
    """The canonical string of a local device."""
    return f"/job:{_here.job}/replica:0/task:{_here.task}/device:{short_name(device)}"


def short_name(device: jax.Device) -> str:
    """The short string of a local device, as ``CPU:1``."""
    return f"{device_kind(device)}:{device_index(device)}"


def local_devices(kind: str | None = None) -> list[jax.Device]:
    """The visible local devices of one kind, or of the best kind there is; starts the backend."""
    if kind is not None:
        return _visible_of(kind, _every_device(kind))
    found = _every_device()
    best = device_kind(found[0])
    return _visible_of(best, found) or local_devices("CPU")


def _every_device(kind: str | None = None) -> list[jax.Device]:
    prepare_backend()
    if kind is None:
        return list(jax.local_devices())
    platform = _KIND_TO_PLATFORM.get(kind, kind.lower())
    if not compat.platform_may_exist(platform):
        return []
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:  # the plugin is installed but no such device is present
        return []


def resolve_device(device: DeviceLike) -> jax.Device:
    """The `jax.Device` that a string or device stands for.

    A string without an index means the first device of its kind. Unknown devices are errors that
    list what exists; TensorFlow would place such work somewhere else without a word.
    """
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, LogicalDevice):
        device = device.name
    if not isinstance(device, str):
        raise InvalidTypeError(
            "A device must be a device string such as 'CPU:0' or a jax.Device. "
            f"Received: {shown(device)} of type {type(device).__name__}"
        )
    spec = parse_device(device)
    if spec.is_remote:
        raise RemoteDeviceError(
            "Devices of other tasks cannot be used from this process. Name local devices, as in "
            f"'CPU:0'. Received: {shown(device)}"
        )
    kind = spec.kind or device_kind(local_devices()[0])
    known = local_devices(kind)
    index = spec.index or 0
    if index < len(known):
        return known[index]
    raise InvalidValueError(
        f"No such device. Devices that exist: {_existing()}. To get more CPU devices, call "
        "px.config.set_logical_device_configuration before JAX starts. "
        f"Received: {shown(device)}"
    )


def resolve_devices(devices: Iterable[DeviceLike]) -> tuple[jax.Device, ...]:
    """Resolve a list of devices, refusing remote, unknown and repeated ones."""
    if isinstance(devices, str | jax.Device) or not isinstance(devices, Iterable):
        raise InvalidTypeError(
            "Devices must be given as a list of device strings or jax.Devices, as in "
            f"['CPU:0', 'CPU:1']. Received: {shown(devices)}"
        )
    listed = list(devices)
    if not listed:
        raise InvalidValueError(
            "A strategy needs at least one device. Leave the argument out to use all devices. "
            f"Received: {shown(devices)}"
        )
    _check_not_mixed(listed)
    resolved = tuple(resolve_device(d) for d in listed)
    repeated = sorted({short_name(d) for d in resolved if resolved.count(d) > 1})
    if repeated:
        raise DuplicateDeviceError(
            f"Each replica needs a device of its own, but {', '.join(repeated)} was listed more "
            f"than once. Received: {shown(listed)}"
        )
    return resolved


def are_left_out(devices: Any) -> bool:
    """Whether a list of devices was not given, or is empty, which means all of them."""
    return devices is None or (isinstance(devices, list | tuple) and not devices)


def default_devices() -> tuple[jax.Device, ...]:
    """All local accelerators, or all local CPU devices where there is no accelerator."""
    return tuple(local_devices())


def host_device() -> jax.Device:
    """The first CPU device of this process."""
    return local_devices("CPU")[0]


def _existing() -> str:
    names = [short_name(d) for kind in _KIND_TO_PLATFORM for d in local_devices(kind)]
    return ", ".join(names)


def _check_not_mixed(devices: Sequence[DeviceLike]) -> None:
    specs = [parse_device(d) for d in devices if isinstance(d, str)]
    remote = [s for s in specs if s.is_remote]
    if remote and len(remote) != len(devices):
        raise InvalidValueError(
            "Local and remote devices cannot be mixed in one strategy. List devices of this "
            f"process only, as in ['CPU:0', 'CPU:1']. Received: {shown(list(devices))}"
        )


# -- logical devices ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PhysicalDevice:
    """A piece of hardware, which may be split into several logical devices."""

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDevice:
    """A device that computations are placed on: a `jax.Device` with TensorFlow's name."""

    name: str
    device_type: str


@dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """One logical device. The fields exist for compatibility; JAX has no such limits.

    `memory_limit` and `experimental_priority` must be None: JAX sets memory limits per process.
    """

    memory_limit: int | None = None
    experimental_priority: int | None = None


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The hardware of this process.

    Asking for ``"CPU"`` never starts JAX, so that the CPU can still be split afterwards. There is
    one physical CPU however many cores it has. Asking for GPUs or TPUs starts JAX if a plugin for
    them is installed.

    Examples:
        >>> import phalanx as px
        >>> px.config.list_physical_devices("CPU")
        [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    kinds = kinds_of(device_type)
    found: list[PhysicalDevice] = []
    for kind in kinds:
        count = 1 if kind == "CPU" else len(_every_device(kind))
        found += [PhysicalDevice(f"/physical_device:{kind}:{i}", kind) for i in range(count)]
    return found


def list_logical_devices(device_type: str | None = None) -> list[LogicalDevice]:
    """The devices that strategies can use; starts JAX.

    Examples:
        >>> import phalanx as px
        >>> px.config.list_logical_devices("CPU")[0]
        LogicalDevice(name='/device:CPU:0', device_type='CPU')
    """
    kinds = kinds_of(device_type)
    return [
        LogicalDevice(f"/device:{kind}:{i}", kind)
        for kind in kinds
        for i in range(len(local_devices(kind)))
    ]


VISIBLE: dict[str, tuple[int, ...]] = {}
"""The numbers of the devices of a kind that may be used, where the user has said so."""


def _visible_of(kind: str, devices: list[jax.Device]) -> list[jax.Device]:
    chosen = VISIBLE.get(kind)
    return devices if chosen is None else [devices[i] for i in chosen if i < len(devices)]


def set_logical_device_configuration(
    device: PhysicalDevice, logical_devices: Sequence[LogicalDeviceConfiguration] | None
) -> None:
    """Split a physical CPU into several logical devices, each a real `jax.Device`.

    Call it before JAX starts, that is, before the first computation. Afterwards, asking for the number
    that JAX already has does nothing, and asking for another number is an error.

    Args:
        device: the CPU, from ``list_physical_devices("CPU")``.
        logical_devices: one `LogicalDeviceConfiguration` per wanted device.
    """
    if not isinstance(device, PhysicalDevice):
        raise InvalidTypeError(
            "The first argument must be a PhysicalDevice from px.config.list_physical_devices. "
            f"Received: {shown(device)}"
        )
    if device.device_type != "CPU":
        raise InvalidValueError(
            f"JAX can split the CPU only, not a {device.device_type}. Received: {shown(device)}"
        )
    given = isinstance(logical_devices, Iterable)
    configs = list(logical_devices or []) if given else [LogicalDeviceConfiguration()]
    whole = given or logical_devices is None
    if not whole or not configs or not all(isinstance(c, LogicalDeviceConfiguration) for c in configs):
        raise InvalidValueError(
            "logical_devices must be a non-empty list of px.config.LogicalDeviceConfiguration(). "
            f"Received: {shown(logical_devices)}"
        )
    if any(c != LogicalDeviceConfiguration() for c in configs):
        raise InvalidValueError(
            "CPU devices have no memory limit or priority of their own in JAX; leave both None. "
            f"Received: {shown(configs)}"
        )
    set_cpu_device_count(len(configs))


def get_logical_device_configuration(
    device: PhysicalDevice,
) -> list[LogicalDeviceConfiguration] | None:
    """The configuration that was set for a CPU, or None if none was."""
    if not isinstance(device, PhysicalDevice):
        raise InvalidTypeError(
            "A PhysicalDevice from px.config.list_physical_devices is needed. "
            f"Received: {shown(device)}"
        )
    if device.device_type != "CPU" or cpu_device_count() == 1:
        return None
    return [LogicalDeviceConfiguration()] * cpu_device_count()


def set_cpu_device_count(count: int) -> None:
    """Make JAX start with `count` CPU devices; an error if it has started with another number."""
    if compat.backends_are_initialized():
        have = len(jax.local_devices(backend="cpu"))
        if have != count:
            raise FrozenDevicesError(
                f"JAX has already started with {have} CPU device(s), and the number cannot change "
                "any more. Call px.config.set_logical_device_configuration at the top of the "
                "program, before any array is made and before any strategy is created. "
                f"Received: {count} logical devices"
            )
        return
    forced = cpu_pool.forced_by_flags(os.environ)
    if forced not in (None, count):
        raise FrozenDevicesError(
            f"The environment variable XLA_FLAGS already asks for {forced} CPU devices. Remove the "
            "flag or ask for the same number. "
            f"Received: {count} logical devices"
        )
    jax.config.update("jax_num_cpu_devices", count)
    prepare_backend()


def ensure_cpu_devices(count: int) -> None:
    """Make sure that there are at least so many CPU devices, to try strategies on any machine.

    Call it at the top of the program, before you make any array. The environment variable
    JAX_NUM_CPU_DEVICES does the same without a line of code.

    Args:
        count: how many, at least. If there are more, they stay.

    Examples:
        >>> import phalanx as px
        >>> px.config.ensure_cpu_devices(2)
        >>> px.MirroredStrategy(["CPU:0", "CPU:1"])
        <MirroredStrategy: 2 replicas, on CPU:0, CPU:1>
    """
    count = check_integer(count, "count", 1, _MOST_DEVICES)
    if cpu_device_count() < count:
        set_cpu_device_count(count)


def cpu_device_count() -> int:
    """How many CPU devices JAX has, or will start with; never starts it."""
    if compat.backends_are_initialized():
        return len(jax.local_devices(backend="cpu"))
    configured = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
    return configured if configured > 0 else (cpu_pool.forced_by_flags(os.environ) or 1)


def prepare_backend() -> None:
    """Size XLA's CPU thread pool, unless JAX has started; see `phalanx.runtime.cpu_pool`."""
    if not compat.backends_are_initialized():
        cpu_pool.prepare(cpu_device_count())


_MOST_DEVICES = 1 << 16


def compute_in_calling_threads() -> None:
    """Let programs of one CPU device run in the thread that calls them.

    For processes that wait for every result: handing a program over to another thread takes longer than
    a small program. Nothing happens if devices have been used, or if the user has said what JAX shall
    do.
    """
    if "JAX_CPU_ENABLE_ASYNC_DISPATCH" not in os.environ:
        with contextlib.suppress(AttributeError):  # other versions of JAX may not have it
            jax.config.update("jax_cpu_enable_async_dispatch", False)


def kinds_of(device_type: Any) -> list[str]:
    """The kind of device that is meant, or all of them."""
    every = device_type is None or (isinstance(device_type, str) and not device_type)
    return list(_KIND_TO_PLATFORM) if every else [_checked_kind(device_type)]


def _checked_kind(device_type: Any) -> str:
    if isinstance(device_type, str) and device_type.upper() in _KIND_TO_PLATFORM:
        return device_type.upper()
    raise InvalidValueError(
        f"device_type must be one of {', '.join(_KIND_TO_PLATFORM)}, or None for all. "
        f"Received: {shown(device_type)}"
    )


def default_device() -> jax.Device:
    """Where JAX puts new arrays in this thread."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined]
    if chosen is not None and isinstance(chosen, jax.Device):
        return chosen
    return _first_device(chosen)


@functools.cache
def _first_device(platform: str | None) -> jax.Device:
    return jax.local_devices(backend=platform)[0]
