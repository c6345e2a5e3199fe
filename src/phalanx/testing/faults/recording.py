"""What a program tells the laboratory: two functions that do nothing elsewhere."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import jax
import numpy as np

from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.runtime import laboratory

__all__ = ["point", "record"]


def record(*, examples: Any = None, state: Any = None, epoch: int = 0) -> None:
    """Tell the fault laboratory what a step has done; does nothing outside it.

    Call it after the step, and before its checkpoint is saved. Which examples count after a restart
    follows from the checkpoints of `px.train`; the laboratory does not see other ones.

    Args:
        examples: the numbers or names of the examples that this worker's replicas have applied: an
            array, a sequence, or a value with a component for each replica.
        state: what must be the same in the end whatever went wrong: variables, arrays or a pytree of
            them. It is enough to tell it once, at the end.
        epoch: in which pass over the data.

    Examples:
        >>> from phalanx.testing import faults
        >>> faults.record(examples=[3, 1], state={"w": [0.5]})
    """
    if not laboratory.is_active():
        return
    about: dict[str, Any] = {"epoch": int(epoch)}
    if examples is not None:
        about["examples"] = _names(examples)
    if state is not None:
        about["state"] = _summaries(state)
    laboratory.reach("record", **about)


def point(phase: str) -> None:
    """A place in a program where the fault laboratory lets faults happen; does nothing outside it.

    Args:
        phase: its name, for `JobFault.phase`.

    Examples:
        >>> from phalanx.testing import faults
        >>> faults.point("between two files")
    """
    laboratory.reach(phase)


def _names(examples: Any) -> list[int | str]:
    parts = examples.values if isinstance(examples, DistributedValues) else [examples]
    found: list[int | str] = []
    for part in parts:
        for x in np.asarray(part).reshape(-1).tolist():
            found.append(x if isinstance(x, int | str) else str(x))
    return found


def _summaries(state: Any) -> dict[str, Any]:
    """Of each array: a checksum, and sums that are nearly the same if the arrays are."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, Variable))
    names = [jax.tree_util.keystr(way, simple=True, separator="/") for way, _ in leaves]
    return {name or "state": _summary(x) for name, (_, x) in zip(names, leaves, strict=True)}


def _summary(leaf: Any) -> dict[str, Any]:
    array = np.ascontiguousarray(leaf.numpy() if isinstance(leaf, Variable) else np.asarray(leaf))
    sums: list[float] = []
    with contextlib.suppress(TypeError, ValueError):  # texts, and what is no number
        wide = array.astype(np.float64).reshape(-1)
        sums = [
            float(wide.sum()),
            float(np.abs(wide).sum()),
            float(wide @ np.cos(np.arange(wide.size))),
        ]
    return {"shape": list(array.shape), "checksum": zlib.crc32(array.tobytes()), "sums": sums}
