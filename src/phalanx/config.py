"""`px.config`: what hardware there is, and how it is split into logical devices."""

from phalanx.core.variables.transactions import protect_variables
from phalanx.runtime.devices import (
    LogicalDevice,
    LogicalDeviceConfiguration,
    PhysicalDevice,
    ensure_cpu_devices,
    get_logical_device_configuration,
    list_logical_devices,
    list_physical_devices,
    set_logical_device_configuration,
)
from phalanx.runtime.host_memory import retain_host_memory
from phalanx.runtime.visible_devices import get_visible_devices, set_visible_devices

__all__ = [
    "LogicalDevice",
    "LogicalDeviceConfiguration",
    "PhysicalDevice",
    "ensure_cpu_devices",
    "get_logical_device_configuration",
    "get_visible_devices",
    "list_logical_devices",
    "list_physical_devices",
    "protect_variables",
    "retain_host_memory",
    "set_logical_device_configuration",
    "set_visible_devices",
]
