"""Array operators for objects that stand for an array: variables and distributed values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import InvalidTypeError

_COMPARABLE = (int, float, complex, np.ndarray, np.generic, jax.Array)
_Binary = Callable[[Any, Any], Any]


def _forward(fn: _Binary) -> _Binary:
    def method(self: Any, other: Any) -> Any:
        return fn(self._operand_or_type_error(), operand_of(other))

    return method


def _reflected(fn: _Binary) -> _Binary:
    def method(self: Any, other: Any) -> Any:
        return fn(operand_of(other), self._operand_or_type_error())

    return method


def operand_of(x: Any) -> Any:
    """The array behind `x` if it stands for one here, else `x` itself."""
    if isinstance(x, ArrayOperators):
        value = x._operand()
        return x if value is None else value
    return x


class ArrayOperators:
    """Arithmetic, comparison, indexing and conversion through `_operand`.

    `_operand` gives the array that the object stands for in the current context, or None where it
    stands for none; operators then raise a TypeError that says so.
    """

    __slots__ = ()
    __array_priority__ = 100

    def _operand(self) -> jax.Array | None:
        raise NotImplementedError

    def _array(self) -> jax.Array:
        """The array, or the error that explains why there is none here."""
        value = self._operand()
        assert value is not None
        return value

    def _operand_or_type_error(self) -> jax.Array:
        """The array, or the TypeError that Python raises for operands that do not fit."""
        try:
            return self._array()
        except ValueError as error:
            raise InvalidTypeError(str(error)) from None

    def __format__(self, spec: str) -> str:
        return format(self._array(), spec) if spec else str(self)

    __add__, __radd__ = _forward(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _forward(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _forward(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _forward(operator.matmul), _reflected(operator.matmul)
    __and__, __rand__ = _forward(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _forward(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _forward(operator.xor), _reflected(operator.xor)
    __lt__, __le__ = _forward(operator.lt), _forward(operator.le)
    __gt__, __ge__ = _forward(operator.gt), _forward(operator.ge)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, _COMPARABLE) and self._operand() is None:
            return other is self
        return self._operand_or_type_error() == operand_of(other)

    def __ne__(self, other: object) -> Any:
        same = self == other
        return not same if isinstance(same, bool) else ~same

    __hash__ = object.__hash__

    def __neg__(self) -> jax.Array:
        return -self._array()

    def __pos__(self) -> jax.Array:
        return +self._array()

    def __abs__(self) -> jax.Array:
        return jnp.abs(self._array())

    def __invert__(self) -> jax.Array:
        return ~self._array()

    def __getitem__(self, index: Any) -> jax.Array:
        return self._array()[operand_of(index)]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self._array())

    def __len__(self) -> int:
        return len(self._array())

    def __bool__(self) -> bool:
        return bool(self._array())

    def __int__(self) -> int:
        return int(self._array())

    def __float__(self) -> float:
        return float(self._array())

    def __complex__(self) -> complex:
        return complex(self._array())

    def __index__(self) -> int:
        return operator.index(self._array())

    def __jax_array__(self) -> jax.Array:
        return self._array()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = np.asarray(self._array(), dtype=dtype)
        return np.array(array, copy=True) if copy else array

    # Array methods that model code calls on parameters.

    @property
    def T(self) -> jax.Array:  # noqa: N802
        """The transpose."""
        return self._array().T

    def astype(self, dtype: Any) -> jax.Array:
        """The value in another dtype."""
        return self._array().astype(dtype)

    def reshape(self, *shape: Any) -> jax.Array:
        """The value in another shape."""
        return self._array().reshape(*shape)
