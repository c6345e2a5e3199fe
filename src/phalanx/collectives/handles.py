"""What an operation that is under way gives back: handles to wait for, and arrays to come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait as wait_for_futures
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from phalanx.core.operators import ArrayOperators
from phalanx.errors import DeadlineExceededError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.futures import settle
from phalanx.runtime.interrupts import uninterrupted

_LOOK = 0.2  # seconds between looks at whether the job has failed


class Handle:
    """An operation that is under way. May be waited for from any thread, in any order, or never.

    A handle that is dropped loses nothing: its operation goes on. In asynchronous code it can be
    awaited, which gives the result.

    Args:
        future: gets the result.
        site: where the operation was launched.
        check: raises if the job has failed.
        source: the rank that a message came from, once it is there.
        wait: how the wait for the operation is shown to the other ranks.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> buffer = np.float32([1, 2])
        >>> handle = px.comm.all_reduce_(buffer, async_op=True)
        >>> handle.wait(), handle.is_completed(), handle.exception()
        (True, True, None)
    """

    def __init__(
        self,
        future: Future[Any],
        site: str = "",
        check: Callable[[], None] | None = None,
        source: Callable[[], int] | None = None,
        wait: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._future, self._check, self._source = future, check, source
        self.site = site
        """Where the operation was launched."""
        self._wait = wait
        self._raised = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the operation has finished. Its error, if any, is raised here, once.

        Args:
            timeout: seconds after which `px.errors.DeadlineExceededError` is raised; the operation goes
                on and can be waited for again. By default the job's deadline ends it.

        Returns:
            True; False if the operation failed and its error has been raised before.
        """
        try:
            self.result(timeout)
        except BaseException as error:
            if isinstance(error, DeadlineExceededError) and not self._future.done():
                raise
            if self._raised:
                return False
            self._raised = True
            raise
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return what the operation gives; raises its error every time."""
        if not self._future.done():
            with self._wait():
                self._await(timeout)
        return self._future.result()

    def _await(self, timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._future.done():
            left = _LOOK if end is None else min(_LOOK, end - time.monotonic())
            if left < 0:
                raise DeadlineExceededError(
                    f"The operation that was launched at {self.site} has not finished within "
                    f"{timeout:g} seconds. It goes on. Received: timeout={shown(timeout)}"
                )
            with uninterrupted():  # futures are not made to be interrupted
                wait_for_futures([self._future], left)
            if self._check is not None and not self._future.done():
                self._check()

    def is_completed(self) -> bool:
        """Whether the operation has finished, well or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """The error of an operation that has failed; None if it has not, or is still under way."""
        return self._future.exception() if self._future.done() else None

    def get_future(self) -> Future[Any]:
        """The result as a `concurrent.futures.Future`, for callbacks."""
        return self._future

    def source_rank(self) -> int:
        """The rank that a received message came from; waits for it."""
        self.result()
        if self._source is None:
            raise InvalidValueError(f"Only handles of receives have a source. Received: {shown(self)}")
        return self._source()

    def following(self, future: Future[Any]) -> Handle:
        """A handle of the same operation whose end is that of another future."""
        return Handle(future, self.site, self._check, self._source, self._wait)

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()

    def __repr__(self) -> str:
        state = "done" if self._future.done() else "under way"
        return f"<Handle of the operation at {self.site}: {state}>"


class LazyHandle(Handle):
    """A handle whose result is what a function gives, which may wait in its own way.

    Args:
        future: is done when the result is there.
        get: gives the result; called with a timeout.
        done: whether the result is there, if the future does not know.
        site: where the operation was launched.
        source: the rank that a message came from.
    """

    def __init__(
        self,
        future: Future[Any],
        get: Callable[[float | None], Any],
        done: Callable[[], bool] | None = None,
        site: str = "",
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(future, site, None, source)
        self._get, self._done = get, done or future.done

    def result(self, timeout: float | None = None) -> Any:
        """See `Handle.result`."""
        return self._get(timeout)

    def is_completed(self) -> bool:
        """See `Handle.is_completed`."""
        return self._done()


class OwnHandle(LazyHandle):
    """A handle that only its own replica waits for."""

    def filling(self, fill: Callable[[Any], None]) -> Handle:
        """A handle that writes the result somewhere when this replica waits for it."""
        future: Future[Any] = Future()

        def get(timeout: float | None) -> Any:
            if not future.done():
                settle(future, lambda: fill_with(self.result(timeout), fill))
            return future.result()

        def done() -> bool:
            if not future.done() and self.is_completed():
                handle.wait()
            return future.done()

        handle = LazyHandle(future, get, done, self.site, self._source)
        return handle


def fill_with(result: Any, fill: Callable[[Any], None]) -> None:
    """Write a result somewhere, if there is any."""
    if result is not None:
        fill(result)


class PendingArray(ArrayOperators):
    """What an asynchronous operation will give. Using it waits for it; so does `value`."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def value(self) -> Any:
        """The array, or arrays; waits."""
        return self._handle.result()

    def _operand(self) -> Any:
        return self._handle.result()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; waits."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> Any:
        """The dtype; waits."""
        return self.value.dtype

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __repr__(self) -> str:
        done = self._handle.is_completed() and self._handle.exception() is None
        return repr(self.value) if done else f"<PendingArray: {self._handle!r}>"


def finished(result: Any = None) -> Handle:
    """The handle of something that is done."""
    future: Future[Any] = Future()
    future.set_result(result)
    return Handle(future)


Outcome = tuple[Any, Handle | None]
"""What functional operations return: the result, and a handle if they were asked for one."""
