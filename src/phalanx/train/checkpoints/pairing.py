"""Which checkpoint of the first worker is the one that another worker saves.

Workers save together what has the same path at the same place of the program, so one of them may save
more than the others. The first worker says what it saves, in the order of its program. Another
worker looks there for its own path. What it finds in its place may show that the first worker will not
save this path; then it writes alone if no other worker writes there, and else it is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.errors import DeadlineExceededError, InvalidValueError, PhalanxError
from phalanx.job.bootstrap import JobConnection
from phalanx.job.hub.client import Member
from phalanx.train.checkpoints.together import FROZEN

__all__ = ["JointSave", "Pairing", "judge", "pairing_of"]

_RECENT = 16  # checkpoints of which the first worker tells
_LOOK_EVERY = 0.1  # seconds
_QUIET = 1.0  # seconds after which the first worker is believed to save nothing more at this place


@dataclass(frozen=True)
class JointSave:
    """A checkpoint that belongs to all workers, as one of them saves it.

    Args:
        path: the directory that it becomes, absolute.
        count: how often this worker has begun to save to that path, this time included.
        place: how many programs between workers had begun; the same on all at one place of a program.
            -1 in another thread than the one that trains: then it could be anywhere.
        is_counted: whether the directory around says which checkpoints it has.
        needs_all: whether each worker has parts of its own.
        is_done: whether the first worker has come to an end with it.
    """

    path: str
    count: int
    place: int
    is_counted: bool = False
    needs_all: bool = False
    is_done: bool = False

    @property
    def pair(self) -> str:
        """A short name, the same on the workers that save this together."""
        return f"{hashlib.sha256(self.path.encode()).hexdigest()[:16]}.{self.count}"

    @property
    def directory(self) -> str:
        """Where only one worker may write."""
        return str(Path(self.path).parent) if self.is_counted else self.path

    def later_than(self, other: JointSave) -> int:
        """How many programs it is later; 0 if that is not known."""
        return 0 if -1 in (self.place, other.place) else self.place - other.place

    def is_after(self, other: JointSave) -> bool:
        """Whether it has a larger number, where checkpoints of one name are counted."""
        own, others = (re.fullmatch(r"(.*-)(\d+)", save.path) for save in (self, other))
        if not (own and others and self.is_counted and other.is_counted):
            return False
        return own[1] == others[1] and int(own[2]) > int(others[2])


def judge(
    own: JointSave,
    others: Sequence[JointSave],
    directories: Collection[str],
    is_quiet: bool,
    is_alone: bool = False,
) -> JointSave | str:
    """What another worker does that has not heard of its own checkpoint.

    Args:
        own: what it saves.
        others: what the first worker saves and this one does not, as far as it knows.
        directories: of all that the first worker saves.
        is_quiet: whether the first worker has said nothing for a while.
        is_alone: whether this worker has written alone in its directory before.

    Returns:
        "wait", "alone", or what the first worker saves in its place.
    """
    # The first worker waits for this one elsewhere, or has gone on in the program, or counts otherwise.
    certain = [save for save in others if save.needs_all and not save.is_done]
    certain += [save for save in others if save.later_than(own) > 0]
    certain += [save for save in others if save.later_than(own) == 0 and save.is_after(own)]
    if own.needs_all or own.directory in directories:
        return certain[0] if certain else "wait"
    beside = [save for save in others if save.later_than(own) == 0]
    is_over = is_alone or (is_quiet and all(save.is_done for save in beside))
    return "alone" if certain or (beside and is_over) else "wait"


class Pairing:
    """Finds together what the workers of a job save; one for each connection to them.

    Args:
        connection: to the other workers.
        clock: the time.
    """

    def __init__(self, connection: JobConnection, clock: Callable[[], float] = time.monotonic) -> None:
        # Only the connection holds it, so that a job that is over can be forgotten; see `pairing_of`.
        self._member: Member = weakref.proxy(connection.member)
        self._rank = connection.rank
        self._first = str(connection.roster[0]["worker"])
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._told: deque[JointSave] = deque(maxlen=_RECENT)
        self._directories: dict[str, None] = {}
        self._alone: set[str] = set()

    def begin(self, path: Path, is_counted: bool, needs_all: bool) -> JointSave:
        """This worker begins to save; call it in the order of the program."""
        status = self._member.status
        place = status.sequence if status.thread == threading.get_ident() else -1
        with self._lock:
            save = JointSave(str(path.absolute()), 0, place, is_counted, needs_all)
            save = self._counted(save)
            if self._rank == 0:
                self._told.append(save)
                if is_counted:
                    self._directories.pop(save.directory, None)  # the newest are last
                    self._directories[save.directory] = None
                self._tell_all()
        return save

    def end(self, save: JointSave) -> None:
        """The first worker has come to an end with a checkpoint."""
        with self._lock:
            for i, each in enumerate(self._told):
                if each.pair == save.pair:
                    self._told[i] = replace(each, is_done=True)
            with contextlib.suppress(PhalanxError):  # the job has failed
                self._tell_all()

    def give_up(self, path: Path, is_counted: bool, error: BaseException) -> None:
        """This worker cannot save what the others perhaps save."""
        why = f"raised {type(error).__name__}: {error!s:.500}"
        with contextlib.suppress(PhalanxError):  # the job has failed
            save = self.begin(path, is_counted, False)
            if self._rank == 0:
                self._member.tell(f"save {save.pair}", {**asdict(save), "error": why})
                self.end(save)
            else:
                self._member.tell(f"part {save.pair}", {"error": why})

    def _counted(self, save: JointSave) -> JointSave:
        count = self._counts[save.path] = self._counts.get(save.path, 0) + 1
        return replace(save, count=count)

    def _tell_all(self) -> None:
        saves = [asdict(save) for save in self._told]
        directories = list(self._directories)[-_RECENT:]
        self._member.tell("saves", {"saves": saves, "directories": directories})

    # -- another worker ----------------------------------------------------------------------------

    def find(self, own: JointSave, seconds: float) -> tuple[JointSave, dict[str, Any] | None]:
        """Wait until the first worker saves the same.

        Args:
            own: what this worker saves.
            seconds: how long the first worker may neither begin nor write anything else.

        Returns:
            What this worker saves, and what the first one said of it; None if it does not save this,
            and this worker may write alone.
        """
        heard = looked = self._clock()
        while True:
            begun = self._member.hear(f"save {own.pair}", [0], _LOOK_EVERY).get(0)
            now = self._clock()
            if now - looked > FROZEN:  # this process did not run, so it heard nothing
                heard = now
            looked = now
            if begun is not None:
                found = _from_json(begun)
                if found.later_than(own) == 0:
                    with self._lock:
                        self._directories[own.directory] = None
                    return own, begun
                if found.later_than(own) > 0:
                    raise self._contradiction(own, found)
                self._refuse(found, f"has not saved to {own.path!r} at that moment")
                with self._lock:  # the first worker has saved it before, without this one
                    own = self._counted(own)
                continue
            if self._look():
                heard = now
            others = self._others()
            for save in others:
                if not save.is_done and self._member.hear(f"writing {save.pair}", [0], 0.0):
                    heard = now
            if all(save.pair != own.pair for save in self._told):
                is_quiet, is_alone = now - heard >= _QUIET, own.directory in self._alone
                verdict = judge(own, others, self._directories, is_quiet, is_alone)
                if isinstance(verdict, JointSave):
                    raise self._contradiction(own, verdict)
                if verdict == "alone":
                    self._alone.add(own.directory)
                    self._pass_one(own, others)
                    return own, None
            if now - heard >= seconds:
                raise self._nothing_begun(own, others, seconds)

    def _look(self) -> bool:
        """Whether the first worker has said anything new."""
        with self._lock:
            news = self._member.hear("saves", [0], 0.0).get(0)
            if news is not None:
                self._told = deque(map(_from_json, news["saves"]), maxlen=_RECENT)
                self._directories |= dict.fromkeys(news["directories"])
        return news is not None

    def _others(self) -> list[JointSave]:
        """What the first worker saves and this one has not come to."""
        return [save for save in self._told if save.count > self._counts.get(save.path, 0)]

    def _pass_one(self, own: JointSave, others: Sequence[JointSave]) -> None:
        """One of the others was what the first worker saves in place of this one."""
        for save in others:
            if save.later_than(own) == 0 and not save.needs_all:
                self._pass(save)
                return

    def _pass(self, save: JointSave) -> None:
        """This worker will not save that any more."""
        with self._lock:
            self._counts[save.path] = max(save.count, self._counts.get(save.path, 0))

    def _refuse(self, save: JointSave, why: str) -> None:
        """Tell the first worker that there will be no parts of a checkpoint."""
        if save.needs_all:
            self._member.tell(f"part {save.pair}", {"error": why})

    def _contradiction(self, own: JointSave, other: JointSave) -> InvalidValueError:
        if other.needs_all or other.later_than(own) == 0:
            self._pass(other)
        if other.path == own.path:
            what = (
                f"saves to {own.path!r} before {self._first} does, which does so later in the program"
            )
        else:
            what = f"saves to {own.path!r}, and {self._first} to {other.path!r}"
        if other.is_after(own) or own.is_after(other):
            what += (
                ". The numbers differ, because one has saved or restored without the other. Give what "
                "one worker saves alone a px.train.Checkpoint of its own"
            )
        else:
            what += ". Give all workers the same directory, on a file system that all of them see"
        self._refuse(other, what)
        return InvalidValueError(f"This worker {what}. Received: {own.path!r}")

    def _nothing_begun(
        self, own: JointSave, others: Sequence[JointSave], seconds: float
    ) -> DeadlineExceededError:
        last = f", and to {others[-1].path!r} instead" if others else ""
        return DeadlineExceededError(
            f"{self._first} did not begin to save to this path within {seconds:g} seconds "
            f"(PHALANX_DEADLINE){last}. All workers must save the same checkpoints. "
            f"Received: {own.path!r}"
        )


def _from_json(fields: dict[str, Any]) -> JointSave:
    return JointSave(**{name: fields[name] for name in JointSave.__dataclass_fields__})


_pairings: weakref.WeakKeyDictionary[Any, Pairing] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def pairing_of(connection: JobConnection) -> Pairing:
    """What this process and the other workers of a job save; it begins anew with each job."""
    with _lock:
        if connection.member not in _pairings:
            _pairings[connection.member] = Pairing(connection)
        return _pairings[connection.member]
