"""How a checkpoint is saved: at once or in another thread, by this process or by all workers together.

Workers meet in no collective. The first worker says where it writes, each worker that has parts of its
own writes them there, and the first one, when it has heard of all, gives the directory its name. If
the first worker has everything, it waits for none. What they tell each other goes through the hub.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import AbortedError, DeadlineExceededError, InvalidValueError, PhalanxError
from phalanx.job.bootstrap import JobConnection
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell, start
from phalanx.runtime.processes import lower_priority
from phalanx.train.checkpoints import directories, files, orbax_files
from phalanx.train.checkpoints.contents import Contents
from phalanx.train.checkpoints.options import CheckpointOptions
from phalanx.train.checkpoints.pairing import JointSave, pairing_of
from phalanx.train.checkpoints.progress import ProgressLine
from phalanx.train.checkpoints.together import Pulse, hear_from_writers

__all__ = ["Order", "Saver"]

_log = logging.getLogger("phalanx")

_PAUSE_PER_BYTE = 2.5e-10  # seconds before a save in the background begins, some times those of a copy
_LONGEST_PAUSE = 0.25


@dataclass(frozen=True)
class Order:
    """A checkpoint to save.

    Args:
        path: the directory that it becomes.
        contents: what this process writes.
        options: how.
        connection: to the other workers, if the checkpoint is theirs too.
        joint: the checkpoint as one of all workers, if it is.
        written: called when the checkpoint is there, by the process that gave it its name.
        followed: called when another worker has done so.
    """

    path: Path
    contents: Contents
    options: CheckpointOptions
    connection: JobConnection | None = None
    joint: JointSave | None = None
    written: Callable[[], None] = lambda: None
    followed: Callable[[], None] = lambda: None


class Saver:
    """Saves one checkpoint after another."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_over = True
        self._bell, self._hurry = Bell(), Bell()
        self._error: BaseException | None = None

    def save(self, order: Order) -> None:
        """Save a checkpoint, after the one that is under way."""
        self.wait()
        if not order.options.is_async:
            with _waiting(order):
                _perform(order)
            return
        # No daemon, so that the end of the program waits for the checkpoint.
        thread = threading.Thread(target=self._run, args=(order,), name="phalanx-checkpoint")
        self._thread, self._is_over, self._hurry = thread, False, Bell()
        try:
            start(thread)
        finally:
            if thread.ident is None:  # there are too many threads, say, or Ctrl-C was quicker
                self._thread, self._is_over = None, True

    def _run(self, order: Order) -> None:
        lower_priority()
        # The next step takes new memory in place of what is saved, and takes longest for that.
        self._hurry.wait(min(order.contents.size * _PAUSE_PER_BYTE, _LONGEST_PAUSE))
        try:
            _perform(order)
        except BaseException as error:  # noqa: BLE001 - the thread that trains is told
            self._error = error
            _log.error("The checkpoint %s was not saved: %s", order.path, error)
        finally:
            self._is_over = True
            self._bell.ring()

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is under way in another thread."""
        return self._thread is not None and not self._is_over

    def wait(self) -> None:
        """Wait for the checkpoint that is under way, and raise what went wrong with it."""
        self.settle()
        self.raise_failure()

    def settle(self) -> None:
        """Wait for the checkpoint that is under way."""
        if self._thread is threading.current_thread():  # a callback of a checkpoint that is complete
            return
        # Not by joining the thread: Python takes it for ended if Ctrl-C ends the join.
        self._hurry.ring()
        while self.is_saving:
            self._bell.wait(1.0)
        self._bell.ring()  # another thread may wait, too

    def raise_failure(self) -> None:
        """Raise what went wrong with the last checkpoint, if it has ended."""
        if self.is_saving:
            return
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _waiting(order: Order) -> contextlib.AbstractContextManager[Any]:
    """Lets the other workers see where this one is."""
    if order.connection is None or order.connection.rank == 0:
        return contextlib.nullcontext()
    return order.connection.member.waiting(f"saving {order.path}")


def _perform(order: Order) -> None:
    if order.connection is None or order.joint is None:
        _write_alone(order)
    elif order.connection.rank == 0:
        _lead(order, order.connection, order.joint)
    else:
        _follow(order, order.connection, order.joint)
    for callback in order.options.experimental_write_callbacks or ():
        takes_path = len(inspect.signature(callback).parameters) > 0
        callback(str(order.path)) if takes_path else callback()


def _write_alone(order: Order) -> None:
    partial = directories.begin(order.path)
    try:
        _write_and_commit(order, partial, lambda own: [own])
    except BaseException:
        directories.discard(partial)
        raise


def _write_and_commit(
    order: Order,
    partial: Path,
    gather: Callable[[Any], list[Any]],
    beat: Callable[[], None] = lambda: None,
) -> None:
    line = ProgressLine(f"Saving {order.path.name}", order.contents.size)

    def progress(count: int) -> None:
        line.add(count)
        beat()

    contents, is_orbax = order.contents, order.options.format == "orbax"
    if is_orbax and order.connection is None:
        orbax_files.write(partial, order.path, contents)
    else:
        own = files.write_part(partial, 0, contents.arrays, contents.values, progress)
        beat()
        parts = gather(own)
        beat()
        if is_orbax:
            files.write_index(partial, parts)
            orbax_files.write_elsewhere(partial, order.path, worker_deadline())
            directories.discard(partial)
        else:
            files.commit(partial, order.path, parts)
    order.written()
    line.done()


# -- several workers -------------------------------------------------------------------------------


def _lead(order: Order, connection: JobConnection, joint: JointSave) -> None:
    """The first worker's part."""
    member, pair = connection.member, joint.pair
    partial: Path | None = None
    try:
        partial = directories.begin(order.path)
        member.tell(f"save {pair}", {**asdict(joint), "partial": str(partial.absolute())})

        def gather(own: Any) -> list[Any]:
            others = _parts_of_others(order, connection, joint, partial) if joint.needs_all else []
            return [own, *others]

        _write_and_commit(order, partial, gather, Pulse(member, pair).beat)
    except BaseException as error:
        with contextlib.suppress(PhalanxError):  # the job has failed
            if partial is None:
                member.tell(f"save {pair}", {**asdict(joint), "error": _told(error)})
            member.tell(f"saved {pair}", {"error": _told(error)})
        if partial is not None:
            directories.discard(partial)
        raise
    finally:
        pairing_of(connection).end(joint)
    member.tell(f"saved {pair}", {})


def _parts_of_others(
    order: Order, connection: JobConnection, joint: JointSave, partial: Path
) -> list[Any]:
    others = range(1, connection.size)
    seconds = worker_deadline()
    heard = hear_from_writers(connection.member, f"part {joint.pair}", others, joint.pair, seconds)
    if missing := [connection.roster[rank]["worker"] for rank in others if rank not in heard]:
        raise DeadlineExceededError(
            f"{', '.join(missing)} did not write parts of a checkpoint, nor anything of them for "
            f"{seconds:g} seconds (PHALANX_DEADLINE). All workers must save, because each has parts "
            "that no other has. "
            f"Received: {shown(str(order.path))}"
        )
    for rank in others:
        if "error" in heard[rank]:
            worker = connection.roster[rank]["worker"]
            raise AbortedError(f"The checkpoint was not saved, because {worker} {heard[rank]['error']}")
    return [files.read_part(partial, rank) for rank in others]


def _follow(order: Order, connection: JobConnection, joint: JointSave) -> None:
    """The part of the other workers."""
    member, first = connection.member, connection.roster[0]["worker"]
    seconds = worker_deadline()
    try:
        joint, begun = pairing_of(connection).find(joint, seconds)
    except BaseException as error:
        with contextlib.suppress(PhalanxError):  # the job has failed
            member.tell(f"part {joint.pair}", {"error": _told(error)})
        raise
    if begun is None:
        _write_alone(order)
        return
    if "error" in begun:
        raise AbortedError(f"The first worker did not save the checkpoint: it {begun['error']}")
    if begun["needs_all"] or joint.needs_all:
        _write_own(order, connection, joint, begun)
    done = hear_from_writers(member, f"saved {joint.pair}", [0], joint.pair, seconds).get(0)
    if done is None:
        raise DeadlineExceededError(
            f"{first} did not finish a checkpoint, and wrote nothing of it "
            f"for {seconds:g} seconds (PHALANX_DEADLINE). Received: {shown(str(order.path))}"
        )
    if "error" in done:
        raise AbortedError(f"The first worker did not save the checkpoint: it {done['error']}")
    order.followed()


def _write_own(order: Order, connection: JobConnection, joint: JointSave, begun: Any) -> None:
    """Write the parts that no other worker has."""
    member, pair = connection.member, joint.pair
    try:
        if begun["needs_all"] != joint.needs_all:
            raise InvalidValueError(
                "All workers must save the same objects, but only "
                f"{'the others have' if joint.needs_all else 'the first worker has'} some of which "
                f"each worker has parts of its own. Received: {shown(str(order.path))}"
            )
        own, pulse = order.contents.own, Pulse(member, pair)
        partial = Path(begun["partial"])
        files.write_part(partial, connection.rank, own.arrays, own.values, lambda _: pulse.beat())
    except FileNotFoundError as error:
        # The first worker may have given up and removed the directory. Either it has said why, or it
        # gives up because of this.
        member.tell(f"part {pair}", {"error": _told(error)})
        return
    except BaseException as error:
        member.tell(f"part {pair}", {"error": _told(error)})
        raise
    member.tell(f"part {pair}", {})


def _told(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"does not see the directory of the checkpoint ({error}). It must be on a file system that "
            "all workers see."
        )
    return f"raised {type(error).__name__}: {error!s:.500}"
