"""Clients and servers over real sockets: messages, requests, strangers, and what breaks."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.processes import wait_until

from phalanx import errors
from phalanx.net import listener
from phalanx.net.addresses import listen
from phalanx.net.client import RequestClient, connect
from phalanx.net.connection import Connection
from phalanx.net.event_loop import EventLoop
from phalanx.net.framing import Limits, Message, ProtocolError
from phalanx.net.listener import Listener

SECONDS = 20.0
KEY = b"secret"
LIMITS = Limits(fields=1 << 16, buffers=64 << 20, most=4)


class Server:
    """Answers each request with what it is given; what else it does is up to its fields."""

    def __init__(self, sock: Any = None) -> None:
        sock = listen("127.0.0.1", 0) if sock is None else sock
        self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        self.connections: list[Connection] = []
        self.closed: list[Exception | None] = []
        self.purposes: list[dict[str, Any]] = []
        self.loop = EventLoop("test-server")
        self.listener = Listener(self.loop, [sock], KEY, self._admit, lambda p: p != {"a": "none"})
        self.loop.start()

    def _admit(self, sock: socket.socket, purpose: dict[str, Any]) -> None:
        def answer(message: Message) -> None:
            what = message.fields.get("do")
            if what == "close":
                connection.close()
            elif what == "ask":
                connection.send({"question": True}, number=2)
            elif what != "nothing":
                connection.send(message.fields, message.buffers, message.number)

        connection = Connection(self.loop, sock, answer, self.closed.append, limits=LIMITS)
        self.purposes.append(purpose)
        self.connections.append(connection)

    def client(
        self, on_message: Callable[[Message], None] = lambda _: None, **options: Any
    ) -> RequestClient:
        sock = connect(self.address, KEY, {"a": 1}, SECONDS)
        return RequestClient(sock, "test-client", on_message, limits=LIMITS, **options).start()

    def close(self) -> None:
        def end() -> None:
            self.listener.close()
            for connection in self.connections:
                connection.close()

        self.loop.call(end)
        self.loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_answers_find_their_requests(server: Server) -> None:
    clients = [server.client() for _ in range(3)]

    def ask(i: int) -> tuple[Any, bytes]:
        message = clients[i % 3].request({"i": i}, [bytes([i]) * i * 1000, b""], timeout=SECONDS)
        return message.fields, b"".join(message.buffers)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(40), timeout=SECONDS))
    assert found == [({"i": i}, bytes([i]) * i * 1000) for i in range(40)]
    assert server.purposes == [{"a": 1}] * 3
    for client in clients:
        client.close()
    wait_until(lambda: server.closed == [None] * 3)


def test_large_buffers_in_both_directions(server: Server) -> None:
    client = server.client()
    data = bytes(range(256)) * (1 << 16)
    message = client.request({}, [data, memoryview(data)[1::1]], timeout=SECONDS)
    assert [bytes(b) for b in message.buffers] == [data, data[1:]]
    client.close()


def test_a_request_has_a_deadline(server: Server) -> None:
    client = server.client()
    with pytest.raises(errors.DeadlineExceededError, match=r"within 0\.1 seconds"):
        client.request({"do": "nothing"}, timeout=0.1)
    assert client.request({"i": 1}, timeout=SECONDS).fields == {"i": 1}, "and others have theirs"
    client.close()


def test_requests_fail_when_the_connection_closes(server: Server) -> None:
    ended = threading.Event()
    client = server.client(on_close=ended.set)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.request, {"do": "nothing"}, timeout=SECONDS)
        client.send({"do": "close"})
        with pytest.raises(errors.UnavailableError):
            waiting.result(SECONDS)
    assert ended.wait(SECONDS)
    wait_until(lambda: not client.loop.is_alive)
    with pytest.raises(errors.UnavailableError):
        client.request({}, timeout=SECONDS)
    client.send({})  # into the void
    client.close()


def test_messages_that_are_no_answers(server: Server) -> None:
    heard: list[Message] = []
    client = server.client(heard.append)
    client.send({"do": "ask"})
    wait_until(lambda: heard)
    assert heard == [Message({"question": True}, [], 2)]
    with pytest.raises(errors.InvalidValueError):
        client.send({"value": object()})
    client.close()


def test_a_handler_that_fails_closes_its_connection_only(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    other = server.client()
    ended = threading.Event()

    def fail(message: Message) -> None:
        raise KeyError("boom")

    client = server.client(fail, on_close=ended.set)
    client.send({"do": "ask"})
    assert ended.wait(SECONDS)
    assert "boom" in caplog.text
    assert other.request({}, timeout=SECONDS).number == 1
    for each in (client, other):
        each.close()


def test_who_sends_no_messages_or_too_large_ones_is_dropped(server: Server) -> None:
    for data in (b"GET / HTTP/1.0\r\n\r\n", b"plx2" + bytes(4) + b"\xff" * 8):
        sock = connect(server.address, KEY, {}, SECONDS)
        sock.settimeout(SECONDS)
        sock.sendall(data)
        assert sock.recv(1) == b""
        sock.close()
    wait_until(lambda: len(server.closed) == 2)
    assert [type(error) for error in server.closed] == [ProtocolError] * 2


def test_who_does_not_read_is_dropped(server: Server) -> None:
    sock = connect(server.address, KEY, {}, SECONDS)
    wait_until(lambda: server.connections)

    def flood() -> None:
        for _ in range(10):
            server.connections[0].send({}, [bytes(8 << 20)])

    server.loop.call(flood)
    wait_until(lambda: server.closed)
    assert "does not read" in str(server.closed[0])
    sock.close()


# -- strangers -----------------------------------------------------------------------------------


def test_only_who_knows_the_key_is_admitted(server: Server) -> None:
    with pytest.raises(errors.UnauthenticatedError, match=f"refuses this token.*{server.address}"):
        connect(server.address, b"guess", {}, SECONDS)
    with pytest.raises(ProtocolError, match="does not serve"):
        connect(server.address, KEY, {"a": "none"}, SECONDS)
    assert server.purposes == []
    wait_until(lambda: server.listener.strangers == 0)


def test_strangers_have_little_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE", 0.2)
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), SECONDS) as stranger:
        stranger.settimeout(SECONDS)
        stranger.sendall(b"a")
        assert len(stranger.recv(46, socket.MSG_WAITALL)) == 46
        assert stranger.recv(1) == b"", "it is dropped"


def test_what_follows_the_handshake_is_not_lost(server: Server) -> None:
    """A client may send its first messages at once, whichever way they are cut."""
    client = server.client()
    assert client.request({"first": 1}, timeout=SECONDS).fields == {"first": 1}
    client.close()


class Short:
    """A listener of a process that has no descriptor left for a while."""

    def __init__(self, sock: socket.socket) -> None:
        self.refusals = 2
        self._sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._sock.accept()


def test_who_listens_goes_on_after_a_time_without_descriptors() -> None:
    short = Short(listen("127.0.0.1", 0))
    server = Server(short)
    client = server.client()
    assert client.request({"i": 1}, timeout=SECONDS).fields == {"i": 1}
    assert short.refusals == 0
    client.close()
    server.close()


def test_nothing_here_needs_jax() -> None:
    """The process of the hub and those who ask it start quickly."""
    program = (
        "import sys, pkgutil, importlib, phalanx.net\n"
        "for m in pkgutil.iter_modules(phalanx.net.__path__, 'phalanx.net.'):\n"
        "    importlib.import_module(m.name)\n"
        "import phalanx.job.hub.server, phalanx.job.observer\n"
        "print([m for m in ('jax', 'jaxlib', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
