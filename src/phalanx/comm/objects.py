"""Collectives of Python objects. They are pickled, and travel between the ranks of one job only.

Between replicas of one process they are pickled as well, so that no two replicas share an object.

Unpickling runs code, so it happens for bytes of workers alone that have proved to know the job's token,
which all connections of a job do.

An object that cannot be pickled takes part as what is wrong with it, so that no rank waits for one that
does not come: all that should have had the object raise the same error, and the ranks stay in step.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.collectives import groups
from phalanx.collectives.perform import GroupLike
from phalanx.comm import functional
from phalanx.core.replica_context import is_compiled
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.runtime.call_site import caller
from phalanx.runtime.formatting import shown

_OBJECT, _PROBLEM = b"\0", b"\1"  # what the rest of the bytes is


def packed(value: Any) -> np.ndarray[Any, Any]:
    """An object as bytes, or what is wrong with it."""
    buffer = io.BytesIO()
    buffer.write(_OBJECT)
    try:
        pickle.dump(value, buffer)
    except Exception as error:  # noqa: BLE001 - an object may raise anything
        where = f"rank {groups.own_rank()} at {caller()}"
        text = f"The object of {where} cannot be pickled: {shown(error)}. Received: {shown(value)}"
        return np.frombuffer(_PROBLEM + text.encode(), np.uint8)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def unpacked(data: Any) -> Any:
    """The object of some bytes; an error if it could not be pickled, or cannot be unpickled here."""
    content = np.ascontiguousarray(data).data
    if bytes(content[:1]) == _PROBLEM:
        raise InvalidTypeError(bytes(content[1:]).decode())
    try:
        return pickle.loads(content[1:])
    except Exception as error:
        raise InvalidTypeError(
            f"An object that another rank sent cannot be unpickled on rank {groups.own_rank()}. Its "
            "class must be importable there, and what it does then must not fail. "
            f"Received: {shown(error)}"
        ) from error


def _is_problem(data: Any) -> bool:
    return bool(data[0] == _PROBLEM[0])


def check_packed(data: Any) -> None:
    """Require that an object could be pickled."""
    if _is_problem(data):
        unpacked(data)


def check_place(name: str) -> None:
    """Require that code is not compiled."""
    inside = groups.replica()
    if inside is not None and is_compiled(inside):
        raise ContextError(
            f"{name} needs objects that are known, but compiled code has arrays alone. Call it outside "
            "of px.function and jax.jit, where replicas run eagerly. Received: a compiled replica"
        )


def all_gather_object(obj: Any, group: GroupLike = None) -> list[Any] | None:
    """A list of the objects of all ranks; None outside of the group.

    Examples:
        >>> import phalanx as px
        >>> px.comm.all_gather_object({"loss": 0.5})
        [{'loss': 0.5}]
    """
    check_place("all_gather_object")
    if isinstance(obj, list) and not isinstance(group, groups.Group | str | None):
        raise InvalidTypeError(
            "all_gather_object returns the list of objects, it does not fill one as in torch. Write "
            f"objects = px.comm.all_gather_object(obj, group). Received: a list, and {shown(group)}"
        )
    parts, _ = functional.all_gather(packed(obj), group)
    return None if parts is None else _all_unpacked(parts)


def _all_unpacked(parts: Sequence[Any]) -> list[Any]:
    return [unpacked(part) for part in parts]


def gather_object(obj: Any, dst: int = 0, group: GroupLike = None) -> list[Any] | None:
    """A list of the objects of all ranks on rank `dst`, None elsewhere."""
    check_place("gather_object")
    mine = packed(obj)
    parts, _ = functional.gather(mine, dst, group)
    if parts is not None:
        return _all_unpacked(parts)
    check_packed(mine)
    return None


def broadcast_object_list(object_list: list[Any], src: int = 0, group: GroupLike = None) -> None:
    """Replace the items of every rank's list by those of rank `src`; the lengths must be the same."""
    check_place("broadcast_object_list")
    if not isinstance(object_list, list):
        raise InvalidTypeError(f"object_list must be a list. Received: {shown(object_list)}")
    found = groups.find(group)
    groups.check_rank(src, "src", found)
    is_source = groups.own_rank() == src
    copies = [packed(object_list)] * len(found) if is_source else None
    part, _ = functional.scatter(copies, src, group)
    if part is None:
        return
    items = unpacked(part)
    if len(items) != len(object_list):
        raise InvalidValueError(
            f"The list must have {len(items)} items, as that of rank {src}. "
            f"Received: {len(object_list)} items"
        )
    object_list[:] = items


def scatter_object_list(objects: Sequence[Any] | None, src: int = 0, group: GroupLike = None) -> Any:
    """Give each rank its object of the list that rank `src` has; the others give None."""
    check_place("scatter_object_list")
    found = groups.find(group)
    groups.check_rank(src, "src", found)
    blocks = None
    if groups.own_rank() == src:
        if not isinstance(objects, Sequence) or len(objects) != len(found):
            raise InvalidValueError(
                f"Rank {src} must give a list of {len(found)} objects. Received: {shown(objects)}"
            )
        blocks = [packed(o) for o in objects]
        problems = [b for b in blocks if _is_problem(b)]
        if problems:
            blocks = problems[:1] * len(found)  # for all of them
    part, _ = functional.scatter(blocks, src, group)
    return None if part is None else unpacked(part)
