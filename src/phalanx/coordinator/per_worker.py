"""Datasets and other things of which every worker has one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.coordinator.dispatcher import Dispatcher
from phalanx.coordinator.peer import Resource
from phalanx.coordinator.questions import closed_error
from phalanx.coordinator.remote_value import PerWorkerValues, ResourceValue
from phalanx.coordinator.values import References, pack_arguments
from phalanx.core.strategy import Strategy
from phalanx.data.dataset import Dataset
from phalanx.data.distribute.distributed_dataset import DistributedDataset
from phalanx.errors import InvalidTypeError, InvalidValueError, UnsupportedError
from phalanx.runtime.formatting import shown
from phalanx.strategies.parameter_server import WorkersDataset

__all__ = ["PerWorkerDataset", "PerWorkerIterator", "make_resource"]


class PerWorkerDataset(PerWorkerValues):
    """A dataset of which every worker has a copy of its own.

    `ClusterCoordinator.create_per_worker_dataset` makes it. ``iter`` of it gives one iterator per
    worker.
    """

    def __iter__(self) -> PerWorkerIterator:
        """One iterator per worker."""
        made: PerWorkerIterator = make_resource(self.owner, PerWorkerIterator, iterator_of, (self,))
        return made

    @property
    def element_spec(self) -> Any:
        """Refused: only workers have the dataset."""
        raise UnsupportedError(
            "The dataset of a worker is made there, so its element_spec is not known here. Ask the "
            f"dataset that you gave to create_per_worker_dataset. Received: {self!r}"
        )


class PerWorkerIterator(PerWorkerValues):
    """One iterator per worker. Give it to scheduled functions, which call ``next`` of it."""

    def __iter__(self) -> PerWorkerIterator:
        """Itself."""
        return self

    def __next__(self) -> Any:
        """Refused: only workers take elements."""
        raise UnsupportedError(
            "Only workers take elements of a per-worker iterator. Give it to a function that "
            f"ClusterCoordinator.schedule schedules, and call next(iterator) there. Received: {self!r}"
        )

    def get_next(self) -> Any:
        """Refused, as ``next`` is."""
        return self.__next__()


class NotADatasetError(InvalidValueError, InvalidTypeError):
    """Something that is no dataset was given where workers need one."""


def make_resource(
    dispatcher: Dispatcher,
    kind: Any,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Any = None,
) -> Any:
    """Let every worker call a function, and keep what it returns.

    Args:
        dispatcher: has the workers.
        kind: a class of `PerWorkerValues`.
        fn: what to call.
        args: its arguments, which may be other resources.
        kwargs: likewise.
    """
    if dispatcher.is_closed:
        raise closed_error()
    if not callable(fn):
        raise InvalidTypeError(
            f"create_per_worker_resource needs a function that workers call. Received: {shown(fn)}"
        )
    arguments, references = pack_arguments(args, kwargs)
    check_own(references, dispatcher)
    if references.inputs:
        raise InvalidValueError(
            "What every worker makes cannot depend on the value of a scheduled function. Fetch it, and "
            f"give the result. Received: {shown(references.inputs[0])}"
        )
    values = [ResourceValue(dispatcher.wait) for _ in dispatcher.links]
    function = dispatcher.functions.shipped(fn)
    number = dispatcher.add_resource(Resource(function, arguments, references.resources, values))
    made = kind(values)
    made.belong_to(dispatcher, number)
    weakref.finalize(made, dispatcher.drop_resource, number).atexit = False
    return made


def check_own(references: References, dispatcher: Dispatcher) -> None:
    """Require that arguments refer to nothing that another coordinator has made."""
    for value in references.inputs:
        if not value.belongs_to(dispatcher.wait):
            raise InvalidValueError(
                "A RemoteValue is an argument of functions that its own coordinator schedules. Fetch "
                f"it, and give the result. Received: {shown(value)}, of another coordinator"
            )
    for resource in references.resources:
        if isinstance(resource, PerWorkerValues) and resource.owner is not dispatcher:
            raise InvalidValueError(
                "The workers of one coordinator do not have what those of another one made, also if "
                "that was closed. Make it with this coordinator. "
                f"Received: {shown(resource)}, of another coordinator"
            )


def dataset_function(strategy: Strategy, given: Any) -> Callable[[], Any]:
    """What makes the dataset on a worker.

    Args:
        strategy: the coordinator's.
        given: a dataset, or a function that returns one.
    """
    if isinstance(given, Dataset | WorkersDataset):
        return _Given(given)
    if callable(given) and not isinstance(given, DistributedDataset):
        return _Made(given, strategy)
    raise NotADatasetError(
        "create_per_worker_dataset needs a px.data.Dataset, what experimental_distribute_dataset "
        f"returns, or a function that returns one of these. Received: {shown(given)}"
    )


class _Given:
    """A dataset that goes to the workers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self) -> Any:
        return _here(self._dataset)


class _Made:
    """A dataset that the workers make."""

    def __init__(self, fn: Callable[[], Any], strategy: Strategy) -> None:
        self.python_function, self._strategy = fn, strategy

    def __call__(self) -> Any:
        with self._strategy.scope():
            dataset = self.python_function()
        if not isinstance(dataset, Dataset | WorkersDataset):
            raise NotADatasetError(
                "The function given to create_per_worker_dataset must return a px.data.Dataset, or "
                f"what experimental_distribute_dataset returns. Received: {shown(dataset)}"
            )
        return _here(dataset)


def iterator_of(dataset: Any) -> Any:
    """The iterator of a worker."""
    return iter(dataset)


def _here(dataset: Any) -> Any:
    return dataset.on_worker() if isinstance(dataset, WorkersDataset) else dataset
