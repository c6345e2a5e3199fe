"""`model.fit` under `px.ParameterServerStrategy`: steps on workers, each at its own pace.

As in TensorFlow, `fit` takes a dataset creator, which makes the dataset of each worker, and needs
`steps_per_epoch`: the workers have no common end of the data. Parameter servers hold all of the state.
A step reads it, computes Keras's own train step, and adds what it has changed, as a whole. So no update
is lost, whatever other workers have done meanwhile; and metrics, which are sums, stay exact. The
variables of the model have the servers' values at the end of each epoch, and when a callback asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from phalanx.coordinator.cluster_coordinator import ClusterCoordinator
from phalanx.core.options import InputContext, InputOptions
from phalanx.core.variables.variable import Variable
from phalanx.data.dataset import Dataset
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.execution.function import function
from phalanx.integrations.keras import touch_points
from phalanx.integrations.keras.adapters import PlacedInput
from phalanx.integrations.keras.own_steps import state_variables
from phalanx.runtime.formatting import shown
from phalanx.strategies.parameter_server import ParameterServerStrategy

_TRAIN = touch_points.PARTS["train_step"]


class DatasetCreator:
    """What makes the dataset of each worker, for `model.fit` under `px.ParameterServerStrategy`.

    Args:
        dataset_fn: takes a `px.InputContext` and returns a `px.data.Dataset` of batches. It is called
            on each worker, so it must be a function that other processes can run. The dataset should
            repeat without end, in an order of its own.
        input_options: accepted as in TensorFlow.

    Examples:
        >>> import phalanx as px
        >>> def dataset_fn(context):
        ...     return px.data.Dataset.range(10).shuffle(10).repeat().batch(4)
        >>> creator = px.keras.DatasetCreator(dataset_fn)
        >>> len(next(iter(creator(px.InputContext()))))
        4
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        input_options: InputOptions | None = None,
    ) -> None:
        if not callable(dataset_fn):
            raise InvalidTypeError(f"dataset_fn must be callable. Received: {shown(dataset_fn)}")
        if not isinstance(input_options, InputOptions | None):
            raise InvalidTypeError(
                f"input_options must be px.InputOptions or None. Received: {shown(input_options)}"
            )
        self.dataset_fn, self.input_options = dataset_fn, input_options

    def __call__(self, context: InputContext) -> Any:
        """The dataset of a worker."""
        return self.dataset_fn(context)


class WorkersInput(PlacedInput):
    """Input that only workers read; here it gives one batch again and again, for its shapes."""

    batch_size = has_partial_batch = partial_batch_size = num_batches = None

    def __init__(self, strategy: ParameterServerStrategy, given: Any, steps: int | None) -> None:
        super().__init__()
        if not isinstance(given, DatasetCreator | Dataset):
            raise InvalidTypeError(
                "Under px.ParameterServerStrategy every worker reads data of its own: pass a "
                f"px.keras.DatasetCreator, or a px.data.Dataset. Received: {shown(given)}"
            )
        if not steps:
            raise InvalidValueError(
                "fit needs steps_per_epoch under px.ParameterServerStrategy: workers take batches at "
                f"their own pace, so there is no common end. Received: steps_per_epoch={shown(steps)}"
            )
        self._local = given if isinstance(given, Dataset) else given(InputContext())
        coordinator = ClusterCoordinator(strategy)
        made = coordinator.create_per_worker_dataset(
            given if isinstance(given, Dataset) else lambda: given(InputContext())
        )
        self.on_workers = iter(made)

    def batches(self) -> Iterator[Any]:
        """A batch, without end."""
        return itertools.repeat(jax.tree.map(np.asarray, next(iter(self._local))))


class ServerStep:
    """Takes the place of Keras's `train_function`: schedules a step on some worker.

    Args:
        model: the model, which is built.
        strategy: whose servers hold its state.
    """

    def __init__(self, model: Any, strategy: ParameterServerStrategy) -> None:
        self._model, self._strategy = model, strategy
        self._coordinator = ClusterCoordinator(strategy)
        self._held: dict[str, list[Any]] = {}
        self._remote: dict[str, list[Variable]] = {}
        self._step: Any = None
        self._logs: Any = None
        self.input: WorkersInput | None = None

    @property
    def is_over(self) -> bool:
        """Whether the coordinator was closed, so that its functions and values are of no use."""
        return self._coordinator is not ClusterCoordinator(self._strategy)

    def __call__(self, state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
        """Schedule a step on a worker, with the state that the servers have."""
        if self.input is None:
            raise InvalidValueError(
                "Models under px.ParameterServerStrategy train with fit alone: a single batch would "
                "have to wait for a worker. Received: train_on_batch"
            )
        for _ in range(self._model.steps_per_execution):
            next(iterator)
            self._send(dict(zip(_TRAIN, state, strict=True)))
            self._coordinator.schedule(self._step, args=(self.input.on_workers,))
        return self._logs, state

    def _send(self, state: dict[str, Any]) -> None:
        """Let the servers have what was changed here, as metrics are by a new epoch."""
        if not self._remote:
            with self._strategy.scope():
                for part, values in state.items():
                    names = [v.path.replace("/", "_") for v in state_variables(self._model, part)]
                    pairs = zip(values, names, strict=True)
                    self._remote[part] = [Variable(np.asarray(x), name=name) for x, name in pairs]
            # Its values are in the variables, which Keras has emptied; a copy of it takes them along.
            touch_points.give_back(self._model, _TRAIN, list(state.values()))
            self._step = _step_on_workers(self._model, self._remote)
            self._logs = dict(self._model.get_metrics_result())
        else:
            for part, values in state.items():
                for x, known, remote in zip(values, self._held[part], self._remote[part], strict=True):
                    if x is not known:
                        remote.assign(np.asarray(x))
        self._held = state

    def fetched(self) -> dict[str, Any]:
        """The state that the servers have, after all steps so far."""
        self._coordinator.join()
        self._held = {
            part: [jax.numpy.asarray(v.numpy()) for v in variables]
            for part, variables in self._remote.items()
        }
        return dict(self._held)


def _step_on_workers(model: Any, remote: dict[str, list[Variable]]) -> Any:
    """A function for workers, which takes the model along: Keras makes a copy of it there."""
    parts = [remote[part] for part in _TRAIN]

    @function
    def step(batches: Any) -> None:
        batch = next(batches)
        touch_points.build_for(model, batch)
        before = [[jax.numpy.asarray(v.value()) for v in part] for part in parts]
        _, after = model.train_step(tuple(before), batch)
        for variables, old, new in zip(parts, before, after, strict=True):
            for v, a, b in zip(variables, old, new, strict=True):
                if b is not a:
                    v.assign_add((b - a).astype(v.dtype))

    return step
