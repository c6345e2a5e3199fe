"""The global seed: where random choices that name no seed come from."""

from __future__ import annotations

import contextlib
import contextvars
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown

__all__ = ["key_source", "keys_from", "next_seed", "set_seed"]


class _Global:
    """The seed, and how many were drawn from it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seed: int | None = None
        self.count = 0


_global = _Global()


def set_seed(seed: int | None) -> None:
    """See `px.random.set_seed`."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int | np.integer)):
        raise InvalidTypeError(f"seed must be an integer or None. Received: {shown(seed)}")
    with _global.lock:
        _global.seed, _global.count = None if seed is None else int(seed), 0


def next_seed() -> int:
    """The next seed for something random: from the global seed, else from the operating system."""
    with _global.lock:
        if _global.seed is None:
            return secrets.randbits(63)
        _global.count += 1
        words: list[Any] = [_global.seed % 2**64, _global.count]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(1))


_source: contextvars.ContextVar[Callable[[], Any] | None] = contextvars.ContextVar(
    "source of keys", default=None
)


def key_source() -> Callable[[], Any] | None:
    """What gives random keys here, in a program that keeps a state of its own for them."""
    return _source.get()


@contextlib.contextmanager
def keys_from(source: Callable[[], Any]) -> Iterator[None]:
    """Let `px.random.next_key` return what a function gives."""
    before = _source.set(source)
    try:
        yield
    finally:
        _source.reset(before)
