"""Remote calls between a server and clients of this process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.net.client import connect

SCALAR = px.TensorSpec((), jnp.float32)


@px.function(input_signature=[SCALAR, SCALAR])
def multiply(a: Any, b: Any) -> Any:
    return a * b


@px.function(input_signature=[SCALAR])
def refuse(a: Any) -> Any:
    raise AssertionError("a is not welcome")


def no_keys() -> Any:
    return {}["key"]


@px.function(input_signature=[px.TensorSpec((None,), jnp.float32)])
def statistics(x: Any) -> Any:
    return {"sum": x.sum(), "rows": (x[:1], x[1:])}


@pytest.fixture
def server() -> Iterator[px.rpc.Server]:
    server = px.rpc.Server.create("grpc", "localhost:0")
    for name, method in (("multiply", multiply), ("refuse", refuse), ("statistics", statistics)):
        server.register(name, method)
    server.register("no_keys", px.function(no_keys))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: px.rpc.Server) -> Iterator[px.rpc.Client]:
    client = px.rpc.Client.create("grpc", server.address, name="tester", timeout_in_ms=20_000)
    yield client
    client.close()


def test_a_call_and_its_result(client: px.rpc.Client) -> None:
    answer = client.call("multiply", [2.0, 3.0], output_specs=SCALAR)
    assert answer.is_ok()
    assert answer.get_error() == (0, "")
    assert float(answer.get_value()) == 6.0
    assert isinstance(answer.get_value(), jnp.ndarray)


def test_methods_of_the_server_are_methods_of_the_client(client: px.rpc.Client) -> None:
    assert float(client.multiply(2.0, 4.0).get_value()) == 8.0
    assert float(client.multiply_blocking(jnp.float32(2), np.float32(5))) == 10.0
    with pytest.raises(AttributeError, match="divide"):
        client.divide(1.0)


def test_nests_go_and_come(client: px.rpc.Client) -> None:
    result = client.statistics_blocking(np.arange(200_000, dtype=np.float32))
    assert float(result["sum"]) == np.arange(200_000, dtype=np.float32).sum()
    assert [len(rows) for rows in result["rows"]] == [1, 199_999]


def test_failures_have_codes_and_the_remote_traceback(client: px.rpc.Client) -> None:
    answer = client.refuse(1.0)
    assert not answer.is_ok()
    assert answer.get_error() == (3, "a is not welcome")
    with pytest.raises(
        px.errors.InvalidArgumentError, match=r"'refuse' at .* is not welcome"
    ) as caught:
        answer.get_value()
    assert "in refuse" in "".join(caught.value.__notes__)
    with pytest.raises(px.errors.UnknownError):
        client.no_keys_blocking()
    with pytest.raises(px.errors.InvalidArgumentError):  # arguments that do not fit
        client.multiply_blocking(np.zeros(3, np.float32), 1.0)


def test_a_method_that_is_not_there(client: px.rpc.Client) -> None:
    code, text = client.call("divide", [1.0]).get_error()
    assert code == 5
    assert "['multiply', 'no_keys', 'refuse', 'statistics']" in text


def test_results_that_do_not_fit_their_specs(client: px.rpc.Client) -> None:
    for specs in (px.TensorSpec((1,)), px.TensorSpec((), jnp.int32), [SCALAR, SCALAR], {"a": SCALAR}):
        answer = client.call("multiply", [2.0, 3.0], output_specs=specs)
        with pytest.raises(px.errors.InvalidArgumentError, match="output_specs"):
            answer.get_value()


def test_arguments_of_calls_are_checked(client: px.rpc.Client) -> None:
    for args in (2.0, np.ones(2, np.float32)):
        with pytest.raises(px.errors.InvalidTypeError, match=r"args=\[x\].*Received: "):
            client.call("multiply", args)  # type: ignore[arg-type]
    with pytest.raises(px.errors.InvalidTypeError, match=r"TensorSpec.*Received: 3"):
        client.call("multiply", [2.0, 3.0], output_specs=3)
    with pytest.raises(px.errors.InvalidTypeError, match="timeout_in_ms must be a number"):
        client.call("multiply", [2.0, 3.0], timeout_in_ms="1")  # type: ignore[arg-type]
    with pytest.raises(px.errors.InvalidTypeError, match=r"another process.*Received: "):
        client.call("multiply", [2.0, threading.Lock()])
    with pytest.raises(px.errors.InvalidTypeError, match="Send what it holds"):
        client.call("multiply", [2.0, px.Variable(1.0)])
    assert float(client.call("multiply", (2.0, 3.0), None, -1).get_value()) == 6.0


def test_a_process_may_end_with_open_clients_and_servers() -> None:
    program = (
        "import phalanx as px\n"
        "server = px.rpc.Server.create('grpc', 'localhost:0')\n"
        "server.register('four', px.function(lambda: 4))\n"
        "server.start()\n"
        "client = px.rpc.Client.create('grpc', server.address)\n"
        "print(int(client.four_blocking()))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert (ended.stdout, ended.stderr) == ("4\n", "")


def test_an_answer_that_takes_too_long() -> None:
    release = threading.Event()
    server = px.rpc.Server.create("grpc", "localhost:0")

    def wait() -> None:
        release.wait(60)

    server.register("wait", px.function(wait))
    server.start()
    client = px.rpc.Client.create("grpc", server.address)
    try:
        answer = client.wait(timeout_in_ms=30)
        assert answer.get_error()[0] == 4
        with pytest.raises(px.errors.DeadlineExceededError, match="'wait' at localhost"):
            answer.get_value()
    finally:
        release.set()
        client.close()
        server.stop()


def test_calls_run_at_the_same_time() -> None:
    both = threading.Barrier(2)
    server = px.rpc.Server.create("grpc", "localhost:0")
    for name in ("one", "other"):
        server.register(name, px.function(lambda: both.wait(30) >= 0))
    server.start()
    client = px.rpc.Client.create("grpc", server.address)
    answers = [client.one(), client.other()]
    assert [a.is_ok() for a in answers] == [True, True]
    client.close()
    server.stop()


def test_no_server() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"localhost:{held.getsockname()[1]}"
        with pytest.raises(px.errors.DeadlineExceededError, match=address):
            px.rpc.Client.create("grpc", address, timeout_in_ms=50)


def test_a_server_that_stops_and_one_that_comes_back(client: px.rpc.Client, server: Any) -> None:
    address = server.address
    server.stop()
    answer = client.call("multiply", [2.0, 3.0], timeout_in_ms=300)
    assert answer.get_error()[0] in (4, 14)
    assert address in str(answer.get_error()[1])
    other = px.rpc.Server.create("grpc", address)
    other.register("multiply", multiply)
    other.start()
    assert float(client.multiply_blocking(2.0, 3.0)) == 6.0
    other.stop()


def test_a_client_that_was_closed(client: px.rpc.Client) -> None:
    client.close()
    with pytest.raises(px.errors.FailedPreconditionError, match="closed"):
        client.call("multiply", [1.0, 2.0])


def test_only_who_knows_the_token_may_call(server: px.rpc.Server) -> None:
    with pytest.raises(px.errors.UnauthenticatedError):
        connect(server.address, b"another token", {"for": "rpc"}, 5.0)


def test_a_stranger_who_sends_garbage_is_dropped(client: px.rpc.Client, server: px.rpc.Server) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(b"\x80\x04garbage" * 100)
        stranger.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: stranger.recv(1000), b""))
    assert len(received) < 1000  # a greeting, and that is all
    assert float(client.multiply_blocking(2.0, 3.0)) == 6.0


def test_registering_is_checked() -> None:
    server = px.rpc.Server.create("grpc", "localhost:0")
    with pytest.raises(ValueError, match=r"px\.function"):
        server.register("plain", lambda: 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="input_signature"):
        server.register("unknown", px.function(lambda x: x))
    server.register("one", px.function(lambda: 1))
    with pytest.raises(px.errors.InvalidArgumentError, match="twice"):
        server.register("one", px.function(lambda: 1))
    with pytest.raises(TypeError):
        server.register(1, px.function(lambda: 1))  # type: ignore[arg-type]
    server.start()
    with pytest.raises(px.errors.FailedPreconditionError, match="before the server starts"):
        server.register("two", px.function(lambda: 2))
    with pytest.raises(px.errors.FailedPreconditionError, match="once"):
        server.start()
    server.stop()
    server.stop()


def test_the_layer_has_one_name() -> None:
    with pytest.raises(ValueError, match="'http'"):
        px.rpc.Server.create("http", "localhost:0")
    with pytest.raises(ValueError, match="'http'"):
        px.rpc.Client.create("http", "localhost:1")
    assert px.experimental.rpc is px.rpc
