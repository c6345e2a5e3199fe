"""Tasks, failures and programs as plain data, and the sentences that describe them."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx import errors

PHASES = ("start", "trace", "compile", "step", "input", "wait", "done")
"""What a worker can be doing. `wait` is waiting for other workers."""

PREEMPTION = "preemption"
"""Under which name a launcher tells workers that machines will be taken away."""

LONGEST_TEXT = 64 * 1024


@dataclass(frozen=True, order=True)
class Task:
    """One process of a job: its type, its index, its address, and its name for people.

    >>> print(Task("worker", 1, "host1:2222"))
    worker 1
    """

    type: str
    id: int
    address: str = field(default="", compare=False)
    name: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return self.name or f"{self.type} {self.id}"


_ERRORS: dict[str, type[errors.PhalanxError]] = {
    "died": errors.WorkerLostError,
    "left": errors.WorkerLostError,
    "exited": errors.WorkerLostError,
    "raised": errors.WorkerFailedError,
    "mismatch": errors.CollectiveMismatchError,
    "deadline": errors.DeadlineExceededError,
    "duplicate": errors.DuplicateTaskError,
    "version": errors.VersionMismatchError,
    "cluster": errors.ClusterEnvironmentError,
    "precondition": errors.FailedPreconditionError,
    "hub": errors.HubLostError,
}


@dataclass(frozen=True)
class Failure:
    """Why a job cannot go on. All of its workers are told the same.

    `kind` is one of the keys of `_ERRORS`; `task` is the task it is about, '' if it is about several.

    >>> Failure("died", "worker 1 died.", "worker 1").error()
    WorkerLostError('worker 1 died.')
    """

    kind: str
    text: str
    task: str = ""

    def error(self) -> errors.PhalanxError:
        """A new exception that says this."""
        return _ERRORS.get(self.kind, errors.UnknownError)(self.text)

    def as_dict(self) -> dict[str, str]:
        """The failure as JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Failure:
        """The failure that `as_dict` wrote."""
        return cls(str(data.get("kind", "")), str(data.get("text", "")), str(data.get("task", "")))


def shorten(text: str, limit: int = LONGEST_TEXT) -> str:
    r"""The text itself, or its beginning and its end where it is longer than the limit.

    >>> shorten("abcdefghij", 6)
    'abc\n[4 characters left out]\nhij'
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def describe_exit(code: int) -> str:
    """How a process ended, from its exit code as `subprocess` gives it.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by signal 9 (SIGKILL)', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal_name(-code) or 'unknown'})"


def signal_name(number: int) -> str:
    """The name of a signal, '' if it has none."""
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def describe_program(details: Any) -> str:
    """One line about a program that communicates.

    `details` is a dict; ``operation``, ``arrays`` (a list such as ``["float32[2,3]"]``) and ``site``
    are shown first and any others after them. Anything else is shown as it is.

    >>> describe_program({"operation": "all_reduce SUM", "arrays": ["float32[2,3]"], "site": "a.py:3"})
    'all_reduce SUM of float32[2,3] at a.py:3'
    """
    if not isinstance(details, Mapping):
        return str(details)
    known = {"operation", "arrays", "site"}
    arrays = details.get("arrays")
    listed = ", ".join(map(str, arrays)) if isinstance(arrays, Sequence) else arrays
    text = str(details.get("operation") or "a program")
    text += f" of {listed}" if listed else ""
    text += f" at {details['site']}" if details.get("site") else ""
    others = [f"{key}={value}" for key, value in details.items() if key not in known]
    return text + (f" ({', '.join(others)})" if others else "")


def mismatch_text(sequence: int, programs: Mapping[str, Any], passed: Mapping[str, Any]) -> str:
    """What is said when workers come to different programs.

    `programs` are what workers were about to run for the first time, at a number in the order that all
    must keep; `passed` are those that were known already, None where they are not remembered.
    """
    rule = (
        f"The workers came to different programs at number {sequence}. All workers must run the same "
        "programs in the same order, with arrays of the same shapes and dtypes."
    )
    lines = [rule]
    lines += [f"  {task}: {describe_program(details)}" for task, details in sorted(programs.items())]
    lines += [
        f"  {task}: " + ("a program that it knew" if details is None else describe_program(details))
        for task, details in sorted(passed.items())
    ]
    lines.append(
        "Usually a branch on the worker's id surrounds a collective, or the workers have batches of "
        "different sizes: communicate outside of the branch, and drop or pad the last batch."
    )
    return "\n".join(lines)


_MARKS = (
    "gloo",
    "nccl",
    "connection closed",
    "connection reset",
    "broken pipe",
    "timed out waiting",
    "unavailable:",
    "deadline_exceeded",
    "coordination service",
)


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error reads as if another process had gone away.

    >>> is_broken_connection(ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    True
    >>> is_broken_connection(ValueError("a and b differ"))
    False
    """
    text = str(error).lower()
    return isinstance(error, ValueError | RuntimeError | OSError) and any(m in text for m in _MARKS)
