"""All tests run on eight logical CPU devices, made the way a user would make them."""

import phalanx as px

px.config.set_logical_device_configuration(
    px.config.list_physical_devices("CPU")[0], [px.config.LogicalDeviceConfiguration()] * 8
)
