"""What a transformation is told besides gradients: arrays, functions, and the loss at other values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from phalanx.core.reduction import ReduceOp
from phalanx.core.strategy import Strategy
from phalanx.core.variables.variable import Variable
from phalanx.train.gradient_communication import dense
from phalanx.train.line_search import ReplicaLoss, loss_of_all

__all__ = ["Extra", "ExtraArguments"]


class Extra(NamedTuple):
    """What a transformation is told besides gradients: arrays, how they lie, and functions."""

    arrays: list[Any]
    form: Any
    functions: dict[str, Any]

    @property
    def nest(self) -> Any:
        """The arrays by their names."""
        return jax.tree.unflatten(self.form, self.arrays)

    def combined(self, strategy: Strategy, op: ReduceOp | None, lead: Variable) -> Extra:
        """The same, with arrays combined over replicas as gradients are."""
        if op is None or not self.arrays:
            return self
        known = [(x, lead) for x in self.arrays]
        return self._replace(arrays=list(strategy.extended.batch_reduce_to(op, known)))

    @property
    def keywords(self) -> dict[str, Any]:
        """For an update that is not compiled by itself."""
        known = self._replace(arrays=[dense(x, x) for x in self.arrays])
        return {"extra": known.nest, "functions": self.functions}


class ExtraArguments:
    """The extra arguments of one replica, on their way to the update of all.

    Args:
        given: by name.
        is_compiled: whether one program stands for all replicas.
    """

    def __init__(self, given: dict[str, Any], is_compiled: bool) -> None:
        self._losses = {k: x for k, x in given.items() if isinstance(x, ReplicaLoss)}
        self._functions = {k: x for k, x in given.items() if callable(x)}
        known = {**self._losses, **self._functions}
        arrays, self._form = jax.tree.flatten({k: x for k, x in given.items() if k not in known})
        self._count = len(arrays)
        # One program has one loss for all replicas; eagerly each replica brings its own.
        losses = () if is_compiled else tuple(self._losses.values())
        self.sent = (*map(jnp.asarray, arrays), *losses)
        """What the replicas bring to their meeting."""

    def met(self, given: Sequence[Any], op: ReduceOp | None) -> Extra:
        """What they have there, of all replicas."""
        met = given[self._count :] or self._losses.values()
        parts = [[x] if isinstance(x, ReplicaLoss) else list(x.values) for x in met]
        losses = {k: loss_of_all(x, op) for k, x in zip(self._losses, parts, strict=True)}
        return Extra(list(given[: self._count]), self._form, self._functions | losses)
