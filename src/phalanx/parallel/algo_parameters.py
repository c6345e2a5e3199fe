"""`set_algo_parameters`: which strategies of operators a search looks at, as in MindSpore."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.parallel.cost import Table
from phalanx.parallel.operators.base import Operator, Strategies
from phalanx.parallel.option_checks import check_type

__all__ = [
    "AlgoParameters",
    "current_algo_parameters",
    "get_algo_parameters",
    "reset_algo_parameters",
    "set_algo_parameters",
]


@dataclass(frozen=True)
class AlgoParameters:
    """Which strategies of operators a search looks at. The names are MindSpore's.

    Args:
        fully_use_devices: an operator is computed by all devices in parts, or repeated by all.
        elementwise_op_strategy_follow: an elementwise operator is cut as its operand is made.
        enable_algo_approxi: of the strategies of an operator, sorted by cost, only some are looked at.
        algo_approxi_epsilon: one part in so many of them; their number is at most its inverse.
        tensor_slice_align_enable: dims of matrix products are only cut into aligned pieces.
        tensor_slice_align_size: a multiple of which the pieces are then.
    """

    fully_use_devices: bool = False
    elementwise_op_strategy_follow: bool = False
    enable_algo_approxi: bool = False
    algo_approxi_epsilon: float = 0.1
    tensor_slice_align_enable: bool = False
    tensor_slice_align_size: int = 16

    def allowed(
        self, operator: Operator, options: Strategies, devices: int, seconds: Table
    ) -> tuple[int, ...]:
        """The numbers of the strategies of an operator that the search may choose.

        Args:
            operator: which one.
            options: all of its strategies.
            devices: how many there are.
            seconds: what each strategy costs.
        """
        found = list(range(len(options)))
        if self.fully_use_devices:
            found = [i for i in found if options.shares[i] in (1, devices)]
        if self.tensor_slice_align_enable and operator.flops:
            found = [i for i in found if self._is_aligned(operator, options, i)]
        if self.enable_algo_approxi:
            found = self._spaced(found, seconds)
        return tuple(found)

    def _is_aligned(self, operator: Operator, options: Strategies, number: int) -> bool:
        """Whether the loops that a strategy cuts have pieces of aligned sizes."""
        if options.shares[number] == 1:
            return True
        pieces = options.counts[number]
        return all(
            count == 1 or (size // count) % self.tensor_slice_align_size == 0
            for size, count in zip(operator.loops, pieces, strict=True)
        )

    def _spaced(self, found: Sequence[int], seconds: Table) -> list[int]:
        """Some of the strategies, evenly spaced in the order of their cost; the cheapest is one."""
        most = math.ceil(1 / self.algo_approxi_epsilon)
        if len(found) <= most:
            return list(found)
        ordered = np.asarray(found)[np.argsort(seconds[list(found)], kind="stable")]
        places = np.unique(np.linspace(0, len(ordered) - 1, most).round().astype(int))
        return sorted(int(i) for i in ordered[places])


_KINDS = {field.name: type(field.default) for field in fields(AlgoParameters)}
_lock = threading.Lock()
_current = [AlgoParameters()]


def set_algo_parameters(*unexpected: Any, **parameters: Any) -> None:
    """Say which strategies of operators searches look at from now on, as in MindSpore.

    All are checked before any of them counts.

    Args:
        *unexpected: refused.
        **parameters: see `AlgoParameters`.

    Examples:
        >>> set_algo_parameters(fully_use_devices=True)
        >>> get_algo_parameters("fully_use_devices")
        True
        >>> reset_algo_parameters()
    """
    if unexpected:
        raise InvalidTypeError("too many positional arguments")
    for name, value in parameters.items():
        if name not in _KINDS:
            raise InvalidValueError(f"Set context keyword {name} is not recognized!")
        check_type(name, value, _KINDS[name])
    size = parameters.get("tensor_slice_align_size", 1)
    if isinstance(size, bool) or not 1 <= size <= 1024:
        raise InvalidValueError(f"Align_size must be in [1, 1024], but got {size}")
    if not 0 < parameters.get("algo_approxi_epsilon", 1.0) <= 1:
        raise ContextError("'epsilon' must be in (0, 1]")
    with _lock:
        _current[0] = replace(_current[0], **parameters)


def get_algo_parameters(attr_key: str) -> Any:
    """The value of one of the parameters.

    Examples:
        >>> get_algo_parameters("tensor_slice_align_size")
        16
    """
    if not isinstance(attr_key, str) or attr_key not in _KINDS:
        raise InvalidValueError(f"Get context keyword {attr_key} is not recognized!")
    return getattr(_current[0], attr_key)


def reset_algo_parameters() -> None:
    """Give all parameters their defaults again.

    Examples:
        >>> reset_algo_parameters()
    """
    with _lock:
        _current[0] = AlgoParameters()


def current_algo_parameters() -> AlgoParameters:
    """The parameters that are in force."""
    return _current[0]
