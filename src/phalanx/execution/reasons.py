"""Why functions run as Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a function runs as Python, and what its author can do."""

    why: str
    remedy: str


LOOPS = Reason(
    "it loops over a dataset or an iterator",
    "Compile the step inside the loop, or use px.train.loop",
)
LOOPS_ELSEWHERE = Reason(
    "a loop over px.range changes variables on parameter servers, or reads rows of them",
    "Compile the step inside the loop, or schedule one function for each step",
)
ROUNDS = Reason(
    "the elements that a loop over px.range takes differ in shape",
    "Use batches of one size, as with drop_remainder=True",
)
ENDED = Reason(
    "an iterator ended in the middle of a loop",
    "Repeat the dataset, or loop as often as it has batches",
)
IN_EAGER_STEP = Reason(
    "it was called from a step that runs eagerly", "Put px.function around strategy.run"
)
NO_ARRAYS = Reason(
    "replicas hold arrays of different ranks or dtypes, or values that are no arrays",
    "Give them JAX arrays that differ in size only",
)


def cannot_join(reason: str) -> Reason:
    """Replicas hold different shapes, and what they run cannot be one program."""
    return Reason(
        f"replicas hold different shapes, and {reason}",
        "Use batches that divide evenly, as with drop_remainder=True",
    )


def failed_to_trace(error: Exception) -> Reason:
    """What a step does cannot be traced, but Python can run it."""
    return Reason(
        f"tracing it failed with {first_line(error)}",
        "Give what it must know as an argument that is no array, and return what it changes",
    )


def first_line(error: Exception) -> str:
    """The kind of an error, and how its text begins."""
    text = (str(error) or type(error).__doc__ or "").splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"
