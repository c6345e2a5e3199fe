"""Name scopes: parts that stand in front of the names of variables and summaries."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown

__all__ = ["in_scope", "name_scope"]

_scopes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("name scopes", default=())


class name_scope:  # noqa: N801 - reads as a statement
    """Put a name in front of the names of variables and summaries in a ``with`` block.

    Args:
        name: the name; one that ends with a slash replaces the scopes around it.

    Examples:
        >>> import phalanx as px
        >>> with px.name_scope("encoder"), px.name_scope("dense") as name:
        ...     print(name, px.Variable(1.0, name="kernel").name)
        encoder/dense/ encoder/dense/kernel:0
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidTypeError(f"A name scope needs a name. Received: {shown(name)}")
        self._name = name

    @property
    def name(self) -> str:
        """The name."""
        return self._name

    def __enter__(self) -> str:
        self._entered = self._scope()
        return self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _scope(self) -> Iterator[str]:
        parts = tuple(part for part in self._name.split("/") if part)
        inner = parts if self._name.endswith("/") else (*_scopes.get(), *parts)
        before = _scopes.set(inner)
        try:
            yield "/".join(inner) + "/"
        finally:
            _scopes.reset(before)


def in_scope(name: str) -> str:
    """A name with those of the scopes around it in front."""
    return "/".join((*_scopes.get(), name))
