"""`px.profile`: what all workers did, as one trace that Perfetto opens.

Each worker lets JAX's profiler write its own files. At the end the first worker gets the traces of
all, moves them to one clock, and writes them in Chrome's trace format, with a process per worker.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from phalanx.collectives import groups
from phalanx.comm import functional, objects
from phalanx.errors import FailedPreconditionError, InvalidTypeError
from phalanx.runtime.formatting import shown

__all__ = ["Profile", "merged_trace", "profile"]

_MARK = "px.profile begins"  # an event by which the trace of a worker is put on its clock
_ROUNDS = 5  # of barriers by which clocks are compared


@dataclass
class Profile:
    """Where a profile is, once it has ended.

    Attributes:
        path: the trace of all workers, ``trace.json.gz``; it is on the machine of the first worker.
        folder: what the profiler of this worker has written, which TensorBoard reads.
    """

    path: Path
    folder: Path

    def __str__(self) -> str:
        return f"<px.profile: {self.path}>"

    __repr__ = __str__


@dataclass(frozen=True)
class WorkerTrace:
    """What one worker gives to the merged trace.

    Args:
        name: of the worker.
        began: seconds since the epoch, on its own clock, when its trace began.
        ahead: by how many seconds its clock is ahead of that of the first worker.
        trace: the text of its trace in Chrome's format, compressed by gzip.
    """

    name: str
    began: float
    ahead: float
    trace: bytes


@contextlib.contextmanager
def profile(folder: str | os.PathLike[str]) -> Iterator[Profile]:
    """Record what devices and threads do while the code inside runs, on all workers of the job.

    Every worker must enter and leave it. The first worker writes ``trace.json.gz`` with a process for
    each worker, on one clock; open it at https://ui.perfetto.dev. Clocks of different machines are
    compared at the beginning, to about the time of a message. If the code inside raises, a worker
    writes its own part only. For parameter servers, which do not meet, only the calling process is
    recorded.

    Args:
        folder: where to write. Each worker has a folder in it, ``worker-0`` and so on, with what JAX's
            profiler has written.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px, tempfile
        >>> with px.profile(tempfile.mkdtemp()) as recorded:
        ...     total = jnp.arange(8.0).sum().block_until_ready()
        >>> recorded.path.name
        'trace.json.gz'
    """
    if not isinstance(folder, str | os.PathLike):
        raise InvalidTypeError(f"profile needs the path of a folder. Received: {shown(folder)}")
    rank = groups.world().rank if groups.is_initialized() else 0
    top = Path(folder)
    mine = top / f"worker-{rank}"
    mine.mkdir(parents=True, exist_ok=True)
    result = Profile(top / "trace.json.gz", mine)
    ahead = _clock_ahead()
    try:
        jax.profiler.start_trace(str(mine), create_perfetto_trace=False)
    except RuntimeError as error:
        raise FailedPreconditionError(
            f"A process has one profiler, and it runs already: {error}. End the other profile first"
        ) from error
    began = time.time()
    whole = False
    try:
        with jax.profiler.TraceAnnotation(_MARK):
            began = time.time()
        yield result
        whole = True
    finally:
        jax.profiler.stop_trace()
        part = WorkerTrace(f"worker {rank}", began, ahead, _newest_trace(mine))
        parts = _gathered(part) if whole else [part]
        if not whole and rank:
            result.path = mine / "trace.json.gz"
        if parts is not None:
            _write(result.path, merged_trace(parts))


def _clock_ahead() -> float:
    """By how much the clock of this worker is ahead of the first worker's."""
    if not groups.is_initialized() or groups.world().size == 1:
        return 0.0
    rank = groups.world().rank
    hosts = objects.all_gather_object(socket.gethostname()) or []
    found = []
    for _ in range(_ROUNDS):
        functional.barrier()
        times = objects.all_gather_object(time.time()) or []
        found.append(times[rank] - times[0])
    return 0.0 if hosts[rank] == hosts[0] else statistics.median(found)  # one machine has one clock


def _newest_trace(folder: Path) -> bytes:
    found = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"), key=os.path.getmtime)
    if not found:
        raise FailedPreconditionError(
            f"The profiler of JAX has written no trace. Received: nothing in {str(folder)!r}"
        )
    return found[-1].read_bytes()


def _gathered(part: WorkerTrace) -> list[WorkerTrace] | None:
    """The parts of all workers, on the first one; None on the others."""
    if not groups.is_initialized() or groups.world().size == 1:
        return [part]
    return objects.gather_object(part, 0)


def _write(path: Path, trace: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    with gzip.open(partial, "wt", encoding="utf-8") as file:
        json.dump(trace, file)
    partial.replace(path)


def merged_trace(parts: Sequence[WorkerTrace]) -> dict[str, Any]:
    """One trace of those of all workers: each is a process, and its planes and lines are threads.

    >>> event = {"ph": "X", "pid": 7, "tid": 3, "ts": 5.0, "dur": 1.0, "name": "add"}
    >>> text = gzip.compress(json.dumps({"traceEvents": [event]}).encode())
    >>> parts = [WorkerTrace("worker 0", 10.0, 0.0, text), WorkerTrace("worker 1", 10.5, 0.5, text)]
    >>> [(e["pid"], e["ts"]) for e in merged_trace(parts)["traceEvents"] if e["ph"] == "X"]
    [(1, 5.0), (2, 5.0)]
    """
    first = min(part.began - part.ahead for part in parts)
    events: list[dict[str, Any]] = []
    for number, part in enumerate(parts, 1):
        given = [e for e in json.loads(gzip.decompress(part.trace))["traceEvents"] if e.get("ph")]
        shift = (part.began - part.ahead - first) * 1e6
        marks = [e["ts"] for e in given if e.get("name") == _MARK and "ts" in e]
        if marks:
            shift -= min(marks)
        events += _one_process(given, number, part.name, shift)
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _one_process(
    events: Sequence[Mapping[str, Any]], number: int, name: str, shift: float
) -> list[dict[str, Any]]:
    """The events of a worker as those of one process; threads are numbered and named anew."""
    planes = {e["pid"]: e["args"]["name"] for e in events if _names(e, "process_name")}
    lines = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if _names(e, "thread_name")}
    used = sorted({(e["pid"], e.get("tid", 0)) for e in events if e["ph"] != "M"})
    threads = {line: i for i, line in enumerate(used, 1)}
    made: list[dict[str, Any]] = [_meta("process_name", number, 0, {"name": name})]
    made.append(_meta("process_sort_index", number, 0, {"sort_index": number}))
    for (plane, line), thread in threads.items():
        words = [planes.get(plane, ""), lines.get((plane, line), f"line {line}")]
        text = " ".join(word for word in words if word)
        made.append(_meta("thread_name", number, thread, {"name": text}))
        made.append(_meta("thread_sort_index", number, thread, {"sort_index": thread}))
    for event in events:
        if event["ph"] != "M":
            thread = threads[event["pid"], event.get("tid", 0)]
            moved = {"ts": event["ts"] + shift} if "ts" in event else {}
            made.append({**event, **moved, "pid": number, "tid": thread})
    return made


def _names(event: Mapping[str, Any], kind: str) -> bool:
    return event["ph"] == "M" and event.get("name") == kind


def _meta(kind: str, process: int, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
