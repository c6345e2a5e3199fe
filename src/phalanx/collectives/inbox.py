"""Where messages wait until they are asked for, and those who ask for messages that have not come."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar


class _Sent(Protocol):
    @property
    def source(self) -> int: ...


M = TypeVar("M", bound=_Sent)


class Inbox(Generic[M]):
    """Brings messages and those who ask for them together, each in the order in which they came.

    >>> from types import SimpleNamespace as Message
    >>> inbox = Inbox()
    >>> future = inbox.take("a", source=1)
    >>> inbox.put("a", Message(source=0))
    >>> future.done(), inbox.take("a").result().source
    (False, 0)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[Hashable, list[M]] = {}
        self._wanted: dict[Hashable, list[tuple[int | None, Future[M]]]] = {}

    def put(self, key: Hashable, message: M) -> None:
        """Give a message to the first that asks for it, or keep it."""
        with self._lock:
            waiting = self._wanted.get(key, [])
            chosen = next((w for w in waiting if w[0] in (None, message.source)), None)
            if chosen is None:
                self._arrived.setdefault(key, []).append(message)
                return
            waiting.remove(chosen)
            if not waiting:
                del self._wanted[key]
        chosen[1].set_result(message)

    def take(self, key: Hashable, source: int | None = None) -> Future[M]:
        """The next message with a key, from one source or from any."""
        future: Future[M] = Future()
        with self._lock:
            here = self._arrived.get(key, [])
            place = next((i for i, m in enumerate(here) if source in (None, m.source)), None)
            if place is None:
                self._wanted.setdefault(key, []).append((source, future))
                return future
            message = here.pop(place)
            if not here:
                del self._arrived[key]
        future.set_result(message)
        return future
