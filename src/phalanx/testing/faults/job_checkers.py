"""What must be true of the history of a job. Each check tells what is wrong; nothing if all is well."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phalanx.runtime.laboratory import END
from phalanx.testing.faults import elastic_history
from phalanx.testing.faults.job_history import Event, JobHistory, Life

__all__ = [
    "checkpoints_kept",
    "ended_well",
    "examples_once",
    "job_failures_named",
    "job_violations",
    "nothing_left",
    "same_state",
]

_AT_ONCE = 5.0  # seconds from a death or an exception to the word that names it
_AT_THE_SAME_TIME = 1.0  # seconds between two failures of which only one may be heard
_DEADLY = ("kill", "raise", "cut")
_LASTING = ("freeze", "slow")
_DAMAGE = ("corrupt", "truncate")
_MOST = 8  # of a long list that are shown


def job_violations(
    history: JobHistory, undisturbed: JobHistory | None = None, *, deadline: float = 3.0
) -> list[str]:
    """Everything that is wrong with a history.

    Args:
        history: what happened.
        undisturbed: what happened in a job without faults, whose examples and final state count.
        deadline: for how many seconds workers wait for each other.
    """
    return [
        *ended_well(history),
        *examples_once(history, undisturbed),
        *checkpoints_kept(history, undisturbed),
        *(same_state(history, undisturbed) if undisturbed is not None else ()),
        *job_failures_named(history, deadline),
        *nothing_left(history),
    ]


def ended_well(history: JobHistory) -> Iterator[str]:
    """The job has come to its end, and has succeeded.

    An elastic one fails if its program raises, or if a worker is lost in what follows the training.
    """
    end = history.end
    if not end:
        yield "the job did not come to its end"
    elif end["exit_code"] != 0:
        failed = [str(event["text"]) for event in history.launcher if event["event"] == "failed"]
        why = failed[-1] if failed else ""
        raised = [pair for pair in history.faults() if pair[1]["kind"] == "raise"]
        is_named = any(history.named(*pair) is not None for pair in raised)
        if not (history.is_elastic and (is_named or elastic_history.has_lost_released(history))):
            yield f"the job ended with exit code {end['exit_code']}: {why:.600}"


def examples_once(history: JobHistory, undisturbed: JobHistory | None = None) -> Iterator[str]:
    """Each example counts once in each epoch, or as often as in the undisturbed job."""
    found = history.applied()
    wanted = Counter(dict.fromkeys(found, 1)) if undisturbed is None else undisturbed.applied()
    if history.end.get("exit_code") != 0:  # then some are missing
        wanted = Counter({key: min(count, found[key]) for key, count in wanted.items() if found[key]})
    missing = wanted - found
    if missing.total() <= history.unrecorded():  # whether they count is seen in the final state
        missing = Counter()
    for what, rest in (("too often", found - wanted), ("too seldom", missing)):
        shown = [f"{example} of epoch {epoch}" for epoch, example in sorted(rest, key=str)[:_MOST]]
        if shown:
            more = f" and {len(rest) - _MOST} more" if len(rest) > _MOST else ""
            yield f"examples count {what}: {', '.join(shown)}{more}"


def checkpoints_kept(history: JobHistory, undisturbed: JobHistory | None = None) -> Iterator[str]:
    """A complete checkpoint is neither lost nor mixed up with another one, and damage is found.

    One that is gone at the end, and was not removed by its manager, is lost, unless the program removes
    checkpoints itself, as the undisturbed job shows.
    """
    if history.is_elastic:  # there, a generation restores only if none has the state in memory
        yield from _newest_restored_by_generations(history)
    else:
        yield from _newest_restored(history)
    damaged = {event["path"] for _, event in history.faults() if event["kind"] in _DAMAGE}
    for path, problem in history.end.get("checkpoints", {}).items():
        if problem and path not in damaged:
            yield f"the checkpoint {path} is not whole: {problem}"
    if undisturbed is None or not _gone(undisturbed):
        for path in _gone(history):
            yield f"the checkpoint {path} was complete, and is gone at the end"


def _gone(history: JobHistory) -> list[str]:
    """The checkpoints that were complete, are not there at the end, and were not removed."""
    there = history.end.get("checkpoints")
    if there is None:
        return []
    removed = {event["path"] for _, event in history.all("removed")}
    complete = dict.fromkeys(str(event["path"]) for _, event in history.all("committed"))
    return [path for path in complete if path not in removed and path not in there]


def _newest_restored(history: JobHistory) -> Iterator[str]:
    for attempt in range(history.attempts):
        lives = [life for life in history.lives if life.attempt == attempt]
        pairs = [pair for pair in history.all("restored") if pair[0].attempt == attempt]
        yield from _restored_alike(history, f"attempt {attempt}", pairs)
        begun = [x for life in lives for x in life.all("restore", "step", "record")]
        is_restoring = any(x["event"] == "restore" for x in begun)
        if is_restoring and not pairs:  # no time for it
            continue
        moment = min((float(x["at"]) for x in begun), default=-math.inf)
        yield from _is_newest(history, f"attempt {attempt}", pairs, moment)


def _newest_restored_by_generations(history: JobHistory) -> Iterator[str]:
    groups: dict[int, list[tuple[Life, Event]]] = {}
    for life, event in history.all("restore", "restored"):
        number = elastic_history.generation_at(life, float(event["at"]))
        groups.setdefault(number, []).append((life, event))
    for number, found in sorted(groups.items()):
        pairs = [pair for pair in found if pair[1]["event"] == "restored"]
        yield from _restored_alike(history, f"generation {number}", pairs)
        if pairs:
            yield from _is_newest(history, f"generation {number}", pairs, float(found[0][1]["at"]))


def _is_newest(
    history: JobHistory, who: str, pairs: Sequence[tuple[Life, Event]], moment: float
) -> Iterator[str]:
    """What was restored is the newest checkpoint that was complete at a moment, or one after it."""
    newest, paths = _newest(history, moment), {str(event["path"]) for _, event in pairs}
    if newest is None or newest in paths or any(_is_newer(history, path, newest) for path in paths):
        return
    yield f"{who} restored {', '.join(sorted(paths)) or 'nothing'}, but {newest} was complete before"


def _restored_alike(
    history: JobHistory, who: str, pairs: Sequence[tuple[Life, Event]]
) -> Iterator[str]:
    """All workers restore one checkpoint, as it was committed and not damaged since."""
    last: dict[int, Event] = {life.worker: event for life, event in pairs}
    different = {(event["path"], event["digest"]) for event in last.values()}
    if len(different) > 1:
        yield f"workers of {who} restored different checkpoints: {sorted(different)}"
    for _, event in pairs:
        digests = {
            x["digest"]
            for _, x in history.all("committed")
            if x["path"] == event["path"] and float(x["at"]) < float(event["at"])
        }
        if digests and event["digest"] not in digests:
            yield f"{who} restored {event['path']}, which is not what was committed"
        path, moment = str(event["path"]), float(event["at"])
        if _damaged_at(history, path, moment) and not _may_be_new(history, path, moment):
            yield f"{who} restored {path}, which was damaged"


def _newest(history: JobHistory, moment: float) -> str | None:
    """The newest checkpoint that was complete at a moment, and neither damaged nor removed by then."""
    removed = {event["path"] for _, event in history.all("removed") if float(event["at"]) < moment}
    whole = [
        str(event["path"])
        for _, event in history.all("committed")
        if float(event["at"]) < moment
        and event["path"] not in removed
        and not _damaged_at(history, str(event["path"]), moment)
    ]
    return whole[-1] if whole else None


def _is_newer(history: JobHistory, path: str, than: str) -> bool:
    """Whether a checkpoint was begun after another: it may be complete without a word of it."""
    saves = {str(event["path"]): float(event["at"]) for _, event in history.all("save")}
    return saves.get(path, -math.inf) > saves.get(than, math.inf)


def _damaged_at(history: JobHistory, path: str, moment: float) -> bool:
    """Whether a checkpoint was damaged before a moment, and not known to be written anew since."""
    damage = _last_damage(history, path, moment)
    written = [float(x["at"]) for _, x in history.all("committed") if x["path"] == path]
    return not any(damage < at < moment for at in written) and damage > -math.inf


def _may_be_new(history: JobHistory, path: str, moment: float) -> bool:
    """Whether a process ended while it wrote a damaged checkpoint anew, perhaps before it said so."""
    damage = _last_damage(history, path, moment)
    ends = (list(life.all("save", "committed"))[-1:] for life in history.lives)
    last = [event for found in ends for event in found]
    saves = [x for x in last if x["event"] == "save" and x["path"] == path]
    return any(damage < float(x["at"]) < moment for x in saves)


def _last_damage(history: JobHistory, path: str, moment: float) -> float:
    """When a checkpoint was damaged for the last time before a moment."""
    events = (event for _, event in history.faults() if event["kind"] in _DAMAGE)
    times = (float(event["at"]) for event in events if event["path"] == path)
    return max((at for at in times if at < moment), default=-math.inf)


def same_state(history: JobHistory, undisturbed: JobHistory) -> Iterator[str]:
    """The final state is that of the undisturbed job, up to the rounding of sums."""
    found, wanted = history.final_states(), undisturbed.final_states()
    if history.end.get("exit_code") != 0:
        return
    for worker, state in found.items():
        expected = wanted.get(worker, next(iter(wanted.values()), None))
        if expected is not None:
            names = [name for name in expected if not _alike(state.get(name), expected[name])]
            names += sorted(set(state) - set(expected))
            if names:
                yield (
                    f"the final state of worker {worker} differs from the undisturbed one: "
                    f"{', '.join(names)}. Is everything saved and restored that its steps change?"
                )
    if wanted and not found:
        yield "no worker has told its final state"


def _alike(a: Mapping[str, Any] | None, b: Mapping[str, Any]) -> bool:
    if a is None or a["shape"] != b["shape"]:
        return False
    if a["checksum"] == b["checksum"]:
        return True
    scale = max([1e-9, *(abs(x) for x in b["sums"])])
    return bool(b["sums"]) and all(
        math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-5 * scale)
        for x, y in zip(a["sums"], b["sums"], strict=True)
    )


def job_failures_named(history: JobHistory, deadline: float = 3.0, slack: float = 2.0) -> Iterator[str]:
    """Every failure is named in time: who, within seconds of a death, or of the deadline of a wait.

    Args:
        history: what happened.
        deadline: for how many seconds workers wait for each other.
        slack: seconds that the machine may be busy with other things.
    """
    for life, fault in history.faults():
        latest = _naming_seconds(fault, deadline)
        if latest is None or not _was_first(history, life, fault):
            continue
        seconds = history.named(life, fault)
        about = f"the {fault['kind']} of worker {life.worker} in attempt {life.attempt}"
        if seconds is None and not _was_overtaken(history, life, fault):
            yield f"{about} was not named"
        elif seconds is not None and seconds > latest + slack:
            yield f"{about} was named after {seconds:.1f} seconds, not {latest:.1f}"
    for event in history.launcher:
        if event["event"] == "failed" and not event["text"].strip():
            yield f"attempt {event['attempt']} failed without a word"


def _naming_seconds(fault: Event, deadline: float) -> float | None:
    """Within how many seconds a fault must be named; None if it need not be."""
    if fault["kind"] == "cut" and fault.get("phase") == "join":  # before others know of it
        return None
    if fault["kind"] == "slow" and fault.get("phase") == END:  # it is heard of, and comes to its end
        return None
    if fault["kind"] in _DEADLY:
        return _AT_ONCE
    if fault["kind"] in _LASTING and fault["seconds"] >= deadline:
        return deadline + _AT_ONCE
    return None


def _was_first(history: JobHistory, life: Life, fault: Event) -> bool:
    """Whether nothing had ended the attempt before, and the fault has ended it."""
    if history.is_elastic:
        return elastic_history.was_first(history, life, fault)
    if life.attempt == history.attempts - 1 and history.end.get("exit_code") == 0:
        return False  # it came when all was done
    earlier = [
        event
        for other, event in history.all("fault", "failure")
        if other.attempt == life.attempt and float(event["at"]) < float(fault["at"])
    ]
    return not any(
        x["event"] == "failure" or x["kind"] in (*_DEADLY, *_LASTING, "notice", "full") for x in earlier
    )


def _was_overtaken(history: JobHistory, life: Life, fault: Event) -> bool:
    """Whether another worker failed while this one still wrote down its exception, and was named."""
    return fault["kind"] == "raise" and any(
        other.attempt == life.attempt
        and event is not fault
        and 0.0 <= float(event["at"]) - float(fault["at"]) < _AT_THE_SAME_TIME
        and history.named(other, event) is not None
        for other, event in history.faults()
        if event["kind"] in _DEADLY
    )


def nothing_left(history: JobHistory) -> Iterator[str]:
    """No process, no listening port and no half written file is left."""
    end = history.end
    for pid in end.get("orphans", ()):
        yield f"the process {pid} is left"
    for address in end.get("listening", ()):
        yield f"a process still listens at {address}"
    for path in end.get("left", ()):
        yield f"the file {path} is left"
