"""When a job is over, how its processes are ended, and with which code.

The rules are a state machine without a clock of its own: events and times in, signals out.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.job.launch.worker_process import shell_code
from phalanx.runtime.deadlines import STUCK_EXIT_CODE

TIMEOUT_CODE = 124
"""The exit code of a job that took too long, as of the command ``timeout``."""

LEFT_CODE = 128 + int(signal.SIGTERM)
"""The exit code of a worker that has left because its machine will be taken away."""


class EndReason(enum.Enum):
    """Why the processes of a job are being ended."""

    DONE = "done"
    """All that the job waits for has succeeded; parameter servers never end by themselves."""
    FAILURE = "failure"
    """A process has failed."""
    INTERRUPT = "interrupt"
    """The user asked for it: Ctrl-C, or a signal."""
    TIMEOUT = "timeout"
    """The job took longer than it may."""


@dataclass(frozen=True)
class Patience:
    """How many seconds processes get to end by themselves before something stronger is done."""

    peers: float = 3.0  # after the first failure: the others find out and say what they saw
    interrupt: float = 5.0  # after SIGINT
    terminate: float = 10.0  # after SIGTERM
    kill: float = 5.0  # after SIGKILL, which a process in a system call may outlive for a while
    finish: float = 10.0  # after SIGTERM to those that are left when the job has succeeded

    def plan(self, reason: EndReason, signum: int) -> list[tuple[int, float]]:
        """The signals to send for a reason, each with the seconds to wait after it; 0 is none."""
        terminate = [(int(signal.SIGTERM), self.terminate), (int(signal.SIGKILL), self.kill)]
        if reason is EndReason.DONE:
            return [(int(signal.SIGTERM), self.finish), terminate[-1]]
        if reason is EndReason.FAILURE:
            return [(0, self.peers), *terminate]
        if reason is EndReason.INTERRUPT and signum == signal.SIGINT:
            return [(signum, self.interrupt), *terminate]
        return terminate


DEFAULT_PATIENCE = Patience()


class ExitPolicy:
    """Follows the processes of a job and says which signals they are to get.

    Args:
        essential: for each process, whether the job waits for it to succeed; the others are ended
            when all essential ones are done.
        patience: how long to wait for processes that should end.
        restarts: for each process, how often it is started again after a failure; the default is 0.
        expendable: for each process, whether the job goes on after its failure, as long as another
            such process is left; the default is that it does not.
        all_train: asked whether expendable processes are essential after all, and not expendable.

    Examples:
        >>> ending = ExitPolicy([True, True])
        >>> ending.exited(1, 3, now=0.0)
        >>> ending.signal(now=0.0), ending.deadline
        (0, 3.0)
        >>> ending.signal(now=3.0) == signal.SIGTERM
        True
        >>> ending.exited(0, -15, now=3.1)
        >>> ending.over(now=3.1), ending.exit_code
        (True, 3)
        >>> ending = ExitPolicy([True, False], restarts=[0, 1])
        >>> ending.exited(1, -9, now=0.0)
        >>> ending.goes_on(1), ending.restarted[1]
        (True, 1)
        >>> ending = ExitPolicy([True, False], expendable=[False, True], all_train=lambda: True)
        >>> ending.exited(0, 0, now=0.0)
        >>> ending.reason, ending.exited(1, 0, now=1.0), ending.reason
        (None, None, <EndReason.DONE: 'done'>)
    """

    def __init__(
        self,
        essential: Sequence[bool],
        patience: Patience = DEFAULT_PATIENCE,
        restarts: Sequence[int] | None = None,
        expendable: Sequence[bool] | None = None,
        all_train: Callable[[], bool] = lambda: False,
    ) -> None:
        self.codes: list[int | None] = [None] * len(essential)
        self.first_failure: int | None = None
        self.reason: EndReason | None = None
        self.deadline: float | None = None
        self.restarted = [0] * len(essential)
        self._essential = list(essential)
        self._restarts = list(restarts or [0] * len(essential))
        self._expendable = list(expendable or [False] * len(essential))
        self._all_train = all_train
        self._dispensed: set[int] = set()  # those that have failed, and were not needed then
        self._patience = patience
        self._plan: list[tuple[int, float]] = []
        self._signum = 0
        self._signalled = False
        self._killed: set[int] = set()
        self.by_itself = [False] * len(essential)

    # -- events ---------------------------------------------------------------------------------

    def exited(self, index: int, code: int, now: float) -> None:
        """A process has ended; `goes_on` tells whether it is to be started again."""
        if code != 0 and self.reason is None and self.restarted[index] < self._restarts[index]:
            self.restarted[index] += 1
            self._killed.discard(index)
            return
        self.codes[index] = code
        self.by_itself[index] = not self._signalled and index not in self._killed
        if self.reason is not None:
            return
        if code != 0 and not self._is_dispensable(index):
            self.first_failure = index
            self._begin(EndReason.FAILURE, now)
        elif code != 0:
            self._dispensed.add(index)
        elif all(self.codes[i] == 0 for i in self._awaited()):
            self._begin(EndReason.DONE, now)

    def kills(self, index: int) -> None:
        """A process is killed, so that it does not end by itself."""
        self._killed.add(index)

    def interrupt(self, signum: int, now: float) -> None:
        """The user wants the job to end; each further time, the next stronger signal is due at once."""
        if self.reason in (EndReason.INTERRUPT, EndReason.DONE):
            self.deadline = now
        else:
            self._signum = signum
            self._begin(EndReason.INTERRUPT, now)

    def timeout(self, now: float) -> None:
        """The job has taken too long."""
        if self.reason is None:
            self._begin(EndReason.TIMEOUT, now)

    # -- answers --------------------------------------------------------------------------------

    def signal(self, now: float) -> int:
        """The signal that the processes that are left are to get now, 0 for none."""
        if self.deadline is None or now < self.deadline or not self._plan:
            return 0
        signum, seconds = self._plan.pop(0)
        self.deadline = now + seconds
        self._signalled = self._signalled or signum != 0
        return signum

    def over(self, now: float) -> bool:
        """Whether all processes have ended, or cannot be ended."""
        if all(code is not None for code in self.codes):
            return True
        return self.deadline is not None and not self._plan and now >= self.deadline

    def goes_on(self, index: int) -> bool:
        """Whether a process is to run: it does, or is to be started again."""
        return self.codes[index] is None

    @property
    def succeeded(self) -> bool:
        """Whether all processes have succeeded; those that were ended after the others count."""
        done = self.reason in (None, EndReason.DONE)
        return all(
            code == 0 or (done and not essential and (expendable or not by_itself))
            for code, essential, expendable, by_itself in zip(
                self.codes, self._essential, self._expendable, self.by_itself, strict=True
            )
        )

    @property
    def exit_code(self) -> int:
        """The code of the job, as a shell gives it: 0 exactly if it succeeded."""
        if self.succeeded:
            return 0
        if self.first_failure is not None:
            return shell_code(self.codes[self.first_failure] or 0)
        if self.reason is EndReason.TIMEOUT:
            return TIMEOUT_CODE
        if self.reason is EndReason.INTERRUPT:
            return shell_code(-self._signum)
        return shell_code(-int(signal.SIGKILL))

    def _is_dispensable(self, index: int) -> bool:
        """Whether the job goes on without a process that has failed."""
        if self._all_train():
            return False
        others = zip(self.codes, self._expendable, strict=True)
        return self._expendable[index] and any(code is None and other for code, other in others)

    def _awaited(self) -> list[int]:
        """The processes that must succeed."""
        chosen = [self._essential]
        if self._all_train():
            chosen.append(self._expendable)
        return [
            i for i, of in enumerate(zip(*chosen, strict=True)) if any(of) and i not in self._dispensed
        ]

    def _begin(self, reason: EndReason, now: float) -> None:
        self.reason = reason
        self._plan = self._patience.plan(reason, self._signum)
        self.deadline = now


class ElasticExitPolicy(ExitPolicy):
    """The rules for a job whose workers come and go: who is lost is no failure, who fails is one.

    A worker is lost if a signal has ended it, or if it has ended itself because native code did not
    come back, or if it left because its machine will be taken away. Any other exit code but 0 is a
    failure of the program, which would fail on other machines too.

    Args:
        most: how many processes there may be at a time.
        patience: how long to wait for processes that should end.

    Examples:
        >>> ending = ElasticExitPolicy(2)
        >>> ending.starts(0), ending.starts(1)
        (None, None)
        >>> ending.exited(1, -9, now=0.0)
        >>> ending.reason, ending.exited(0, 0, now=1.0), ending.exit_code
        (None, None, 0)
    """

    def __init__(self, most: int, patience: Patience = DEFAULT_PATIENCE) -> None:
        super().__init__([True] * most, patience)
        self.codes = [0] * most  # of places at which no process has been started yet
        self._has_succeeded = self._has_failed = False
        self._last_lost: int | None = None
        self._lost_code = 0
        self._missed_code = 0

    def starts(self, index: int) -> None:
        """A process is started at a place."""
        self.codes[index] = None
        self._killed.discard(index)

    def exited(self, index: int, code: int, now: float) -> None:
        """A process has ended."""
        self.codes[index] = code
        self.by_itself[index] = not self._signalled and index not in self._killed
        if self.reason is not None:
            return
        self._has_succeeded = self._has_succeeded or code == 0
        if is_lost(code):
            self._last_lost, self._lost_code = index, code
        elif code != 0:
            self.fail(now, index)

    def fail(self, now: float, index: int | None = None) -> None:
        """The job cannot go on: for a process, or because too few are left."""
        if self.reason is None:
            self._has_failed = index is None
            self.first_failure = self._last_lost if index is None else index
            self._begin(EndReason.FAILURE, now)

    def misses(self, code: int) -> None:
        """A worker was lost after the training, and none does what it had left to do."""
        self._missed_code = self._missed_code or code

    @property
    def succeeded(self) -> bool:
        """Whether a worker has come to the end of the program, and nothing went wrong."""
        is_whole = self._has_succeeded and not self._missed_code
        return is_whole and self.reason in (None, EndReason.DONE)

    @property
    def exit_code(self) -> int:
        """The code of the job, as a shell gives it: 0 exactly if it succeeded."""
        have_all_left = self.reason is None and not self.succeeded
        if self._has_failed or have_all_left:  # a new process may run where the last one was lost
            return shell_code(self._missed_code or self._lost_code) or 1
        return super().exit_code


def has_left(code: int) -> bool:
    """Whether an exit code says that the process has ended because of a notice; see `LEFT_CODE`.

    The signals are those of notices, which end a process that has not said yet what it does then.

    >>> has_left(143), has_left(-15), has_left(-10), has_left(-9)
    (True, True, True, False)
    """
    return code in (LEFT_CODE, -signal.SIGTERM, -signal.SIGUSR1)


def is_lost(code: int) -> bool:
    """Whether an exit code says that the machine or the process was lost, not that the program failed.

    >>> is_lost(-9), is_lost(143), is_lost(70), is_lost(1), is_lost(0)
    (True, True, True, False, False)
    """
    return code < 0 or code in (LEFT_CODE, 128 + signal.SIGKILL, STUCK_EXIT_CODE)
