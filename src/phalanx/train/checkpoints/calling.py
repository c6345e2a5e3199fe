"""Where checkpoints and weights may be saved and restored: between steps, once for all replicas."""

from __future__ import annotations

from phalanx.core import context as ctx
from phalanx.errors import ContextError
from phalanx.runtime import compat

__all__ = ["require_between_steps"]


def require_between_steps(what: str) -> None:
    """Refuse code that is compiled, and code that runs on a replica.

    Args:
        what: the call that must stand elsewhere.
    """
    if compat.is_staging():
        raise ContextError(
            f"{what} is called between steps, so it cannot be a part of a compiled function. "
            "Call it outside."
        )
    if ctx.active_replica() is not None:
        raise ContextError(
            f"{what} needs the cross-replica context, because it is called once for all replicas, but "
            "this code runs on a replica. Call it outside of Strategy.run."
        )
