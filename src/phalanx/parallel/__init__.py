"""`px.parallel`: programs that are laid out over devices by a plan, which is searched.

`search` reads a function, finds the cheapest layout of all of its tensors, and proves that there is
none cheaper by its model of costs.
"""

from phalanx.parallel.applying import apply
from phalanx.parallel.hardware import Device, Hardware, Measurements, fit, profile
from phalanx.parallel.hardware_files import load_hardware, save_hardware
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
from phalanx.parallel.strategy_files import (
    MindSporeStrategy,
    load_mindspore_strategy,
    read_mindspore_strategy,
)

__all__ = [
    "Alternative",
    "Device",
    "DeviceMesh",
    "Hardware",
    "Link",
    "Measurements",
    "MemoryUse",
    "MindSporeStrategy",
    "OperatorPlan",
    "Plan",
    "PlannedCollective",
    "RunnerUp",
    "Shardings",
    "TensorPlan",
    "Topology",
    "apply",
    "fit",
    "load_hardware",
    "load_mindspore_strategy",
    "mesh_of",
    "meshes",
    "profile",
    "read_mindspore_strategy",
    "save_hardware",
    "search",
]
