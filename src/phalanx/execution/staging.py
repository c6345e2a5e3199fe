"""What users are told when Python asks for a value that a program only computes later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from phalanx.core.callsite import describe_traceback
from phalanx.core.errors import StagedValueError


@contextmanager
def explained() -> Iterator[None]:
    """Turn JAX's errors about traced values into one that names the line and the ways out."""
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise StagedValueError(
            "Python code asked for a value that the compiled function only computes later, at "
            f"{describe_traceback(error.__traceback__)}. The replica id and all arrays are such "
            "values. Write the branch with jnp.where or jax.lax.cond, or run the step eagerly: "
            "call strategy.run outside of px.function and jax.jit."
        ) from error
