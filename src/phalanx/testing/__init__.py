"""`px.testing`: what tests of distributed code need."""

from phalanx.testing.communication import Communication, Traffic, assert_communication, communication
from phalanx.testing.equivalence import assert_equivalent
from phalanx.testing.logical_devices import logical_devices

__all__ = [
    "Communication",
    "Traffic",
    "assert_communication",
    "assert_equivalent",
    "communication",
    "logical_devices",
]
