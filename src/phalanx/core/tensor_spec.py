"""What is known of an array before it exists: its shape and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an argument; a dimension of None fits any size.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> spec = px.TensorSpec((None, 3), jnp.float32)
        >>> spec.accepts(jnp.ones((5, 3))), spec.accepts(jnp.ones((5, 4)))
        (True, False)
    """

    shape: tuple[int | None, ...]
    dtype: Any = jnp.float32
    name: str | None = None

    def accepts(self, x: Any) -> bool:
        """Whether an array has this shape and dtype."""
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            return False
        fits = len(x.shape) == len(self.shape) and all(
            want in (None, have) for want, have in zip(self.shape, x.shape, strict=True)
        )
        return fits and jnp.dtype(x.dtype) == jnp.dtype(self.dtype)
