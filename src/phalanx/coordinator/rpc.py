"""Remote calls: functions that a server registers, and clients call by name."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.cluster.tasks import text
from phalanx.coordinator.rpc_service import LIMITS, PURPOSE, RpcService, code_of, error_of, pack, unpack
from phalanx.core.tensor_spec import TensorSpec
from phalanx.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    InvalidValueError,
    PhalanxError,
    UnavailableError,
)
from phalanx.execution.function import Function
from phalanx.job.preflight import is_loopback
from phalanx.job.tokens import find_token
from phalanx.net.addresses import split_address
from phalanx.net.client import RequestClient
from phalanx.net.endpoint import Endpoint, dial
from phalanx.net.framing import Message
from phalanx.runtime.deadlines import worker_deadline
from phalanx.runtime.formatting import shown
from phalanx.runtime.numbers import check_number

__all__ = ["Client", "Server", "StatusOrResult"]

_LONGEST = 7 * 24 * 3600 * 1000  # milliseconds


def _key(address: str) -> bytes:
    return find_token(is_loopback(split_address(address)[0])).encode()


def _check_layer(rpc_layer: str) -> None:
    if not isinstance(rpc_layer, str) or rpc_layer != "grpc":
        raise InvalidValueError(
            "The only protocol of remote calls has the name 'grpc', as in TensorFlow. "
            f"Received: {shown(rpc_layer)}"
        )


class Server:
    """Runs functions that clients call by name.

    Make one with `create`, register functions, and start it. It listens at the address it was given,
    and clients must know the job's token.

    Examples:
        >>> import jax.numpy as jnp
        >>> import phalanx as px
        >>> server = px.rpc.Server.create("grpc", "localhost:0")
        >>> scalar = px.TensorSpec((), jnp.float32)
        >>> @px.function(input_signature=[scalar, scalar])
        ... def multiply(a, b):
        ...     return a * b
        >>> server.register("multiply", multiply)
        >>> server.start()
        >>> client = px.rpc.Client.create("grpc", server.address)
        >>> float(client.multiply_blocking(2.0, 3.0))
        6.0
        >>> client.close(), server.stop()
        (None, None)
    """

    def __init__(self, address: str) -> None:
        split_address(text(address, "The address of a server"))
        self._address = address
        self._methods: dict[str, Callable[..., Any]] = {}
        self._service: RpcService | None = None
        self._endpoint: Endpoint | None = None
        self._is_over = False

    @staticmethod
    def create(rpc_layer: str, address: str) -> Server:
        """Make a server, which does not listen yet.

        Args:
            rpc_layer: the name of the protocol, 'grpc'.
            address: ``host:port``; with port 0, `address` says which port it is once it has started.
        """
        _check_layer(rpc_layer)
        return Server(address)

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self._address if self._endpoint is None else self._endpoint.address

    def register(self, method_name: str, func: Function) -> None:
        """Let clients call a function. All functions must be registered before the server starts.

        Args:
            method_name: the name that clients call.
            func: a function that `px.function` returned. If it has arguments, it needs an
                `input_signature`.
        """
        if self._endpoint is not None or self._is_over:
            raise FailedPreconditionError(
                "All methods must be registered before the server starts. "
                f"Received: {shown(method_name)}"
            )
        if not isinstance(method_name, str) or not method_name:
            raise InvalidTypeError(
                f"The name of a method must be a text. Received: {shown(method_name)}"
            )
        if method_name in self._methods:
            raise InvalidArgumentError(
                f"Each method needs a name of its own. Received: {shown(method_name)}, twice"
            )
        if not isinstance(func, Function):
            raise InvalidValueError(
                f"A remote method must be a compiled function: wrap it in px.function. "
                f"Received: {shown(func)}"
            )
        if func.input_signature is None and inspect.signature(func.python_function).parameters:
            raise InvalidValueError(
                "A remote method with arguments must say which they are: "
                f"px.function(input_signature=[px.TensorSpec(…)]). Received: {shown(func)}"
            )
        self._methods[method_name] = func

    def start(self) -> None:
        """Listen, and answer calls in threads of this process."""
        if self._is_over or self._endpoint is not None:
            raise FailedPreconditionError(
                f"A server starts once. Received: a second start of the server at {self.address}"
            )
        endpoint = Endpoint(self._address, _key(self._address))
        self._service = RpcService(self._methods)
        endpoint.serve(PURPOSE, self._service.admit)
        self._endpoint = endpoint.start()

    def stop(self) -> None:
        """Stop listening, and end all connections."""
        endpoint, service = self._endpoint, self._service
        self._is_over = True
        if endpoint is not None and service is not None:
            self._address = endpoint.address
            self._endpoint = self._service = None
            endpoint.close()
            service.close()

    def __del__(self, is_end: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_endpoint", None) is not None and not is_end():
            self.stop()


class StatusOrResult:
    """What becomes of a remote call: its result, or why there is none. Asking waits for the answer.

    Examples:
        >>> import phalanx as px
        >>> server = px.rpc.Server.create("grpc", "localhost:0")
        >>> server.register("four", px.function(lambda: 4))
        >>> server.start()
        >>> client = px.rpc.Client.create("grpc", server.address)
        >>> answer = client.four()
        >>> answer.is_ok(), answer.get_error(), int(answer.get_value())
        (True, (0, ''), 4)
        >>> client.call("five").get_error()[0]
        5
        >>> client.close(), server.stop()
        (None, None)
    """

    def __init__(self, future: Future[Message], deadline: float, what: str, output_specs: Any) -> None:
        self._future, self._deadline, self._what = future, deadline, what
        self._specs = output_specs
        self._answer: Message | None = None

    def is_ok(self) -> bool:
        """Whether the call has succeeded."""
        return self._status()[0] == 0

    def get_error(self) -> tuple[int, str]:
        """The status code, 0 if the call has succeeded, and the message."""
        return self._status()

    def get_value(self) -> Any:
        """What the function returned; raises if the call has failed.

        A failure of the function is raised as the error of `px.errors` that stands for its status code.
        """
        code, problem = self._status()
        assert self._answer is not None
        if code:
            error = error_of(code, f"{self._what} failed: {problem}")
            if "traceback" in self._answer.fields:
                error.add_note(f"Where it happened:\n{self._answer.fields['traceback']}")
            raise error
        value = jax.tree.map(
            lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x,
            unpack(self._answer.buffers),
        )
        if self._specs is not None:
            self._check(value)
        return value

    def _status(self) -> tuple[int, str]:
        if self._answer is None:
            self._answer = self._wait()
        fields = self._answer.fields
        return int(fields["code"]), str(fields.get("message", ""))

    def _wait(self) -> Message:
        try:
            return self._future.result(max(0.0, self._deadline - time.monotonic()))
        except PhalanxError as error:
            return Message({"code": code_of(error), "message": str(error)})
        except TimeoutError:
            problem = "there was no answer in time"
            return Message({"code": code_of(DeadlineExceededError()), "message": problem})

    def _check(self, value: Any) -> None:
        try:
            fits = jax.tree.map(TensorSpec.accepts, self._specs, value)
        except ValueError:  # another structure
            fits = False
        if not all(jax.tree.leaves(fits)):
            raise InvalidArgumentError(
                f"{self._what} returned what does not fit its `output_specs`, {shown(self._specs)}. "
                f"Received: {shown(value)}"
            )


class Client:
    """Calls the functions of a server.

    Besides `call`, a client has two methods for each function of the server: one with its name, which
    returns a `StatusOrResult` at once, and one with ``_blocking`` at the end, which returns the result
    or raises.

    Examples:
        >>> import phalanx as px
        >>> server = px.rpc.Server.create("grpc", "localhost:0")
        >>> server.register("four", px.function(lambda: 4))
        >>> server.start()
        >>> client = px.rpc.Client.create("grpc", server.address)
        >>> int(client.call("four").get_value()), int(client.four_blocking())
        (4, 4)
        >>> client.close(), server.stop()
        (None, None)
    """

    def __init__(self, address: str, name: str = "", timeout_in_ms: int = 0) -> None:
        self._address, self._name = text(address, "The address of a server"), name
        self._timeout = _seconds(timeout_in_ms)
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        self._is_closed = False
        for method in self._methods():
            if not hasattr(type(self), method):
                setattr(self, method, partial(self._call, method))
            setattr(self, f"{method}_blocking", partial(self._call_blocking, method))

    @staticmethod
    def create(rpc_layer: str, address: str, name: str = "", timeout_in_ms: int = 0) -> Client:
        """Connect to a server, which must be there in time.

        Args:
            rpc_layer: the name of the protocol, 'grpc'.
            address: ``host:port`` of the server.
            name: of the client, for messages.
            timeout_in_ms: how long the server may take to be there, and for each answer. 0 means as
                long as workers wait for each other (PHALANX_DEADLINE).
        """
        _check_layer(rpc_layer)
        return Client(address, name, timeout_in_ms)

    def __repr__(self) -> str:
        return f"<rpc.Client{f' {self._name}' if self._name else ''} of {self._address}>"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The server at {self.__dict__.get('_address')} has no method {name!r}. "
            f"Received: {shown(name)}"
        )

    def call(
        self,
        method_name: str,
        args: Sequence[Any] | None = None,
        output_specs: Any = None,
        timeout_in_ms: int = 0,
    ) -> StatusOrResult:
        """Call a function of the server; does not wait for the answer.

        Args:
            method_name: the name it was registered with.
            args: its arguments: arrays, numbers, texts, and nests of them.
            output_specs: a nest of `px.TensorSpec` that the result must fit; None takes any.
            timeout_in_ms: how long the answer may take; 0 takes the client's.
        """
        if not isinstance(args, tuple | list | None):
            raise InvalidTypeError(
                f"args must be a tuple or a list, for example args=[x]. Received: {shown(args)}"
            )
        _check_specs(output_specs)
        seconds = _seconds(timeout_in_ms) if timeout_in_ms else self._timeout
        deadline = time.monotonic() + seconds
        what = f"The remote call of {method_name!r} at {self._address}"
        arguments = pack(tuple(args or ()))
        try:
            connection = self._connected(deadline)
            future = connection.ask({"op": "call", "method": method_name}, arguments)
        except (DeadlineExceededError, UnavailableError) as error:
            future = Future()
            future.set_exception(error)
        return StatusOrResult(future, deadline, what, output_specs)

    def close(self) -> None:
        """End the connection. Calls that wait for an answer fail."""
        self._is_closed = True
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __del__(self, is_end: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.__dict__.get("_connection") is not None and not is_end():
            self.close()

    def _call(self, method: str, *args: Any, timeout_in_ms: int = 0) -> StatusOrResult:
        return self.call(method, args, timeout_in_ms=timeout_in_ms)

    def _call_blocking(self, method: str, *args: Any, timeout_in_ms: int = 0) -> Any:
        return self.call(method, args, timeout_in_ms=timeout_in_ms).get_value()

    def _methods(self) -> list[str]:
        deadline = time.monotonic() + self._timeout
        answer = self._connected(deadline).ask({"op": "methods"})
        try:
            return list(answer.result(max(0.0, deadline - time.monotonic())).fields["methods"])
        except TimeoutError:
            raise DeadlineExceededError(
                f"The rpc server at {self._address} did not say in time which methods it has. "
                f"Received: timeout {self._timeout:g} s"
            ) from None

    def _connected(self, deadline: float) -> _Connection:
        """The connection to the server; a new one if it was lost."""
        with self._lock:
            if self._is_closed:
                raise FailedPreconditionError(f"The client was closed. Received: {self!r}")
            if self._connection is None or self._connection.is_lost:
                left = max(0.01, round(deadline - time.monotonic(), 3))  # errors show it
                self._connection = _Connection(self._address, left)
            return self._connection


class _Connection:
    """A connection to a server, and the requests that wait for its answers."""

    def __init__(self, address: str, seconds: float) -> None:
        self._address = address
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Message]] = {}
        sock = dial(address, _key(address), {"for": PURPOSE}, seconds, peer="rpc server")
        self._client = RequestClient(
            sock, "phalanx-rpc-client", self._receive, self._fail, limits=LIMITS
        ).start()

    @property
    def is_lost(self) -> bool:
        """Whether the server has ended the connection, or is gone."""
        return self._client.is_closed

    def ask(self, fields: dict[str, Any], buffers: Sequence[Any] = ()) -> Future[Message]:
        """Send a request; its answer comes later."""
        future: Future[Message] = Future()
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = future
        self._client.send(fields, buffers, number)
        if self.is_lost:
            self._fail()
        return future

    def close(self) -> None:
        self._client.close()
        self._fail()

    def _receive(self, message: Message) -> None:
        with self._lock:
            future = self._pending.pop(message.number, None)
        if future is not None:
            future.set_result(message)

    def _fail(self) -> None:
        with self._lock:
            pending = list(self._pending.values())
            self._pending.clear()
        for future in pending:
            future.set_exception(
                UnavailableError(f"The connection to the rpc server at {self._address} has closed.")
            )


def _check_specs(specs: Any) -> None:
    if not all(isinstance(spec, TensorSpec) for spec in jax.tree.leaves(specs)):
        raise InvalidTypeError(
            "output_specs must be a nest of px.TensorSpec that looks like the result, or None. "
            f"Received: {shown(specs)}"
        )


def _seconds(milliseconds: int | None) -> float:
    if milliseconds is None:
        return worker_deadline()
    given = check_number(milliseconds, "timeout_in_ms", -_LONGEST, _LONGEST)
    return given / 1000 if given > 0 else worker_deadline()
