"""The connection of a task to one parameter server: requests in order, sent again after a loss."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from phalanx.errors import (
    DeadlineExceededError,
    PhalanxError,
    UnauthenticatedError,
    UnavailableError,
)
from phalanx.net.endpoint import dial
from phalanx.net.framing import Decoder, Message, ProtocolError
from phalanx.net.stream import Stream
from phalanx.parameter_server import wire
from phalanx.parameter_server.buffers import BufferPool
from phalanx.parameter_server.landing import Landing, Room
from phalanx.parameter_server.lane import Lane, Placed
from phalanx.parameter_server.service import PURPOSE
from phalanx.parameter_server.shared_memory import SharedMemory, offer
from phalanx.parameter_server.wire import LIMITS, Kind

__all__ = ["Refusal", "ServerLink", "greeted"]

_log = logging.getLogger("phalanx")

_TRY = 4.5  # seconds for one try to reach a server, after which it is named
_LARGE = 64 << 10  # bytes of a request that are worth a lane
_MOST_HELD = 32  # requests of one message
_PAUSE = 0.05  # seconds between tries to reach a server that is gone
_LARGEST_NUMBER = 0xFFFFFFFF

M = TypeVar("M", bound=SharedMemory)


Request = tuple[list[Any], Callable[[Any], None]]
"""What was asked of a server, kept until there is an answer, and who gets that."""


class Refusal(Exception):
    """A server does not want to serve this task; `error` says why."""

    def __init__(self, error: PhalanxError) -> None:
        self.error = error


class ServerLink:
    """A connection to one server, for one thread.

    Requests are answered in their order. After a loss they are sent again in that order, which is
    harmless: servers know what they have done.

    Args:
        address: of the server.
        key: the job's secret.
        hello: what the server is told first.
        pool: memory for what is received.
        timeout: seconds after which a server that is gone, or does not answer, is given up.
    """

    def __init__(
        self, address: str, key: bytes, hello: dict[str, Any], pool: BufferPool, timeout: float
    ) -> None:
        self.address, self.index = address, int(hello["index"])
        self._key, self._hello, self._pool, self._timeout = key, hello, pool, timeout
        self._stream: Stream | None = None
        self._lane: Lane | None = None
        self._landing: Landing | None = None
        self._may_have_lane = self._may_have_landing = True
        self._number = 0
        self.pending: deque[Request] = deque()
        """Requests without an answer."""
        self._held: list[list[Any]] = []  # the last of them, which have not been sent
        self._counts: deque[int] = deque()  # how many of them each message has that was sent
        self.bytes_in = self.bytes_out = 0

    def connect(self) -> None:
        """Reach the server now rather than at the first request."""
        if self._stream is None:
            self._reach()
        self._hello.pop("begin", None)  # an empty store must not take the place of a lost one
        self._hello.pop("resume", None)

    def ask(self, buffers: list[Any], then: Callable[[Any], None], *, hold: bool = False) -> None:
        """Send a request, now or with the next one; `then` gets the buffers of its answer."""
        sent = buffers
        if sum(map(len, buffers)) >= _LARGE:
            sent, then = self._laned(buffers, then)
            hold = False  # the server may begin
        self.pending.append((buffers, then))
        if self._stream is None:
            self._reach()
            return
        self._held.append(sent)
        if not hold or len(self._held) >= _MOST_HELD:
            self.flush()

    def flush(self) -> None:
        """Send what is held, as one message."""
        held, stream = self._held, self._stream
        if not held or stream is None:
            return
        self._held = []
        self._counts.append(len(held))
        try:
            buffers = held[0] if len(held) == 1 else wire.several(held)
            stream.send(buffers, self._next_number(), self._timeout)
        except DeadlineExceededError as error:
            self._lose()
            raise self._silent() from error
        except OSError:
            self._lose()
            self._reach()

    def answer(self) -> None:
        """Wait for the next answer."""
        self.flush()
        while True:
            stream = self._stream
            if stream is None:
                stream = self._reach()
            try:
                message = stream.receive(self._timeout, self._remind)
            except DeadlineExceededError as error:
                self._lose()
                raise self._silent() from error
            except OSError:
                self._lose()
                continue
            self._take(message)
            return

    def poll(self) -> bool:
        """Take the next answer if it is there; whether it was."""
        if self._stream is None:
            self._reach()
        elif not self._counts:  # nothing was sent that could be answered
            return False
        assert self._stream is not None
        try:
            message = self._stream.poll()
        except OSError:
            self._lose()
            return False
        if message is None:
            return False
        self._take(message)
        return True

    def close(self) -> None:
        """End the connection."""
        self._lose()
        self.pending.clear()

    # -- inside ----------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        """Give the answers of a message to those who have asked."""
        count, pending = self._counts.popleft(), self.pending
        if count == 1:
            pending.popleft()[1](message.buffers)
            return
        answers = wire.read_several(message.buffers)
        takers = [pending.popleft()[1] for _ in range(count)]
        failure: Exception | None = None
        for then, answer in zip(takers, answers, strict=True):
            try:
                then(answer)
            except Exception as error:  # noqa: BLE001 - the others must hear of theirs
                failure = failure or error
        if failure is not None:
            raise failure

    def _laned(self, buffers: list[Any], then: Callable[[Any], None]) -> Request:
        """What to send of a large request: where its arrays are, if the server can look there.

        Also who gets the answer, which gives the room back.
        """
        if self._lane is None and self._may_have_lane:
            self._may_have_lane = False
            self._lane = self._offered(Lane, {})
        lane = self._lane
        if lane is None or not lane.fits(buffers):
            return buffers, then
        while self.pending and self.poll():  # places that come back are in the caches of the processors
            pass
        if self._lane is not lane:  # of a connection that was lost
            return buffers, then
        while (placed := lane.place(buffers)) is None:
            if not self.pending:
                return buffers, then
            self.answer()
            if self._lane is not lane:
                return buffers, then
        return placed[0], partial(_release, lane, placed[1], then)

    def room(self, size: int) -> Room | None:
        """Where the server can write a value of so many bytes, if it can."""
        if self._landing is None and self._may_have_landing:
            self._may_have_landing = False
            self._landing = self._offered(Landing, {"landing": True})
        return None if self._landing is None else self._landing.room(size)

    def has(self, room: Room) -> bool:
        """Whether room is of the present connection."""
        return room.landing is self._landing

    def _offered(self, make: Callable[[], M], fields: dict[str, Any]) -> M | None:
        """Let the server open memory of this process; it is no mistake if it cannot."""
        stream = self._stream
        if stream is None or stream.socket.family != socket.AF_UNIX:
            return None
        memory = offer(make)
        if memory is None:
            return None
        answers: list[Any] = []
        try:
            self.ask(wire.with_fields(Kind.LANE, {**memory.description, **fields}), answers.append)
            while not answers:
                self.answer()
            wire.read_outcome(answers[0])
        except UnavailableError:
            if not answers:  # the server is gone
                raise
            return None
        finally:
            memory.close_descriptor()
        return memory if self._stream is stream else None

    def _next_number(self) -> int:
        self._number = self._number % _LARGEST_NUMBER + 1
        return self._number

    def _lose(self) -> None:
        stream, self._stream = self._stream, None
        self._lane = self._landing = None  # as many as there are connections
        self._may_have_lane = self._may_have_landing = True
        self._held = []
        if stream is not None:
            self.bytes_in += stream.bytes_in
            self.bytes_out += stream.bytes_out
            stream.close()

    def _reach(self) -> Stream:
        """Connect, again and again until it is too late, and send what has no answer."""
        start = named = time.monotonic()
        while True:
            left = max(0.1, start + self._timeout - time.monotonic())
            try:
                stream = self._greet(min(left, _TRY))
                for buffers, _ in self.pending:
                    stream.send(buffers, self._next_number(), left)
                self._counts = deque([1] * len(self.pending))
            except Refusal as refusal:
                raise refusal.error from None
            except (UnauthenticatedError, ProtocolError):
                raise
            except OSError as error:
                now = time.monotonic()
                if now - start > self._timeout - _PAUSE:
                    raise self._missing() from error
                if isinstance(error, DeadlineExceededError) or now - named >= _TRY:
                    named = now
                    self._remind(now - start)
            else:
                self._stream = stream
                return stream
            time.sleep(_PAUSE)

    def _remind(self, seconds: float) -> None:
        """Say who is missing; no wait is silent."""
        _log.warning(
            "Waiting for the parameter server, ps task %d, at %s, for %.0f seconds; it is given up "
            "after %g seconds.",
            self.index,
            self.address,
            seconds,
            self._timeout,
        )

    def _greet(self, timeout: float) -> Stream:
        return greeted(self.address, self._key, self._hello, timeout, Decoder(LIMITS, self._pool.take))

    def _missing(self) -> UnavailableError:
        return UnavailableError(
            f"The parameter server, ps task {self.index}, could not be reached at {self.address} "
            f"within {self._timeout:g} seconds. Its process has died or its machine is down. "
            f"Received: {self.address}"
        )

    def _silent(self) -> UnavailableError:
        return UnavailableError(
            f"The parameter server, ps task {self.index}, at {self.address} has not answered for "
            f"{self._timeout:g} seconds. Its process may be stopped. Received: {self.address}"
        )


def _release(lane: Lane, placed: Placed, then: Callable[[Any], None], answer: Any) -> None:
    """An answer has come: the room of its request may be used again, also in a lane that was lost."""
    lane.release(placed)
    then(answer)


def greeted(
    address: str, key: bytes, hello: dict[str, Any], timeout: float, decoder: Decoder | None = None
) -> Stream:
    """A connection to a server on which the task takes part in a run; a `Refusal` if it must not.

    Args:
        address: of the server.
        key: the job's secret.
        hello: what the server is told.
        timeout: seconds for each message.
        decoder: where received buffers go.
    """
    sock = dial(
        address,
        key,
        {"for": PURPOSE},
        timeout,
        peer=f"parameter server (ps task {hello['index']})",
        hint="Its process may not run, or the cluster may name another place. ",
    )
    stream = Stream(sock, LIMITS, decoder, spins=True)
    try:
        told = _say_hello(stream, hello, timeout)
        if "challenge" in told:
            _say_hello(stream, {**hello, **told}, timeout)
    except BaseException:
        stream.close()
        raise
    return stream


def _say_hello(stream: Stream, hello: dict[str, Any], timeout: float) -> dict[str, Any]:
    stream.send(wire.with_fields(Kind.HELLO, hello), 0, timeout)
    answer = stream.receive(timeout)
    try:
        wire.read_outcome(answer.buffers)
    except PhalanxError as error:
        raise Refusal(error) from None
    return wire.fields_in(answer.buffers)
