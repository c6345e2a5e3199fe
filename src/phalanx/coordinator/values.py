"""Results, errors and arguments of closures, on their way between processes."""

from __future__ import annotations

import functools
import pickle
import struct
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import jax
import numpy as np

from phalanx.core.structure import map_nest
from phalanx.errors import (
    CancelledError,
    InvalidTypeError,
    OutOfRangeError,
    UnavailableError,
    UnknownError,
)
from phalanx.runtime.formatting import shown
from phalanx.runtime.pickling import noting

__all__ = [
    "NOTHING",
    "References",
    "RemoteTraceback",
    "load_arguments",
    "load_error",
    "load_value",
    "lost_value",
    "pack_arguments",
    "pack_error",
    "pack_value",
    "refer_to_input",
    "refer_to_resource",
]

NOTHING = b"-"
"""What stands for None where empty bytes stand for a value that was lost."""

_ARRAY = b"="  # how an array begins; what is pickled begins otherwise
_DEEPEST = 20  # exceptions that led to one another
_PLAIN = frozenset({int, float, bool, str, bytes, complex, np.ndarray})


class RemoteTraceback(Exception):
    """Where an error was raised on a worker: the cause of the error that is raised here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f"on the worker:\n{self.args[0]}"


# -- results --------------------------------------------------------------------------------------


def pack_value(value: Any) -> bytes:
    """What a closure returns, as bytes: arrays as NumPy arrays, and no bytes for None.

    >>> load_value(pack_value({"a": jax.numpy.ones(2)}))
    {'a': array([1., 1.], dtype=float32)}
    >>> pack_value(None), load_value(b"")
    (b'', None)
    """
    if value is None:
        return b""
    if isinstance(value, jax.Array):
        return _pack_array(np.asarray(value))
    if type(value) not in _PLAIN:
        value = map_nest(_on_host, value)
    return _dumps(value, "What a scheduled function returns")


def load_value(data: bytes) -> Any:
    """What a closure returned, with NumPy arrays."""
    if not data or data == NOTHING:
        return None
    return _load_array(data) if data.startswith(_ARRAY) else pickle.loads(data)


def _pack_array(array: np.ndarray[Any, Any]) -> bytes:
    """An array as bytes, in a fraction of the time that pickling takes: most closures return one."""
    name, shape = _name(array.dtype), array.shape
    head = struct.pack(f"<BB{len(shape)}Q", len(name), len(shape), *shape)
    return b"".join((_ARRAY, head, name, array.tobytes()))


@functools.cache
def _name(dtype: np.dtype[Any]) -> bytes:
    return dtype.name.encode()


def _load_array(data: bytes) -> np.ndarray[Any, Any]:
    length, dims = data[1], data[2]
    at = 3 + 8 * dims
    shape = struct.unpack_from(f"<{dims}Q", data, 3)
    dtype = np.dtype(data[at : at + length].decode())
    return np.frombuffer(bytearray(data[at + length :]), np.uint8).view(dtype).reshape(shape)


def _on_host(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _dumps(value: Any, what: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception:  # noqa: BLE001 - whatever the classes of the user do
        try:
            return cloudpickle.dumps(value)
        except Exception as error:
            raise InvalidTypeError(
                f"{what} must be something that can be sent to another process: {error}. "
                f"Received: {shown(value)}"
            ) from error


# -- errors ---------------------------------------------------------------------------------------


def pack_error(error: BaseException) -> bytes:
    """An error with its traceback, as bytes; the end of input is an `OutOfRangeError`."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, StopIteration):
        error = OutOfRangeError("The end of the dataset was reached.")
    elif not isinstance(error, Exception):  # SystemExit, KeyboardInterrupt: of the worker, not ours
        error = UnknownError(f"{type(error).__name__}: {error}")
    try:
        data = cloudpickle.dumps((_bare(error), text))
        pickle.loads(data)  # an exception may be one that cannot be made again
    except Exception:  # noqa: BLE001 - whatever the classes of the user do
        error = UnknownError(f"{type(error).__name__}: {error}")
        data = pickle.dumps((error, text), protocol=5)
    return data


def _bare(error: BaseException) -> BaseException:
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def load_error(data: bytes) -> BaseException:
    """The error of a closure; its cause says where it was raised."""
    try:
        error, text = pickle.loads(data)
    except Exception as failure:  # noqa: BLE001 - a class that only the worker has
        error, text = UnknownError(f"The worker raised what cannot be unpickled here: {failure}"), ""
    if not isinstance(error, BaseException):
        error = UnknownError(f"A worker sent an error that is none: {shown(error)}")
    error.__cause__ = RemoteTraceback(text)
    return error


def lost_value(closure: int) -> UnavailableError:
    """A closure is done, but what it returned is lost."""
    return UnavailableError(
        f"The updates of closure {closure} were made, but the worker that had its value was lost "
        "before it could send it. It is not run again, because then its updates would count twice. "
        "Return small values: servers keep those."
    )


def given_up(name: str, has_begun: bool) -> CancelledError:
    """A closure that is not settled, and whose coordinator is closed."""
    if has_begun:
        return CancelledError(
            f"The coordinator was closed before it knew what became of {name}. Its updates may have "
            "been made."
        )
    return CancelledError(f"{name} was not run, because the coordinator was closed.")


# -- arguments ------------------------------------------------------------------------------------


class References:
    """What arguments refer to: values of other closures; and resources of workers, and variables."""

    __slots__ = ("inputs", "resources")

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.resources: list[Any] = []


class _Thread(threading.local):
    references: References | None = None  # of the arguments that are being pickled
    resolve: Callable[[str, int], Any] | None = None  # for those that are being unpickled


_thread = _Thread()
_NO_REFERENCES = References()


def pack_arguments(
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[bytes, References]:
    """The arguments of a call as bytes, none if there are none, and what they refer to."""
    if not isinstance(args, tuple | list | None):
        raise InvalidTypeError(
            f"args must be a tuple or a list, for example args=(x,). Received: {shown(args)}"
        )
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)
    ):
        raise InvalidTypeError(f"kwargs must be a dict from names to values. Received: {shown(kwargs)}")
    if not args and not kwargs:
        return b"", _NO_REFERENCES
    found = References()
    before, _thread.references = _thread.references, found
    try:
        arguments = (tuple(args or ()), dict(kwargs or {}))
        with noting(found.resources):
            return _dumps(arguments, "The arguments of a scheduled function"), found
    finally:
        _thread.references = before


def refer_to_input(value: Any) -> Any:
    """What to pickle for the value of another closure, which goes along; for ``__reduce__``."""
    inputs = _collected(value).inputs
    inputs.append(value)
    return _resolve, ("input", len(inputs) - 1)


def refer_to_resource(value: Any, number: int) -> Any:
    """What to pickle for a resource, which every worker has; for ``__reduce__``."""
    _collected(value).resources.append(value)
    return _resolve, ("resource", number)


def _collected(value: Any) -> References:
    if _thread.references is None:
        raise InvalidTypeError(
            f"A {type(value).__name__} can be given to functions that a ClusterCoordinator schedules, "
            f"and is pickled only for them. Received: {shown(value)}"
        )
    return _thread.references


def _resolve(kind: str, number: int) -> Any:
    if _thread.resolve is None:
        raise InvalidTypeError("A reference was unpickled where there is nothing that it refers to.")
    return _thread.resolve(kind, number)


def load_arguments(data: bytes, resolve: Callable[[str, int], Any]) -> tuple[tuple[Any, ...], Any]:
    """The arguments of a call; `resolve` finds what they refer to."""
    if not data:
        return (), {}
    before, _thread.resolve = _thread.resolve, resolve
    try:
        args, kwargs = pickle.loads(data)
    finally:
        _thread.resolve = before
    return args, kwargs
