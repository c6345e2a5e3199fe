"""The replica context: what a function given to `Strategy.run` can ask and do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core import context as ctx
from phalanx.core.structure import check_arguments
from phalanx.errors import ContextError, InvalidValueError, MergeMismatchError
from phalanx.runtime import compat
from phalanx.runtime.devices import short_name
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.core.options import CommunicationOptions
    from phalanx.core.reduction import ReduceOp
    from phalanx.core.strategy import Strategy


@dataclass(frozen=True)
class MergePoint:
    """A place where all replicas meet and one function is called for all of them.

    `kind` says what the meeting is for; replicas may only meet for the same thing. `always_wrap`
    keeps arguments per replica even if every replica gave the very same object.
    """

    kind: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    always_wrap: bool = False


@dataclass(frozen=True)
class Wait:
    """Something that a replica waits for until another replica, or process, has done it.

    Args:
        ready: whether it has been done.
        what: what it is, for people.
        look: waits a little while for other processes; raises if they have failed. None if the
            replicas of this process do it.
    """

    ready: Callable[[], bool]
    what: str
    look: Callable[[], None] | None = None


class Rendezvous(Protocol):
    """How an executor lets the replicas of one run meet."""

    def meet(self, context: ReplicaContext, point: MergePoint) -> Any:
        """Wait for all replicas, call the function once, and give this replica its result."""
        ...

    def wait_until(self, context: ReplicaContext, wait: Wait) -> None:
        """Let other replicas go on until what this one waits for has been done."""
        ...


class SoloRendezvous:
    """The meeting of a single replica with itself."""

    def meet(self, context: ReplicaContext, point: MergePoint) -> Any:
        """Call the function at once, in cross-replica context."""
        with ctx.push(ctx.Mode(context.strategy)):
            return point.fn(context.strategy, *point.args, **point.kwargs)

    def wait_until(self, context: ReplicaContext, wait: Wait) -> None:
        """No other replica can do it."""
        del context
        if not wait.ready():
            raise MergeMismatchError(
                f"A single replica waits for {wait.what}, which no other replica does."
            )


class ReplicaContext:
    """The view of one replica inside `Strategy.run`; get it from `px.get_replica_context`.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> def step():
        ...     context = px.get_replica_context()
        ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1)
        >>> print(strategy.run(step))
        PerReplica:{
          0: Array(3, shape=(), dtype=int32),
          1: Array(3, shape=(), dtype=int32)
        }
    """

    def __init__(
        self,
        strategy: Strategy,
        replica_id_in_sync_group: Any,
        *,
        device: jax.Device | None = None,
        rendezvous: Rendezvous | None = None,
        index: int | None = None,
        compiled: bool = False,
    ) -> None:
        if not _is_replica_id(replica_id_in_sync_group):
            raise InvalidValueError(
                "replica_id_in_sync_group must be an int, an integer array of rank 0, or None. "
                f"Received: {shown(replica_id_in_sync_group)}"
            )
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._device = device
        self._rendezvous = rendezvous or SoloRendezvous()
        self._index = int(replica_id_in_sync_group or 0) if index is None else index
        self._entered: list[list[Any]] = []
        self._outer_trace = compat.current_trace()
        self._compiled = compiled

    def __repr__(self) -> str:
        which = "each replica" if self._compiled else f"replica {self._index}"
        return f"<px.ReplicaContext of {which} of {self._strategy!r}>"

    @property
    def strategy(self) -> Strategy:
        """The strategy whose `run` is going on."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas compute together."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The index of this replica among all replicas, as an int32 scalar.

        Outside of every strategy it is the Python int 0.
        """
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, as a tuple of one short device string."""
        ctx.require_replica_context(self, "ReplicaContext.devices")
        device = self._device or jnp.zeros(()).devices().pop()
        return (short_name(device),)

    # -- meeting the other replicas -------------------------------------------------------------

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Let all replicas meet, and call `merge_fn` once for all of them.

        Args:
            merge_fn: called as ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context.
                Arguments that differ between replicas arrive as `PerReplica` values; the function
                of replica 0 is the one that is called.
            args: positional arguments of this replica.
            kwargs: keyword arguments of this replica.

        Returns:
            What `merge_fn` returned; where that holds distributed values, this replica's
            components.

        Examples:
            >>> import phalanx as px
            >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> def total(strategy, x):
            ...     return sum(strategy.experimental_local_results(x))
            >>> def step(three):
            ...     context = px.get_replica_context()
            ...     v = three + context.replica_id_in_sync_group
            ...     return context.merge_call(total, args=(v,)) + v
            >>> [int(x) for x in strategy.run(step, args=(3,)).values]
            [10, 11]
        """
        if not callable(merge_fn):
            raise InvalidValueError(f"merge_fn must be callable. Received: {shown(merge_fn)}")
        check_arguments(args, kwargs)
        point = MergePoint("merge_call", merge_fn, tuple(args), dict(kwargs or {}))
        return meet(self, point)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a nest of arrays over all replicas; every replica gets the result.

        Differentiable: the gradient of a sum over replicas is the sum of the replicas' gradients,
        and that of a mean is their mean. None and empty containers in the nest stay as they are.

        Args:
            reduce_op: `px.ReduceOp` or its name.
            value: a nest of arrays, numbers or `px.IndexedSlices`, of the same shapes everywhere.
            options: how tensors are packed.
        """
        from phalanx.core.collective_calls import all_reduce

        ctx.require_replica_context(self, "ReplicaContext.all_reduce")
        return all_reduce(self, reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Join a nest of arrays over all replicas along `axis`; every replica gets the result.

        The sizes along `axis` may differ between replicas, and may be 0. Differentiable: each
        replica gets its part of the sum of the replicas' gradients.
        """
        from phalanx.core.collective_calls import all_gather

        ctx.require_replica_context(self, "ReplicaContext.all_gather")
        return all_gather(self, value, axis, options)

    # -- as a context manager, for code that implements strategies ------------------------------

    def __enter__(self) -> ReplicaContext:
        count = self.num_replicas_in_sync
        entered: list[Any] = [ctx.push(ctx.Mode(self._strategy, self))]
        if count > 1:
            entered.append(compat.replica_count_in_jit_key(count))
        for manager in entered:
            manager.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._entered:
            raise ContextError("This replica context was not entered")
        for manager in reversed(self._entered.pop()):
            manager.__exit__(None, None, None)


def _is_replica_id(x: Any) -> bool:
    if x is None or (isinstance(x, int) and not isinstance(x, bool)):
        return True
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return is_array and x.ndim == 0 and bool(jnp.issubdtype(x.dtype, jnp.integer))


# -- what only executors and collectives ask --------------------------------------------------------


def meet(context: ReplicaContext, point: MergePoint) -> Any:
    """Meet the other replicas at a merge point of any kind."""
    ctx.require_replica_context(context, f"ReplicaContext.{point.kind}")
    require_known_values(context, point.kind)
    return context._rendezvous.meet(context, point)


def wait_until(context: ReplicaContext, wait: Wait) -> None:
    """Let the other replicas go on until what this one waits for has been done.

    For replicas that run eagerly; an error if they all wait.
    """
    context._rendezvous.wait_until(context, wait)


def require_known_values(context: ReplicaContext, what: str) -> None:
    """Require that a replica, if it runs eagerly, is not staging a program."""
    if (
        context.num_replicas_in_sync > 1
        and not context._compiled
        and compat.staging_since(context._outer_trace)
    ):
        raise ContextError(
            f"{what} was called while the replica was staging a program (jax.jit, lax.scan, "
            "lax.cond or jax.vmap inside an eagerly run replica function). Replicas that run "
            "eagerly can only meet with known values: call it outside of the staged function."
        )


def run_of(context: ReplicaContext) -> Rendezvous:
    """The run that a replica belongs to, one object for all replicas of this process."""
    return context._rendezvous


def is_compiled(context: ReplicaContext) -> bool:
    """Whether one traced program stands for all replicas."""
    return context._compiled


def is_transformed(context: ReplicaContext) -> bool:
    """Whether `Strategy.run` was called inside a JAX transformation such as `jax.grad`."""
    return compat.is_transformation(context._outer_trace)


def index_of(context: ReplicaContext) -> int:
    """The position of a replica among the replicas of this process, as a Python int."""
    return context._index


def replica_device(context: ReplicaContext) -> jax.Device | None:
    """The device of a replica, or None where JAX's default device is used."""
    return context._device


def current_index() -> int:
    """The replica, or the copy under update, that this thread works for; else 0."""
    mode = ctx.current_mode()
    if mode.replica_context is not None:
        return index_of(mode.replica_context)
    return mode.update_index or 0
