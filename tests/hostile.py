"""Values that nobody means, for every place where a user or an environment gives one."""

from typing import Any

import numpy as np

HUGE = 10**5000
"""Python refuses to print it."""


class Hostile:
    """Raises from every method that a careless message or comparison would call."""

    def _raise(self, *args: object) -> Any:
        raise RuntimeError("hostile")

    __repr__ = __str__ = __eq__ = __ne__ = __bool__ = __len__ = __reduce__ = __format__ = _raise  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def nested(depth: int) -> list[Any]:
    """A list in a list in a list."""
    nest: list[Any] = []
    for _ in range(depth):
        nest = [nest]
    return nest


VALUES: dict[str, Any] = {
    "None": None,
    "-1": -1,
    "0": 0,
    "True": True,
    "huge": HUGE,
    "-huge": -HUGE,
    "nan": np.nan,
    "inf": np.inf,
    "-inf": -np.inf,
    "half": 0.5,
    "text": "",
    "digits": "9" * 5000,
    "zeros": "\0\0",
    "lone surrogate": "\ud800",
    "bytes": b"\xff",
    "list": [],
    "None in a list": [None],
    "dict": {},
    "deep": nested(50),
    "object": object(),
    "hostile": Hostile(),
    "hostile in a list": [Hostile()],
    "class": int,
    "function": lambda *args: None,
    "strings": np.array(["a"]),
    "objects": np.array([None]),
}
