"""Stands between tasks and those who dial them: can end connections, and hold what they carry.

TCP neither repeats nor reorders what it carries. Tasks still meet repeated and late messages: a request
arrives, its answer is lost, and it is sent again over a new connection; or an old connection delivers
later than the new one. A proxy does both.
"""

from __future__ import annotations

import asyncio
import contextlib
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
        self._timers: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
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
        self._timers.add(task)
        task.add_done_callback(self._timers.discard)

    async def _listen(self) -> None:
        for task in self._targets:
            # Not a coroutine: what asyncio does about the end of one complains if it was cancelled, and
            # one that is cancelled before it has begun cannot close its connection.
            def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: str = task
            ) -> None:
                serving = self._loop.create_task(self._serve(task, reader, writer))
                serving.add_done_callback(lambda _: writer.transport.abort())
                self._keep(serving)

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            self.addresses[task] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._servers.append(server)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        # A connection that was accepted just now has a task that is not there yet.
        while rest := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
            await asyncio.sleep(0)

    async def _serve(
        self, task: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            far_reader, far = await asyncio.open_connection(*split_address(self._targets[task]))
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        pair = _Pair(writer, far)
        self._pairs[task].add(pair)
        try:
            await asyncio.gather(
                _copy(reader, far, pair.there, pair), _copy(far_reader, writer, pair.back, pair)
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
