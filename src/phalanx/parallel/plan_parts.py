"""Parts of plans that concern the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["PlannedPipeline", "PlannedStage", "RunnerUp"]


@dataclass(frozen=True)
class RunnerUp:
    """The best plan that differs, and its cost."""

    difference: str
    cost: float


@dataclass(frozen=True)
class PlannedStage:
    """A part of a function that is a stage of a pipeline, or a chunk of one.

    Args:
        first: the number of its first equation.
        end: the number of the equation after its last one.
        seconds: of its computation for one micro batch, gradient included.
        parameters: the names of the parameters that it is the first to use.
        result: what it hands over, as text; empty for the last one.
    """

    first: int
    end: int
    seconds: float
    parameters: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class PlannedPipeline:
    """How a plan cuts a function into stages.

    Args:
        stages: how many.
        chunks: per stage.
        schedule: its name.
        micro_batches: into how many a batch is cut.
        cuts: the numbers of the equations after which it is cut.
        parts: the stages, or the chunks in the order of the model.
        seconds: of one step, by the schedule's own latency.
        bubble: the share of the time in which stages wait.
        memory: the bytes that each device of each stage holds.
        others: the next best numbers of stages and schedules.
        picture: when which stage does what, by these costs, as SVG.
    """

    stages: int
    chunks: int
    schedule: str
    micro_batches: int
    cuts: tuple[int, ...]
    parts: tuple[PlannedStage, ...]
    seconds: float
    bubble: float
    memory: tuple[float, ...]
    others: tuple[RunnerUp, ...] = ()
    picture: str = ""

    def to_data(self) -> dict[str, Any]:
        """As nested dictionaries and lists."""
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> PlannedPipeline:
        """From nested dictionaries and lists, as JSON has them."""
        parts = [PlannedStage(**{**p, "parameters": tuple(p["parameters"])}) for p in data["parts"]]
        return PlannedPipeline(
            **{
                **data,
                "cuts": tuple(data["cuts"]),
                "parts": tuple(parts),
                "memory": tuple(data["memory"]),
                "others": tuple(RunnerUp(**other) for other in data["others"]),
            }
        )
