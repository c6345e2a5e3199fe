"""Stands between tasks and those who dial them: can end connections, and hold what they carry.

TCP neither repeats nor reorders what it carries. Tasks still meet repeated and late messages: a request
arrives, its answer is lost, and it is sent again over a new connection; or an old connection delivers
later than the new one. A proxy does both.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from phalanx.net.addresses import split_address

__all__ = ["Proxies"]

_CHUNK = 64 << 10
_START = 10.0  # seconds


class _Pair:
    """A connection, and the one that was made for it."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.there, self.back = asyncio.Event(), asyncio.Event()  # whether bytes may pass
        self.there.set()
        self.back.set()

    def end(self) -> None:
        self.there.set()
        self.back.set()
        self.near.transport.abort()
        self.far.transport.abort()


class Proxies:
    """A proxy for each of several tasks, all in one thread.

    Args:
        targets: where each task listens, by its name.

    Attributes:
        addresses: where its proxy listens.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self._targets = dict(targets)
        self._pairs: dict[str, set[_Pair]] = {task: set() for task in targets}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[socket.socket] = []
        self.addresses: dict[str, str] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._wait(self._listen())

    def close(self) -> None:
        """End everything."""
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START)
        self._loop.close()

    def __enter__(self) -> Proxies:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- faults ----------------------------------------------------------------------------------

    def cut(self, task: str) -> int:
        """End all connections to a task; returns how many there were."""
        return self._each(task, lambda pair: pair.end())

    def delay(self, task: str, seconds: float) -> int:
        """Let what goes to a task and comes from it wait."""

        def hold(pair: _Pair) -> None:
            pair.there.clear()
            pair.back.clear()
            self._later(seconds, pair.there.set, pair.back.set)

        return self._each(task, hold)

    def lose_answers(self, task: str, seconds: float) -> int:
        """Let a task get what is sent to it, and lose what it sends; then the connections end."""

        def hold(pair: _Pair) -> None:
            pair.back.clear()
            self._later(seconds, pair.end)

        return self._each(task, hold)

    def deliver_late(self, task: str, seconds: float) -> int:
        """Hold what is sent to a task, end the connections of the senders, and then deliver it."""

        def hold(pair: _Pair) -> None:
            pair.there.clear()
            self._later(seconds, pair.near.transport.abort)
            self._later(2 * seconds, pair.there.set)

        return self._each(task, hold)

    # -- inside ----------------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_START)

    def _each(self, task: str, do: Callable[[_Pair], None]) -> int:
        async def do_all() -> int:
            pairs = list(self._pairs[task])
            for pair in pairs:
                do(pair)
            return len(pairs)

        return int(self._wait(do_all()))

    def _later(self, seconds: float, *calls: Callable[[], Any]) -> None:
        async def call() -> None:
            await asyncio.sleep(seconds)
            for do in calls:
                do()

        self._keep(self._loop.create_task(call()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        for task in self._targets:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)
            self._listeners.append(listener)
            self.addresses[task] = f"127.0.0.1:{listener.getsockname()[1]}"
            self._loop.add_reader(listener, self._accept, task, listener)

    def _accept(self, task: str, listener: socket.socket) -> None:
        """Take a connection.

        A server of asyncio has a task for each that it takes. If that is cancelled before it has begun,
        or the server is closed before, the connection stays open.
        """
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionAbortedError):
            sock, _ = listener.accept()
            sock.setblocking(False)
            serving = self._loop.create_task(self._serve(task, sock))
            serving.add_done_callback(
                lambda _: sock.close()
            )  # also one that was cancelled before it began
            self._keep(serving)

    async def _end(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, task: str, sock: socket.socket) -> None:
        try:
            far_reader, far = await asyncio.open_connection(*split_address(self._targets[task]))
        except OSError:
            return  # nothing listens there
        try:
            reader, near = await asyncio.open_connection(sock=sock)
        except BaseException:
            far.transport.abort()
            raise
        pair = _Pair(near, far)
        self._pairs[task].add(pair)
        try:
            await asyncio.gather(
                _copy(reader, far, pair.there, pair), _copy(far_reader, near, pair.back, pair)
            )
        finally:
            self._pairs[task].discard(pair)
            pair.end()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may: asyncio.Event, pair: _Pair
) -> None:
    """Copy until the connection ends, which ends the other one when all has been delivered."""
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            await may.wait()
            writer.write(data)
            with contextlib.suppress(OSError):
                await writer.drain()
    await may.wait()
    writer.close()
