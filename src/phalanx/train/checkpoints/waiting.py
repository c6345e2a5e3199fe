"""Values of a checkpoint that wait for variables.

An optimizer makes its own at its first step, and a lifted Keras model when it is called. Such a thing
has ``is_built`` and ``when_built(then)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.core.regions import Region, cut, whole
from phalanx.core.variables.variable_parts import Part
from phalanx.train.checkpoints.files import ArraySource, Saved
from phalanx.train.checkpoints.restoring import Restoring
from phalanx.train.checkpoints.trackables import found

__all__ = ["WaitingValues", "waiting_values"]

_log = logging.getLogger("phalanx")


class WaitingValues:
    """The values of a thing that has no variables yet. Reads like a checkpoint.

    They are read, and so checked, when the checkpoint is restored: it may be removed before they are
    needed.

    Args:
        saved: the checkpoint.
        names: of the values.
        name: the name that leads to the thing.
        owner: the thing whose values they are.
    """

    def __init__(self, saved: Saved, names: Sequence[str], name: str, owner: Any) -> None:
        self.path = saved.path
        self.entries = {each: saved.entries[each] for each in names}
        self.values: Mapping[str, Any] = {}
        self.is_given = False
        self._arrays = {each: saved.read(each) for each in names}
        self._name, self._owner = name, owner

    def wait(self) -> None:
        """Give the thing its values when it has made its variables."""
        self._owner.when_built(self._give)

    def _give(self) -> None:
        things = found({self._name: self._owner})
        restoring = Restoring(self, things)  # type: ignore[arg-type]
        restoring.read()
        if restoring.missing:
            _log.warning("%s has no values for %s.", self.path, ", ".join(restoring.missing))
        restoring.give()
        self.is_given = True
        self._arrays = {}

    def read(self, name: str, region: Region | None = None) -> np.ndarray[Any, Any]:
        """An array, or a region of it."""
        array = self._arrays[name]
        return array if region is None else cut(array, region)

    def verify(self, name: str) -> None:
        """Nothing: it was checked when it was read."""

    def sources(self) -> dict[str, ArraySource]:
        """What to write of them, if they wait still."""
        return {
            name: ArraySource(e.shape, e.dtype, [Part(whole(e.shape), self._arrays[name])], key=e.key)
            for name, e in (() if self.is_given else self.entries.items())
        }


def waiting_values(
    saved: Saved,
    unused: Sequence[str],
    owners: Mapping[str, Any],
    other_names: Callable[[str], list[str]],
) -> list[WaitingValues]:
    """What waits for things without variables: values of a checkpoint that no other thing takes."""
    result = []
    for name, owner in owners.items():
        for way in (name, *other_names(name)):
            start = f"{way}/" if way else ""
            names = [x for x in unused if x.startswith(start) and x in saved.entries]
            if names:
                result.append(WaitingValues(saved, names, way, owner))
                break
    return result
