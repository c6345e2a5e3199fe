"""Performs collectives: between replicas inside `Strategy.run`, else between the workers of a job."""

from __future__ import annotations

from typing import Any

from phalanx.collectives import groups, prepared_calls, worker_calls
from phalanx.collectives.groups import Group
from phalanx.collectives.handles import Outcome
from phalanx.collectives.table import Request
from phalanx.core.replica_context import ReplicaContext, is_compiled
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

GroupLike = Group | str | None
Op = Any


def perform(
    name: str,
    group: GroupLike,
    async_op: bool = False,
    x: Any = None,
    *,
    op: Op = None,
    root: int | None = None,
    splits: tuple[Any, Any] | None = None,
    out: Any = None,
    timeout: float | None = None,
) -> Outcome:
    """Perform an operation of the table.

    See `Request` for the arguments.
    """
    if not isinstance(async_op, bool):
        raise InvalidTypeError(f"async_op must be True or False. Received: {shown(async_op)}")
    context = groups.replica()
    signed = None
    if context is None and not async_op and timeout is None and name in prepared_calls.NAMES:
        signed = prepared_calls.signature(name, group, x, op, out)
        if signed is not None:
            result = prepared_calls.attempt(signed, x, out)
            if result is not prepared_calls.NOT_DONE:
                return result, None
    found = groups.find(group)
    request = Request.of(name, found.ranks, x, op, root, splits, out)
    if context is None:
        outcome = worker_calls.perform(request, found, async_op, timeout)
        if signed is not None:
            prepared_calls.keep(signed, found, request)
        return outcome
    check_replicas(found)
    return _between_replicas(context, found, request, async_op)


def _between_replicas(
    context: ReplicaContext, group: Group, request: Request, async_op: bool
) -> Outcome:
    if is_compiled(context) or context.num_replicas_in_sync == 1:
        from phalanx.collectives.compiled_replicas import CompiledReplicas

        return CompiledReplicas(context, group, request.operation.name).run(request, async_op)
    from phalanx.collectives.eager_replicas import EagerReplicas

    return EagerReplicas(context, group).run(request, async_op)


def check_replicas(group: Group) -> Group:
    """Require a group whose ranks are replicas."""
    count = groups.world_size()
    if max(group.ranks) >= count:
        raise InvalidValueError(
            f"Inside strategy.run the ranks are the {count} replicas. Received: {shown(group)}"
        )
    return group
