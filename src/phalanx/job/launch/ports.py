"""Ports on this machine for the tasks of a local cluster."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

from phalanx.errors import InvalidValueError, ResourceExhaustedError

_LOWEST, _HIGHEST = 10_240, 65_535
_MANY = 1000


class PortReservation:
    """TCP ports that stay free for the tasks of a cluster as long as this object is open.

    The kernel hands out ports of its ephemeral range on demand, so these come from outside it.
    The UDP port of the same number is held meanwhile, which keeps others that reserve ports in this way
    from taking the same ones.

    Examples:
        >>> with PortReservation(2) as reservation:
        ...     len(set(reservation.ports))
        2
    """

    def __init__(self, count: int) -> None:
        if count < 0:
            raise InvalidValueError(f"The number of ports cannot be negative. Received: {count}")
        self.ports: list[int] = []
        self._held: list[socket.socket] = []
        candidates = _candidates()
        while len(self.ports) < count:
            port = next(candidates, None)
            if port is None:
                self.close()
                raise ResourceExhaustedError(
                    f"There are not enough free ports on this machine. Received: count={count}"
                )
            held = _hold(port)
            if held is not None:
                self._held.append(held)
                self.ports.append(port)

    def close(self) -> None:
        """Give the ports back."""
        for held in self._held:
            held.close()
        self._held.clear()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _candidates() -> Iterator[int]:
    low, high = _ephemeral_range()
    ports = [p for p in range(_LOWEST, _HIGHEST) if not low <= p <= high]
    if len(ports) < _MANY:  # the whole range is ephemeral here
        ports = list(range(_LOWEST, _HIGHEST))
    random.SystemRandom().shuffle(ports)
    return iter(ports)


def _ephemeral_range() -> tuple[int, int]:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            low, high = file.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 49_152, 65_535  # IANA's, which macOS follows


def _hold(port: int) -> socket.socket | None:
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        held.bind(("127.0.0.1", port))
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", port))
    except OSError:
        held.close()
        return None
    return held
