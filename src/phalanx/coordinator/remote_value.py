"""Values that are computed elsewhere: of one closure, or one for each worker."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from phalanx.coordinator.values import load_value, refer_to_input, refer_to_resource
from phalanx.core.structure import Leaf, map_nest
from phalanx.errors import InvalidTypeError, UnsupportedError
from phalanx.runtime.formatting import shown
from phalanx.runtime.interrupts import Bell

__all__ = ["PerWorkerValues", "RemoteValue", "RemoteValueStatus"]


class _NoRemoteValueError(InvalidTypeError, AssertionError):
    """Something else was given than remote values. TensorFlow asserts it."""


class RemoteValueStatus(enum.Enum):
    """What is known of a remote value.

    Examples:
        >>> import phalanx as px
        >>> [status.name for status in px.coordinator.RemoteValueStatus]
        ['NOT_READY', 'ABORTED', 'READY']
    """

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class RemoteValue(Leaf):
    """What a scheduled function will have returned.

    `ClusterCoordinator.schedule` returns it. Give it to other scheduled functions: they start when it
    is there.

    Examples:
        ::

            doubled = coordinator.schedule(double, args=(21,))
            coordinator.schedule(double, args=(doubled,)).fetch()
    """

    __slots__ = ("__weakref__", "_bells", "_data", "_error", "_status", "_wait", "closure")

    _lock: ClassVar[threading.Lock] = threading.Lock()  # for the bells of several waiting threads

    def __init__(self, wait: Callable[[RemoteValue, Bell], None]) -> None:
        self._status = RemoteValueStatus.NOT_READY
        self._data = b""
        self._error: BaseException | None = None
        self._bells: list[Bell] | None = None
        self._wait = wait
        self.closure = 0
        """The number of the closure, once the coordinator has taken it up."""

    def get(self) -> Any:
        """Wait for the value, and return it with arrays of JAX.

        Raises what the function raised, or `px.errors.CancelledError` if it never ran.
        """
        return map_nest(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, self.fetch())

    def fetch(self) -> Any:
        """Wait for the value, and return it with NumPy arrays.

        Raises what the function raised, or `px.errors.CancelledError` if it never ran.
        """
        return load_value(self.data())

    def data(self) -> bytes:
        """Wait for the value, and return it as it was pickled."""
        if self._status is RemoteValueStatus.NOT_READY:
            bell = Bell()
            with self._lock:
                self._bells = [*(self._bells or ()), bell]
            if self._status is RemoteValueStatus.NOT_READY:
                self._wait(self, bell)
        if self._error is not None:
            raise self._error
        return self._data

    @property
    def status(self) -> RemoteValueStatus:
        """What is known of the value."""
        return self._status

    @property
    def error(self) -> BaseException | None:
        """Why there is no value, if that is so."""
        return self._error

    def settle(self, data: bytes, error: BaseException | None = None) -> None:
        """The value is there, or will never be. For the coordinator."""
        self._data, self._error = data, error
        self._status = RemoteValueStatus.READY if error is None else RemoteValueStatus.ABORTED
        for bell in self._bells or ():
            bell.ring()

    def belongs_to(self, wait: Callable[[RemoteValue, Bell], None]) -> bool:
        """Whether the value is of the coordinator that waits in this way."""
        return self._wait == wait

    def unsettle(self) -> None:
        """The value has to be made once more. For the coordinator."""
        self._status, self._error = RemoteValueStatus.NOT_READY, None

    def __reduce__(self) -> Any:
        return refer_to_input(self)

    def __repr__(self) -> str:
        return f"<px.coordinator.RemoteValue {self._status.value}>"


class ResourceValue(RemoteValue):
    """What one worker has of a resource. It stays there."""

    __slots__ = ()

    def fetch(self) -> Any:
        """Refused: it stays where it is."""
        self.data()
        raise UnsupportedError(
            "What create_per_worker_dataset and create_per_worker_resource make stays on the workers. "
            "Give it to a scheduled function that returns what you need. "
            f"Received: {self!r}"
        )

    def __reduce__(self) -> Any:
        raise InvalidTypeError(
            "Give the whole PerWorkerValues to a scheduled function: it gets what its own worker has. "
            f"Received: {self!r}"
        )


class PerWorkerValues(Leaf):
    """One remote value for each worker.

    `create_per_worker_dataset` and `iter` of it make these. A scheduled function to which they are
    given gets the value of the worker on which it runs.

    Args:
        values: the `RemoteValue` of each worker.

    Examples:
        ::

            numbers = iter(coordinator.create_per_worker_dataset(px.data.Dataset.range(100)))
            coordinator.schedule(step, args=(numbers,))
    """

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        wrong = [v for v in values if not isinstance(v, RemoteValue)]
        if wrong:
            raise _NoRemoteValueError(
                f"PerWorkerValues take RemoteValues only. Received: {shown(wrong[0])}"
            )
        self._values = tuple(values)
        self._resource: int | None = None
        self.owner: Any = None
        """Who has made it."""

    def belong_to(self, owner: Any, resource: int) -> None:
        """It is what workers know by a number. For the coordinator."""
        self.owner, self._resource = owner, resource

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """The value of each worker."""
        return self._values

    @property
    def resource(self) -> int | None:
        """The number that workers know it by, if they hold it."""
        return self._resource

    def __reduce__(self) -> Any:
        if self._resource is None:
            raise InvalidTypeError(
                "Only PerWorkerValues that a ClusterCoordinator has made can be given to scheduled "
                f"functions. Received: {self!r}"
            )
        return refer_to_resource(self, self._resource)

    def __repr__(self) -> str:
        return f"<px.coordinator.{type(self).__name__} of {len(self._values)} workers>"
