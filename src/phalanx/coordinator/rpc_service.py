"""Answers remote calls: functions by name, run by a few threads."""

from __future__ import annotations

import logging
import pickle
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import cloudpickle
import jax
import numpy as np

from phalanx import errors
from phalanx.data.run.thread_pool import PendingCall, ThreadPool
from phalanx.net.connection import Connection
from phalanx.net.event_loop import EventLoop
from phalanx.net.framing import Limits, Message, ProtocolError, encode
from phalanx.runtime.formatting import shown

__all__ = ["LIMITS", "PURPOSE", "RpcService", "code_of", "error_of", "pack", "unpack"]

_log = logging.getLogger(__name__)

PURPOSE = "rpc"
"""What connections of clients are for."""
LIMITS = Limits(buffers=1 << 40, most=1 << 16)
"""How large calls and answers may be."""

_GRACE = 1.0  # seconds for calls that run at the end

_CODES: dict[int, type[errors.OpError]] = {
    1: errors.CancelledError,
    2: errors.UnknownError,
    3: errors.InvalidArgumentError,
    4: errors.DeadlineExceededError,
    5: errors.NotFoundError,
    6: errors.AlreadyExistsError,
    7: errors.PermissionDeniedError,
    8: errors.ResourceExhaustedError,
    9: errors.FailedPreconditionError,
    10: errors.AbortedError,
    11: errors.OutOfRangeError,
    12: errors.UnimplementedError,
    13: errors.InternalError,
    14: errors.UnavailableError,
    15: errors.DataLossError,
    16: errors.UnauthenticatedError,
}


def code_of(error: BaseException) -> int:
    """The status code that stands for an exception.

    >>> code_of(errors.NotFoundError("")), code_of(AssertionError()), code_of(RuntimeError())
    (5, 3, 2)
    """
    for code, kind in _CODES.items():
        if isinstance(error, kind):
            return code
    if isinstance(error, AssertionError | TypeError | ValueError):
        return 3
    return 12 if isinstance(error, NotImplementedError) else 2


def error_of(code: int, message: str) -> errors.OpError:
    """The exception that stands for a status code.

    >>> error_of(5, "There is no such method.")
    NotFoundError('There is no such method.')
    """
    return _CODES.get(code, errors.UnknownError)(message)


def pack(values: Any) -> list[Any]:
    """A nest of arrays, numbers and texts as bytes; the arrays themselves are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    plain = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, values)
    try:
        head = cloudpickle.dumps(plain, protocol=5, buffer_callback=buffers.append)
    except errors.PhalanxError:
        raise
    except Exception as error:
        raise errors.InvalidTypeError(
            "What goes through a remote call must be something that can be sent to another process: "
            f"{error}. Received: {shown(values)}"
        ) from error
    return [head, *(buffer.raw() for buffer in buffers)]


def unpack(buffers: Sequence[Any]) -> Any:
    """What `pack` was given. Only for what came from a peer that has proved itself."""
    if not buffers:
        raise ProtocolError("A peer sent a call without arguments.")
    return pickle.loads(buffers[0], buffers=buffers[1:])


class RpcService:
    """Serves the connections of clients.

    Calls run in threads of their own, several at a time, in the order in which they came.

    Args:
        methods: the functions by name.
        threads: how many calls run at the same time.
    """

    def __init__(self, methods: Mapping[str, Callable[..., Any]], threads: int = 16) -> None:
        self._methods = dict(methods)
        self._threads = ThreadPool(threads, "phalanx-rpc-call")
        self._calls: list[PendingCall[None]] = []
        self._open: set[Connection] = set()
        self._loop = EventLoop("phalanx-rpc").start()

    def admit(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        """Take the connection of a client."""
        self._loop.call_soon(partial(self._begin, sock))

    def close(self, grace: float = _GRACE) -> None:
        """End all connections. Calls that run have a moment to come to their end and be answered."""
        end = time.monotonic() + grace
        while (calls := self._loop.call(self._running)) and (left := end - time.monotonic()) > 0:
            self._threads.wait(calls, left)
        self._threads.stop()
        self._loop.call(self._end_all)
        self._loop.close()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._open)

    def status(self) -> dict[str, Any]:
        """The methods, and how many calls run."""
        return {"methods": sorted(self._methods), "running": len(self._loop.call(self._running))}

    def _running(self) -> list[PendingCall[None]]:
        self._calls = [call for call in self._calls if not call.done]
        return self._calls

    def _end_all(self) -> None:
        for connection in list(self._open):
            connection.close()

    def _begin(self, sock: socket.socket) -> None:
        def receive(message: Message) -> None:
            self._receive(connection, message)

        def closed(error: Exception | None) -> None:
            self._open.discard(connection)

        connection = Connection(self._loop, sock, receive, closed, limits=LIMITS, backlog=1 << 40)
        self._open.add(connection)

    def _receive(self, connection: Connection, message: Message) -> None:
        if message.fields.get("op") == "methods":
            connection.send({"methods": sorted(self._methods)}, number=message.number)
        elif message.fields.get("op") == "call":
            self._calls = [*self._running(), self._threads.submit(self._answer, connection, message)]
        else:
            raise ProtocolError("A client asks for what is no call.")

    def _answer(self, connection: Connection, message: Message) -> None:
        try:
            answer = self._result(str(message.fields.get("method")), message)
            pieces = encode(answer, LIMITS)
        except BaseException as error:  # noqa: BLE001 - raised again at the client
            _log.debug("A remote call failed", exc_info=True)
            pieces = encode(_failure(error, message.number), LIMITS)
        self._loop.call_soon(partial(connection.push, pieces))

    def _result(self, name: str, message: Message) -> Message:
        method = self._methods.get(name)
        if method is None:
            raise errors.NotFoundError(
                f"The server has no such method, but {sorted(self._methods)}. Received: {name!r}"
            )
        return Message({"code": 0}, pack(method(*unpack(message.buffers))), message.number)


def _failure(error: BaseException, number: int) -> Message:
    trace = "".join(traceback.format_exception(error))
    text = str(error) or type(error).__name__
    return Message({"code": code_of(error), "message": text, "traceback": trace}, (), number)
