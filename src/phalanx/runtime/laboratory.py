"""This process in a fault laboratory: the points at which faults happen to it, and its history.

A process takes part if PHALANX_FAULTS names the folder of a laboratory, as `px.testing.faults.run`
makes them; else nothing here does anything. The folder has a schedule as JSON. Each process appends
what happens to it to a file of its own there, a JSON object in each line. All moments are seconds of
`time.monotonic`, which processes of one machine share.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "DELAYED",
    "END",
    "FOLDER",
    "PHASES",
    "InjectedError",
    "LaboratoryProcess",
    "is_active",
    "note",
    "provide",
    "reach",
]

FOLDER = "PHALANX_FAULTS"
"""The environment variable that names the folder of the laboratory."""

SCHEDULE = "schedule.json"
HISTORY = "history-"
FROZEN = "frozen-"

_NUMBER = "PHALANX_DOOR_NUMBER"  # which worker of an elastic job this is; none has it a second time

END = "end"

PHASES = (
    *("start", "input", "step", "save", "write", "commit", "restore", "record", END),
    *("join", "carry"),
)
"""Where faults can happen: a worker starts, takes an element of its input, begins a step, has taken the
values of a checkpoint, writes some of them, gives the checkpoint its name, restores one, has recorded
what it applied, or has come to its end: before it tells the others, and when it waits for them. In an
elastic job also: it joins a generation, or takes over its state."""

DELAYED = ("kill", "freeze", "notice", "cut")
"""What can also happen a while after a process was at a point, perhaps in the middle of native code."""


class InjectedError(RuntimeError):
    """A worker of a fault laboratory raises, because the schedule says so."""


class LaboratoryProcess:
    """What a process does in a laboratory.

    Args:
        folder: of the laboratory.
        environ: tells which task and which attempt this is.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        config = json.loads(environ.get("TF_CONFIG") or "{}")
        task = config.get("task", {"type": "worker", "index": 0})
        number = environ.get(_NUMBER)
        self.worker = int(task["index"] if number is None else number)
        self.attempt = 0 if number is not None else int(environ.get("PHALANX_RESTART") or 0)
        schedule = json.loads((folder / SCHEDULE).read_text())
        self._seed = schedule["seed"]
        self._faults = [
            fault
            for fault in schedule["faults"]
            if fault["worker"] == self.worker and fault["attempt"] == self.attempt
        ]
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._frozen = 0
        name = f"{HISTORY}{task['type']}-{self.worker}-{self.attempt}-{os.getpid()}.jsonl"
        # A process of an elastic job that has started Python anew goes on with its history.
        before = _lines(folder / name) if (folder / name).exists() else []
        self._counts.update(x["event"] for x in before if "step" in x and x["event"] != "fault")
        self._file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        addresses = config.get("cluster", {}).get(task["type"], [])
        address = addresses[self.worker] if self.worker < len(addresses) else None
        about = {"pid": os.getpid(), "worker": self.worker, "attempt": self.attempt}
        if before:
            self.note("anew")
        else:
            self.note("process", **about, address=address)
        atexit.register(self._exit)

    def _exit(self) -> None:
        self.note("exit", processor_seconds=time.process_time())

    def note(self, event: str, **about: Any) -> None:
        """Write a line of the history, in one piece."""
        line = json.dumps({"event": event, "at": time.monotonic(), **about})
        os.write(self._file, f"{line}\n".encode())

    def reach(self, phase: str, **about: Any) -> None:
        """This process is at a point: note it, and let the faults happen that are due."""
        with self._lock:
            step = self._counts[phase]
            self._counts[phase] += 1
        self.note(phase, step=step, **about)
        due = [x for x in self._faults if x["phase"] == phase and x["step"] == step]
        for fault in due:
            if fault["after"] > 0 and fault["kind"] in DELAYED:
                threading.Thread(target=self._later, args=(fault,), daemon=True).start()
            else:
                self._play(fault)

    def _later(self, fault: Mapping[str, Any]) -> None:
        threading.Event().wait(fault["after"])
        self._play(fault)

    def _play(self, fault: Mapping[str, Any]) -> None:
        kind = fault["kind"]
        if kind in ("corrupt", "truncate"):
            self._damage(fault)
            return
        self.note("fault", **fault)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "freeze":
            self._freeze(fault["seconds"])
        elif kind == "raise":
            raise InjectedError(
                f"The fault laboratory lets worker {self.worker} raise in its phase {fault['phase']!r}."
            )
        elif kind == "slow":
            threading.Event().wait(fault["seconds"])
        elif kind == "notice":
            os.kill(os.getpid(), signal.Signals[fault["signal"]])
        elif kind == "cut":
            for cut in _provided.get("cut", ()):
                cut()
        elif kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        elif kind == "clock":
            _jump(fault["seconds"])

    def _freeze(self, seconds: float) -> None:
        """Stop; the laboratory lets this process go on."""
        self._frozen += 1
        path = self.folder / f"{FROZEN}{os.getpid()}-{self._frozen}"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"pid": os.getpid(), "until": time.monotonic() + seconds}))
        fresh.rename(path)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _damage(self, fault: Mapping[str, Any]) -> None:
        """Damage the newest checkpoint, unless it is the only one that is whole."""
        whole = [path for path in self._committed() if path.is_dir()]
        if len(whole) < 2:
            return
        files = sorted(x for x in whole[-1].rglob("*") if x.is_file() and x.stat().st_size)
        largest = max(files, key=lambda x: x.stat().st_size)
        chosen = random.Random(f"{self._seed} {fault}").choice([*files, largest, largest])
        size = chosen.stat().st_size
        self.note("fault", **fault, path=str(whole[-1]), file=chosen.name)
        if fault["kind"] == "truncate":
            os.truncate(chosen, size // 2)
            return
        middle = size // 2 // _LINE * _LINE  # arrays begin at such places: it is no padding
        with open(chosen, "r+b") as file:
            file.seek(middle)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 0x10]))

    def _committed(self) -> list[Path]:
        """The checkpoints that processes have completed and that no fault has damaged, in order."""
        found: dict[str, float] = {}
        damaged: dict[str, float] = {}
        for path in self.folder.glob(f"{HISTORY}*"):
            for event in _lines(path):
                if event["event"] == "committed":
                    found[event["path"]] = event["at"]
                elif event["event"] == "fault" and event["kind"] in ("corrupt", "truncate"):
                    damaged[event["path"]] = event["at"]
        whole = {path: at for path, at in found.items() if at > damaged.get(path, 0.0)}
        return [Path(path) for path in sorted(whole, key=whole.__getitem__)]


_LINE = 64  # bytes

_provided: dict[str, list[Callable[[], Any]]] = {}
_known: list[LaboratoryProcess | None] = []


def _lines(path: Path) -> list[dict[str, Any]]:
    """The events in a file; the last one may be half written, by a process that was killed."""
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _jump(seconds: float) -> None:
    """Let the clock of this process jump, as far as Python asks `time.time` and `time.time_ns`."""
    before, before_ns = time.time, time.time_ns
    time.time = lambda: before() + seconds
    time.time_ns = lambda: before_ns() + int(seconds * 1e9)


def _laboratory() -> LaboratoryProcess | None:
    """The laboratory of this process; found out late, because workers may be copies of a process."""
    if not _known:
        folder = os.environ.get(FOLDER)
        _known.append(LaboratoryProcess(Path(folder), os.environ) if folder else None)
    return _known[0]


def is_active() -> bool:
    """Whether this process is in a laboratory."""
    return _laboratory() is not None


def note(event: str, **about: Any) -> None:
    """Write a line of the history."""
    laboratory = _known[0] if _known else _laboratory()
    if laboratory is not None:
        laboratory.note(event, **about)


def reach(phase: str, **about: Any) -> None:
    """This process is at a point where faults can happen."""
    laboratory = _known[0] if _known else _laboratory()
    if laboratory is not None:
        laboratory.reach(phase, **about)


def provide(kind: str, fault: Callable[[], Any]) -> None:
    """Say how a fault is done that this layer cannot do."""
    _provided.setdefault(kind, []).append(fault)
