"""Several devices on any machine."""

from __future__ import annotations

from phalanx.errors import InvalidValueError
from phalanx.runtime.devices import set_cpu_device_count
from phalanx.runtime.formatting import shown


def logical_devices(n: int) -> None:
    """Split the CPU into `n` logical devices, so that tests can use strategies with several replicas.

    Call it at the top of ``conftest.py``, before anything starts JAX. It does the same as
    `px.config.set_logical_device_configuration`: asking again for the number that JAX has already does
    nothing, and asking for another one is an error.

    Examples:
        >>> import phalanx as px
        >>> px.testing.logical_devices(8)
        >>> len(px.config.list_logical_devices("CPU"))
        8
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidValueError(f"n must be a whole number of at least 1. Received: {shown(n)}")
    set_cpu_device_count(n)
