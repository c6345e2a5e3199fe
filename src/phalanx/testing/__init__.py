"""`px.testing`: what tests of distributed code need."""

from phalanx.testing.devices import logical_devices
from phalanx.testing.equivalence import assert_equivalent
from phalanx.testing.traffic import Communication, Traffic, assert_communication, communication

__all__ = [
    "Communication",
    "Traffic",
    "assert_communication",
    "assert_equivalent",
    "communication",
    "logical_devices",
]
