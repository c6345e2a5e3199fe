"""The program of a process of which workers are copies, so that imports are paid for once.

It imports what it is told to, and forks for every order that comes over its socket: an environment, and
the descriptors of the new process. It tells how a copy ended, and keeps its number until its parent has
closed the copy's own socket. When the parent is gone it ends. Like `child.py`, it is run by its path.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

HEADER = 8
DESCRIPTORS = 5
"""What comes with an order: standard output and error, commands, replies, and the copy's socket."""


def main(descriptor: int) -> None:
    """Serve until the parent is gone; a copy goes on as a worker."""
    atexit.register(_leave)  # before all others, so that it is called after them
    with socket.socket(fileno=descriptor) as parent:
        first = receive(parent)
        if first is None:
            return
        path, modules = first[0]
        sys.path[:] = path
        for name in modules:
            module = importlib.import_module(name)
            for public in getattr(module, "__all__", ()):
                getattr(module, public, None)  # some modules load such names on first use
        gc.freeze()  # so that looking for garbage does not touch, and so copy, all memory
        order = _serve(parent)
    if order is not None:
        try:
            _work(*order)
        except SystemExit as end:
            _codes.append(end.code)
            raise
        _codes.append(None)


def _serve(parent: socket.socket) -> tuple[dict[str, str], list[int]] | None:
    """Fork for each order; returns the order in the copy, and None in the end."""
    copies: dict[int, tuple[int, socket.socket]] = {}  # by process id: its pidfd and its socket
    with selectors.DefaultSelector() as selector:
        selector.register(parent, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    order = receive(parent)
                    if order is None:
                        return None
                    environ, descriptors = order
                    pid = os.fork()
                    if pid == 0:
                        for pidfd, status in copies.values():
                            os.close(pidfd)
                            status.close()
                        os.close(descriptors.pop())
                        return environ, descriptors
                    *others, last = descriptors
                    for fd in others:
                        os.close(fd)
                    copies[pid] = (os.pidfd_open(pid), socket.socket(fileno=last))
                    for thing in copies[pid]:
                        selector.register(thing, selectors.EVENT_READ, pid)
                    send(parent, pid)
                    continue
                pidfd, status = copies[key.data]
                if key.fileobj == pidfd:
                    selector.unregister(pidfd)
                    send(status, _code(key.data))
                    status.shutdown(socket.SHUT_WR)  # so that it stays readable
                else:  # the parent has done with it
                    _forget(key.data)
                    selector.unregister(status)
                    if pidfd in selector.get_map():
                        selector.unregister(pidfd)
                    os.close(pidfd)
                    status.close()
                    del copies[key.data]


def _code(pid: int) -> int:
    """How a copy has ended; its number stays taken."""
    state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert state is not None
    return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status


def _forget(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _work(environ: dict[str, str], descriptors: list[int]) -> None:
    """Be a worker: with a session, an environment and standard streams of its own."""
    os.setsid()
    stdout, stderr, commands, replies = descriptors
    for own, number in ((stdout, 1), (stderr, 2)):
        os.dup2(own, number)
        os.close(own)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(environ)
    spec = importlib.util.spec_from_file_location("child", Path(__file__).with_name("child.py"))
    assert spec is not None
    assert spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.main(commands, replies)


_codes: list[object] = []
"""How a copy ends, when it has come to its end."""


def _leave() -> None:
    """End a copy at once: Python would take all modules apart, which copies all memory."""
    if _codes:
        code = _codes[0] or 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


# -- messages, also of the other side ---------------------------------------------------------------


def send(to: socket.socket, message: Any, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message, as JSON has them, and descriptors."""
    body = json.dumps(message).encode()
    header = len(body).to_bytes(HEADER, "big")
    if descriptors:
        socket.send_fds(to, [header], list(descriptors))
    else:
        to.sendall(header)
    to.sendall(body)


def receive(of: socket.socket) -> tuple[Any, list[int]] | None:
    """The next message and its descriptors; None at the end."""
    header, descriptors, _, _ = socket.recv_fds(of, HEADER, DESCRIPTORS)
    header += _read(of, HEADER - len(header)) if header else b""
    body = _read(of, int.from_bytes(header, "big"))
    return (json.loads(body), list(descriptors)) if body else None


def _read(of: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = of.recv(count - len(data))
        if not piece:
            return b""
        data += piece
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))
