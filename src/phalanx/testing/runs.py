"""A function that runs on all workers of a `MultiProcess` cluster, and what becomes of it."""

from __future__ import annotations

import contextlib
import functools
import operator
import pickle
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phalanx.errors import DeadlineExceededError, WorkerFailedError, WorkerLostError
from phalanx.job.hub.descriptions import describe_exit

if TYPE_CHECKING:
    from phalanx.testing.multi_process import MultiProcess

__all__ = ["MultiProcessRun", "Reply", "WorkerOutcome"]

_PEER_SECONDS = 10.0
_LAST_LINES = 30


@dataclass(frozen=True)
class WorkerOutcome:
    """What became of a function on one worker.

    `error` is what it raised, or how the process died, and None if it returned `value`. `exit_code` is
    that of a process that died, -n if signal n killed it. `stdout` and `stderr` are what the worker has
    written meanwhile.
    """

    worker: int
    name: str
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None
    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)


@dataclass(frozen=True)
class Reply:
    """What a worker sent, or how it died, as it came; unpacked on demand.

    `kind` is value, error or death, and `content` the pickled value, the parts of the error, or the
    exit code.
    """

    kind: str
    content: Any
    stdout: bytes
    stderr: bytes
    when: float

    def outcome(self, worker: int, name: str) -> WorkerOutcome:
        """The outcome, with its value or exception."""
        stdout, stderr = (text.decode("utf-8", "replace") for text in (self.stdout, self.stderr))
        value: Any = None
        error: BaseException | None = None
        if self.kind == "value":
            try:
                value = pickle.loads(self.content)
            except Exception as problem:  # noqa: BLE001 - whatever a class does when it is unpickled
                error = WorkerFailedError(f"What {name} returned cannot be read here: {problem!r}")
                error.__cause__ = problem
        elif self.kind == "error":
            error = _remote_error(name, *self.content)
        else:
            last = "\n".join(stderr.splitlines()[-_LAST_LINES:])
            error = WorkerLostError(
                f"{name} {describe_exit(self.content)} while it ran the function. "
                + (f"It wrote last:\n{last}" if last else "It wrote nothing to its standard error.")
            )
        code = self.content if self.kind == "death" else None
        return WorkerOutcome(worker, name, value, error, code, stdout, stderr)


def _remote_error(name: str, kind: str, text: str, trace: str, pickled: bytes) -> WorkerFailedError:
    error = WorkerFailedError(f"{name} raised {kind}: {text}\n\nOn {name}:\n{trace}")
    if pickled:
        with contextlib.suppress(Exception):  # then there is no cause, but the text
            error.__cause__ = pickle.loads(pickled)
    return error


class MultiProcessRun:
    """A function that runs on all workers, as `MultiProcess.start` returns it."""

    def __init__(self, cluster: MultiProcess, number: int, call: bytes) -> None:
        self._cluster = cluster
        self.number = number
        self.call = call
        self.replies: dict[int, Reply] = {}
        self._outcomes: dict[int, tuple[Reply, WorkerOutcome]] = {}

    @property
    def done(self) -> bool:
        """Whether the function has ended on all workers, one way or another."""
        return len(self.replies) == len(self._cluster.names)

    def results(self, timeout: float = 60.0) -> list[WorkerOutcome]:
        """What became of the function on each worker, when it has ended on all of them."""
        if not self._cluster.wait(lambda: self.done, timeout):
            raise self._too_late(timeout)
        return [self._outcome(worker) for worker in sorted(self.replies)]

    def result(self, timeout: float = 60.0) -> list[Any]:
        """What the function returned on each worker; raises the first failure.

        After a failure the others get ten seconds to end too, so that their errors are known.
        """
        deadline = time.monotonic() + timeout
        while not self.done:
            until = min(deadline, self._first_failure() + _PEER_SECONDS)
            # Wake up for every reply: it may be the failure that shortens the wait.
            news = functools.partial(operator.ne, self.replies, dict(self.replies))
            if not self._cluster.wait(news, until - time.monotonic()):
                break
        if error := self._first_error():
            raise error
        return [outcome.value for outcome in self.results(0.0)]

    def _first_failure(self) -> float:
        failed = (reply.when for reply in self.replies.values() if reply.kind != "value")
        return min(failed, default=float("inf"))

    def _first_error(self) -> BaseException | None:
        """The first failure, with notes on the others."""
        order = sorted(self.replies, key=lambda worker: self.replies[worker].when)
        errors = [error for worker in order if (error := self._outcome(worker).error) is not None]
        if not errors:
            return None
        first, notes = errors[0], [str(error).splitlines()[0] for error in errors[1:]]
        for note in notes:
            if note not in getattr(first, "__notes__", ()):
                first.add_note(note)
        return first

    def _outcome(self, worker: int) -> WorkerOutcome:
        reply = self.replies[worker]
        if self._outcomes.get(worker, (None,))[0] is not reply:
            name = self._cluster.names[worker]
            self._outcomes[worker] = (reply, reply.outcome(worker, name))
        return self._outcomes[worker][1]

    def _too_late(self, timeout: float) -> DeadlineExceededError:
        names = self._cluster.names
        late = [worker for worker in range(len(names)) if worker not in self.replies]
        listed = ", ".join(names[worker] for worker in late)
        stacks = "".join(
            f"\n\n{names[worker]}:\n{text}" for worker, text in self._cluster.stacks(late).items()
        )
        return DeadlineExceededError(
            f"The function has not ended within {timeout:g} seconds on {listed}. What they do:{stacks}"
        )
