"""The synchronization x aggregation rules of variables.

`synchronization` says when copies are brought together, `aggregation` says how. Which combination does
what, in which context, is decided here once; variables and both executors obey.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from phalanx.core.errors import InvalidValueError, UnsupportedError
from phalanx.core.options import NamedEnum
from phalanx.core.showing import shown


class VariableSynchronization(NamedEnum):
    """When the copies of a variable are brought together.

    AUTO means ON_WRITE. ON_WRITE keeps all copies equal: writes are aggregated. ON_READ lets each
    replica write a copy of its own and aggregates when the variable is read outside of replicas.
    NONE is for variables without a strategy.
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(NamedEnum):
    """How the values that replicas write to a variable become one value.

    NONE refuses to choose: replicas that write different values are an error.
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


def check_kinds(synchronization: Any, aggregation: Any, name: str) -> None:
    """Require enum members, as TensorFlow does; strings are not accepted."""
    if not isinstance(synchronization, VariableSynchronization):
        raise InvalidValueError(
            f"synchronization of variable {name!r} must be a px.VariableSynchronization. "
            f"Received: {shown(synchronization)}"
        )
    if not isinstance(aggregation, VariableAggregation):
        raise InvalidValueError(
            f"aggregation of variable {name!r} must be a px.VariableAggregation. "
            f"Received: {shown(aggregation)}"
        )


def effective_synchronization(
    synchronization: VariableSynchronization, name: str
) -> VariableSynchronization:
    """The synchronization of a variable that has several copies."""
    if synchronization is VariableSynchronization.AUTO:
        return VariableSynchronization.ON_WRITE
    if synchronization is VariableSynchronization.NONE:
        raise InvalidValueError(
            "Variables with copies on several replicas need a synchronization: ON_WRITE or "
            f"ON_READ. Received: synchronization=NONE for variable {shown(name)}"
        )
    return synchronization


def check_dtype(aggregation: VariableAggregation, dtype: Any, name: str) -> None:
    """MEAN cannot be stored in a type without fractions."""
    if aggregation is VariableAggregation.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        raise InvalidValueError(
            f"Variable {name!r} cannot average values in the integer type {dtype}. Use a floating "
            f"dtype or another aggregation. Received: aggregation=MEAN, dtype={dtype}"
        )


def check_scatter(method: str, aggregation: VariableAggregation, name: str) -> None:
    """Sums and means of sparse updates are defined for adding and subtracting only."""
    additive = method in ("scatter_add", "scatter_sub")
    reducing = aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
    if reducing and not additive:
        raise UnsupportedError(
            f"{method} from several replicas has no sum or mean. Use scatter_add or scatter_sub, "
            "or create the variable with aggregation NONE or ONLY_FIRST_REPLICA. "
            f"Received: aggregation={aggregation.name} on variable {shown(name)}"
        )


def copy_value_for_read_sum(value: Any, replicas: int, dtype: Any) -> Any:
    """What each copy of an ON_READ/SUM variable holds so that reading it gives `value` back.

    An equal share, cut to the dtype: an integer that does not divide reads back smaller.
    """
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return lax.div(array, jnp.asarray(replicas, array.dtype)).astype(dtype)
    return (array / replicas).astype(dtype)
