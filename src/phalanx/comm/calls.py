"""One call of a collective between workers: its arrays, its group, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.cluster.hub.status import PeerWait
from phalanx.comm import groups
from phalanx.comm.channels import Notice
from phalanx.comm.devices import OnDevices
from phalanx.comm.groups import Group
from phalanx.comm.handles import Handle, PendingArray, finished
from phalanx.comm.host import OnHost
from phalanx.comm.lanes import Lane
from phalanx.comm.reductions import Reduction, kind_of
from phalanx.comm.world import World
from phalanx.core import compat
from phalanx.core.callsite import caller
from phalanx.core.deadlines import worker_deadline
from phalanx.core.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.core.interrupts import uninterrupted
from phalanx.core.operators import ArrayOperators, operand_of
from phalanx.core.showing import shown

Outcome = tuple[Any, Handle | None]
"""What functional operations return: the result, and a handle if they were asked for one."""


def as_array(x: Any, what: str = "The tensor") -> Any:
    """An array or a number as NumPy's or JAX's array; a NumPy array stays one."""
    if isinstance(x, ArrayOperators):
        x = operand_of(x)
    if isinstance(x, bool | int | float | complex):
        x = jnp.asarray(x)
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        x = np.asarray(x) if isinstance(x, np.generic) else x
        if not compat.is_key_array(x) and kind_of(x.dtype):
            return x
    raise InvalidTypeError(
        f"{what} must be an array of numbers or a px.Variable. Received: {shown(x)} of type "
        f"{type(x).__name__}"
    )


def as_arrays(xs: Any, count: int, what: str) -> list[Any]:
    """A list of one array per rank, all of one dtype."""
    if not isinstance(xs, Sequence) or isinstance(xs, str) or len(xs) != count:
        raise InvalidValueError(
            f"{what} must be a list of {count} arrays, one for each rank of the group. "
            f"Received: {shown(xs)}"
        )
    arrays = [as_array(x, what) for x in xs]
    if len({jnp.dtype(x.dtype) for x in arrays}) > 1:
        raise InvalidValueError(
            f"{what} must have arrays of one dtype. Received: {[str(x.dtype) for x in arrays]}"
        )
    return arrays


def kind(x: Any) -> str:
    """The dtype and shape of an array, for people and for comparing."""
    return f"{jnp.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]"


def like(x: Any, result: Any) -> Any:
    """The result as NumPy's array if `x` is one."""
    return np.array(result) if isinstance(x, np.ndarray) else result


def snapshot(x: Any, async_op: bool) -> Any:
    """What `x` is now, whatever becomes of its memory while an operation is under way."""
    return x.copy() if async_op and isinstance(x, np.ndarray) else x


class Movement(Protocol):
    """How an operation moves its data: see `host.OnHost` and `devices.OnDevices`."""

    def agree(self) -> list[Any]:
        """Meet the others; the value of each member."""
        ...

    def reduce(self, x: Any, op: Reduction, place: int | None = None, out: Any = None) -> Any:
        """The reduction of all arrays, at one place or everywhere."""
        ...

    def reduce_scatter(self, xs: Any, op: Reduction, out: Any = None) -> Any:
        """The reduction of the arrays that all have for this member."""
        ...

    def from_one(self, x: Any, place: int, out: Any = None) -> Any:
        """The array of one member."""
        ...

    def gather(self, x: Any, place: int | None = None, outs: Any = None) -> Any:
        """The arrays of all members, of any shapes."""
        ...

    def gather_rows(self, x: Any, place: int | None = None, out: Any = None) -> Any:
        """The arrays of all members, of one shape, joined."""
        ...

    def scatter(self, xs: Sequence[Any] | None, place: int, out: Any = None) -> Any:
        """This member's array of the list that one has."""
        ...

    def scatter_rows(self, x: Any, place: int, out: Any = None) -> Any:
        """This member's part of the array that one has."""
        ...

    def exchange(self, xs: Sequence[Any], outs: Any = None) -> list[Any]:
        """Array i to member i; those that came."""
        ...

    def exchange_rows(
        self, x: Any, inputs: Sequence[int], check: Callable[[list[Any]], None], out: Any = None
    ) -> Any:
        """Parts of an array to all members; those that came, joined."""
        ...


Work = Callable[[Movement], Any]


@dataclass(frozen=True)
class Call:
    """An operation of a group that this process is a member of.

    Args:
        name: the operation.
        group: whose it is.
        me: the rank of this process there.
        async_op: whether the caller goes on at once.
        site: where it was called.
    """

    name: str
    group: Group
    me: int
    async_op: bool
    site: str

    def perform(
        self, same: str, work: Work, value: Any = None, timeout: float | None = None
    ) -> Outcome:
        """Compare with the other members and run `work`, after what was launched before.

        Args:
            same: what must be the same for all members, in words.
            work: moves the data, and returns the result.
            value: what the other members shall know, as JSON has it.
            timeout: seconds to wait for the others.
        """
        if len(self.group) == 1:
            result = work(OnDevices(self.group, 0, lambda: [value]))
            handle = finished(result) if self.async_op else None
            return (PendingArray(handle), handle) if handle else (result, None)
        world = groups.world()
        where = repr(self.group.name)
        if self.group.name != groups.WORLD_COMM_GROUP:
            where += f" of the ranks {list(self.group.ranks)}"
        notice = Notice(f"{self.name}({same}) in {where}", self.site, value)
        seconds = worker_deadline() if timeout is None else timeout
        before = world.programs()

        wait = world.wait_of(self.group.members, notice)

        def run() -> Any:
            with wait:
                return self._run(world, notice, seconds, before, work, wait)

        lane = world.lane(self.group.members)
        if not self.async_op:
            # An interrupt in the middle would leave the connections in the middle of something. It
            # waits until the operation has ended, or until nothing has moved for a moment.
            with uninterrupted(), wait.blocking():
                ran, result = lane.try_now(run)
            return (result if ran else self._wait(lane, run, wait).result()), None
        handle = Handle(lane.submit(run), self.site, world.check, wait=wait.blocking)
        return PendingArray(handle), handle

    def _wait(self, lane: Lane, run: Callable[[], Any], wait: PeerWait) -> Handle:
        if lane.is_current:
            raise ContextError(
                f"{self.name} cannot be waited for inside of a callback of another operation of the "
                "same ranks, which it comes after. Use async_op=True there. Received: async_op=False"
            )
        return Handle(lane.submit(run), self.site, groups.world().check, wait=wait.blocking)

    def _run(
        self,
        world: World,
        notice: Notice,
        seconds: float,
        before: Any,
        work: Work,
        wait: PeerWait,
    ) -> Any:
        try:
            world.check()
            channel = world.channel(self.group.members, seconds, wait)
            host = OnHost(channel, self.group.ranks, notice, seconds)
            if world.is_on_host:
                result = work(host)
            else:
                if before is not None:
                    before.block_until_ready()
                result = work(OnDevices(self.group, self.me, host.agree))
            channel.finish()
            return result
        except Exception as error:
            cause = world.explain(error, notice, seconds)
            cause.add_note(f"In {self.name}, launched at {self.site}.")
            if cause is error:
                raise
            raise cause from error


def begin(name: str, group: Any, async_op: Any, arrays: Sequence[Any] = ()) -> Call | None:
    """The call of an operation; None if this process is no member of the group."""
    if not isinstance(async_op, bool):
        raise InvalidTypeError(f"async_op must be True or False. Received: {shown(async_op)}")
    found = groups.find(group)
    me = groups.get_rank(found)
    if me < 0:
        return None
    if len(found) > 1 and any(compat.is_tracer(x) for x in arrays):
        raise ContextError(
            f"{name} between workers needs known arrays. Inside of jax.jit, px.function or lax.scan, "
            "communicate inside of strategy.run, where ranks are the replicas. Received: a traced array"
        )
    return Call(name, found, me, async_op, caller())
