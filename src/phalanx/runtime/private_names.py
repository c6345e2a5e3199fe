"""Finding private names of JAX, which move and vanish between versions.

`find` never fails: a name that is not there is a `Missing`, which says so when it is used. So a new
version of JAX takes away features one by one, and never the whole package. The names are sought by
`runtime/compat.py`, `job/jax_distributed.py` and `job/hub/coordination_service.py` only. This module
does not import JAX.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
from typing import Any, Final, NoReturn

from phalanx.errors import UnimplementedError

__all__ = ["REQUIREMENT", "SOUGHT", "Missing", "find", "need"]

REQUIREMENT: Final = "jax>=0.10.2,<0.13"
"""The versions that Phalanx is tested with; `pyproject.toml` says the same."""

SOUGHT: Final[dict[str, str]] = {}
"""Every private name that has been sought, and what it is for."""


class Missing:
    """Stands for a name that this JAX does not have; any use of it raises `UnimplementedError`."""

    def __init__(self, name: str, purpose: str) -> None:
        self._name, self._purpose = name, purpose

    def fail(self, *_: Any, **__: Any) -> NoReturn:
        """Say which name is missing, and what cannot work without it."""
        version = importlib.metadata.version("jax")
        raise UnimplementedError(
            f"{self._purpose} needs {self._name.replace(':', '.')}, which JAX {version} does not have "
            "any more, or keeps somewhere else. Install a version that Phalanx is tested with: "
            f"pip install '{REQUIREMENT}'. Received: JAX {version}"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # tools ask every object for such attributes
        self.fail()

    __call__ = __getitem__ = __setitem__ = __contains__ = __iter__ = __instancecheck__ = fail


def find(purpose: str, *homes: str) -> Any:
    """The first of some names that exists, each written ``module:name``; a `Missing` if none does.

    `purpose` is what cannot work without it, as the beginning of a sentence.
    """
    for home in homes:
        SOUGHT[home] = purpose
    for home in homes:
        try:
            return pkgutil.resolve_name(home)
        except (ImportError, AttributeError):
            continue
    return Missing(homes[0], purpose)


def need(*found: Any) -> None:
    """Raise the error of the first `Missing` among some names; before anything has changed."""
    for name in found:
        if isinstance(name, Missing):
            name.fail()
