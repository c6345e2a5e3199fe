"""The eager executor: replicas take turns, and hand over where they meet.

The function is called once per replica, in replica order. One replica runs at a time; device work
overlaps all the same, because JAX only queues it. Replica 0 runs in the caller's thread. As long as no
merge point is reached the others run after it in the same thread. At the first merge point they get
threads of their own, because each must wait in the middle of its function while the others catch
up: replica 1 runs up to its merge point, then replica 2, and so on; then the merge function runs once,
in the caller's thread; then the replicas go on, in order. This is deterministic, and measured to be
faster than threads that compete for the interpreter.

A replica may also wait for something that another one does, such as sending it a message
(`ReplicaContext.wait_until`). Then the first that can go on does. If none can, the run fails.
"""

from __future__ import annotations

import contextvars
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from phalanx.core import context as ctx
from phalanx.core.regrouping import regroup
from phalanx.core.replica_context import MergePoint, ReplicaContext, Wait, index_of
from phalanx.core.values import select_replica
from phalanx.core.variables import transactions
from phalanx.errors import DeadlineExceededError, MergeMismatchError
from phalanx.runtime import activity, compat
from phalanx.runtime.call_site import CallSite, call_site, where_is
from phalanx.runtime.deadlines import replica_patience
from phalanx.runtime.devices import short_name
from phalanx.runtime.interrupts import Bell, start

if TYPE_CHECKING:
    from phalanx.core.strategy import Strategy

_log = logging.getLogger("phalanx")


class ReplicaAborted(BaseException):
    """Raised inside a replica that must stop because another replica failed.

    Derives from `BaseException` so that a broad ``except Exception`` in user code does not keep
    a replica running whose peers are gone. It never reaches the caller of `Strategy.run`.
    """


def run_replicas(
    strategy: Strategy,
    devices: Sequence[jax.Device],
    replica_ids: Sequence[Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call `fn` once per replica and join the results."""
    span = strategy.extended._span
    if span is not None:
        activity.count_steps()

    def execute() -> list[Any]:
        return EagerRun(strategy, devices, replica_ids, fn, args, kwargs).execute()

    results = transactions.atomically(execute)
    return results[0] if len(results) == 1 and span is None else regroup(results, span=span)


class _Status(enum.Enum):
    NOT_STARTED = "has not started"
    RUNNING = "is running"
    AT_MERGE_POINT = "waits at a merge point"
    ANSWERED = "may go on from a merge point"
    WAITING = "waits for another replica"
    DONE = "has returned"


class _Replica:
    """One replica of a run: where it is, and what it has to say."""

    def __init__(self, index: int, device: jax.Device, context: ReplicaContext) -> None:
        self.index = index
        self.device = device
        self.context = context
        self.status = _Status.NOT_STARTED
        self.result: Any = None
        self.error: BaseException | None = None
        # The merge point that it waits at or met at last, and the answer it gets there.
        self.point: MergePoint | None = None
        self.site: CallSite | None = None
        self.answer: Any = None
        self.merge_error: BaseException | None = None
        self.meetings = 0
        # What it waits for outside of merge points.
        self.wait: Wait | None = None
        self.thread: threading.Thread | None = None
        self.baton = Bell()

    def __str__(self) -> str:
        return f"replica {self.index} ({short_name(self.device)})"

    @property
    def can_run(self) -> bool:
        """Whether it would get any further if it were let."""
        if self.status is _Status.WAITING:
            return self.wait is None or self.wait.ready()
        return self.status in (_Status.NOT_STARTED, _Status.ANSWERED)


class EagerRun:
    """One call of `Strategy.run`: the rendezvous of its replicas."""

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[jax.Device],
        replica_ids: Sequence[Any],
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._strategy = strategy
        self._span = strategy.extended._span
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._replicas = [
            _Replica(
                i,
                device,
                ReplicaContext(
                    strategy,
                    replica_id,
                    device=device,
                    rendezvous=self,
                    index=i,
                ),
            )
            for i, (device, replica_id) in enumerate(zip(devices, replica_ids, strict=True))
        ]
        self._baton = Bell()  # handed to the caller's thread
        self._aborted = False
        self._failure: BaseException | None = None
        self._merge_error: BaseException | None = None
        self._outer_device = jax.config.jax_default_device  # type: ignore[attr-defined]
        self._caller = threading.current_thread()
        self._thread_state: compat.ThreadState | None = None
        if len(self._replicas) > 1:
            self._thread_state = compat.ThreadState()
            self._contextvars = contextvars.copy_context()

    # -- the caller's thread: replica 0, and everybody's director -------------------------------

    def execute(self) -> list[Any]:
        """Run all replicas to the end; raises what the first failing one raised."""
        first, *others = self._replicas
        try:
            self._run_all(first, others)
        except ReplicaAborted:
            assert self._failure is not None
            raise self._failure from self._failure.__cause__
        finally:
            self._stop(others)
        return [replica.result for replica in self._replicas]

    def _run_all(self, first: _Replica, others: Sequence[_Replica]) -> None:
        self._call(first)
        for replica in others:
            self._finish(replica, first)

    def _call(self, replica: _Replica) -> None:
        """Run the function for one replica in the current thread."""
        replica.status = _Status.RUNNING
        try:
            with replica.context, jax.default_device(replica.device):
                args, kwargs = select_replica(replica.index, (self._args, dict(self._kwargs)))
                replica.result = self._fn(*args, **kwargs)
        except ReplicaAborted:
            raise
        except BaseException as error:
            if error is not self._merge_error:  # which belongs to no replica in particular
                error.add_note(f"Raised on {replica} of {len(self._replicas)} of {self._strategy!r}.")
            raise
        finally:
            replica.status = _Status.DONE

    def _finish(self, replica: _Replica, first: _Replica) -> None:
        """Run a replica to its end, after replica 0 has returned."""
        if replica.status is _Status.NOT_STARTED:
            self._call(replica)  # no merge point so far, and there must not be one now
            return
        self._bring_up(replica)
        if replica.status is _Status.AT_MERGE_POINT:
            self._fail(self._count_mismatch(replica, first))

    def meet(self, context: ReplicaContext, point: MergePoint) -> Any:
        """See `Rendezvous.meet`; called in the replica's thread."""
        replica = self._replicas[index_of(context)]
        if self._aborted:
            raise ReplicaAborted
        if len(self._replicas) == 1:
            return select_replica(0, self._merge([point])) if self._span else self._merge([point])
        replica.point, replica.site = point, site_in_replica()
        replica.meetings += 1
        if replica.index == 0:
            self._direct()
        elif replica.thread is None:
            self._fail(self._count_mismatch(replica, self._replicas[0]))
        else:
            self._wait_for_answer(replica)
        replica.point = None
        answer, error = replica.answer, replica.merge_error
        replica.answer = replica.merge_error = None
        if error is not None:
            raise error
        return answer

    def _direct(self) -> None:
        """Replica 0 is at a merge point: bring up the others, merge, and note the answers."""
        first, *others = self._replicas
        for replica in others:
            self._bring_up(replica)
            if replica.status is _Status.DONE:
                self._fail(self._count_mismatch(first, replica))
            if replica.point is None or not self._belong_together(first, replica):
                self._fail(self._kind_mismatch(first, replica))
        points = [r.point for r in self._replicas if r.point is not None]
        answer: Any = None
        error: BaseException | None = None
        try:
            answer = self._merge(points)
        except ReplicaAborted:
            raise
        except BaseException as raised:  # noqa: BLE001 - every replica must see it
            error = self._merge_error = raised
        for replica in self._replicas:
            replica.answer = select_replica(replica.index, answer)
            replica.merge_error = error
            if replica is not first:
                replica.status = _Status.ANSWERED

    def _merge(self, points: Sequence[MergePoint]) -> Any:
        """Call replica 0's merge function for all replicas, in cross-replica context."""
        point = points[0]
        if len(points) == 1 and self._span is None:
            args, kwargs = point.args, point.kwargs
        else:
            nests = [(p.args, dict(p.kwargs)) for p in points]
            args, kwargs = regroup(nests, always_wrap=point.always_wrap, span=self._span)
        with ctx.push(ctx.Mode(self._strategy)), jax.default_device(self._outer_device):
            return point.fn(self._strategy, *args, **kwargs)

    def wait_until(self, context: ReplicaContext, wait: Wait) -> None:
        """See `Rendezvous.wait_until`; called in the replica's thread."""
        replica = self._replicas[index_of(context)]
        if self._aborted:
            raise ReplicaAborted
        replica.wait, replica.site = wait, site_in_replica()
        if threading.current_thread() is self._caller:
            while not wait.ready():
                self._let_another_run(replica)
        elif not wait.ready():
            self._hand_over(replica, _Status.WAITING)
        replica.wait = None

    @staticmethod
    def _belong_together(a: _Replica, b: _Replica) -> bool:
        assert a.point is not None
        assert b.point is not None
        return a.point.kind == b.point.kind and a.site == b.site

    # -- handing over ---------------------------------------------------------------------------

    def _bring_up(self, replica: _Replica) -> None:
        """Let a replica, and those that it waits for, run until it is at a merge point or its end."""
        while replica.status not in (_Status.AT_MERGE_POINT, _Status.DONE):
            if replica.can_run:
                self._advance(replica)
            else:
                self._let_another_run(replica)

    def _let_another_run(self, waiting: _Replica) -> None:
        """Let the first replica that can go on do so; if none can, wait for other processes."""
        for replica in self._replicas:
            if replica is not waiting and replica.can_run:
                self._advance(replica)
                return
        looks = [r.wait.look for r in self._replicas if r.wait is not None and r.wait.look is not None]
        if not looks:
            self._fail(self._deadlock())
        for look in looks:
            look()

    def _advance(self, replica: _Replica) -> None:
        """Let a replica run until it waits for others, or to its end."""
        replica.status = _Status.RUNNING
        if replica.thread is None:
            replica.thread = threading.Thread(
                target=self._contextvars.copy().run,
                args=(self._in_thread, replica),
                name=f"phalanx-replica-{replica.index}",
                daemon=True,
            )
            start(replica.thread)
        else:
            replica.baton.ring()
        self._await(replica)
        if replica.error is not None:
            self._fail(replica.error)

    def _in_thread(self, replica: _Replica) -> None:
        """The body of a replica's thread."""
        try:
            assert self._thread_state is not None
            self._thread_state.apply()
            self._call(replica)
        except ReplicaAborted:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            replica.error = error
        finally:
            replica.status = _Status.DONE
            self._baton.ring()

    def _await(self, replica: _Replica) -> None:
        """Wait until a replica hands the baton back; warn, and in the end give up."""
        patience = replica_patience()
        started = time.monotonic()
        while not self._baton.wait(patience.warn_after):
            waited = time.monotonic() - started
            where = where_is(replica.thread.ident if replica.thread else None)
            text = (
                f"{replica} has not reached its next merge point for {waited:.0f} s. It is at {where}"
            )
            if waited >= patience.give_up_after:
                self._fail(
                    DeadlineExceededError(
                        f"{text}. The other replicas wait for it at {self._replicas[0].site}. Set "
                        "PHALANX_REPLICA_DEADLINE to wait longer."
                    )
                )
            _log.warning("%s", text)

    def _wait_for_answer(self, replica: _Replica) -> None:
        """Park a replica at a merge point until it is told to go on."""
        self._hand_over(replica, _Status.AT_MERGE_POINT)

    def _hand_over(self, replica: _Replica, status: _Status) -> None:
        """Give the baton to the caller's thread, and wait until it comes back."""
        replica.status = status
        self._baton.ring()
        while not replica.baton.wait(1.0):
            if self._aborted or not self._caller.is_alive():
                raise ReplicaAborted
        if self._aborted:
            raise ReplicaAborted

    # -- failing --------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """End the run with an error; unwinds the calling replica without its code noticing."""
        if self._failure is None:
            self._failure = error
        raise ReplicaAborted

    def _stop(self, replicas: Sequence[_Replica]) -> None:
        """Unwind every replica that still waits, and let no thread outlive the run."""
        self._aborted = True
        for replica in replicas:
            replica.baton.ring()
        for replica in replicas:
            if replica.thread is not None and replica.thread.ident is not None:
                replica.thread.join(timeout=5.0)
                if replica.thread.is_alive():
                    _log.warning(
                        "%s does not stop: it is at %s", replica, where_is(replica.thread.ident)
                    )

    def _deadlock(self) -> MergeMismatchError:
        states = "; ".join(f"{r} {_state(r)}" for r in self._replicas)
        return MergeMismatchError(f"Replicas wait for each other, so none can go on: {states}.")

    def _count_mismatch(self, waiting: _Replica, done: _Replica) -> MergeMismatchError:
        return MergeMismatchError(
            "Some replicas met more often than others, so one would wait forever. "
            f"{waiting} waits at its meeting number {waiting.meetings}, {_kind(waiting)}, at "
            f"{waiting.site}, but {done} has returned after {done.meetings} meeting(s)"
            f"{_last(done)}. Call collectives, merge_call and aggregated variable updates the same "
            "number of times on every replica."
        )

    def _kind_mismatch(self, a: _Replica, b: _Replica) -> MergeMismatchError:
        return MergeMismatchError(
            "Replicas met at different places, so their values do not belong together. "
            f"{a} called {_kind(a)} at {a.site}; {b} called {_kind(b)} at {b.site}. Call collectives, "
            "merge_call and aggregated variable updates in the same order from the same lines on "
            "every replica: compute inside a branch on the replica id, communicate outside of it."
        )


def _kind(replica: _Replica) -> str:
    return replica.point.kind if replica.point is not None else "nothing"


def _state(replica: _Replica) -> str:
    if replica.wait is not None:
        return f"waits for {replica.wait.what} at {replica.site}"
    if replica.point is not None:
        return f"waits at {_kind(replica)} at {replica.site}"
    return "has returned" if replica.status is _Status.DONE else replica.status.value


def _last(replica: _Replica) -> str:
    return f", the last at {replica.site}" if replica.site is not None else ""


def site_in_replica() -> CallSite:
    """Where in the function that a replica runs eagerly this code was called."""
    return call_site(until=EagerRun._call.__code__)
