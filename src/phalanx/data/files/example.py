"""`Example` messages, spelled as in TensorFlow: named lists of byte strings, floats or integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

from phalanx.data.files import example_wire as wire
from phalanx.errors import InvalidArgumentError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.protobuf_wire import Malformed

_INT64 = np.iinfo(np.int64)


class _ValueList:
    """A list of values of one kind; `value` is a plain Python list."""

    _kind: ClassVar[int]

    def __init__(self, value: Iterable[Any] = ()) -> None:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise InvalidTypeError(
                f"The value of a {type(self).__name__} must be a list. "
                f"Received: {shown(value)} of type {type(value).__name__}"
            )
        self.value: list[Any] = self._checked(value)

    def _checked(self, value: Iterable[Any]) -> list[Any]:
        raise NotImplementedError

    def _pack(self) -> tuple[int, list[bytes]]:
        return self._kind, self._parts(self._checked(self.value))

    def _parts(self, items: list[Any]) -> list[bytes]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ValueList) and self._pack() == other._pack()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self.value!r})"


class BytesList(_ValueList):
    """A list of byte strings.

    Examples:
        >>> import phalanx as px
        >>> px.train.BytesList(value=[b"a", b"b"]).value
        [b'a', b'b']
    """

    _kind = wire.BYTES

    def _checked(self, value: Iterable[Any]) -> list[Any]:
        items = [bytes(v) if isinstance(v, bytearray | memoryview | np.bytes_) else v for v in value]
        for item in items:
            if not isinstance(item, bytes):
                raise InvalidTypeError(
                    "A BytesList holds bytes; encode strings, as in 'text'.encode(), and arrays, "
                    f"as in array.tobytes(). Received: {shown(item)} of type {type(item).__name__}"
                )
        return items

    def _parts(self, items: list[Any]) -> list[bytes]:
        return items


class FloatList(_ValueList):
    """A list of 32-bit floats.

    Examples:
        >>> import phalanx as px
        >>> px.train.FloatList(value=[0.5, 2]).value
        [0.5, 2.0]
    """

    _kind = wire.FLOAT

    def _checked(self, value: Iterable[Any]) -> list[Any]:
        with np.errstate(over="ignore"):
            return _numbers(value, "FloatList", "biuf").astype(np.float32).tolist()

    def _parts(self, items: list[Any]) -> list[bytes]:
        return [wire.pack_floats(items)]


class Int64List(_ValueList):
    """A list of 64-bit integers.

    Examples:
        >>> import phalanx as px
        >>> px.train.Int64List(value=[1, -2]).value
        [1, -2]
    """

    _kind = wire.INT64

    def _checked(self, value: Iterable[Any]) -> list[Any]:
        items = _numbers(value, "Int64List", "biuO").tolist()
        for item in items:
            if not isinstance(item, int):
                raise InvalidTypeError(
                    "An Int64List holds integers. "
                    f"Received: {shown(item)} of type {type(item).__name__}"
                )
            if not _INT64.min <= item <= _INT64.max:
                raise InvalidValueError(f"An Int64List holds 64-bit integers. Received: {shown(item)}")
        return [int(item) for item in items]

    def _parts(self, items: list[Any]) -> list[bytes]:
        return [wire.pack_integers(items)]


def _numbers(value: Iterable[Any], what: str, kinds: str) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value if isinstance(value, np.ndarray) else list(value))
    except (ValueError, TypeError, OverflowError):
        array = np.empty((), object)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise InvalidTypeError(
            f"The value of a {what} must be a flat list of "
            f"{'integers' if what == 'Int64List' else 'numbers'}. Received: {shown(value)}"
        )
    return array


_LISTS: dict[int, type[_ValueList]] = {each._kind: each for each in (BytesList, FloatList, Int64List)}


class Feature:
    """The values of one feature: a `BytesList`, a `FloatList` or an `Int64List`.

    Examples:
        >>> import phalanx as px
        >>> feature = px.train.Feature(float_list=px.train.FloatList(value=[0.5]))
        >>> feature.WhichOneof("kind"), feature.float_list.value, feature.int64_list.value
        ('float_list', [0.5], [])
    """

    def __init__(
        self,
        *,
        bytes_list: BytesList | None = None,
        float_list: FloatList | None = None,
        int64_list: Int64List | None = None,
    ) -> None:
        given = dict(zip(wire.KINDS, (bytes_list, float_list, int64_list), strict=True))
        chosen = {kind: values for kind, values in given.items() if values is not None}
        if len(chosen) > 1:
            raise InvalidValueError(
                "A Feature has one kind of values. Received: "
                + " and ".join(wire.KINDS[kind] for kind in chosen)
            )
        for kind, values in chosen.items():
            if not isinstance(values, _LISTS[kind]):
                raise InvalidTypeError(
                    f"{wire.KINDS[kind]} must be a {_LISTS[kind].__name__}. Received: {shown(values)}"
                )
        self._chosen: int | None = next(iter(chosen), None)
        self._lists: dict[int, _ValueList] = {**chosen}

    def WhichOneof(self, oneof_group: str = "kind") -> str | None:  # noqa: N802
        """The name of the list that is set, or None."""
        if oneof_group != "kind":
            raise InvalidValueError(f"The group of a Feature is 'kind'. Received: {shown(oneof_group)}")
        kind = self._kind()
        return None if kind is None else wire.KINDS[kind]

    @property
    def bytes_list(self) -> BytesList:
        """The byte strings; empty if the feature is of another kind."""
        return self._list(wire.BYTES)  # type: ignore[return-value]

    @property
    def float_list(self) -> FloatList:
        """The floats; empty if the feature is of another kind."""
        return self._list(wire.FLOAT)  # type: ignore[return-value]

    @property
    def int64_list(self) -> Int64List:
        """The integers; empty if the feature is of another kind."""
        return self._list(wire.INT64)  # type: ignore[return-value]

    def _list(self, kind: int) -> _ValueList:
        """A list to read or to fill: the first one that is filled decides on the kind."""
        if self._kind() in (None, kind):
            return self._lists.setdefault(kind, _LISTS[kind]())
        return _LISTS[kind]()

    def _kind(self) -> int | None:
        if self._chosen is None:
            self._chosen = next((kind for kind, x in self._lists.items() if x.value), None)
        return self._chosen

    def _pack(self) -> tuple[int, list[bytes]]:
        kind = self._kind()
        return (wire.UNSET, []) if kind is None else self._lists[kind]._pack()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Feature) and self._pack() == other._pack()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind = self._kind()
        return "Feature()" if kind is None else f"Feature({wire.KINDS[kind]}={self._lists[kind]!r})"


class _FeatureMap(dict[str, Feature]):
    """Features by name; asking for one that is not there makes it."""

    def __missing__(self, key: str) -> Feature:
        self[key] = Feature()
        return self[key]


class Features:
    """Features by name.

    Examples:
        >>> import phalanx as px
        >>> features = px.train.Features()
        >>> features.feature["label"].int64_list.value.append(3)
        >>> features
        Features(feature={'label': Feature(int64_list=Int64List(value=[3]))})
    """

    def __init__(self, feature: Mapping[str, Feature] | None = None) -> None:
        self.feature: dict[str, Feature] = _FeatureMap(feature or {})
        self._check()

    def _check(self) -> None:
        for key, feature in self.feature.items():
            if not isinstance(key, str) or not isinstance(feature, Feature):
                raise InvalidTypeError(
                    "Features maps strings to px.train.Feature objects. "
                    f"Received: {shown(key)}: {shown(feature)} of type {type(feature).__name__}"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self.feature == other.feature

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Features(feature={dict(self.feature)!r})"


class Example:
    """A record with named features, as TensorFlow stores them in TFRecord files.

    Examples:
        >>> import phalanx as px
        >>> label = px.train.Feature(int64_list=px.train.Int64List(value=[7]))
        >>> example = px.train.Example(features=px.train.Features(feature={"label": label}))
        >>> data = example.SerializeToString()
        >>> px.train.Example.FromString(data).features.feature["label"].int64_list.value
        [7]
    """

    def __init__(self, features: Features | None = None) -> None:
        if features is not None and not isinstance(features, Features):
            raise InvalidTypeError(f"features must be px.train.Features. Received: {shown(features)}")
        self._is_set = features is not None
        self.features = Features() if features is None else features

    def SerializeToString(self, deterministic: bool | None = None) -> bytes:  # noqa: N802
        """The message as bytes.

        Args:
            deterministic: accepted as in TensorFlow; features always stand in the order of their names.
        """
        self.features._check()
        if not self._is_set and not self.features.feature:
            return b""
        return wire.write_example({k: f._pack() for k, f in self.features.feature.items()})

    @classmethod
    def FromString(cls, serialized: bytes) -> Self:  # noqa: N802
        """The message that `SerializeToString` made bytes of, here or in TensorFlow."""
        example = cls()
        example.ParseFromString(serialized)
        return example

    def ParseFromString(self, serialized: bytes) -> int:  # noqa: N802
        """Replace the features by those of a serialized message; how many bytes it has."""
        if not isinstance(serialized, bytes | bytearray | memoryview):
            raise InvalidTypeError(
                f"A serialized Example is bytes. Received: {type(serialized).__name__}"
            )
        data = bytes(serialized)
        feature: dict[str, Feature] = {}
        try:
            for key, values in wire.scan(data).items():
                feature[key.decode()] = _unpack(values.kind, values.parts(data))
        except Malformed as reason:
            raise wire.malformed("This", reason, data) from None
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"The name of a feature is not UTF-8. Received: {shown(error.object)}"
            ) from error
        self._is_set, self.features = bool(data), Features(feature)
        return len(data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Example) and self.features == other.features

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Example(features={self.features!r})"


def _unpack(kind: int, parts: list[bytes]) -> Feature:
    if kind == wire.BYTES:
        return Feature(bytes_list=BytesList(parts))
    if kind == wire.FLOAT:
        return Feature(float_list=FloatList(wire.floats(parts)))
    if kind == wire.INT64:
        return Feature(int64_list=Int64List(wire.integers(parts)[0]))
    return Feature()
