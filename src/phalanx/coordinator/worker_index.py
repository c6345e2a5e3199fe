"""On which worker a scheduled function runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from phalanx.errors import ContextError

__all__ = ["experimental_get_current_worker_index", "on_worker"]


class _Thread(threading.local):
    worker: int | None = None


_thread = _Thread()


@contextlib.contextmanager
def on_worker(index: int) -> Iterator[None]:
    """Run the functions of a worker, in this thread."""
    _thread.worker = index
    try:
        yield
    finally:
        _thread.worker = None


def experimental_get_current_worker_index() -> int:
    """The index of the worker that runs the function which calls this.

    Call it in a function that `ClusterCoordinator.schedule` schedules. A compiled function has the
    index of its worker in it as a constant.

    Examples:
        >>> import phalanx as px
        >>> px.coordinator.experimental_get_current_worker_index()
        Traceback (most recent call last):
            ...
        phalanx.errors.ContextError: Only functions that a ClusterCoordinator schedules run on...
    """
    if _thread.worker is None:
        raise ContextError(
            "Only functions that a ClusterCoordinator schedules run on a worker. Call "
            "experimental_get_current_worker_index in one of them."
        )
    return _thread.worker
