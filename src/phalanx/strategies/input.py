"""How strategies distribute input; all of them do it alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.core import context as ctx
from phalanx.core.extended import StrategyExtended
from phalanx.data.distribute.factory import distribute_dataset, distribute_from_function, numpy_dataset


class DistributesInput(StrategyExtended):
    """The part of a strategy that distributes datasets."""

    def _distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return distribute_dataset(self._strategy, dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        with ctx.entered(self._strategy, "distribute_datasets_from_function"):
            return distribute_from_function(self._strategy, dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """A dataset of the slices of NumPy arrays along their first dimension; a list is stacked."""
        del session
        ctx.require_cross_replica_or_default(self._strategy, "experimental_make_numpy_dataset")
        return numpy_dataset(numpy_input)
