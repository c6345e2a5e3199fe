"""`px.parallel`: programs that are laid out over devices by a plan, which is searched.

`search` reads a function, finds the cheapest layout of all of its tensors, and proves that there is
none cheaper by its model of costs.
"""

from phalanx.parallel.applying import apply
from phalanx.parallel.hardware import Device, Hardware, Measurements, fit, profile
from phalanx.parallel.mesh import DeviceMesh, Link, Topology, mesh_of, meshes
from phalanx.parallel.plan import (
    Alternative,
    MemoryUse,
    OperatorPlan,
    Plan,
    PlannedCollective,
    RunnerUp,
    Shardings,
    TensorPlan,
)
from phalanx.parallel.searching import search

__all__ = [
    "Alternative",
    "Device",
    "DeviceMesh",
    "Hardware",
    "Link",
    "Measurements",
    "MemoryUse",
    "OperatorPlan",
    "Plan",
    "PlannedCollective",
    "RunnerUp",
    "Shardings",
    "TensorPlan",
    "Topology",
    "apply",
    "fit",
    "mesh_of",
    "meshes",
    "profile",
    "search",
]
