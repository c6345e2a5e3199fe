"""A worker's end of the hub."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from phalanx import __version__
from phalanx.errors import DeadlineExceededError, PhalanxError, UnavailableError
from phalanx.job.hub.connect import connect_to_hub
from phalanx.job.hub.descriptions import Failure, is_broken_connection, shorten
from phalanx.job.hub.worker_reports import LONGEST_SITE, Reporter
from phalanx.job.hub.worker_status import Waiting, WorkerStatus
from phalanx.job.hub.worker_table import WorkerTable
from phalanx.net.client import RequestClient
from phalanx.net.framing import Message
from phalanx.runtime import laboratory
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.thread_stacks import all_stacks

_log = logging.getLogger(__name__)

_INTERVAL = 0.25  # seconds between looks at the status
_ANSWER = 10.0  # seconds within which the hub itself answers
_MOST_NEWS = 10_000  # that are kept for those who ask later

Roster = dict[str, Any]
"""Who is in the job, once all have joined: "members", a list of dicts by rank, and whether there is a
"service" for JAX."""


def versions() -> dict[str, str]:
    """What must be, or should be, the same on all workers."""
    return {
        "phalanx": __version__,
        "jax": metadata.version("jax"),
        "python": platform.python_version(),
    }


class Member:
    """One worker's connection to the hub.

    The constructor connects, trying again until `timeout` has passed, and joins. `wait_joined` waits
    for the others. Methods that wait raise the job's failure as soon as there is one.

    Args:
        address: the hub's ``host:port``.
        token: the job's secret.
        task_type: the type of this process's task.
        task_id: its index.
        cluster: a text that describes the cluster; must be the same on all workers.
        timeout: seconds within which the hub must be reached.
        problem: what is already known to be wrong with this worker; joining then fails the job.
        about: overrides for what is told of this process, such as its versions.

    Attributes:
        status: what this worker is doing, to be written by the training thread; see `WorkerStatus`.
        wait: the innermost wait that is going on, or None.
        told: whether the program has been told of the job's failure by an exception.
    """

    def __init__(
        self,
        address: str,
        token: str,
        task_type: str,
        task_id: int,
        *,
        cluster: str = "",
        timeout: float = 60.0,
        problem: Failure | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.address, self.task = address, f"{task_type} {task_id}"
        self.rank, self.size = -1, 0
        self.status = WorkerStatus()
        self.wait: Waiting | None = None
        self.told = False
        self._failure: Failure | None = None
        self._callbacks: list[Callable[[Failure], None]] = []
        self._knocked: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._roster: Roster | None = None
        self._arrivals: list[dict[str, Any]] = []
        self._exchanged: dict[str, list[Any]] = {}
        self._exchange_counts: dict[str, int] = {}
        self._agreed: set[int] = set()
        self._news: dict[tuple[str, int | None], Any] = {}
        self._listeners: dict[str, Callable[[int | None, Any], None]] = {}
        self._reporter = Reporter(self.status)
        self._closing = False
        self._client = RequestClient(
            connect_to_hub(address, token, timeout),
            "phalanx-member",
            self._handle,
            self._end,
            after_round=self._report_status,
            tick=_INTERVAL,
        )
        self._send(
            {
                "type": "join",
                "task_type": task_type,
                "task_id": task_id,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "cluster": cluster,
                "problem": None if problem is None else problem.as_dict(),
                **versions(),
                **(about or {}),
            }
        )
        _members.add(self)
        self._client.start()

    # -- the job ---------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        """Why the job cannot go on, or None."""
        return self._failure

    def check(self) -> None:
        """Raise the job's failure if there is one."""
        if self._failure is not None:
            raise self._error()

    def _error(self) -> PhalanxError:
        assert self._failure is not None
        self.told = True
        return self._failure.error()

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """Call `callback` once with the job's failure: in the member's thread, or now if known."""
        with self._changed:
            if self._failure is None:
                self._callbacks.append(callback)
                return
        callback(self._failure)

    def on_knock(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in the member's thread, whenever devices of workers want to connect."""
        self._knocked = callback

    def knock(self) -> None:
        """Tell all workers that devices want to connect."""
        self._send({"type": "knock"})

    def wait_joined(
        self, timeout: float, progress: Callable[[dict[str, Any]], None] | None = None
    ) -> Roster:
        """Wait for all workers to join; `progress` is called with each message about one that has."""
        end = time.monotonic() + timeout
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._roster or self._failure or self._arrivals,
                    max(0.0, end - time.monotonic()),
                )
                news, self._arrivals = self._arrivals, []
            for arrival in news:
                if progress is not None:
                    progress(arrival)
            self.check()
            if self._roster is not None:
                return self._roster
            if not news and time.monotonic() >= end:
                raise self.late("the start", timeout)

    def meet(self, name: str, timeout: float) -> bool:
        """Wait until all workers are at the same place, or have finished; returns whether they are.

        A worker that is there runs no more programs: those who do fail, instead of waiting for it.
        Unlike the other methods that wait, this one raises nothing: a job that has failed, or workers
        that do not come in time, are just not there.
        """
        key = f"meet {name}"
        if self._failure is None and not self._closing:
            last, operations = int(self.status.sequence), self.status.operations()
            post = {"type": "post", "name": key, "value": None}
            self._send({**post, "last": last, "operations": operations})
            with self._changed:
                self._changed.wait_for(lambda: key in self._exchanged or self._failure, timeout)
        return self._exchanged.pop(key, None) is not None

    def exchange(
        self,
        name: str,
        value: Any,
        timeout: float | None = None,
        given_up: threading.Event | None = None,
    ) -> list[Any]:
        """Give `value` to all workers and get theirs, by rank; None for workers that have finished.

        Values must be small and as JSON has them. All workers must exchange under the same names in the
        same order. If `given_up` is given, the call is made ahead, by another thread than the one that
        trains: it is not shown as waiting, and once the event is set it returns what it knows.
        """
        self.check()
        count = self._exchange_counts[name] = self._exchange_counts.get(name, 0) + 1
        key = f"{name}#{count}"
        self._send({"type": "post", "name": key, "value": value})
        if given_up is not None:
            return self._exchange_ahead(key, value, given_up)
        with self.waiting(""):
            self._wait_for(lambda: key in self._exchanged, f"the exchange {name!r}", timeout)
        return self._exchanged.pop(key)

    def _exchange_ahead(self, key: str, value: Any, given_up: threading.Event) -> list[Any]:
        """Wait as long as it takes: the thread that trains has the deadline."""
        while not given_up.is_set():
            with self._changed:
                done = lambda: key in self._exchanged or self._failure is not None  # noqa: E731
                if not self._changed.wait_for(done, _INTERVAL):
                    continue
            self.check()
            return self._exchanged.pop(key)
        return [value]

    def tell(self, name: str, value: Any = None) -> None:
        """Tell all other workers something small; none waits for it. See `hear`."""
        self.check()
        self._send({"type": "tell", "name": name, "value": value})

    def hear(self, name: str, ranks: Sequence[int], timeout: float) -> dict[int, Any]:
        """Wait until some workers have told something, once under each name; returns it by rank.

        Any thread may wait here: it is not shown as a wait of the training. Who has told nothing when
        the time is over is missing in the result.
        """
        keys = [(name, rank) for rank in ranks]
        with self._changed:
            self._changed.wait_for(
                lambda: all(key in self._news for key in keys) or self._failure is not None, timeout
            )
            found = {
                rank: self._news.pop((name, rank)) for _, rank in keys if (name, rank) in self._news
            }
        if len(found) < len(keys):
            self.check()
        return found

    def when_told(self, name: str, callback: Callable[[int | None, Any], None] | None) -> None:
        """Call `callback` in the member's thread with the rank and what it tells under a name.

        The rank is None for news of the launcher. What is told before there is a callback is kept for
        it. None ends it.
        """
        with self._changed:
            kept = [key for key in self._news if key[0] == name] if callback is not None else []
            earlier = [(rank, self._news.pop((name, rank))) for _, rank in kept]
            if callback is None:
                self._listeners.pop(name, None)
            else:
                self._listeners[name] = callback
        for rank, value in earlier:
            assert callback is not None
            callback(rank, value)

    def agree(self, sequence: int, digest: str, details: Any, timeout: float | None = None) -> None:
        """Wait until all workers have come to program `sequence` with the same digest.

        Args:
            sequence: the number of the program in the order that all workers keep.
            digest: a hash of everything that must be the same.
            details: a dict that shows it to people: ``operation``, ``arrays``, ``site``. Give the same
                object to `WorkerStatus.begin` whenever the program runs, so that runs can be compared.
            timeout: seconds to wait, by default PHALANX_DEADLINE.
        """
        self.check()
        site = str(details.get("site", "")) if isinstance(details, Mapping) else ""
        self._reporter.remember(details, digest)
        self._send({"type": "sign", "sequence": sequence, "digest": digest, "details": details})
        with self.waiting(site):
            self._wait_for(lambda: sequence in self._agreed, site, timeout)
        self._agreed.discard(sequence)

    def waiting(self, site: str) -> Waiting:
        """Marks a wait for other workers; a context manager. See `Waiting`."""
        return Waiting(self, site)

    def cause_of(self, error: BaseException, timeout: float = 2.0) -> PhalanxError | None:
        """The job's failure as an exception, if `error` is only its echo.

        A worker whose peer dies gets an error of a broken connection, often before the hub has said
        who died: this waits a moment for it.
        """
        if isinstance(error, PhalanxError) or not is_broken_connection(error):
            return None
        if self._failure is None:
            self._send({"type": "broken", "site": self.status.site})
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, timeout)
        return None if self._failure is None else self._error()

    def report_exception(self, error: BaseException) -> None:
        """Tell all workers that this one has failed; returns when the hub knows."""
        if isinstance(error, PhalanxError) and self._failure is not None:
            return  # it was the others' failure in the first place
        shown = "".join(traceback.format_exception(error))
        headline = "".join(traceback.format_exception_only(error)).strip()
        who = f"{self.task} (pid {os.getpid()} on {socket.gethostname()})"
        self.report(Failure("raised", f"{who} raised {headline}\n\n{shown}", self.task))

    def report(self, failure: Failure, timeout: float = 5.0) -> None:
        """Tell all workers that the job cannot go on; returns when the hub knows."""
        message = {"type": "fail", "kind": failure.kind, "text": shorten(failure.text)}
        with contextlib.suppress(PhalanxError):
            self._ask(message, timeout)

    def declare_deadline(
        self, site: str, seconds: float, what: str = "", ranks: Sequence[int] = ()
    ) -> None:
        """Tell the hub that this worker has waited for too long; the job's failure follows.

        `ranks` are those that it has waited for, if it knows.
        """
        site, what = site[:LONGEST_SITE], what[:LONGEST_SITE]
        about = {"site": site, "seconds": seconds, "what": what, "ranks": list(ranks)}
        self._send({"type": "deadline", **about})

    def table(self, every: float = 0.0, timeout: float = _ANSWER) -> tuple[WorkerTable, bool]:
        """Who does what, and whether this member should show it.

        That is so if a worker is late, and no member has shown it in the last `every` seconds.
        """
        answer = self._ask({"type": "table", "every": every}, timeout)
        return WorkerTable(answer["rows"]), bool(answer["first"])

    def come_to_end(self, patience: float) -> None:
        """Say that this worker has nothing left to do, and for how long it would wait for the others.

        Those who are silent for longer need not be waited for: the launcher ends them.
        """
        if not self._closing:
            self._send({"type": "end", "patience": patience})

    def leave(self, timeout: float = 2.0) -> None:
        """Say that this worker has finished, and close the connection."""
        if self._closing:
            return
        self.status.phase = "done"
        with contextlib.suppress(PhalanxError):
            self._ask({"type": "leave"}, timeout)
        self._closing = True
        self._client.close(timeout)
        _members.discard(self)

    # -- waiting -----------------------------------------------------------------------------------

    def _wait_for(self, done: Callable[[], bool], site: str, timeout: float | None) -> None:
        seconds = worker_deadline() if timeout is None else timeout
        with self._changed:
            self._changed.wait_for(lambda: done() or self._failure is not None, seconds)
        self.check()  # first: what is done after a failure was done without those who are gone
        if not done():
            raise self.late(site, seconds)

    def late(
        self, site: str, seconds: float, what: str = "", ranks: Sequence[int] = ()
    ) -> PhalanxError:
        """Let the hub say who is late, on all workers; returns the error to raise."""
        self.declare_deadline(site, seconds, what, ranks)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None, _ANSWER)
        if self._failure is not None:
            return self._error()
        return DeadlineExceededError(
            f"{self.task} waited for {seconds:g} seconds at {site}, and the hub at {self.address} does "
            "not answer."
        )

    def _ask(self, message: Mapping[str, Any], timeout: float) -> Mapping[str, Any]:
        try:
            return self._client.request(message, timeout=timeout).fields
        except UnavailableError:
            raise (self._failure or self._gone()).error() from None

    # -- the thread --------------------------------------------------------------------------------

    def _send(self, message: Mapping[str, Any]) -> None:
        self._client.send(message)

    def _report_status(self) -> None:
        message = self._reporter.message(time.monotonic())
        if message is not None:
            self._send(message)

    def _handle(self, received: Message) -> None:
        message = dict(received.fields)
        kind = message["type"]
        if kind == "stack?":
            answer = {"type": "stack", "text": shorten(all_stacks())}
            self._client.send(answer, number=received.number)
            return
        if kind == "ran?":
            number = message["sequence"]
            self._send({"type": "ran", "sequence": number, "details": self.status.ran(number)})
            return
        if kind == "knock":
            self._knocked()
            return
        if kind == "failure":
            self._fail(Failure.from_dict(message))
            return
        if kind == "told":
            self._note(str(message["name"]), message["rank"], message["value"])
            return
        with self._changed:
            if kind == "welcome":
                self.rank, self.size = message["rank"], message["size"]
                self.task = str(message["name"])
            elif kind == "joined":
                self._arrivals.append(message)
            elif kind == "ready":
                self._roster = message
            elif kind == "exchanged":
                self._exchanged[message["name"]] = message["values"]
            elif kind == "agreed":
                self._agreed.add(message["sequence"])
            self._changed.notify_all()

    def _note(self, name: str, rank: int | None, value: Any) -> None:
        with self._changed:
            listener = self._listeners.get(name)
            if listener is None:
                self._news[name, rank] = value
                while len(self._news) > _MOST_NEWS:  # which no thread wanted to hear
                    self._news.pop(next(iter(self._news)))
                self._changed.notify_all()
        if listener is not None:
            listener(rank, value)

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = failure
            laboratory.note("failure", kind=failure.kind, task=failure.task, text=failure.text)
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            try:
                callback(failure)
            except Exception:  # noqa: BLE001 - the others and this thread must go on
                _log.exception("A callback for the failure of the job failed")

    def _gone(self) -> Failure:
        text = (
            f"The connection of {self.task} to the hub at {self.address} has closed. The hub runs in "
            "the launcher, or next to the first worker: that machine is down, or the job was stopped."
        )
        return Failure("hub", text)

    def _end(self) -> None:
        self._fail(self._gone())
        self._closing = True


_members: weakref.WeakSet[Member] = weakref.WeakSet()


def _close_in_child() -> None:
    # A child that keeps the socket open would hide the death of its parent from the hub.
    for member in list(_members):
        member._client.socket.close()
        member._closing = True
    _members.clear()


os.register_at_fork(after_in_child=_close_in_child)
