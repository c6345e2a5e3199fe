"""`Module`: an object that knows the variables and modules in its attributes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from phalanx.core.name_scopes import name_scope
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidTypeError
from phalanx.runtime.formatting import shown

__all__ = ["Module"]


class Module:
    """Base of models: finds the variables in its attributes, and in modules, lists and dicts there.

    Args:
        name: a name; that of the class in small letters by default.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> class Dense(px.Module):
        ...     def __init__(self, size, name=None):
        ...         super().__init__(name=name)
        ...         with self.name_scope:
        ...             self.w = px.Variable(jnp.ones(size), name="w")
        ...             self.b = px.Variable(0.0, trainable=False, name="b")
        ...     def __call__(self, x):
        ...         return jnp.dot(x, self.w) + self.b
        >>> layer = Dense(2)
        >>> [v.name for v in layer.variables], [v.name for v in layer.trainable_variables]
        (['dense/b:0', 'dense/w:0'], ['dense/w:0'])
    """

    def __init__(self, name: str | None = None) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise InvalidTypeError(f"The name of a module must be a text. Received: {shown(name)}")
        self._name = name or _small(type(self).__name__)

    @property
    def name(self) -> str:
        """The name."""
        return getattr(self, "_name", None) or _small(type(self).__name__)

    @property
    def name_scope(self) -> name_scope:
        """A scope that puts the module's name in front of the names of its variables."""
        return name_scope(self.name)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All variables: those of its own attributes, sorted by name, then those of its modules."""
        return tuple(x for x in self._parts() if isinstance(x, Variable))

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """The variables that training changes."""
        return tuple(v for v in self.variables if v.trainable)

    @property
    def non_trainable_variables(self) -> tuple[Variable, ...]:
        """The other variables."""
        return tuple(v for v in self.variables if not v.trainable)

    @property
    def submodules(self) -> tuple[Module, ...]:
        """All modules in it, as deep as they go, without itself."""
        return tuple(x for x in self._parts() if isinstance(x, Module) and x is not self)

    def _parts(self) -> Iterator[Variable | Module]:
        """The variables and modules in it, each once."""
        seen = {id(self)}
        waiting: list[Module] = [self]
        while waiting:
            module = waiting.pop(0)
            inner = []
            for key in sorted(vars(module)):
                value = vars(module)[key]
                for x in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Variable | Module)):
                    if not isinstance(x, Variable | Module) or id(x) in seen:
                        continue
                    seen.add(id(x))
                    yield x
                    if isinstance(x, Module):
                        inner.append(x)
            waiting = inner + waiting

    @classmethod
    def with_name_scope(cls, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that runs in the module's name scope; used as a decorator."""

        @functools.wraps(method)
        def scoped(self: Module, *args: Any, **kwargs: Any) -> Any:
            with self.name_scope:
                return method(self, *args, **kwargs)

        return scoped

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: {len(self.variables)} variables>"


def _small(name: str) -> str:
    """The name of a class as the name of an object.

    >>> _small("MyDense2D")
    'my_dense2_d'
    """
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
