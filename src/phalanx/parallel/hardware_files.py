"""Hardware as JSON, as ``phalanx bench hardware`` writes it."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from phalanx.errors import InvalidValueError, NotFoundError
from phalanx.parallel.hardware import Device, Hardware
from phalanx.parallel.mesh import Link

VERSION = 1


def save_hardware(hardware: Hardware, path: str | Path) -> None:
    """Write hardware to a file, for `load_hardware`."""
    device = hardware.device
    data = {
        "version": VERSION,
        "name": hardware.name,
        "flops": dict(device.flops),
        "bandwidth": device.bandwidth,
        "memory": device.memory,
        "efficiency": device.efficiency,
        "inner": list(astuple(hardware.inner)),
        "outer": list(astuple(hardware.outer)),
        "devices_per_host": hardware.devices_per_host,
        "reduce_scatter": hardware.reduce_scatter,
        "all_to_all": hardware.all_to_all,
    }
    Path(path).write_text(json.dumps(data, indent=1) + "\n")


def load_hardware(path: str | Path) -> Hardware:
    """Read what `save_hardware`, or ``phalanx bench hardware --json``, has written."""
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        raise NotFoundError(
            f"There is no file with the figures of hardware. Received: {str(path)!r}."
        ) from None
    try:
        data: Any = json.loads(text)
        if data["version"] != VERSION:
            raise KeyError("version")
        device = Device(data["flops"], data["bandwidth"], data["memory"], data["efficiency"])
        return Hardware(
            data["name"],
            device,
            Link(*data["inner"]),
            Link(*data["outer"]),
            data["devices_per_host"],
            data["reduce_scatter"],
            data["all_to_all"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(
            f"This file has no figures of hardware: {error!r}. Received: {str(path)!r}."
        ) from error
