"""Objects that stay in the process that made them, and objects that all processes of a job share."""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown

T = TypeVar("T", bound="StaysHere")


class StaysHere:
    """Refuses to be pickled, with a word on what to send instead; `copy.copy` works.

    Attributes:
        instead: what to do instead, as a sentence.
    """

    instead = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidTypeError(
            f"A {type(self).__name__} belongs to the devices of this process and cannot be pickled. "
            f"{self.instead} Received: {shown(self)}"
        )

    def __copy__(self: T) -> T:
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone


class OnePerProcess:
    """Pickled, it is a reference: each process that unpickles it makes it once.

    Attributes:
        is_owner: whether something elsewhere ends with the object, so that it must outlast references.
    """

    is_owner = False
    _shared_key = ""

    def recipe(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Hook: what makes it in another process, and from what."""
        raise NotImplementedError

    @property
    def shared_key(self) -> str:
        """What all processes know it by."""
        if not self._shared_key:
            self._share(secrets.token_hex(12))
        return self._shared_key

    def _share(self, key: str) -> None:
        self._shared_key = key
        _shared[key] = self

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, args = self.recipe()
        if self.is_owner and _thread.noted is not None:
            _thread.noted.append(self)
        return _here, (self.shared_key, make, args)


class _Thread(threading.local):
    noted: list[Any] | None = None


_thread = _Thread()


class noting:  # noqa: N801 - reads as a statement
    """Note the owners that are pickled in a ``with`` block.

    The bytes refer to them, so those who keep the bytes keep the objects too.

    Args:
        owners: where to note them.
    """

    __slots__ = ("_before", "_owners")

    def __init__(self, owners: list[Any]) -> None:
        self._owners = owners

    def __enter__(self) -> None:
        self._before, _thread.noted = _thread.noted, self._owners

    def __exit__(self, *error: object) -> None:
        _thread.noted = self._before


_shared: weakref.WeakValueDictionary[str, OnePerProcess] = weakref.WeakValueDictionary()


def _here(key: str, make: Callable[..., Any], args: tuple[Any, ...]) -> OnePerProcess:
    found = _shared.get(key)
    if found is None:
        found = make(*args)
        found._share(key)
    return found
