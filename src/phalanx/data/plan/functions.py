"""Functions of the user: how they are called, and what they may return."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.plan.elements import DatasetSpec, Ragged, RaggedSpec, dtype_of, flatten, spec_of
from phalanx.errors import DatasetFunctionError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

Function = Callable[..., Any]


def caller(fn: Function, structure: Any) -> Callable[[Sequence[Any]], Any]:
    """`fn` as a function of the leaves of an element.

    As in TensorFlow a tuple is unpacked into several arguments, unless `fn` cannot take so many.
    """
    if tree_util.treedef_is_leaf(structure):
        return lambda leaves: fn(leaves[0])
    example = tree_util.tree_unflatten(structure, range(structure.num_leaves))
    if type(example) is not tuple or not _takes(fn, len(example)):
        return lambda leaves: fn(tree_util.tree_unflatten(structure, leaves))
    if example == tuple(range(structure.num_leaves)):
        return lambda leaves: fn(*leaves)
    return lambda leaves: fn(*tree_util.tree_unflatten(structure, leaves))


def _takes(fn: Function, count: int) -> bool:
    try:
        inspect.signature(fn).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a built-in function without a signature
        pass
    return True


def function_error(what: str, where: str, error: BaseException) -> DatasetFunctionError:
    """The error for a function that failed; `error` is its cause."""
    failure = DatasetFunctionError(
        f"The function given to {what} failed for {where}: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    return failure


def check_signature(signature: Any, what: str) -> Any:
    """A pytree of specs from what a user gives as `output_signature`."""
    leaves, structure = tree_util.tree_flatten(signature, is_leaf=lambda x: isinstance(x, list))
    if not leaves:
        raise InvalidValueError(
            f"The output_signature of {what} needs at least one spec. Received: {shown(signature)}"
        )
    return tree_util.tree_unflatten(structure, [_check_spec(leaf, what) for leaf in leaves])


def _check_spec(spec: Any, what: str) -> Any:
    if isinstance(spec, RaggedSpec | DatasetSpec):
        return spec
    if isinstance(spec, list) or not hasattr(spec, "shape") or not hasattr(spec, "dtype"):
        raise InvalidTypeError(
            f"The output_signature of {what} must be a px.TensorSpec, or tuples and dictionaries of "
            f"them. Received: {shown(spec)}"
        )
    return TensorSpec(tuple(spec.shape), np.dtype(spec.dtype))


class Form:
    """The form of the elements that a function makes: structure, dtypes and shapes.

    Either the user gives it, and values are converted to it. Or the first element decides, and the
    others must have its structure and dtypes; their shapes may differ.

    Args:
        what: the operation, for messages.
        spec: the form, or None to learn it.
    """

    def __init__(self, what: str, spec: Any = None) -> None:
        self._what = what
        self._given = spec is not None
        self._lock = threading.Lock()
        self._spec: Any = None
        self._structure: Any = None
        self._leaves: list[Any] = []
        self._dtypes: list[Any] = []
        if spec is not None:
            self._learn(spec)

    def __reduce__(self) -> Any:
        return Form, (self._what, self._spec if self._given else None)

    @property
    def spec(self) -> Any | None:
        """The form, or None as long as it is not known."""
        return self._spec

    def _learn(self, spec: Any) -> None:
        self._leaves, self._structure = tree_util.tree_flatten(spec)
        self._dtypes = [getattr(leaf, "dtype", None) for leaf in self._leaves]
        self._spec = spec

    def leaves_of(self, value: Any, where: str, rows: int | None = None) -> list[Any]:
        """The leaves of something that a function made, in the right form.

        Args:
            value: what the function returned.
            where: the element, for messages.
            rows: None for one element; else `value` holds that many elements as columns.
        """
        leaves, structure = flatten(value)
        if rows is not None:
            self._check_rows(leaves, rows, where)
        if self._spec is None:
            self._learn_from(leaves, structure, rows)
        if structure != self._structure:
            raise InvalidTypeError(
                f"{self._what} must make elements of one structure: {self._structure}. "
                f"Received: {structure} for {where}"
            )
        if self._given:
            return [self._fit(x, s, where, rows) for x, s in zip(leaves, self._leaves, strict=True)]
        for leaf, dtype in zip(leaves, self._dtypes, strict=True):
            if dtype is not None and dtype_of(leaf) != dtype:
                raise InvalidTypeError(
                    f"{self._what} must make elements of one dtype: {dtype}. "
                    f"Received: {dtype_of(leaf)} for {where}"
                )
        return leaves

    def _learn_from(self, leaves: list[Any], structure: Any, rows: int | None) -> None:
        if not leaves:
            raise InvalidValueError(
                f"{self._what} must make elements of at least one array. Received: None"
            )
        specs = [spec_of(leaf) for leaf in leaves]
        if rows is not None:
            specs = [TensorSpec(tuple(spec.shape[1:]), spec.dtype) for spec in specs]
        with self._lock:
            if self._spec is None:
                self._learn(tree_util.tree_unflatten(structure, specs))

    def _check_rows(self, leaves: list[Any], rows: int, where: str) -> None:
        for leaf in leaves:
            count = len(leaf) if isinstance(leaf, Ragged) or np.ndim(leaf) else None
            if count != rows:
                raise InvalidValueError(
                    f"A vectorized function must return one row per element, here {rows}. "
                    f"Received: {count} rows ({self._what}, {where})"
                )

    def _fit(self, leaf: Any, spec: Any, where: str, rows: int | None) -> Any:
        """A leaf that fits its given spec."""
        if not isinstance(spec, TensorSpec):
            if not isinstance(spec_of(leaf), type(spec)):
                self._misfit(leaf, spec, where)
            return leaf
        if isinstance(leaf, Ragged) and rows is None:
            self._misfit(leaf, spec, where)
        shape = leaf.shape if hasattr(leaf, "shape") else np.shape(leaf)
        shape = shape if rows is None else shape[1:]
        fits = len(shape) == len(spec.shape) and all(
            want is None or want == have for want, have in zip(spec.shape, shape, strict=True)
        )
        if not fits:
            self._misfit(leaf, spec, where)
        if dtype_of(leaf) == spec.dtype:
            return leaf
        if isinstance(leaf, Ragged) or not np.can_cast(dtype_of(leaf), spec.dtype, "same_kind"):
            self._misfit(leaf, spec, where)
        return leaf.astype(spec.dtype)

    def _misfit(self, leaf: Any, spec: Any, where: str) -> None:
        raise InvalidTypeError(
            f"{self._what} must make elements that fit its output_signature, here {spec}. "
            f"Received: {spec_of(leaf)} for {where}"
        )
