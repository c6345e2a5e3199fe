"""`px.parallel`: programs that are laid out over devices, by MindSpore's modes or by a searched plan.

`parallelize` gives a function in one of five modes. `search` reads a function, finds the cheapest
layout of all of its tensors, and proves that there is none cheaper by its model of costs. `pipeline`
runs a model in stages.
"""

from phalanx.parallel.algo_parameters import (
    AlgoParameters,
    get_algo_parameters,
    reset_algo_parameters,
    set_algo_parameters,
)
from phalanx.parallel.applying import apply
from phalanx.parallel.auto_parallel import AutoParallel, ParallelMode
from phalanx.parallel.context import (
    get_auto_parallel_context,
    reset_auto_parallel_context,
    set_auto_parallel_context,
)
from phalanx.parallel.device_layout import Layout
from phalanx.parallel.hardware import Device, Hardware, Measurements, fit, profile
from phalanx.parallel.hardware_files import load_hardware, save_hardware
from phalanx.parallel.mesh import DeviceMesh, Link, Topology, mesh_of, meshes
from phalanx.parallel.mindspore_files import (
    MindSporeStrategy,
    load_mindspore_strategy,
    read_mindspore_strategy,
)
from phalanx.parallel.parallelizing import Parallelized, parallelize
from phalanx.parallel.pipelines.cells import (
    GradAccumulation,
    MicroBatchInterleaved,
    Pipeline,
    PipelineCell,
    PipelineGradReducer,
)
from phalanx.parallel.pipelines.cut_search import search_pipeline
from phalanx.parallel.pipelines.cutting import CutFunction, cut_function
from phalanx.parallel.pipelines.named_schedules import schedule
from phalanx.parallel.pipelines.optimizing import PipelineOptimizer
from phalanx.parallel.pipelines.pipelined import Pipelined
from phalanx.parallel.pipelines.pipelining import pipeline
from phalanx.parallel.pipelines.recording import Timeline
from phalanx.parallel.pipelines.schedule import (
    ActionCosts,
    PipelineAction,
    PipelineSchedule,
    TimedAction,
)
from phalanx.parallel.pipelines.stages import Stage, split
from phalanx.parallel.pipelines.strategy import PipelineStrategy
from phalanx.parallel.plan import (
    Alternative,
    MemoryUse,
    OperatorPlan,
    Plan,
    PlannedCollective,
    PlannedPipeline,
    RunnerUp,
    Shardings,
    TensorPlan,
)
from phalanx.parallel.plan_parts import PlannedStage
from phalanx.parallel.running import value_and_grad
from phalanx.parallel.searching import search
from phalanx.parallel.sharding import shard
from phalanx.parallel.spanning import all_devices
from phalanx.parallel.strategy import AutoParallelStrategy

__all__ = [
    "ActionCosts",
    "AlgoParameters",
    "Alternative",
    "AutoParallel",
    "AutoParallelStrategy",
    "CutFunction",
    "Device",
    "DeviceMesh",
    "GradAccumulation",
    "Hardware",
    "Layout",
    "Link",
    "Measurements",
    "MemoryUse",
    "MicroBatchInterleaved",
    "MindSporeStrategy",
    "OperatorPlan",
    "ParallelMode",
    "Parallelized",
    "Pipeline",
    "PipelineAction",
    "PipelineCell",
    "PipelineGradReducer",
    "PipelineOptimizer",
    "PipelineSchedule",
    "PipelineStrategy",
    "Pipelined",
    "Plan",
    "PlannedCollective",
    "PlannedPipeline",
    "PlannedStage",
    "RunnerUp",
    "Shardings",
    "Stage",
    "TensorPlan",
    "TimedAction",
    "Timeline",
    "Topology",
    "all_devices",
    "apply",
    "cut_function",
    "fit",
    "get_algo_parameters",
    "get_auto_parallel_context",
    "load_hardware",
    "load_mindspore_strategy",
    "mesh_of",
    "meshes",
    "parallelize",
    "pipeline",
    "profile",
    "read_mindspore_strategy",
    "reset_algo_parameters",
    "reset_auto_parallel_context",
    "save_hardware",
    "schedule",
    "search",
    "search_pipeline",
    "set_algo_parameters",
    "set_auto_parallel_context",
    "shard",
    "split",
    "value_and_grad",
]
