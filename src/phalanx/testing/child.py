"""The program of a `px.testing.MultiProcess` worker: runs the functions that its parent sends.

It is started by its path and imports nothing of Phalanx, so that a worker starts in a tenth of a second
and only functions that use JAX pay for it. Messages are eight bytes of length and a pickle; they come
from the parent over a pipe that no other process has.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from typing import Any


def main(commands: int, replies: int) -> None:
    """Serve until the parent says that it was the last function, or is gone."""
    for fd in (commands, replies):
        os.set_inheritable(fd, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.path[:] = _receive(commands)
    import cloudpickle  # only now, because the path tells where it is

    _send(replies, ("ready", 0, b""))
    while (order := _receive(commands)) is not None:
        run, call = order
        reply = _run(run, call, cloudpickle.dumps)
        sys.stdout.flush()
        sys.stderr.flush()
        _send(replies, reply)


def _run(run: int, call: bytes, dumps: Any) -> tuple[str, int, Any]:
    try:
        fn, args, kwargs = pickle.loads(call)
        return ("value", run, dumps(fn(*args, **kwargs)))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        told = error.with_traceback(_without_this_file(error.__traceback__))
        text = "".join(traceback.format_exception(told))
        try:
            pickled = dumps(error)
        except Exception:  # noqa: BLE001 - then the text must do
            pickled = b""
        return ("error", run, (type(error).__name__, str(error), text, pickled))


def _without_this_file(trace: Any) -> Any:
    return trace.tb_next if trace is not None and trace.tb_next is not None else trace


def _receive(fd: int) -> Any:
    header = _read(fd, 8)
    return pickle.loads(_read(fd, int.from_bytes(header, "big"))) if header else None


def _read(fd: int, count: int) -> bytes:
    """`count` bytes, or none if the parent is gone."""
    data = bytearray()
    while len(data) < count:
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def _send(fd: int, message: Any) -> None:
    body = pickle.dumps(message, protocol=5)
    view = memoryview(len(body).to_bytes(8, "big") + body)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
