"""Files of safetensors: which types they have, and how their arrays are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from phalanx.errors import InvalidTypeError

__all__ = ["check_types", "read_file"]

Array = np.ndarray[Any, Any]

_EIGHT_BITS = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Types that the package writes, but does not read as arrays of NumPy."""
_TYPES = {
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("bfloat16", "float16", "float32", "float64", "complex64"),
    *_EIGHT_BITS.values(),
}


def check_types(arrays: Mapping[str, Array]) -> None:
    """Raise unless safetensors has a type for all arrays.

    >>> check_types({"a": np.zeros(1, "complex128")})
    Traceback (most recent call last):
        ...
    phalanx.errors.InvalidTypeError: safetensors has no type for an array of the object, ... complex128
    """
    for name, array in arrays.items():
        if array.dtype.name not in _TYPES:
            raise InvalidTypeError(
                f"safetensors has no type for an array of the object, {name!r}. Convert it to another "
                f"dtype before. Received: an array of {array.dtype.name}"
            )


def read_file(path: str) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a file by name, and the texts that are kept with them."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:  # checks the file's order
        names = list(file.keys())
        types = {name: file.get_slice(name).get_dtype() for name in names}
        arrays = {name: file.get_tensor(name) for name in names if types[name] not in _EIGHT_BITS}
        metadata = dict(file.metadata() or {})
    with open(path, "rb") as data:
        length = int.from_bytes(data.read(8), "little")
        head = json.loads(data.read(length))
        for name in names:
            if name in arrays:
                continue
            start, stop = head[name]["data_offsets"]
            data.seek(8 + length + start)
            flat = np.frombuffer(data.read(stop - start), jnp.dtype(_EIGHT_BITS[types[name]]))
            arrays[name] = flat.reshape(head[name]["shape"]).copy()
    return {name: arrays[name] for name in names}, metadata
