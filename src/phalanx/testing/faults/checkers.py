"""What must be true of every history. Each check tells what is wrong, and nothing if all is well."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from phalanx.testing.faults.history import (
    ClosureEnded,
    ClosureRaised,
    ClosureSubmitted,
    Happened,
    History,
    Named,
    ServersAtEnd,
    ServersRead,
)

__all__ = [
    "closure_violations",
    "effects_once",
    "errors_once",
    "failures_named",
    "nothing_lost",
    "reads_advance",
    "staleness_held",
]

_SILENT = ("kill", "freeze", "isolate")  # faults in which a task is missing


def closure_violations(history: History, *, max_staleness: int | None = None) -> list[str]:
    """Everything that is wrong with a history."""
    return [
        *effects_once(history),
        *nothing_lost(history),
        *reads_advance(history),
        *staleness_held(history, max_staleness),
        *errors_once(history),
        *failures_named(history),
    ]


def effects_once(history: History) -> Iterator[str]:
    """In the end each closure has had its effect once on each of its servers.

    Those that have failed or were cancelled have had none, and nothing else happened.
    """
    outcomes = history.outcomes
    expected: dict[tuple[int, int], int] = {}
    for event in history.submitted.values():
        ended = outcomes.get(event.closure)
        counts = 0 if ended is not None and ended.outcome != "done" else 1
        expected.update(((server, event.closure), counts) for server in event.servers)
    finals = list(history.all(ServersAtEnd))
    if len(finals) != 1:
        yield f"the run did not come to its end: there are {len(finals)} of it"
    for final in finals:
        for server, effects in enumerate(final.effects):
            for closure, count in enumerate(effects):
                wanted = expected.get((server, closure), 0)
                if count != wanted:
                    yield f"closure {closure} counts {count} times on server {server}, not {wanted}"


def nothing_lost(history: History) -> Iterator[str]:
    """What was known to be done when a read began is seen by it; so is what a closure needs."""
    submitted = {event.closure: event for event in history.all(ClosureSubmitted)}
    for view, known in _with_known(history):
        for server, seen in enumerate(view.seen):
            if not known.done[server] <= seen:
                gone = sorted(known.done[server] - seen)
                yield f"closures {gone} were done, but {_name(view)} does not see them on {server}"
    for event in history.all(ClosureEnded):
        for closure in submitted[event.closure].needs:
            for server in submitted[closure].servers:
                if event.view is not None and closure not in event.view.seen[server]:
                    yield f"closure {event.closure} does not see {closure}, which it needs"


def reads_advance(history: History) -> Iterator[str]:
    """A read sees all that an earlier one saw: one of the same reader, or one that was over before."""
    by_reader: dict[tuple[int, str], list[ServersRead]] = {}
    for view in history.views:
        by_reader.setdefault((view.run, view.reader), []).append(view)
    for views in by_reader.values():
        views.sort(key=lambda v: v.order)
        for before, after in itertools.pairwise(views):
            for server, (old, new) in enumerate(zip(before.seen, after.seen, strict=True)):
                if not old <= new:
                    yield f"{_name(after)} lacks {sorted(old - new)} on {server}, seen before by itself"
    for view, known in _with_known(history):
        for server, new in enumerate(view.seen):
            if not known.seen[server] <= new:
                gone = sorted(known.seen[server] - new)
                yield f"{_name(view)} lacks {gone} on {server}, seen before by others"


@dataclass
class _Known:
    """What had come to an end in a run, by server: closures, and what they have seen."""

    done: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    seen: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


def _with_known(history: History) -> Iterator[tuple[ServersRead, _Known]]:
    """Each read, and what was known in its run before it began."""
    servers = {event.closure: event.servers for event in history.all(ClosureSubmitted)}
    done = sorted((e for e in history.all(ClosureEnded) if e.outcome == "done"), key=lambda e: -e.at)
    known: dict[int, _Known] = defaultdict(_Known)
    for view in sorted(history.views, key=lambda v: v.begun):
        while done and done[-1].at < view.begun:
            event = done.pop()
            for server in servers[event.closure]:
                known[event.run].done[server].add(event.closure)
            for server, seen in enumerate(() if event.view is None else event.view.seen):
                known[event.run].seen[server] |= seen
        yield view, known[view.run]


def staleness_held(history: History, bound: int | None) -> Iterator[str]:
    """Between the read and the effect of a closure, at most so many others have their effects."""
    if bound is None:
        return
    servers = {closure: event.servers for closure, event in history.submitted.items()}
    for final in history.all(ServersAtEnd):
        totals = [sum(1 for count in effects if count) for effects in final.effects]
        for closure, ended in history.outcomes.items():
            if ended.outcome != "done" or ended.view is None:
                continue
            for server in servers[closure]:
                before = totals[server] - 1 - final.later[server][closure]
                missed = before - len(ended.view.seen[server])
                if missed > bound:
                    yield f"closure {closure} missed {missed} others on server {server}, not {bound}"


def errors_once(history: History) -> Iterator[str]:
    """Errors that are raised are those of closures that failed, each at most once, and one at least."""
    raised = [(event.run, event.closure) for event in history.all(ClosureRaised)]
    failed = {(e.run, e.closure) for e in history.all(ClosureEnded) if e.outcome == "failed"}
    for key in sorted(set(raised)):
        if raised.count(key) > 1:
            yield f"the error of closure {key[1]} was raised {raised.count(key)} times"
        if key not in failed:
            yield f"the error of closure {key[1]} was raised, which has not failed"
    for run in sorted({run for run, _ in failed} - {run for run, _ in raised}):
        yield f"closures of run {run} failed, and no error was raised"


def failures_named(history: History, seconds: float = 5.0, slack: float = 1.0) -> Iterator[str]:
    """A task that is missing for longer, while the program runs, is named in time by some process.

    Args:
        history: what happened.
        seconds: within which a task must be named.
        slack: seconds that the machine may be busy with other things.
    """
    end = max((final.at for final in history.all(ServersAtEnd)), default=math.inf)
    for fault in history.all(Happened):
        latest = fault.begun + seconds + slack
        if fault.kind not in _SILENT or min(end, fault.ended) < latest:
            continue
        names = [n for n in history.all(Named) if fault.task in n.text]
        if not any(fault.begun <= n.at <= latest for n in names):
            yield f"{fault.task} was missing for {fault.ended - fault.begun:.1f} s and was not named"


def _name(view: ServersRead) -> str:
    return f"read {view.order} of {view.reader}"
