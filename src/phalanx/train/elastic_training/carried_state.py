"""The state of a training in memory: taken between steps, carried to other workers, and given back.

It has the form of a checkpoint, so that it fits any number of workers, but no files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.regions import Region, assemble, cut, whole
from phalanx.core.variables.transactions import Moment
from phalanx.core.variables.variable import Variable
from phalanx.errors import DataLossError
from phalanx.train.checkpoints.contents import encoded, held_of, source_of
from phalanx.train.checkpoints.files import ArrayEntry, ArraySource
from phalanx.train.checkpoints.trackables import is_stateful

__all__ = ["CarriedState", "StateReferences"]

Array = np.ndarray[Any, Any]


class StateReferences:
    """The values of things after one step: arrays on their devices, none of which is copied.

    Args:
        things: variables, arrays, numbers and objects with a state, by name; see `trackables.found`.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        variables = [thing for thing in things.values() if isinstance(thing, Variable)]
        self._moment = Moment(variables)
        self._things = {
            name: thing.state() if is_stateful(thing) else thing for name, thing in things.items()
        }

    def is_whole(self) -> bool:
        """Whether this process has all of it."""
        return self._moment.read(
            lambda: (
                not any(
                    held_of(thing)[0].is_spread for thing in self._things.values() if _is_array(thing)
                )
            )
        )

    def carried(self) -> CarriedState:
        """The values on the host."""
        return self._moment.read(self._read)

    def _read(self) -> CarriedState:
        arrays: dict[str, ArraySource] = {}
        values: dict[str, Any] = {}
        for name, thing in self._things.items():
            if _is_array(thing):
                arrays[name] = source_of(*held_of(thing), False)
            else:
                values[name] = {"same": encoded(name, thing, arrays, 0, False)}
        return CarriedState(
            {name: ArrayEntry(s.shape, s.dtype, key=s.key) for name, s in arrays.items()},
            {name: _whole_array(source) for name, source in arrays.items()},
            values,
        )


def _is_array(thing: Any) -> bool:
    return isinstance(thing, Variable | jax.Array | np.ndarray | np.generic)


def _whole_array(source: ArraySource) -> Array:
    parts = [(part.region, part.array) for part in source.parts]
    found = assemble(source.shape, jnp.dtype(source.dtype), whole(source.shape), parts)
    return np.array(found).reshape(source.shape)


@dataclass
class CarriedState:
    """The state of a training on the host. Reads like a checkpoint."""

    entries: dict[str, ArrayEntry]
    arrays: dict[str, Array] = field(repr=False)
    values: dict[str, Any]
    path: Path = Path("the memory of another worker")

    def read(self, name: str, region: Region | None = None) -> Array:
        """An array, or a region of it."""
        array = self.arrays[name]
        return array if region is None else cut(array, region)

    def verify(self, name: str) -> None:
        """Nothing can be wrong with an array in memory."""

    # -- as bytes --------------------------------------------------------------------------------

    def pack(self) -> Array:
        """All of it as bytes."""
        about = [
            {**vars(entry), "name": name, "chunks": None, "bytes": self.arrays[name].nbytes}
            for name, entry in self.entries.items()
        ]
        head = json.dumps({"arrays": about, "values": self.values}).encode()
        data = [_bytes_of(self.arrays[name]) for name in self.entries]
        start = np.frombuffer(struct.pack("<Q", len(head)) + head, np.uint8)
        return np.concatenate([start, *data])

    @classmethod
    def unpack(cls, data: Array) -> CarriedState:
        """What `pack` made."""
        try:
            (length,) = struct.unpack("<Q", data[:8].tobytes())
            head = json.loads(data[8 : 8 + length].tobytes())
            at = 8 + length
            entries: dict[str, ArrayEntry] = {}
            arrays: dict[str, Array] = {}
            for about in head["arrays"]:
                name, size, dtype = str(about["name"]), int(about["bytes"]), jnp.dtype(about["dtype"])
                shape = tuple(map(int, about["shape"]))
                entries[name] = ArrayEntry(shape, dtype.name, key=about["key"])
                arrays[name] = np.array(data[at : at + size]).view(dtype).reshape(shape)
                at += size
            return cls(entries, arrays, dict(head["values"]))
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise DataLossError(f"The state of another worker cannot be read: {error}") from error


def _bytes_of(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
