"""The variables and positions inside objects, by the way that leads to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.core.variables import Variable
from phalanx.data.distribute.distributed_dataset import DistributedIterator
from phalanx.data.run.iterator import Iterator as DatasetIterator
from phalanx.errors import ContextError, InvalidTypeError
from phalanx.runtime.formatting import shown

__all__ = ["found", "is_position"]


def is_position(x: Any) -> bool:
    """Whether something has a position that a checkpoint saves."""
    return isinstance(x, DistributedIterator | DatasetIterator)


def found(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The variables and iterators in objects, each under the first name that leads to it.

    Dicts, lists and tuples are gone through, objects with ``variables`` (optimizers, metrics) by
    these, and other objects by their attributes.

    >>> from phalanx.core.variables import Variable
    >>> v = Variable(1.0)
    >>> list(found({"model": {"layers": [v]}, "same": v}))
    ['model/layers/0']
    """
    result: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # and keeps them alive
    for name, thing in objects.items():
        is_known = id(thing) in seen
        leaves = list(_walk(name, thing, seen))
        if not leaves and not is_known and not _may_be_empty(thing):
            raise InvalidTypeError(
                "A checkpoint saves variables, iterators, optimizers, metrics, and objects that hold "
                f"them. Received: {name}={shown(thing)}"
            )
        result.update(leaves)
    return result


def _walk(path: str, thing: Any, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, Variable) or is_position(thing):
        yield path, thing
        return
    for name, part in _parts(thing):
        yield from _walk(f"{path}/{name}" if path else name, part, seen)


def _parts(thing: Any) -> list[tuple[str, Any]]:
    """What an object is made of, by name."""
    if isinstance(thing, Mapping):
        return [(str(key), value) for key, value in thing.items()]
    if isinstance(thing, list | tuple):
        return [(str(i), value) for i, value in enumerate(thing)]
    if isinstance(thing, type):
        return []
    try:
        variables = getattr(thing, "variables", None)
    except ContextError:  # an optimizer that has no state yet
        return []
    if isinstance(variables, list | tuple):
        return [(str(i), value) for i, value in enumerate(variables)]
    held = getattr(thing, "__dict__", {})
    return [(name, value) for name, value in held.items() if _is_worth_a_look(value)]


def _is_worth_a_look(value: Any) -> bool:
    if isinstance(value, Variable | Mapping | list | tuple) or is_position(value):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)


def _may_be_empty(thing: Any) -> bool:
    """Whether an object that holds nothing now may hold something later."""
    if isinstance(thing, Mapping | list | tuple):
        return True
    try:
        return hasattr(thing, "variables") or hasattr(thing, "build")
    except ContextError:
        return True
