"""Which hardware strategies may use."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.devices import VISIBLE, PhysicalDevice, kinds_of, list_physical_devices
from phalanx.runtime.formatting import shown

__all__ = ["get_visible_devices", "set_visible_devices"]


def set_visible_devices(
    devices: PhysicalDevice | Sequence[PhysicalDevice], device_type: str | None = None
) -> None:
    """Say which hardware strategies may use; call it at the top of the program.

    Devices that are not visible have no names, and strategies without a list of devices do not take
    them. JAX itself still sees them. The CPU is always visible.

    Args:
        devices: from `list_physical_devices`; none hides all of `device_type`.
        device_type: the kind that is meant, if not all.

    Examples:
        >>> import phalanx as px
        >>> px.config.set_visible_devices([], "GPU")
        >>> px.config.get_visible_devices("GPU")
        []
    """
    listed = [devices] if isinstance(devices, PhysicalDevice) else devices
    if not isinstance(listed, Sequence) or not all(isinstance(d, PhysicalDevice) for d in listed):
        raise InvalidTypeError(
            "set_visible_devices needs devices of px.config.list_physical_devices. "
            f"Received: {shown(devices)}"
        )
    kinds = kinds_of(device_type)
    unknown = [d for d in listed if d.device_type not in kinds or d not in list_physical_devices()]
    if unknown:
        raise InvalidValueError(
            f"There are no such devices among {list_physical_devices(device_type)}. "
            f"Received: {shown(unknown)}"
        )
    for kind in kinds:
        if kind != "CPU":
            mine = [d.name for d in listed if d.device_type == kind]
            VISIBLE[kind] = tuple(int(name.rpartition(":")[2]) for name in mine)


def get_visible_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """The hardware that strategies may use; see `set_visible_devices`.

    Examples:
        >>> import phalanx as px
        >>> px.config.get_visible_devices("CPU")
        [PhysicalDevice(name='/physical_device:CPU:0', device_type='CPU')]
    """
    found = list_physical_devices(device_type)
    return [
        d
        for d in found
        if d.device_type not in VISIBLE or int(d.name.rpartition(":")[2]) in VISIBLE[d.device_type]
    ]
