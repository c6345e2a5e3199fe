"""How a checkpoint is saved: at once or in another thread, by this process or by all workers together.

Workers meet in no collective. The first worker says where it writes, each worker that has parts of its
own writes them there, and the first one, when it has heard of all, gives the directory its name. If
the first worker has everything, it waits for none. What they tell each other goes through the hub.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import AbortedError, DeadlineExceededError, InvalidValueError, PhalanxError
from phalanx.job.bootstrap import JobConnection
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import start
from phalanx.runtime.processes import lower_priority
from phalanx.runtime.shared_numbers import SharedCount
from phalanx.train.checkpoints import files, orbax_files
from phalanx.train.checkpoints.contents import Contents
from phalanx.train.checkpoints.options import CheckpointOptions
from phalanx.train.checkpoints.progress import ProgressLine
from phalanx.train.checkpoints.together import Pulse, hear_from_writers

__all__ = ["Order", "Saver"]

_log = logging.getLogger("phalanx")

_serials = SharedCount()


@dataclass(frozen=True)
class Order:
    """A checkpoint to save.

    Args:
        path: the directory that it becomes.
        contents: what this process writes.
        options: how.
        connection: to the other workers, if the checkpoint is theirs too.
        number: tells apart the checkpoints that the workers save together; the same on all of them.
        written: called when the checkpoint is there, by the process that gave it its name.
        followed: called when another worker has done so.
    """

    path: Path
    contents: Contents
    options: CheckpointOptions
    connection: JobConnection | None = None
    number: str = ""
    written: Callable[[], None] = lambda: None
    followed: Callable[[], None] = lambda: None


class Saver:
    """Saves one checkpoint after another."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._serial, self._shared = _serials.next(), 0

    def next_number(self) -> str:
        """Of the next checkpoint that workers save together, all with their savers of this serial."""
        self._shared += 1
        return f"{self._serial}.{self._shared}"

    def save(self, order: Order) -> None:
        """Save a checkpoint, after the one that is under way."""
        self.wait()
        if not order.options.is_async:
            with _waiting(order):
                _perform(order)
            return
        # No daemon, so that the end of the program waits for the checkpoint.
        self._thread = threading.Thread(target=self._run, args=(order,), name="phalanx-checkpoint")
        start(self._thread)

    def _run(self, order: Order) -> None:
        lower_priority()
        try:
            _perform(order)
        except BaseException as error:  # noqa: BLE001 - the thread that trains is told
            self._error = error
            _log.error("The checkpoint %s was not saved: %s", order.path, error)

    def wait(self) -> None:
        """Wait for the checkpoint that is under way, and raise what went wrong with it."""
        thread = self._thread
        if thread is not None:
            while thread.is_alive():
                thread.join(1.0)  # so that Ctrl-C comes through
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
    if order.connection is None:
        _write_alone(order)
    elif order.connection.rank == 0:
        _lead(order, order.connection)
    else:
        _follow(order, order.connection)
    for callback in order.options.experimental_write_callbacks or ():
        takes_path = len(inspect.signature(callback).parameters) > 0
        callback(str(order.path)) if takes_path else callback()


def _write_alone(order: Order) -> None:
    partial = files.begin(order.path)
    try:
        _write_and_commit(order, partial, lambda own: [own])
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
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
            shutil.rmtree(partial, ignore_errors=True)
        else:
            files.commit(partial, order.path, parts)
    order.written()
    line.done()


# -- several workers -------------------------------------------------------------------------------


def _lead(order: Order, connection: JobConnection) -> None:
    """The first worker's part."""
    member, number = connection.member, order.number
    partial = files.begin(order.path)
    try:
        where = {"path": str(order.path.absolute()), "partial": str(partial.absolute())}
        member.tell(f"save {number}", where)

        def gather(own: Any) -> list[Any]:
            return (
                [own, *_parts_of_others(order, connection, partial)]
                if order.contents.is_spread
                else [own]
            )

        _write_and_commit(order, partial, gather, Pulse(member, number).beat)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(PhalanxError):  # the job has failed
            member.tell(f"saved {number}", {"error": _told(error)})
        raise
    member.tell(f"saved {number}", {})


def _parts_of_others(order: Order, connection: JobConnection, partial: Path) -> list[Any]:
    others = range(1, connection.size)
    seconds = worker_deadline()
    told = hear_from_writers(connection.member, f"part {order.number}", others, order.number, seconds)
    if missing := [connection.roster[rank]["worker"] for rank in others if rank not in told]:
        raise DeadlineExceededError(
            f"{', '.join(missing)} did not write parts of a checkpoint, nor anything of them for "
            f"{seconds:g} seconds (PHALANX_DEADLINE). All workers must save, because each has parts "
            "that no other has. "
            f"Received: {shown(str(order.path))}"
        )
    for rank in others:
        if "error" in told[rank]:
            worker = connection.roster[rank]["worker"]
            raise AbortedError(f"The checkpoint was not saved, because {worker} {told[rank]['error']}")
    return [files.read_part(partial, rank) for rank in others]


def _follow(order: Order, connection: JobConnection) -> None:
    """The part of the other workers."""
    member, number, rank = connection.member, order.number, connection.rank
    seconds = worker_deadline()
    begun = member.hear(f"save {number}", [0], seconds).get(0)
    if begun is None:
        raise DeadlineExceededError(
            f"{connection.roster[0]['worker']} did not begin to save within {seconds:g} seconds "
            f"(PHALANX_DEADLINE). Received: {shown(str(order.path))}"
        )
    if begun["path"] != str(order.path.absolute()):
        if order.contents.is_spread:
            problem = (
                f"saves to {str(order.path)!r}, and the first worker to {begun['path']!r}. Give all "
                "workers the same directory, on a file system that all of them see."
            )
            member.tell(f"part {number}", {"error": problem})
            raise InvalidValueError(f"This worker {problem} Received: {shown(str(order.path))}")
        _write_alone(order)
        return
    if order.contents.is_spread:
        try:
            partial = Path(begun["partial"])
            own = order.contents.own
            pulse = Pulse(member, number)
            files.write_part(partial, rank, own.arrays, own.values, lambda _: pulse.beat())
        except BaseException as error:
            member.tell(f"part {number}", {"error": _told(error)})
            raise
        member.tell(f"part {number}", {})
    done = hear_from_writers(member, f"saved {number}", [0], number, seconds).get(0)
    if done is None:
        raise DeadlineExceededError(
            f"{connection.roster[0]['worker']} did not finish a checkpoint, and wrote nothing of it "
            f"for {seconds:g} seconds (PHALANX_DEADLINE). Received: {shown(str(order.path))}"
        )
    if "error" in done:
        raise AbortedError(f"The first worker did not save the checkpoint: it {done['error']}")
    order.followed()


def _told(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"does not see the directory of the checkpoint ({error}). It must be on a file system that "
            "all workers see."
        )
    return f"raised {type(error).__name__}: {error!s:.500}"
