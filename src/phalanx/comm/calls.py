"""One call of a collective between workers: its arrays, its group, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.comm import groups, programs
from phalanx.comm.groups import Group
from phalanx.comm.handles import Handle, PendingArray
from phalanx.comm.reductions import kind_of
from phalanx.core import compat
from phalanx.core.callsite import call_site
from phalanx.core.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.core.operators import ArrayOperators, operand_of
from phalanx.execution.meetings import Meeting

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
        f"{what} must be an array of numbers or a px.Variable. Received: {x!r} of type "
        f"{type(x).__name__}"
    )


def as_arrays(xs: Any, count: int, what: str) -> list[Any]:
    """A list of one array per rank, all of one dtype."""
    if not isinstance(xs, Sequence) or isinstance(xs, str) or len(xs) != count:
        raise InvalidValueError(
            f"{what} must be a list of {count} arrays, one for each rank of the group. Received: {xs!r}"
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

    def launch(
        self,
        same: str,
        work: Callable[[list[Any]], Any],
        value: Any = None,
        timeout: float | None = None,
    ) -> Handle:
        """Run `work` with the values of all members, after what was launched before.

        Args:
            same: what must be the same for all members.
            work: computes the result.
            value: what the other members shall know, as JSON has it.
            timeout: seconds to wait for the others.
        """
        world = groups.world()
        if len(self.group) == 1:
            future: Future[Any] = Future()
            future.set_result(work([value]))
            return Handle(future, self.site)
        before = world.programs()
        shown = f"{self.name}({same}) in {self.group.name!r}"

        def run() -> Any:
            try:
                world.check()
                if before is not None:
                    before.block_until_ready()
                values = world.agree(self.group.ranks, shown, shown, value, self.site, timeout)
                return work(values)
            except Exception as error:
                cause = world.cause_of(error)
                cause.add_note(f"In {self.name}, launched at {self.site}.")
                if cause is error:
                    raise
                raise cause from error

        lane = world.lane(tuple(sorted(self.group.ranks)))
        return Handle(lane.submit(run), self.site, world.check)

    def outcome(self, handle: Handle) -> Outcome:
        """What a functional operation returns."""
        if self.async_op:
            return PendingArray(handle), handle
        return handle.result(), None

    def run(self, kind: str, x: Any, *parameters: Any) -> Any:
        """Run a program on the devices of the group."""
        return programs.run(kind, self.group.devices, x, *parameters)


def begin(name: str, group: Any, async_op: Any, arrays: Sequence[Any] = ()) -> Call | None:
    """The call of an operation; None if this process is no member of the group."""
    if not isinstance(async_op, bool):
        raise InvalidTypeError(f"async_op must be True or False. Received: {async_op!r}")
    found = groups.find(group)
    me = groups.get_rank(found)
    if me < 0:
        return None
    if len(found) > 1 and any(compat.is_tracer(x) for x in arrays):
        raise ContextError(
            f"{name} between workers needs known arrays. Inside of jax.jit, px.function or lax.scan, "
            "communicate inside of strategy.run, where ranks are the replicas. Received: a traced array"
        )
    return Call(name, found, me, async_op, str(call_site(until=Meeting.digest.__code__)))
