"""The workers of this job: who they are, how they agree on what to do, and their lanes."""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from contextlib import AbstractContextManager
from typing import Any

import jax

from phalanx.cluster.bootstrap import Connection
from phalanx.cluster.hub.dialling import split_address
from phalanx.cluster.hub.facts import Failure
from phalanx.cluster.preflight import bind_host
from phalanx.cluster.tokens import find_token
from phalanx.comm import compat
from phalanx.comm.lanes import Lane
from phalanx.comm.mailbox import Mailbox, Message
from phalanx.core.deadlines import worker_deadline
from phalanx.core.errors import PhalanxError
from phalanx.execution.meetings import Ledger, Meeting
from phalanx.execution.throttle import THROTTLE

_LOOK = 0.1  # seconds between looks at whether the job has failed
_FIRST_SAYS = 2.0  # seconds that others wait for the first of a group to say who is missing


class World:
    """All workers of the job, or this process alone.

    Args:
        connection: to the other workers; None if there are none.
    """

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection
        self.rank = 0 if connection is None else connection.rank
        self.size = 1 if connection is None else connection.size
        self._lanes: dict[Any, Lane] = {}
        self._sequences: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()
        self.mailbox: Mailbox | None = None
        self._hosts = ["" for _ in range(self.size)]
        self._names = [f"rank {i}" for i in range(self.size)]
        if connection is not None:
            self._join(connection)

    def _join(self, connection: Connection) -> None:
        place = connection.place
        token = find_token(place.is_local).encode()
        self._hosts = [str(m.get("host")) for m in connection.roster]
        self._names = [f"rank {i} ({m.get('worker')})" for i, m in enumerate(connection.roster)]
        key = hashlib.sha256(b"mailbox of " + token).digest()
        self.mailbox = Mailbox(self.rank, bind_host(place.task, place.is_local), key, self._find)
        compat.publish(f"phalanx/mailbox/{self.rank}", str(self.mailbox.port))
        ledger = THROTTLE.ledger
        if ledger is not None:
            self._orderly = OrderlyLedger(ledger, self.settle)
            THROTTLE.ledger = self._orderly
        atexit.register(self.settle)

    def _find(self, rank: int) -> tuple[str, int]:
        """The address of another worker's mailbox; waits for it to come to its collectives."""
        assert self._connection is not None
        end = time.monotonic() + worker_deadline()
        while True:
            self.check()
            port = compat.look_up(f"phalanx/mailbox/{rank}", min(1.0, worker_deadline()))
            if port is not None:
                return split_address(self._connection.place.tasks[rank].address)[0], int(port)
            if time.monotonic() > end:
                raise self.fail("deadline", self._late_text([rank], "its first collective", "here"))

    # -- the job ---------------------------------------------------------------------------------

    def names(self, ranks: Sequence[int]) -> str:
        """Ranks, for people."""
        return ", ".join(self._names[r] for r in ranks)

    def check(self) -> None:
        """Raise the job's failure if there is one."""
        if self._connection is not None:
            self._connection.member.check()

    def fail(self, kind: str, text: str) -> PhalanxError:
        """Tell all workers that the job cannot go on; returns the error to raise."""
        assert self._connection is not None
        member = self._connection.member
        member.report(Failure(kind, text))
        return (member.failure or Failure(kind, text)).error()

    def cause_of(self, error: Exception) -> Exception:
        """The job's failure, if an error is only its echo."""
        if self._connection is None:
            return error
        return self._connection.member.cause_of(error) or error

    def local_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks that are on this machine."""
        return [r for r in ranks if self._hosts[r] == self._hosts[self.rank]]

    # -- order -----------------------------------------------------------------------------------

    def lane(self, key: Any) -> Lane:
        """The thread that runs operations of one kind in order."""
        with self._lock:
            if key not in self._lanes:
                self._lanes[key] = Lane("-".join(map(str, key)))
            return self._lanes[key]

    def settle(self) -> None:
        """Wait until what was launched is done, or the job has failed."""
        with self._lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            last = lane.last
            while last is not None and not last.done() and not lane.is_current:
                wait_for_futures([last], _LOOK)
                if self._connection is not None and self._connection.member.failure is not None:
                    return

    def programs(self) -> Any:
        """The newest program of a strategy, which must be over before other programs begin."""
        return self._orderly.token if hasattr(self, "_orderly") else None

    def close(self) -> None:
        """Finish what was launched and stop all threads."""
        self.settle()
        atexit.unregister(self.settle)
        for lane in self._lanes.values():
            lane.close()
        if self.mailbox is not None:
            self.mailbox.close()
        if hasattr(self, "_orderly") and THROTTLE.ledger is self._orderly:
            THROTTLE.ledger = self._orderly.inner

    # -- agreeing --------------------------------------------------------------------------------

    def agree(
        self,
        ranks: tuple[int, ...],
        operation: str,
        same: str,
        value: Any,
        site: str,
        timeout: float | None = None,
    ) -> list[Any]:
        """Make sure that the members of a group do the same; returns the value of each of them.

        Args:
            ranks: the members.
            operation: what is about to be done, for people.
            same: what must be the same for all.
            value: what may differ, as JSON has it.
            site: where it was called.
            timeout: seconds to wait, by default the job's deadline.
        """
        if len(ranks) == 1 or self.mailbox is None:
            return [value]
        members = tuple(sorted(ranks))
        number = self._sequences[members] = self._sequences.get(members, 0) + 1
        topic = f"agree {members} {number}"
        mine = {"same": same, "operation": operation, "site": site, "value": value}
        seconds = worker_deadline() if timeout is None else timeout
        first = members[0]
        if self.rank != first:
            answer = self.mailbox.expect(f"{topic} answer", first)
            self.mailbox.post(first, topic, mine)
            late = lambda: self._late_text([first], operation, site)  # noqa: E731
            return list(self._wait(answer, seconds + _FIRST_SAYS, late).about["values"])
        others = {r: self.mailbox.expect(topic, r) for r in members[1:]}
        end = time.monotonic() + seconds
        said = {self.rank: mine}
        for rank, future in others.items():
            late = lambda: self._late_text(  # noqa: E731
                [r for r, f in others.items() if not f.done()], operation, site
            )
            said[rank] = self._wait(future, max(0.0, end - time.monotonic()), late).about
        if len({s["same"] for s in said.values()}) > 1:
            raise self.fail("mismatch", self._mismatch_text(said))
        values = [said[r]["value"] for r in ranks]
        for rank in others:
            self.mailbox.post(rank, f"{topic} answer", {"values": values})
        return values

    def _wait(self, future: Future[Message], seconds: float, late: Callable[[], str]) -> Message:
        end = time.monotonic() + seconds
        while not future.done():
            self.check()
            if time.monotonic() > end:
                raise self.fail("deadline", late())
            wait_for_futures([future], _LOOK)
        return future.result()

    def receive(self, topic: str, source: int | None) -> Future[Message]:
        """The next message on a topic."""
        assert self.mailbox is not None
        return self.mailbox.expect(topic, source)

    def _late_text(self, late: Sequence[int], operation: str, site: str) -> str:
        return (
            f"{self._names[self.rank]} waited for {self.names(late)} until the deadline: {operation} "
            f"at {site} needs all members of the group. All of them must make the same calls in the "
            "same order."
        )

    def _mismatch_text(self, said: dict[int, dict[str, Any]]) -> str:
        rule = (
            "The ranks of a group came to different operations. All of them must make the same calls "
            "in the same order, with arrays that fit together."
        )
        lines = [rule]
        lines += [
            f"  {self._names[r]}: {s['operation']} at {s['site']}" for r, s in sorted(said.items())
        ]
        return "\n".join(lines)


class OrderlyLedger:
    """Lets programs of strategies and collectives take turns: both use the same connections.

    Args:
        inner: the ledger that compares programs.
        settle: waits until all collectives that were launched are done.
    """

    def __init__(self, inner: Ledger, settle: Callable[[], None]) -> None:
        self.inner, self._settle = inner, settle
        self.token: Any = None

    def meet(self, meeting: Meeting) -> AbstractContextManager[Any]:
        """See `Ledger.meet`."""
        self._settle()
        return self.inner.meet(meeting)

    def begun(self, token: Any) -> None:
        """See `Ledger.begun`."""
        self.token = token
        self.inner.begun(token)


def device_of(rank: int) -> jax.Device:
    """The device with which a worker takes part in collectives: its first."""
    devices = [d for d in jax.devices() if d.process_index == rank]
    return min(devices, key=lambda d: d.id)
