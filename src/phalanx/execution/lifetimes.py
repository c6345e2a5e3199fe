"""Tables that keep nothing alive: their entries end with the objects that they were made for."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Identity(weakref.ref[Any]):
    """A part of a key that stands for an object, and for no other, without keeping it alive.

    A new object may get the `id` of one that is gone; an `Identity` is not fooled by it.
    """

    __slots__ = ("_id",)

    def __init__(self, x: Any) -> None:  # `__new__` has made the reference
        self._id = id(x)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._id != other._id:
            return False
        x = self()
        return self is other or (x is not None and x is other())


class KeptIdentity:
    """The same for objects that cannot be referred to without keeping them alive."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptIdentity) and self.x is other.x


class Whole:
    """An argument that is taken as it is, also if it is a container or says that it equals another."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


def identity(x: Any) -> Identity | KeptIdentity:
    """A part of a key that stands for an object, and keeps it alive only if it must."""
    return Identity(x) if may_end(x) else KeptIdentity(x)


def may_end(x: Any) -> bool:
    """Whether an object can be referred to without keeping it alive."""
    return type(x).__weakrefoffset__ != 0


class Table(Generic[T]):
    """A dict whose entries end with the first of the objects that they depend on.

    An entry must not refer to those objects, or they would never end.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[T, list[weakref.ref[Any]]]] = {}

    def get(self, key: Hashable) -> T | None:
        """The value of a key, if there is one."""
        try:
            entry = self._entries.get(key)
        except ValueError as error:  # JAX's, if comparing what is in a pytree was interrupted
            if error.__cause__ is not None and not isinstance(error.__cause__, Exception):
                raise error.__cause__ from None
            raise
        return None if entry is None else entry[0]

    def put(self, key: Hashable, value: T, needs: Iterable[Any]) -> None:
        """Keep a value until one of the objects in `needs` ends."""
        table = weakref.ref(self)  # the table and its entries make no cycle, and end at once

        def forget(_: weakref.ref[Any]) -> None:
            here = table()
            if here is not None:
                here._entries.pop(key, None)

        self._entries[key] = (value, [weakref.ref(x, forget) for x in needs])

    def __len__(self) -> int:
        return len(self._entries)
