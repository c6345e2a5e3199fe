"""Functions and results on their way between processes."""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import cloudpickle

from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown

__all__ = ["frame", "pack", "pack_call", "split_frames"]


def frame(message: Any) -> bytes:
    """A message as bytes, with its length in front."""
    body = pickle.dumps(message, protocol=5)
    return len(body).to_bytes(8, "big") + body


def split_frames(data: bytearray) -> list[Any]:
    """Removes the messages that are complete from the data, and returns them.

    >>> data = bytearray(frame("one") + frame(2)[:5])
    >>> split_frames(data), len(data)
    (['one'], 5)
    """
    messages = []
    while len(data) >= 8 and len(data) >= (end := 8 + int.from_bytes(data[:8], "big")):
        messages.append(pickle.loads(memoryview(data)[8:end].toreadonly()))
        del data[:end]
    return messages


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """A call as bytes.

    The function's module goes along with it, so that the other process need not import it: a test, a
    notebook or a script would run again from its top. What comes from other modules is imported.
    """
    if not callable(fn):
        raise InvalidTypeError(f"fn must be a function. Received: {shown(fn)}")
    return pack((fn, args, dict(kwargs)), fn)


def pack(value: Any, fn: Callable[..., Any]) -> bytes:
    """A value with a function in it as bytes. The function's module goes along, as in `pack_call`."""
    try:
        with _by_value(_module_of(fn)):
            return cloudpickle.dumps(value)
    except Exception as error:
        raise InvalidTypeError(
            "The function, its arguments, and what the function uses of its module must be things that "
            f"can be sent to another process: {error}. Received: {shown(fn)}"
        ) from error


def _module_of(fn: Any) -> ModuleType | None:
    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    return module if module is not None and not _is_installed(module) else None


def _is_installed(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    package = module.__name__.partition(".")[0]
    if path is None or package == "phalanx":
        return True
    places = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return any(path.startswith(place) for place in places)


@contextlib.contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    registered = cloudpickle.list_registry_pickle_by_value()
    if module is None or module.__name__ in registered:
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
