"""What users are told when Python asks for a value that a program only computes later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from phalanx.errors import ContextError, StagedValueError
from phalanx.runtime.call_site import describe_traceback


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
    except Exception as error:
        if "different trace level" not in str(error):  # as flax says, which is perhaps not installed
            raise
        raise ContextError(
            "A module of flax NNX was made outside of the code that is compiled, which captures it and "
            f"would change it, at {describe_traceback(error.__traceback__)}. Give it to the compiled "
            "function and to strategy.run as an argument, and return what they change: "
            "model, optimizer = strategy.run(step, args=(model, optimizer, x))."
        ) from error
