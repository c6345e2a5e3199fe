"""What an `input_fn` gives, divided by a strategy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from phalanx.core import context as ctx
from phalanx.core.options import InputContext
from phalanx.core.strategy import Strategy
from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown


def argument_names(fn: Callable[..., Any]) -> list[str]:
    """The names of the arguments of a function.

    >>> argument_names(lambda features, labels, mode: None)
    ['features', 'labels', 'mode']
    """
    return list(inspect.signature(fn).parameters)


def distributed_input(
    input_fn: Callable[..., Any], known: Mapping[str, Any], strategy: Strategy
) -> Any:
    """The batches of an `input_fn`, for the replicas of a strategy.

    Args:
        input_fn: returns global batches, or those of one pipeline if it takes an ``input_context``.
        known: the arguments that it may have, by name.
        strategy: who divides the batches.
    """
    if not callable(input_fn):
        raise InvalidTypeError(f"input_fn must be a function. Received: {shown(input_fn)}")
    names = argument_names(input_fn)
    chosen = {name: known[name] for name in names if name in known}
    if "input_context" in names:

        def of_pipeline(context: InputContext) -> Any:
            return _checked(input_fn(input_context=context, **chosen))

        return strategy.distribute_datasets_from_function(of_pipeline)
    dataset = _checked(input_fn(**chosen))
    if strategy is ctx.default_mode().strategy:
        return dataset
    return strategy.experimental_distribute_dataset(dataset)


def _checked(dataset: Any) -> Any:
    if isinstance(dataset, tuple | dict) or not hasattr(dataset, "__iter__"):
        raise InvalidTypeError(
            "input_fn must return a dataset of batches: "
            "px.data.Dataset.from_tensor_slices((features, labels)).batch(32). "
            f"Received: {shown(dataset)}"
        )
    return dataset
