"""`Optional`: the next element, or the knowledge that there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from phalanx.errors import InvalidArgumentError

_NOTHING = object()


class Optional:
    """A value that may be missing, as `DistributedIterator.get_next_as_optional` returns it.

    It is a pytree: whether there is a value is known while tracing, the value itself is not.

    Examples:
        >>> import phalanx as px
        >>> present = px.experimental.Optional.from_value(3)
        >>> present.has_value(), present.get_value()
        (True, 3)
        >>> px.experimental.Optional.empty(None).has_value()
        False
    """

    __slots__ = ("_element_spec", "_value")

    def __init__(self, value: Any = _NOTHING, element_spec: Any = None) -> None:
        self._value = value
        self._element_spec = element_spec

    @staticmethod
    def from_value(value: Any) -> Optional:
        """An optional that holds `value`."""
        return Optional(value)

    @staticmethod
    def empty(element_spec: Any) -> Optional:
        """An optional that holds nothing."""
        return Optional(element_spec=element_spec)

    def has_value(self) -> bool:
        """Whether there is a value."""
        return self._value is not _NOTHING

    def get_value(self) -> Any:
        """The value; an `InvalidArgumentError` if there is none."""
        if self._value is _NOTHING:
            raise InvalidArgumentError("This Optional holds no value. Ask has_value() first.")
        return self._value

    @property
    def element_spec(self) -> Any:
        """What is known of the value."""
        return self._element_spec

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"


def _flatten(optional: Optional) -> tuple[tuple[Any, ...], Any]:
    present = optional.has_value()
    return ((optional._value,) if present else ()), optional._element_spec


def _unflatten(spec: Any, children: Sequence[Any]) -> Optional:
    return Optional(children[0] if children else _NOTHING, spec)


jax.tree_util.register_pytree_node(Optional, _flatten, _unflatten)
