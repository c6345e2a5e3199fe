"""Collectives between the workers of a job: compared with the other members, and run in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.collectives import groups
from phalanx.collectives.channels import Notice
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Handle, Outcome, PendingArray, finished
from phalanx.collectives.operation_queue import OperationQueue
from phalanx.collectives.table import Request, Takes
from phalanx.collectives.workers_on_devices import OnDevices
from phalanx.collectives.workers_on_host import OnHost
from phalanx.collectives.world import World
from phalanx.errors import ContextError, InvalidValueError
from phalanx.job.hub.worker_status import PeerWait
from phalanx.runtime import compat
from phalanx.runtime.call_site import caller
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.interrupts import uninterrupted


def perform(request: Request, group: Group, async_op: bool, timeout: float | None = None) -> Outcome:
    """Perform a collective between workers."""
    call = begin(request.operation.name, group, async_op, request.arrays)
    if call is None:
        return None, None
    if request.operation.takes is Takes.LIST and request.operation.root == "src":
        _check_source(call, request)
    request.me = call.me
    if async_op:
        # The caller may change its arrays while the operation is under way; a buffer that the result
        # is put into belongs to the operation until it is done.
        own = [
            x.copy() if isinstance(x, np.ndarray) and x is not request.out else x
            for x in request.arrays
        ]
        request.x = own if isinstance(request.x, list) else own[0] if own else None
    return call.perform(request, timeout)


def _check_source(call: WorkerCall, request: Request) -> None:
    source = request.ranks[request.root]
    if request.x is not None and call.me != request.root:
        raise InvalidValueError(
            f"Only rank {source}, the source, gives a list to scatter. Received: a list on another rank"
        )
    if request.x is None and call.me == request.root:
        raise InvalidValueError(
            f"The list of scatter on rank src must be a list of {len(request.ranks)} arrays, one for "
            "each rank of the group. Received: None"
        )


@dataclass(frozen=True)
class WorkerCall:
    """An operation of a group that this process is a member of.

    `me` is the place of this process in the group.
    """

    name: str
    group: Group
    me: int
    async_op: bool
    site: str

    def perform(self, request: Request, timeout: float | None) -> Outcome:
        """Compare with the other members and move the data, after what was launched before."""
        if len(self.group) == 1:
            result = request.perform(OnDevices(self.group, 0, lambda: [request.told]))
            handle = finished(result) if self.async_op else None
            return (PendingArray(handle), handle) if handle else (result, None)
        world = groups.world()
        notice = self.notice(request)
        seconds = worker_deadline() if timeout is None else timeout
        before = world.programs()
        wait = world.wait_of(self.group.members, notice)

        def run() -> Any:
            with wait:
                return self._run(world, notice, seconds, before, request, wait)

        queue = world.queue(self.group.members)
        if not self.async_op:
            # An interrupt in the middle would leave the connections in the middle of something. It
            # waits until the operation has ended, or until nothing has moved for a moment.
            with uninterrupted(), wait.blocking():
                ran, result = queue.try_now(run)
            return (result if ran else self._wait(queue, run, wait).result()), None
        handle = Handle(queue.submit(run), self.site, world.check, wait=wait.blocking)
        return PendingArray(handle), handle

    def go_on(self, request: Request) -> Any:
        """Go on with an operation on the host that was begun, and whose turn it is."""
        world, notice = groups.world(), self.notice(request)
        with world.wait_of(self.group.members, notice) as wait, wait.blocking():
            return self._run(world, notice, worker_deadline(), None, request, wait, is_begun=True)

    def notice(self, request: Request) -> Notice:
        """What the other members are told."""
        where = repr(self.group.name)
        if self.group.name != groups.WORLD_COMM_GROUP:
            where += f" of the ranks {list(self.group.ranks)}"
        return Notice(f"{self.name}({request.same}) in {where}", self.site, request.told)

    def _wait(self, queue: OperationQueue, run: Callable[[], Any], wait: PeerWait) -> Handle:
        if queue.is_current:
            raise ContextError(
                f"{self.name} cannot be waited for in a callback of another operation of the "
                "same ranks, which it comes after. Use async_op=True there. Received: async_op=False"
            )
        return Handle(queue.submit(run), self.site, groups.world().check, wait=wait.blocking)

    def _run(
        self,
        world: World,
        notice: Notice,
        seconds: float,
        before: Any,
        request: Request,
        wait: PeerWait,
        is_begun: bool = False,
    ) -> Any:
        try:
            if not is_begun:
                world.check()
            channel = world.channel(self.group.members, seconds, wait)
            host = OnHost(channel, self.group.ranks, notice, seconds, self._mismatch)
            if world.is_on_host:
                result = request.perform(host)
            else:
                if before is not None:
                    before.block_until_ready()
                result = request.perform(OnDevices(self.group, self.me, host.agree, self._mismatch))
            channel.finish()
            return result
        except Exception as error:
            cause = world.explain(error, notice, seconds)
            cause.add_note(f"In {self.name}, launched at {self.site}.")
            if cause is error:
                raise
            raise cause from error

    def _mismatch(self, text: str) -> Exception:
        """The error for members that cannot do what they were called for together."""
        return groups.world().fail("mismatch", f"{self.name} at {self.site}: {text}")


def begin(name: str, group: Any, async_op: bool, arrays: Sequence[Any] = ()) -> WorkerCall | None:
    """The call of an operation; None if this process is no member of the group."""
    found = groups.find(group)
    rank = groups.world().rank
    if rank not in found.ranks:
        return None
    me = found.ranks.index(rank)
    if len(found) > 1 and any(compat.is_tracer(x) for x in arrays):
        raise ContextError(
            f"{name} between workers needs known arrays. Inside jax.jit, px.function or lax.scan, "
            "communicate inside strategy.run, where ranks are the replicas. Received: a traced array"
        )
    return WorkerCall(name, found, me, async_op, caller())
