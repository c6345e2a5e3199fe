"""Nests: how per-replica results become one nest, and how a nest is cut for one replica.

The user's structure stays outside and distributed values sit at the leaves. Lists, tuples, named
tuples and mappings keep their type, and so does every pytree node registered with JAX (flax
dataclasses, equinox modules, …). All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from phalanx.errors import InvalidTypeError, InvalidValueError, StructureMismatchError
from phalanx.runtime.formatting import shown

Merge = Callable[[tuple[Any, ...]], Any]


class Leaf:
    """Base of the classes that are leaves for Phalanx even where JAX could look inside.

    Distributed values, variables and sparse slices are passed on whole.
    """

    __slots__ = ()


def is_leaf(x: Any) -> bool:
    """Whether Phalanx treats `x` as a leaf."""
    return x is None or isinstance(x, Leaf) or _children(x) is None


def map_nest(fn: Callable[[Any], Any], nest: Any) -> Any:
    """Apply `fn` to each leaf of a nest, keeping its structure. None is a leaf."""
    parts = _children(nest)
    if parts is None:
        return fn(nest)
    children, rebuild, _ = parts
    return rebuild([map_nest(fn, child) for child in children])


def leaves(nest: Any) -> list[Any]:
    """The leaves of a nest, in order."""
    parts = _children(nest)
    if parts is None:
        return [nest]
    return [leaf for child in parts[0] for leaf in leaves(child)]


def replace_leaves(nest: Any, new: Sequence[Any]) -> Any:
    """The nest with its leaves replaced by `new`, in order."""
    remaining = iter(new)
    return map_nest(lambda _: next(remaining), nest)


def merge_nests(nests: Sequence[Any], merge: Merge) -> Any:
    """Combine one nest per replica into a single nest, calling `merge` on each tuple of leaves.

    Raises `StructureMismatchError` where the nests differ in container type, length or keys.
    """
    parts = [_children(nest) for nest in nests]
    if all(part is None for part in parts):
        return merge(tuple(nests))
    first = parts[0]
    for i, part in enumerate(parts):
        if part is None or first is None or part[2] != first[2]:
            raise StructureMismatchError(
                "Replicas must produce the same structure: the same container types, lengths and "
                f"keys. Received: {shown(nests[0])} on replica 0 and {shown(nests[i])} on replica {i}"
            )
    assert first is not None
    children = [part[0] for part in parts if part is not None]
    if isinstance(nests[0], Mapping):  # each in an order of its own
        children = [[nest[key] for key in nests[0]] for nest in nests]
    columns = zip(*children, strict=True)
    return first[1]([merge_nests(column, merge) for column in columns])


# The parts of a container: its children, how to build it from new ones, and what must agree
# between replicas.
_Parts = tuple[Sequence[Any], Callable[[list[Any]], Any], Any]


def _children(x: Any) -> _Parts | None:
    """The parts of a container, or None if `x` is a leaf."""
    if x is None or isinstance(x, Leaf | jax.Array):
        return None
    cls = type(x)
    if isinstance(x, tuple) and hasattr(cls, "_fields"):
        return x, lambda new: cls(*new), (cls, len(x))
    if isinstance(x, list | tuple):
        return x, cls, (cls, len(x))
    if isinstance(x, Mapping):
        keys = list(x)
        return (
            [x[k] for k in keys],
            lambda new: _rebuild_mapping(x, keys, new),
            (cls, frozenset(keys)),
        )
    children, treedef = jax.tree_util.tree_flatten(x, is_leaf=lambda y: y is not x)
    if children and jax.tree_util.treedef_is_leaf(treedef):  # a node without children is none
        return None
    return children, lambda new: jax.tree_util.tree_unflatten(treedef, new), treedef


def _rebuild_mapping(original: Mapping[Any, Any], keys: list[Any], new: list[Any]) -> Any:
    items = zip(keys, new, strict=True)
    factory = getattr(original, "default_factory", None)
    if factory is not None:
        return type(original)(factory, items)  # type: ignore[call-arg]
    return type(original)(items)  # type: ignore[call-arg]


def check_call(fn: Any, args: Any, kwargs: Any, name: str = "fn") -> None:
    """Require a callable with a list of positional and a dict of keyword arguments."""
    if not callable(fn):
        raise InvalidTypeError(f"{name} must be callable. Received: {shown(fn)}")
    check_arguments(args, kwargs)


def check_arguments(args: Any, kwargs: Any) -> None:
    """Require a list of positional and a dict of keyword arguments."""
    if not isinstance(args, list | tuple):
        raise InvalidValueError(
            "args must be a list or tuple of positional arguments; for one argument write "
            f"args=(x,). Received: {shown(args)} of type {type(args).__name__}"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidValueError(f"kwargs must be a dict or None. Received: {shown(kwargs)}")
