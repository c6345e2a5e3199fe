"""What objects are made of: variables, arrays and positions, by the way that leads to them."""

from __future__ import annotations

import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

__all__ = [
    "check_array",
    "found",
    "is_stateful",
    "other_names",
    "replaced",
    "same_name",
    "without_state",
]

_NUMBERS = (bool, int, float)
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
_OPAQUE = (str, bytes, type, types.ModuleType, *_FUNCTIONS)
_FOREIGN = ("phalanx", "jax", "jaxlib", "numpy", "threading", "logging", "concurrent", "asyncio")
"""Packages whose objects are not looked into: they hold no state of a program."""

_MOST_NAMES = 100  # of one thing

Visit = Callable[[str, Any], Any]
"""Takes the path of a leaf and the leaf; returns what should stand in its place."""
Pieces = tuple[list[tuple[str, Any]], Callable[[list[Any]], Any]]
"""What an object is made of, by name; and a function that makes it of new pieces."""


def is_stateful(x: Any) -> bool:
    """Whether something says itself what its state is, by `state` and `restore`."""
    if isinstance(x, Variable | type):
        return False
    return _has(x, "state") and _has(x, "restore")


def _has(x: Any, name: str) -> bool:
    """Whether something has a method; not if it makes up whatever it is asked for, as nnx.Rngs does."""
    return callable(inspect.getattr_static(x, name, None))


def found(objects: Mapping[str, Any]) -> dict[str, Any]:
    """The variables, arrays, numbers and stateful objects in objects, by the names that lead to them.

    Mappings, lists, deques, tuples and registered pytrees are gone through; objects with ``variables``
    (optimizers, metrics, Keras models) by these; other objects by their attributes. A variable or an
    object that is there twice counts under its first name. Numbers count in pytrees that were given,
    also if an object leads to them first; else not in attributes of objects, where they say how a model
    is built.

    >>> v = Variable(1.0)
    >>> list(found({"model": {"layers": [v]}, "same": v}))
    ['model/layers/0']
    """
    result: dict[str, Any] = {}

    def collect(path: str, leaf: Any) -> Any:
        if result.setdefault(path, leaf) is not leaf:
            raise same_name(path)
        return leaf

    walk = _Walk(collect, objects)
    for name, thing in objects.items():
        count, is_known = len(result), id(thing) in walk.seen
        walk(name, thing, not isinstance(thing, _NUMBERS))
        if len(result) == count and not is_known and not _may_be_empty(thing):
            raise InvalidTypeError(
                "A checkpoint saves variables, arrays, iterators, optimizers, metrics, objects with "
                f"`state` and `restore`, and what holds them. Received: {name}={shown(thing)}"
            )
    return result


def same_name(name: str) -> InvalidValueError:
    """Two values have the same name."""
    return InvalidValueError(
        "Two values have the same name, so one would be lost: names are the ways that lead to "
        f"values, with slashes between. Rename a key or an attribute. Received: {name!r} twice"
    )


def without_state(objects: Mapping[str, Any]) -> dict[str, Any]:
    """What in objects has made no variables yet, such as optimizers, by the names that lead to them."""
    walk = _Walk(lambda path, leaf: leaf)
    for name, thing in objects.items():
        walk(name, thing, False)
    return walk.unbuilt


def other_names(objects: Mapping[str, Any]) -> Callable[[str], list[str]]:
    """A function that says which other names lead to what `found` calls by one name.

    >>> v = Variable(1.0)
    >>> other_names({"head": {"w": v}, "same": v})("head/w")
    ['same']
    """
    walk = _Walk(lambda path, leaf: leaf)
    for name, thing in objects.items():
        walk(name, thing, not isinstance(thing, _NUMBERS))
    again: dict[str, list[str]] = {}
    for first, other in walk.again:
        again.setdefault(first, []).append(other)

    def others(name: str) -> list[str]:
        names = dict.fromkeys([name])
        pending = deque(names)
        while pending and len(names) < _MOST_NAMES:  # what is inside itself has names without end
            parts = pending.popleft().split("/")
            for i in range(1, len(parts) + 1):
                for other in again.get("/".join(parts[:i]), ()):
                    way = "/".join([other, *parts[i:]])
                    if way not in names:
                        names[way] = None
                        pending.append(way)
        return list(names)[1:]

    return others


def replaced(objects: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The objects with new values for arrays and numbers, by the names that `found` gives them.

    What can be changed (dicts, lists, objects) is changed, what cannot (tuples, other pytrees, frozen
    objects) is made anew.

    >>> params = {"w": np.zeros(2), "step": 1}
    >>> replaced({"params": params}, {"params/step": 5})["params"] is params, params["step"]
    (True, 5)
    """
    walk = _Walk(values.get, objects)
    return {name: walk(name, thing, not isinstance(thing, _NUMBERS)) for name, thing in objects.items()}


class _Walk:
    """Goes through objects, each once, and calls a function for each leaf.

    Args:
        visit: the function.
        given: objects that were given. Numbers in pytrees of them count wherever they are found first.
    """

    def __init__(self, visit: Visit, given: Mapping[str, Any] | None = None) -> None:
        self._visit, self._given = visit, given or {}
        self.seen: dict[int, tuple[str, Any, Any]] = {}  # names, things, and what became of them
        self.again: list[tuple[str, str]] = []  # names of things that are there twice
        self.unbuilt: dict[str, Any] = {}

    def __call__(self, path: str, thing: Any, with_numbers: bool) -> Any:
        if _is_value(thing):
            check_array(path, thing)
            return self._visit(path, thing)
        if with_numbers and isinstance(thing, _NUMBERS):
            return self._visit(path, thing)
        if thing is None or isinstance(thing, (*_OPAQUE, *_NUMBERS)):
            return thing
        if id(thing) in self.seen:
            first, _, result = self.seen[id(thing)]
            self.again.append((first, path))
            return result
        if isinstance(thing, DistributedValues) and not isinstance(thing, Variable):
            raise InvalidTypeError(
                "A value with a component for each replica cannot be saved. Keep it in a px.Variable, "
                f"or combine it by strategy.reduce. Received: {path}={shown(thing)}"
            )
        is_leaf = isinstance(thing, Variable) or is_stateful(thing)
        is_once = is_leaf or not isinstance(thing, tuple)  # a tuple in two places is made anew in both
        if is_once:
            self.seen[id(thing)] = path, thing, thing
        if is_leaf:
            return self._visit(path, thing)
        if _has(thing, "when_built") and not thing.is_built:
            self.unbuilt[path] = thing
        pieces, join = _taken_apart(thing)
        is_tree = _is_tree(thing)
        with_numbers = is_tree and (with_numbers or id(thing) in self._given_trees)
        old = [piece for _, piece in pieces]
        new = [self(f"{path}/{name}" if path else name, piece, with_numbers) for name, piece in pieces]
        result = thing if all(a is b for a, b in zip(old, new, strict=True)) else join(new)
        if is_once:
            self.seen[id(thing)] = path, thing, result
        return result

    @functools.cached_property
    def _given_trees(self) -> dict[int, Any]:
        trees: dict[int, Any] = {}
        for thing in self._given.values():
            _collect_trees(thing, trees)
        return trees


def _collect_trees(thing: Any, trees: dict[int, Any]) -> None:
    """Collect the pytrees in a pytree by identity, but for tuples, which are gone through each time."""
    if id(thing) in trees or not _is_tree(thing):
        return
    if isinstance(thing, (type(None), Variable, DistributedValues)) or is_stateful(thing):
        return
    if not isinstance(thing, tuple):
        trees[id(thing)] = thing
    for _, piece in _taken_apart(thing)[0]:
        _collect_trees(piece, trees)


def _is_tree(thing: Any) -> bool:
    return isinstance(thing, Mapping | list | deque | tuple) or _is_registered(thing)


def _is_value(x: Any) -> bool:
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return is_array and not isinstance(x, Variable | str | bytes)  # np.str_ is a text


def check_array(path: str, array: Any) -> None:
    """Raise unless the elements of an array can be saved: texts and objects cannot.

    >>> check_array("model/names", np.array(["a", "b"]))
    Traceback (most recent call last):
        ...
    phalanx.errors.InvalidTypeError: ... Received: model/names, an array of <U1
    """
    if isinstance(array, jax.Array):
        return
    dtype = array.dtype
    try:
        is_known = np.dtype(jnp.dtype(dtype.name)) == dtype.newbyteorder("=")
    except TypeError:
        is_known = False
    if not is_known or dtype.hasobject or not dtype.itemsize:
        raise InvalidTypeError(
            "Arrays of numbers can be saved, those of texts, objects and records cannot. Keep them in "
            f"lists or in an array for each field. Received: {path}, an array of {dtype}"
        )


# -- taking apart ----------------------------------------------------------------------------------


def _taken_apart(thing: Any) -> Pieces:
    if isinstance(thing, MutableMapping):
        keys = list(thing)
        return [(str(key), thing[key]) for key in keys], lambda new: _set_items(thing, keys, new)
    if isinstance(thing, list | deque):
        return _numbered(thing), lambda new: _set_items(thing, range(len(new)), new)
    if isinstance(thing, tuple):
        fields = getattr(thing, "_fields", None)
        if fields is not None:
            return list(zip(fields, thing, strict=True)), lambda new: type(thing)(*new)
        return _numbered(thing), type(thing)
    variables = _variables_of(thing)
    if variables is not None:
        return variables, lambda new: thing
    if _is_of_keras(thing):
        return _of_keras(thing)
    if _is_registered(thing):
        return _of_pytree(thing)
    if type(thing).__module__.split(".")[0] in _FOREIGN:
        return [], lambda new: thing
    held = _attributes_of(thing)
    if isinstance(thing, Mapping) and not held:  # which cannot be changed
        kind: Any = type(thing)
        keys = list(thing)
        pieces = [(str(key), thing[key]) for key in keys]
        return pieces, lambda new: kind(dict(zip(keys, new, strict=True)))
    return list(held.items()), lambda new: _set_attributes(thing, dict(zip(held, new, strict=True)))


def _numbered(things: Any) -> list[tuple[str, Any]]:
    return [(str(i), piece) for i, piece in enumerate(things)]


def _variables_of(thing: Any) -> list[tuple[str, Any]] | None:
    """The variables that an optimizer or a metric lists, and those of its loss scale."""
    try:
        variables = getattr(thing, "variables", None)
    except ContextError:  # an optimizer that has no state yet
        return []
    except Exception:  # noqa: BLE001 - of another library, such as a module of flax.linen
        return None
    if not isinstance(variables, list | tuple) or not all(isinstance(v, Variable) for v in variables):
        return None
    scale = getattr(thing, "loss_scale", None)
    return [*_numbered(variables), *([] if scale is None else [("loss_scale", scale)])]


def _is_of_keras(thing: Any) -> bool:
    """Whether something is a model, a layer, an optimizer or a metric of Keras."""
    of_keras = any(kind.__module__.partition(".")[0] == "keras" for kind in type(thing).__mro__)
    return of_keras and isinstance(getattr(thing, "variables", None), list)


def _of_keras(thing: Any) -> Pieces:
    """The values of Keras's variables by number, as lifted models have them; the optimizer's, too."""
    getattr(thing, "jax_state_sync", lambda: None)()  # `fit` holds the values during an epoch
    optimizer = getattr(thing, "optimizer", None)
    if optimizer is not None and not optimizer.built and thing.built:
        optimizer.build(thing.trainable_variables)
    of_optimizer = [] if optimizer is None else optimizer.variables
    variables = [*thing.variables, *of_optimizer]
    names = [*map(str, range(len(thing.variables)))]
    names += [f"optimizer/{i}" for i in range(len(of_optimizer))]

    def put(new: list[Any]) -> Any:
        for v, value in zip(variables, new, strict=True):
            v.assign(value)
        return thing

    return [(name, v.value) for name, v in zip(names, variables, strict=True)], put


def _is_registered(thing: Any) -> bool:
    """Whether JAX knows how to take something apart."""
    return not tree_util.all_leaves([thing])


def _of_pytree(thing: Any) -> Pieces:
    pairs, structure = tree_util.tree_flatten_with_path(thing, is_leaf=lambda x: x is not thing)
    names = [tree_util.keystr(path, simple=True, separator="/") for path, _ in pairs]
    pieces = list(zip(names, [piece for _, piece in pairs], strict=True))
    put = getattr(thing, "set_value", None)
    if names == ["value"] and callable(put):  # as a variable of flax.nnx, which others may share
        return pieces, lambda new: put(new[0]) or thing
    return pieces, lambda new: tree_util.tree_unflatten(structure, new)


def _set_items(thing: Any, keys: Any, new: list[Any]) -> Any:
    for key, value in zip(keys, new, strict=True):
        if thing[key] is not value:
            thing[key] = value
    return thing


def _attributes_of(thing: Any) -> dict[str, Any]:
    """The attributes that an object has itself, in a dict or in slots."""
    held = dict(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = vars(kind) if "__slots__" in vars(kind) else {}
        for name, slot in slots.items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(thing, name):
                held.setdefault(name, getattr(thing, name))
    return held


def _set_attributes(thing: Any, new: dict[str, Any]) -> Any:
    """Give an object new attributes, or make another one if it is frozen."""
    try:
        for name, value in new.items():
            if getattr(thing, name, None) is not value:
                setattr(thing, name, value)
    except Exception:  # noqa: BLE001 - libraries have errors of their own for it
        fresh = object.__new__(type(thing))
        for name, value in new.items():
            object.__setattr__(fresh, name, value)
        return fresh
    return thing


def _may_be_empty(thing: Any) -> bool:
    """Whether an object that holds nothing now may hold something later."""
    if thing is None:
        return True
    if isinstance(thing, tuple) and thing and all(isinstance(x, _FUNCTIONS) for x in thing):
        return False  # a transformation of optax, whose state is another thing
    if isinstance(thing, Mapping | list | deque | tuple):
        return True
    try:
        return hasattr(thing, "variables") or hasattr(thing, "build")
    except Exception as error:  # noqa: BLE001 - of another library, such as a module of flax.linen
        return isinstance(error, ContextError)
