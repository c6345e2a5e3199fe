"""Tells people when workers wait for each other for long, and ends what cannot be freed.

`WaitPolicy` decides what to do, from what it is told; `Watchdog` is the thread around it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from phalanx.errors import PhalanxError
from phalanx.job.device_connections import Gate, cut, tries_to_connect
from phalanx.job.hub.client import Member
from phalanx.job.hub.descriptions import Failure
from phalanx.job.hub.worker_table import WorkerTable, phase_text
from phalanx.runtime.call_site import where_is
from phalanx.runtime.deadlines import STUCK_EXIT_CODE, terminate_patience, worker_deadline

_PERIOD = 0.5
_WARN_AFTER = 5.0  # seconds
_IDLE_GRACE = 4.0  # seconds
_IDLE_SHARE = 0.1  # of one core


@dataclass(frozen=True)
class Observation:
    """What the watchdog sees of its worker; times are those since when something is so."""

    waits_since: float | None = None  # the program waits for other workers
    peers_since: float | None = None  # an operation of px.comm waits for other ranks
    input_since: float | None = None  # the program waits for its own input
    device_waits_since: float | None = None  # the newest program between workers has not finished
    failed_since: float | None = None  # this process knows that the job has a failure
    told: bool = False  # whether the program has been told of the failure by an exception
    is_idle: bool = False  # whether the process has hardly computed since the failure
    seconds: float | None = None  # how long the wait may take, if not as long as any


class WaitPolicy:
    """Decides when to show the table, when to give up, and when to end the process.

    Args:
        warn_after: seconds of waiting after which the table is shown.
        every: seconds after which it is shown again.
        deadline: seconds of waiting after which the job gives up.
        grace: seconds for native code to come back after the job has failed. Code that does not
            compute has less: it waits for what will not come.

    >>> policy = WaitPolicy(warn_after=5.0, every=30.0, deadline=600.0, grace=15.0)
    >>> waits = Observation(waits_since=0.0)
    >>> policy.decide(waits, now=4.0), policy.decide(waits, now=5.0)
    (None, 'show')
    >>> policy.shown(now=5.0)
    >>> policy.decide(waits, now=34.0), policy.decide(waits, now=600.0)
    (None, 'give up')
    """

    def __init__(self, *, warn_after: float, every: float, deadline: float, grace: float) -> None:
        self.warn_after, self.every = warn_after, every
        self.deadline, self.grace = deadline, grace
        self._shown: float | None = None
        self._asked: float | None = None
        self._tried: float | None = None

    def decide(self, seen: Observation, now: float) -> str | None:
        """What to do now: 'show', 'give up', 'end' or None."""
        hidden = (seen.device_waits_since, seen.input_since)
        starts = [t for t in (seen.waits_since, seen.peers_since, *hidden) if t is not None]
        if seen.failed_since is not None:
            untold = not seen.told and any(t is not None for t in hidden)
            hangs = seen.waits_since is not None or untold
            grace = min(self.grace, _IDLE_GRACE) if seen.is_idle else self.grace
            return "end" if hangs and now - seen.failed_since >= grace else None
        if not starts:
            self._shown = self._asked = self._tried = None
            return None
        waited = now - min(starts)
        deadline = self.deadline if seen.seconds is None else seen.seconds
        if waited >= deadline and _due(self._tried, min(self.every, deadline / 10), now):
            self._tried = now
            return "give up"
        due = _due(self._shown, self.every, now) and _due(self._asked, min(self.every, 1.0), now)
        if waited >= min(self.warn_after, deadline / 2) and self._tried is None and due:
            self._asked = now
            return "show"
        return None

    def shown(self, now: float) -> None:
        """The table was shown; there may also have been no worker to wait for."""
        self._shown = now


class FailureClock:
    """Since when this process knows of a failure, without the time in which it did not run.

    A process that was frozen, and goes on after its job has failed, needs its grace like any other.

    >>> clock = FailureClock()
    >>> clock.look(False, 0.0, 0.5), clock.look(True, 1.0, 0.5), clock.look(True, 1.6, 0.5)
    (None, 1.0, 1.0)
    >>> clock.look(True, 9.6, 0.5)  # eight seconds later, of which it ran for one at most
    8.0
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._looked = 0.0

    def look(self, failed: bool, now: float, period: float) -> float | None:
        """What the time is since which it knows; None if there is no failure.

        Args:
            failed: whether it knows of one.
            now: the time, asked for after that.
            period: after how many seconds it should look again.
        """
        if not failed:
            return None
        if self._since is None:
            self._since = now
        else:
            self._since += max(0.0, now - self._looked - 2 * period)
        self._looked = now
        return self._since


def _due(last: float | None, every: float, now: float) -> bool:
    return last is None or now - last >= every


class Watchdog:
    """Watches over one worker in a thread of its own.

    The table of workers is shown after `warn_after` seconds of waiting, by default five, or half of a
    deadline that is shorter than ten, and again after `every` seconds. See `WaitPolicy`.
    """

    def __init__(
        self,
        member: Member,
        *,
        warn_after: float | None = None,
        every: float = 30.0,
        deadline: float | None = None,
        grace: float = 15.0,
        file: TextIO | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        seconds = worker_deadline() if deadline is None else deadline
        self._member = member
        warn_after = min(_WARN_AFTER, seconds / 2) if warn_after is None else warn_after
        self._policy = WaitPolicy(warn_after=warn_after, every=every, deadline=seconds, grace=grace)
        self._file, self._end = file, end
        self._seen: dict[str, tuple[Any, float]] = {}
        self._gate: Gate | None = None
        self._gates: list[Any] = []
        self._failure = FailureClock()
        self._failed_since: float | None = None
        self._computed = 0.0
        self._stopped = threading.Event()
        self._period = min(_PERIOD, max(0.02, min(warn_after, grace, seconds) / 4))
        self._thread = threading.Thread(target=self._run, name="phalanx-watchdog", daemon=True)

    @property
    def deadline(self) -> float:
        """After how many seconds a wait for other workers fails the job."""
        return self._policy.deadline

    def keep(self, gate: Gate, addresses: Sequence[Any]) -> None:
        """Close this gate whenever it need not be open; `addresses` are those of all gates."""
        self._gate, self._gates = gate, list(addresses)

    def start(self) -> Watchdog:
        """Begin to watch."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        if self._gate is not None:
            self._gate.release()

    def name_silent(self) -> None:
        """Say without which workers this one comes to its end: those of which nothing is heard."""
        answer = self._ask(0.0)
        silent = [row for row in answer[0].rows if row["quiet"]] if answer is not None else []
        if silent and self._member.failure is None:
            if terminate_patience() is None:
                until = "; without phalanx run, nothing ends them"
            else:
                seconds = f"{self.deadline:g} seconds (PHALANX_DEADLINE)"
                until = f", or when nothing is heard of those for {seconds}"
            self._write(
                f"phalanx: {self._member.task} has come to its end, and does not wait any longer for "
                f"{', '.join(_describe(row) for row in silent)}. The job ends when all have{until}."
            )

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            now = time.monotonic()
            self._look_at_gates()
            action = self._policy.decide(self._observe(now), now)
            if action == "show":
                if self._show():
                    self._policy.shown(now)
            elif action == "give up":
                self._give_up()
            elif action == "end":
                self._end_process()
                return

    def _look_at_gates(self) -> None:
        if self._gate is None:
            return
        if self._member.failure is not None:
            # Again and again: gloo may have been about to connect when all its connections were cut.
            cut(self._gates)
            return
        self._gate.close()
        if tries_to_connect(self._gates):
            with contextlib.suppress(PhalanxError):
                self._member.knock()

    def _observe(self, now: float) -> Observation:
        member = self._member
        is_new, failed = self._failed_since is None, member.failure is not None
        # Not `now`: the process may have been frozen, and have heard of the failure, since then.
        self._failed_since = self._failure.look(failed, time.monotonic(), self._period)
        if is_new and failed:
            self._computed = time.process_time()
        wait, status, peers = member.wait, member.status, member.status.long_peer_waits(now)
        reads, pending = status.phase == "input", status.pending
        is_ready = pending is None or _is_ready(pending)
        return Observation(
            waits_since=None if wait is None else wait.since,
            peers_since=peers[0].since if peers else None,
            input_since=self._since("input", status.snapshot() if reads else None, now),
            device_waits_since=self._since("devices", None if is_ready else id(pending), now),
            failed_since=self._failed_since,
            told=member.told,
            is_idle=self._is_idle(now),
            seconds=None if wait is None else wait.seconds,
        )

    def _is_idle(self, now: float) -> bool:
        if self._failed_since is None:
            return False
        return time.process_time() - self._computed < _IDLE_SHARE * (now - self._failed_since)

    def _since(self, what: str, current: Any, now: float) -> float | None:
        """Since when something has been the same, as far as was seen; None if it is None."""
        if current is None:
            self._seen.pop(what, None)
            return None
        if what not in self._seen or self._seen[what][0] != current:
            self._seen[what] = (current, now)
        return self._seen[what][1]

    def _ask(self, every: float) -> tuple[WorkerTable, bool] | None:
        try:
            return self._member.table(every=every)
        except (PhalanxError, TimeoutError):
            return None

    def _show(self) -> bool:
        """One worker shows the whole table; the others say only whom they wait for."""
        answer = self._ask(self._policy.every * 0.9)
        if answer is None:
            return False
        table, is_first = answer
        late = self._late(table)
        if not late:
            return False  # all workers are in the same program, which just takes long
        names = [row["worker"] for row in late]
        if self._member.task in names:
            lasts = max(row["seconds"] for row in late)
            said = f"all workers have waited for their input for {lasts:.0f} seconds"
        else:
            site = self._site()
            where = f" at {site}" if site else ""
            places = ", ".join(_describe(row) for row in late)
            said = f"{self._member.task} waits for {', '.join(names)}{where}. Late: {places}"
        self._write(f"phalanx: {said}.")
        if is_first:
            self._write(str(table))
        return True

    def _give_up(self) -> None:
        """Only if a worker has been late for that long: a program may take as long as it takes."""
        answer, wait = self._ask(0.0), self._member.wait
        seconds = wait.seconds if wait is not None and wait.seconds else self._policy.deadline
        if answer is not None and self._late(answer[0], 0.9 * seconds):
            peers = self._member.status.long_peer_waits(time.monotonic())
            what = peers[0].what if peers and wait is None else ""
            self._member.declare_deadline(self._site(), seconds, what)

    def _late(self, table: WorkerTable, seconds: float = 0.0) -> list[dict[str, Any]]:
        """The rows of those that are late: not of this worker, unless all wait for their input."""
        late = [row for row in table.late() if max(row["behind"], row["quiet"]) >= seconds]
        others = [row for row in late if row["worker"] != self._member.task]
        reads = all(row["phase"] == "input" and row["state"] == "joined" for row in table.rows)
        return late if reads and len(late) == len(table.rows) else others

    def _site(self) -> str:
        wait, peers = self._member.wait, self._member.status.long_peer_waits(time.monotonic())
        if wait is not None and wait.site:
            return wait.site
        if peers:
            return peers[0].site
        is_reading = self._member.status.phase == "input"
        return where_is(self._member.status.thread) if is_reading else self._member.status.site

    def _end_process(self) -> None:
        failure = self._member.failure or Failure("", "")
        where = "its input" if self._member.status.phase == "input" else "native code"
        self._write(
            f"phalanx: {self._member.task} hangs in {where} although the job has failed, and is "
            f"ended with exit code {STUCK_EXIT_CODE}. The failure: {failure.text}"
        )
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._end(STUCK_EXIT_CODE)

    def _write(self, text: str) -> None:
        file = self._file or sys.stderr
        try:
            file.write(text + "\n")
            file.flush()
        except (OSError, ValueError):
            self._file = None  # a closed file is no reason to stop watching


def _describe(row: Mapping[str, Any]) -> str:
    """Who is late, and where it has been for how long."""
    return f"{row['worker']} {phase_text(row)}" if row["state"] == "joined" else str(row["worker"])


def _is_ready(pending: Any) -> bool:
    try:
        return bool(pending.is_ready())
    except (RuntimeError, ValueError):  # a deleted or failed array waits for nothing
        return True
