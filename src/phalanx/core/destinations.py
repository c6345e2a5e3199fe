"""Which devices a destination means: a device, or the devices of a value or variable."""

from __future__ import annotations

from typing import Any

import jax

from phalanx.core import compat
from phalanx.core.devices import LogicalDevice, resolve_device
from phalanx.core.errors import InvalidDestinationError, InvalidTypeError
from phalanx.core.showing import shown
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.values import DistributedValues
from phalanx.core.variables import Variable


def destination_devices(destinations: Any, lists: bool = False) -> tuple[jax.Device, ...]:
    """The devices of a destination, in replica order.

    Args:
        destinations: a device string or `jax.Device`, a variable, a distributed value, or an array.
        lists: whether a list or tuple of devices is also allowed.
    """
    if isinstance(destinations, str | jax.Device | LogicalDevice):
        return (resolve_device(destinations),)
    if isinstance(destinations, SpmdPerReplica):
        return ()  # the program runs on all of them
    if isinstance(destinations, Variable | DistributedValues):
        return tuple(device for x in destinations.values for device in _device_of(x))
    if isinstance(destinations, jax.Array):
        return _device_of(destinations)
    if lists and isinstance(destinations, list | tuple):
        return tuple(device for d in destinations for device in destination_devices(d))
    raise InvalidDestinationError(
        "The destination must be one device, or a value or variable whose devices are meant. To "
        "reach all replicas, give a variable or a per-replica value. "
        f"Received: {shown(destinations)} of type {type(destinations).__name__}"
    )


def _device_of(x: Any) -> tuple[jax.Device, ...]:
    if isinstance(x, Variable) and x._device is not None:
        return (x._device,)
    if compat.is_tracer(x):
        return ()
    if isinstance(x, jax.Array):
        return tuple(sorted(x.devices(), key=lambda d: d.id))
    raise InvalidDestinationError(
        f"This destination holds a value that is on no device. Received: {shown(x)}"
    )


def checked_pairs(pairs: Any) -> list[tuple[Any, Any]]:
    """A list of (value, destinations) pairs, or an error that says what else was given."""
    checked = []
    for pair in pairs if isinstance(pairs, list | tuple) else [pairs]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InvalidTypeError(
                f"batch_reduce_to needs a list of (value, destinations) pairs. Received: {shown(pair)}"
            )
        destination_devices(pair[1])
        checked.append((pair[0], pair[1]))
    return checked
