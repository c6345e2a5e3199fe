"""What counts in the history of an elastic job, and how long its changes took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.testing.faults.job_history import JobHistory, Life

__all__ = [
    "applied_by_generations",
    "change_named",
    "change_recovered",
    "generation_at",
    "has_changed_generation",
    "has_lost_released",
    "was_first",
]

_ENDS_A_WORKER = ("kill", "notice", "freeze", "cut")

Event = Mapping[str, Any]


def applied_by_generations(lives: Sequence[Life]) -> Counter[tuple[int, int | str]]:
    """How often each example of each epoch counts in the end.

    A step that was under way when a worker was lost has happened on a survivor, and is not made again,
    or is made again by the next generation. So what was recorded last for a step counts.
    """
    last: dict[int, int] = {}
    found: list[tuple[int, int, Event]] = []
    for life in lives:
        for generation, step, record in _records(life):
            last[step] = max(generation, last.get(step, 0))
            found.append((generation, step, record))
    counted: Counter[tuple[int, int | str]] = Counter()
    for generation, step, record in found:
        if generation == last[step]:
            counted.update((record["epoch"], example) for example in record["examples"])
    return counted


def _records(life: Life) -> Iterator[tuple[int, int, Event]]:
    """What a process has recorded, with the generation and the step."""
    step: Event | None = None
    for event in life.events:
        if event["event"] == "elastic step":
            step = event
        elif event["event"] == "record" and "examples" in event and step is not None:
            yield int(step["generation"]), int(step["number"]), event


def _entry(life: Life, moment: float) -> Event:
    """The last generation that a process had joined at a moment."""
    joined = [x for x in life.all("join") if float(x["at"]) <= moment]
    return joined[-1] if joined else {"generation": 0, "rank": -1}


def generation_at(life: Life, moment: float) -> int:
    """The number of the last generation that a process had joined at a moment; 0 if it had not."""
    return int(_entry(life, moment)["generation"])


def has_changed_generation(history: JobHistory, life: Life, fault: Event) -> bool:
    """Whether a fault was the last one in its generation, and another generation followed."""
    number = _entry(life, float(fault["at"]))["generation"]
    if not any(x["generation"] > number for _, x in history.all("join")):
        return False
    return not any(
        float(event["at"]) > float(fault["at"])
        and _entry(other, float(event["at"]))["generation"] == number
        for other, event in history.faults()
    )


def was_first(history: JobHistory, life: Life, fault: Event) -> bool:
    """Whether a fault has ended its generation, and nothing had before."""
    moment = float(fault["at"])
    number = _entry(life, moment)["generation"]
    earlier = [
        event
        for other, event in history.all("fault", "failure")
        if float(event["at"]) < moment and _entry(other, float(event["at"]))["generation"] == number
    ]
    is_last = fault["kind"] == "raise" and history.end.get("exit_code") != 0  # which ends the job
    return number > 0 and not earlier and (is_last or has_changed_generation(history, life, fault))


def has_lost_released(history: JobHistory) -> bool:
    """Whether a fault has ended a worker when the training was over, so that none took its place."""
    return any(
        float(event["at"]) <= float(fault["at"])
        for life, fault in history.faults()
        if fault["kind"] in _ENDS_A_WORKER
        for event in life.all("released")
    )


def change_named(history: JobHistory, life: Life, fault: Event) -> float | None:
    """Seconds from a fault to the first word that names its worker; None if there is none.

    Workers have names of their places, which stay the same in all generations; the process that is
    started in place of a lost one has its name.
    """
    moment = float(fault["at"])
    name = str(_entry(life, moment).get("name", f"worker {life.worker}"))
    told = [x for x in history.launcher if name in str(x.get("text", ""))]
    told += [x for _, x in history.all("failure") if name in x["text"]]
    return min((float(x["at"]) - moment for x in told if float(x["at"]) >= moment), default=None)


def change_recovered(history: JobHistory, life: Life, fault: Event) -> float | None:
    """Seconds from a fault to the first step that all workers of a later generation have begun."""
    number, moment = _entry(life, float(fault["at"]))["generation"], float(fault["at"])
    starts: dict[int, list[float]] = {}
    for one in history.lives:
        first: dict[int, float] = {}
        for event in one.all("elastic step"):
            first.setdefault(int(event["generation"]), float(event["at"]))
        for generation, at in first.items():
            starts.setdefault(generation, []).append(at)
    later = [max(at) for generation, at in starts.items() if generation > number]
    return min((at - moment for at in later if at > moment), default=None)
