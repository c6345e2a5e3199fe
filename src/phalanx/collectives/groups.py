"""Groups of ranks, and the world that they are in."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.cluster import roles
from phalanx.cluster.resolvers.base import ClusterResolver
from phalanx.cluster.resolvers.tfconfig import TFConfigClusterResolver
from phalanx.collectives.table import place_of
from phalanx.collectives.world import World, device_of
from phalanx.core import context as ctx
from phalanx.core.replica_context import ReplicaContext, index_of, is_compiled
from phalanx.errors import FailedPreconditionError, InvalidTypeError, InvalidValueError, NotFoundError
from phalanx.job import connection
from phalanx.runtime.formatting import shown

WORLD_COMM_GROUP = "phalanx_world_group"
"""The name of the group of all ranks."""


@dataclass(frozen=True)
class Group:
    """Some of the ranks, in an order of their own. Made by `create_group` and `new_group`.

    Args:
        name: the name by which operations find it.
        ranks: the members, as ranks in the world.
    """

    name: str
    ranks: tuple[int, ...]
    destroyed: list[bool] = field(default_factory=list, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.ranks)

    @functools.cached_property
    def members(self) -> tuple[int, ...]:
        """The members in the order of the world."""
        return tuple(sorted(self.ranks))

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each member."""
        return tuple(device_of(r) for r in self.ranks)


_lock = threading.RLock()
_worlds: list[World] = []
_started: list[bool] = []
_groups: dict[str, Group] = {}
_made: dict[tuple[int, ...], int] = {}
_made_inside: weakref.WeakKeyDictionary[ReplicaContext, dict[tuple[int, ...], int]]
_made_inside = weakref.WeakKeyDictionary()


def init(cluster_resolver: ClusterResolver | None = None, timeout: float | None = None) -> None:
    """Meet the other workers. A multi-worker strategy does it by itself; again does nothing.

    Must come before JAX starts, like the strategy. Without a cluster, or with one worker, this process
    is a world of its own.

    Args:
        cluster_resolver: who the workers are; by default TF_CONFIG, which ``phalanx run`` sets.
        timeout: seconds that operations wait for other workers, by default PHALANX_DEADLINE.
    """
    resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
    if not isinstance(resolver, ClusterResolver):
        raise InvalidTypeError(
            "cluster_resolver must be a px.cluster_resolver.ClusterResolver or None. "
            f"Received: {shown(cluster_resolver)}"
        )
    with _lock:
        if connection.connected() is None and _worker_count(resolver) > 1:
            connection.connect_once(resolver, timeout)
        world()
        _started[:] = [True]


def _worker_count(resolver: ClusterResolver) -> int:
    spec = resolver.cluster_spec()
    if not spec or not spec.jobs or resolver.task_type in (None, "ps", "evaluator"):
        return 1
    return roles.worker_count(spec, resolver.task_type)


def world() -> World:
    """The world of this process, which is made when it is first needed."""
    if _worlds and _worlds[0].size > 1:
        return _worlds[0]  # there is no other one until `leave_world`
    with _lock:
        connected = connection.connected()
        if not _worlds or (connected is not None and _worlds[0].size == 1):
            if connected is None and _worker_count(TFConfigClusterResolver()) > 1:
                raise FailedPreconditionError(
                    "This process is one of several workers, which have not met yet: call "
                    "px.comm.init(), or make the multi-worker strategy, at the top of the program."
                )
            _worlds[:] = [World(connected)]
        return _worlds[0]


def destroy() -> None:
    """Finish what is under way and forget all groups; the strategies of the process stay."""
    with _lock:
        if _worlds and _worlds[0].size == 1:
            _worlds.pop().close()
        elif _worlds:
            _worlds[0].settle()
        _groups.clear()
        _made.clear()
        _started.clear()


def leave_world() -> None:
    """Close the connections to other ranks and forget them, before this process joins others."""
    with _lock:
        for known in _worlds:
            known.close()
        _worlds.clear()
        _groups.clear()
        _made.clear()
        _started.clear()


def is_initialized() -> bool:
    """Whether `init` was called, or a multi-worker strategy has met the other workers."""
    return bool(_started) or connection.connected() is not None


# -- ranks -----------------------------------------------------------------------------------------


def replica() -> ReplicaContext | None:
    """The replica that this code runs for inside `Strategy.run`: then replicas are the ranks."""
    return ctx.active_replica()


def world_size() -> int:
    """The number of all ranks, here."""
    inside = replica()
    return world().size if inside is None else inside.num_replicas_in_sync


def own_rank() -> int | None:
    """The rank of this worker or replica; None in compiled code, which stands for all replicas."""
    inside = replica()
    if inside is None:
        return world().rank
    return None if is_compiled(inside) else index_of(inside) + inside.strategy.extended._first_replica


def find(group: Any) -> Group:
    """The group that was given, or named; None is the world."""
    if group is None or group == WORLD_COMM_GROUP:
        return _everyone(world_size())
    if isinstance(group, Group) and not group.destroyed:
        return group
    if isinstance(group, str) and group in _groups:
        return _groups[group]
    if isinstance(group, str | Group):
        raise NotFoundError(
            f"There is no such group; known are {[WORLD_COMM_GROUP, *_groups]}. "
            f"Received: {shown(group)}"
        )
    raise InvalidTypeError(f"group must be a Group, its name, or None. Received: {shown(group)}")


@functools.cache
def _everyone(size: int) -> Group:
    return Group(WORLD_COMM_GROUP, tuple(range(size)))


def create_group(name: str, ranks: Sequence[int]) -> Group:
    """Make a group with a name. Its members alone need to call this.

    Args:
        name: the same for all members.
        ranks: the ranks of the members in the world, in the order that the group shall have.
    """
    if not isinstance(name, str) or not name:
        raise InvalidTypeError(f"The name of a group must be a text. Received: {shown(name)}")
    group = Group(name, check_ranks(ranks))
    with _lock:
        known = _groups.setdefault(name, group)
    if known.ranks != group.ranks or name == WORLD_COMM_GROUP:
        raise InvalidValueError(
            f"There is a group {shown(name)} already, of other ranks. Received: {list(ranks)}"
        )
    return known


def new_group(ranks: Sequence[int] | None = None) -> Group:
    """Make a group without a name of its own; of all ranks if none are given. See `create_group`."""
    members = check_ranks(range(world_size()) if ranks is None else ranks)
    inside = replica()
    with _lock:
        counts = _made if inside is None else _made_inside.setdefault(inside, {})
        number = counts[members] = counts.get(members, 0) + 1
        kind = "group" if inside is None else "replicas"
        return create_group(f"{kind}_{'_'.join(map(str, members))}_{number}", members)


def destroy_group(group: Group | str) -> None:
    """Forget a group; its name may be used again."""
    if replica() is not None and isinstance(group, Group) and group.destroyed:
        return  # by another replica
    found = find(group)
    if found.name == WORLD_COMM_GROUP:
        raise InvalidValueError(f"The world cannot be destroyed as a group. Received: {shown(group)}")
    with _lock:
        found.destroyed.append(True)
        _groups.pop(found.name, None)


def check_ranks(ranks: Any) -> tuple[int, ...]:
    """Require ranks of the world, each once."""
    try:
        members = tuple(ranks)
    except TypeError:
        members = ()
    if not members or any(isinstance(r, bool) or not isinstance(r, int) for r in members):
        raise InvalidValueError(f"A group needs a list of at least one rank. Received: {shown(ranks)}")
    if len(set(members)) < len(members):
        raise InvalidValueError(f"A group has each rank once. Received: {shown(list(members))}")
    for rank in members:
        check_rank(rank, "Rank")
    return members


def check_rank(rank: Any, what: str, group: Group | None = None) -> int:
    """Require a rank of the world, or of a group; returns its place there."""
    if group is None:
        return place_of(rank, what, tuple(range(world_size())), "the world")
    return place_of(rank, what, group.ranks, f"the group {group.name!r}")


def get_rank(group: Group | str | None = None) -> Any:
    """The rank of this process in a group, -1 if it is no member.

    Inside `Strategy.run` it is the replica's, which is an array where code is compiled.
    """
    inside = replica()
    if inside is not None and group is None:
        return inside.replica_id_in_sync_group
    members = find(group).ranks
    return _of_own_rank(lambda rank: members.index(rank) if rank in members else -1)


def _of_own_rank(entry: Callable[[int], int]) -> Any:
    """What a function gives for the own rank; an array where code is compiled."""
    rank = own_rank()
    if rank is not None:
        return entry(rank)
    inside = replica()
    assert inside is not None
    table = [entry(r) for r in range(inside.num_replicas_in_sync)]
    return jnp.asarray(table)[inside.replica_id_in_sync_group]


def get_world_size(group: Group | str | None = None) -> int:
    """The number of ranks of a group; -1 if this rank is no member, as in torch.

    Compiled code has no rank of its own, and gets the number in any case.
    """
    members = find(group).ranks
    return len(members) if own_rank() in (*members, None) else -1


def get_group_size(group: Group | str | None = None) -> int:
    """The number of ranks of a group."""
    return len(find(group))


def get_local_rank(group: Group | str | None = None) -> Any:
    """The place of this process among the members on its machine; -1 if it is no member.

    Inside `Strategy.run` it is the replica's, which is an array where code is compiled.
    """
    machines, members = _machines(), find(group).ranks

    def place(rank: int) -> int:
        if rank not in members:
            return -1
        return sum(machines[m] == machines[rank] for m in members[: members.index(rank)])

    return _of_own_rank(place)


def get_local_rank_size(group: Group | str | None = None) -> int:
    """How many members of a group are on this machine.

    Inside `Strategy.run`, if all machines have as many.
    """
    machines, members = _machines(), find(group).ranks
    rank = own_rank()
    here = machines if rank is None else [machines[rank]]
    counts = {sum(machines[m] == machine for m in members) for machine in here}
    if len(counts) == 1:
        return counts.pop()
    raise InvalidValueError(
        "The machines have different numbers of members, but compiled code has one number for all "
        f"replicas. Received: {members} on the machines {machines}"
    )


def _machines() -> list[str]:
    """The machine of each rank."""
    inside = replica()
    if inside is None:
        return world().hosts
    count = inside.num_replicas_in_sync
    if inside.strategy.extended._span is None:
        return [""] * count
    hosts = world().hosts
    return [hosts[r * len(hosts) // count] for r in range(count)]


def get_world_rank_from_group_rank(group: Group | str | None, group_rank_id: int) -> int:
    """The rank in the world of a member of a group."""
    members = find(group).ranks
    if not isinstance(group_rank_id, int) or not 0 <= group_rank_id < len(members):
        raise InvalidValueError(
            f"The group has the ranks 0 to {len(members) - 1}. Received: {shown(group_rank_id)}"
        )
    return members[group_rank_id]


def get_group_rank_from_world_rank(world_rank_id: int, group: Group | str | None) -> int:
    """The rank in a group of a rank in the world."""
    return check_rank(world_rank_id, "world_rank_id", find(group))


def get_process_group_ranks(group: Group | str | None = None) -> list[int]:
    """The members of a group, as ranks in the world."""
    return list(find(group).ranks)
