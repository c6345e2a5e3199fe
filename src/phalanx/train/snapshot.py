"""`snapshot`: the values of many variables at one moment."""

from __future__ import annotations

from typing import Any

import jax

from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown


def snapshot(variables: Any) -> Any:
    """The values of variables as they were after one and the same step.

    While another thread trains, reading variables one after the other gives values of different steps.
    This function never does. It neither waits for a running step nor delays it, and sees nothing of
    it: inside a step it gives the values from before.

    Args:
        variables: a nest of variables, as for a checkpoint. Other leaves are returned as they are.

    Returns:
        The nest with arrays in place of the variables, as `Variable.state` gives them.

    Examples:
        >>> import phalanx as px
        >>> a, b = px.Variable(1.0), px.Variable(2.0)
        >>> px.train.snapshot({"a": a, "b": b})
        {'a': Array(1., dtype=float32), 'b': Array(2., dtype=float32)}
    """
    if compat.is_staging():
        raise ContextError(
            "px.train.snapshot reads variables between steps, so it cannot be a part of a compiled "
            "function. Call it outside."
        )
    found = [v for v in jax.tree.leaves(variables) if isinstance(v, Variable)]
    if not found:
        raise InvalidTypeError(f"A nest with variables is needed. Received: {shown(variables)}")

    def read() -> Any:
        return jax.tree.map(lambda v: v.state() if isinstance(v, Variable) else v, variables)

    return transactions.between_steps(found, read)
