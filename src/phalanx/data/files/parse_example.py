"""Parsing serialized `Example` messages into arrays, a whole batch at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phalanx.data.files import example_wire as wire
from phalanx.data.plan.elements import Ragged
from phalanx.errors import InvalidArgumentError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.protobuf_wire import Malformed

Array = np.ndarray[Any, np.dtype[Any]]

_DTYPES = {
    wire.BYTES: np.dtype(object),
    wire.FLOAT: np.dtype(np.float32),
    wire.INT64: np.dtype(np.int64),
}
_NAMES = {
    wire.BYTES: "string",
    wire.FLOAT: "float32",
    wire.INT64: "int64",
}


def _kind_of(dtype: Any) -> int:
    if dtype in (bytes, str, "string", "bytes"):
        return wire.BYTES
    try:
        wanted = np.dtype(dtype)
    except TypeError:
        wanted = None
    for kind, known in _DTYPES.items():
        if wanted == known:
            return kind
    raise InvalidTypeError(
        "A feature is stored as float32, int64 or string (bytes); parse it as one of them and convert "
        f"it afterwards. Received: dtype={shown(dtype)}"
    )


def _shape_of(shape: Any) -> tuple[int, ...]:
    dims = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    for dim in dims:
        if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or dim < 0:
            raise InvalidValueError(
                "The shape of a feature must be made of sizes; use FixedLenSequenceFeature or "
                f"VarLenFeature where the number of values varies. Received: shape={shown(shape)}"
            )
    return tuple(int(dim) for dim in dims)


@dataclass(frozen=True)
class VarLenFeature:
    """A feature with any number of values.

    A single record gives a one-dimensional array, a batch of records a `px.data.Ragged` value.

    Args:
        dtype: ``float32``, ``int64`` or ``bytes`` (also as ``"string"``).

    Examples:
        >>> import numpy as np, phalanx as px
        >>> px.io.VarLenFeature(np.int64)
        VarLenFeature(dtype=<class 'numpy.int64'>)
    """

    dtype: Any

    def __post_init__(self) -> None:
        _kind_of(self.dtype)


@dataclass(frozen=True)
class FixedLenFeature:
    """A feature whose values fill a shape exactly.

    Args:
        shape: of the values of one record; ``[]`` for a single value.
        dtype: ``float32``, ``int64`` or ``bytes`` (also as ``"string"``).
        default_value: for records without the feature; without a default that is an error.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> px.io.FixedLenFeature([28, 28], np.float32).shape
        [28, 28]
    """

    shape: Any
    dtype: Any
    default_value: Any = None

    def __post_init__(self) -> None:
        _default(self, _shape_of(self.shape))


@dataclass(frozen=True)
class FixedLenSequenceFeature:
    """A feature with any number of items of one shape, filled up in a batch to the longest record.

    Args:
        shape: of one item.
        dtype: ``float32``, ``int64`` or ``bytes`` (also as ``"string"``).
        allow_missing: must be True, as in TensorFlow: a record without the feature has no items.
        default_value: what to fill up with; 0 or the empty string if not given.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> px.io.FixedLenSequenceFeature([], np.int64, allow_missing=True).default_value is None
        True
    """

    shape: Any
    dtype: Any
    allow_missing: bool = False
    default_value: Any = None

    def __post_init__(self) -> None:
        _default(self, ())
        if 0 in _shape_of(self.shape):
            raise InvalidValueError(f"An item must have values. Received: shape={shown(self.shape)}")
        if not self.allow_missing:
            raise InvalidValueError(
                "FixedLenSequenceFeature needs allow_missing=True: records may have no items, and are "
                "filled up to the longest one. Received: allow_missing=False"
            )


ParsedFeature = FixedLenFeature | FixedLenSequenceFeature | VarLenFeature


def _default(
    feature: FixedLenFeature | FixedLenSequenceFeature, shape: tuple[int, ...]
) -> Array | None:
    """The default value of a feature as an array of its dtype and `shape`."""
    kind = _kind_of(feature.dtype)
    value = feature.default_value
    if value is None:
        return None
    try:
        if kind == wire.BYTES:
            array = np.array(value, object)
            if not all(isinstance(v, bytes) for v in array.flat):
                raise TypeError
        else:
            array = np.asarray(value)
            if array.dtype.kind not in ("biu" if kind == wire.INT64 else "biuf"):
                raise TypeError
            array = array.astype(_DTYPES[kind])
        return (
            array.reshape(shape) if array.size == int(np.prod(shape)) else np.broadcast_to(array, shape)
        )
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"default_value must be a {_NAMES[kind]} of shape {shape}. Received: {shown(value)}"
        ) from error


# -- parsing ------------------------------------------------------------------------------


def parse_example(
    serialized: Any,
    features: Mapping[str, ParsedFeature],
    example_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Parse a batch of serialized `px.train.Example` messages into a dictionary of arrays.

    Args:
        serialized: a one-dimensional array or list of bytes.
        features: what to take from each record, by name: `FixedLenFeature`, `FixedLenSequenceFeature`
            or `VarLenFeature`. Other features of the records are left alone.
        example_names: names of the records for error messages; without them they are numbered.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> def record(x):
        ...     feature = px.train.Feature(float_list=px.train.FloatList(value=x))
        ...     return px.train.Example(px.train.Features({"x": feature})).SerializeToString()
        >>> batch = [record([1, 2]), record([3, 4])]
        >>> px.io.parse_example(batch, {"x": px.io.FixedLenFeature([2], np.float32)})
        {'x': array([[1., 2.], [3., 4.]], dtype=float32)}
    """
    records = _as_records(serialized)
    wanted = _check_features(features)
    if example_names is None:
        names = [f"record {i}" for i in range(len(records))]
    else:
        names = [f"record {str(name)!r}" for name in example_names]
        if len(names) != len(records):
            raise InvalidValueError(
                "example_names must have one name per record. "
                f"Received: {len(names)} names for {len(records)} records"
            )
    return _parse(records, wanted, names)


def parse_single_example(
    serialized: Any, features: Mapping[str, ParsedFeature], example_names: str | None = None
) -> dict[str, Any]:
    """Parse one serialized `px.train.Example` message into a dictionary of arrays.

    Args:
        serialized: the bytes of the message.
        features: what to take from it, as for `parse_example`.
        example_names: the name of the record for error messages.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> feature = px.train.Feature(int64_list=px.train.Int64List(value=[7]))
        >>> data = px.train.Example(px.train.Features({"y": feature})).SerializeToString()
        >>> px.io.parse_single_example(data, {"y": px.io.FixedLenFeature([], np.int64)})
        {'y': np.int64(7)}
    """
    if isinstance(serialized, np.ndarray) and serialized.ndim == 0:
        serialized = serialized.item()
    if not isinstance(serialized, bytes):
        raise InvalidTypeError(
            "parse_single_example takes the bytes of one record; parse_example takes a batch of them. "
            f"Received: {type(serialized).__name__}"
        )
    name = "the record" if example_names is None else f"record {example_names!r}"
    parsed = _parse([serialized], _check_features(features), [name])
    return {key: value[0] for key, value in parsed.items()}


def _as_records(serialized: Any) -> list[bytes]:
    if isinstance(serialized, bytes | str) or not isinstance(serialized, Sequence | np.ndarray):
        raise InvalidTypeError(
            "parse_example takes a list or array of records; for a single one there is "
            f"parse_single_example. Received: {type(serialized).__name__}"
        )
    if np.ndim(serialized) != 1:
        raise InvalidValueError(
            f"The records must have one dimension. Received: shape {np.shape(serialized)}"
        )
    records = list(serialized)
    for record in records:
        if not isinstance(record, bytes):
            raise InvalidTypeError(f"Records are bytes. Received: {type(record).__name__}")
    return records


def _check_features(features: Mapping[str, ParsedFeature]) -> dict[str, ParsedFeature]:
    if not isinstance(features, Mapping) or not features:
        raise InvalidValueError(
            f"features must be a dictionary that names what to parse. Received: {shown(features)}"
        )
    for key, feature in features.items():
        if not isinstance(key, str) or not isinstance(feature, ParsedFeature):
            raise InvalidTypeError(
                "features maps names to FixedLenFeature, FixedLenSequenceFeature or VarLenFeature. "
                f"Received: {shown(key)}: {shown(feature)}"
            )
    return dict(features)


def _parse(
    records: list[bytes], features: Mapping[str, ParsedFeature], names: Sequence[str]
) -> dict[str, Any]:
    try:
        alike = wire.scan_alike(records)
        layouts = wire.scan_all(records) if alike is None else [alike.layout] * len(records)
    except Malformed as reason:
        which = reason.record
        raise wire.malformed(names[which].capitalize(), reason, records[which]) from None
    batch = _Batch(records, layouts, names, None if alike is None else alike.matrix)
    return {key: _column(key, feature, batch) for key, feature in features.items()}


class _Batch(NamedTuple):
    """Records that are parsed together; as rows of a matrix too, if all have one layout."""

    records: Sequence[bytes]
    layouts: Sequence[wire.Layout]
    names: Sequence[str]
    matrix: wire.Bytes | None


_MISSING = wire.Values(wire.UNSET, [])


def _column(key: str, feature: ParsedFeature, batch: _Batch) -> Any:
    """One feature of all records."""
    kind, encoded, names = _kind_of(feature.dtype), key.encode(), batch.names
    found = [layout.get(encoded, _MISSING) for layout in batch.layouts]
    kinds = np.array([values.kind for values in found], np.int64)
    wrong = (kinds != kind) & (kinds != wire.UNSET)
    if wrong.any():
        which = int(wrong.argmax())
        raise InvalidArgumentError(
            f"Feature {shown(key)} of {names[which]} has another type than was asked for. Received: "
            f"{_NAMES[int(kinds[which])]} in the record, dtype {_NAMES[kind]} in features"
        )
    try:
        decoded = _decode_alike(kind, batch.matrix, found[0]) if batch.matrix is not None else None
        numbers, counts = decoded or _decode(kind, batch.records, found)
    except Malformed as reason:
        raise InvalidArgumentError(
            f"Feature {shown(key)} cannot be read: {reason}. Received: {len(names)} records"
        ) from None
    if isinstance(feature, FixedLenFeature):
        return _fixed(key, feature, numbers, counts, kinds == kind, names)
    if isinstance(feature, FixedLenSequenceFeature):
        return _sequence(key, feature, numbers, counts, names)
    return Ragged(np.split(numbers, np.cumsum(counts)[:-1])) if len(counts) else Ragged([])


def _decode_alike(kind: int, matrix: wire.Bytes, values: wire.Values) -> tuple[Array, Array] | None:
    """As `_decode`, of records with one layout; None where it is no faster."""
    if kind == wire.BYTES or len(values.spans) != 1 or not values.is_packed:
        return None
    ((start, stop),) = values.spans
    part = matrix[:, start:stop]
    if kind == wire.FLOAT:
        numbers = np.ascontiguousarray(part).view("<f4").reshape(-1)
        return numbers, np.full(len(matrix), (stop - start) // 4)
    numbers, stops = wire.integers([part.tobytes()])
    ends = (stop - start) * np.arange(1, len(matrix) + 1)
    return numbers, np.diff(np.searchsorted(stops, ends, side="right"), prepend=0)


def _decode(kind: int, records: Sequence[bytes], found: Sequence[wire.Values]) -> tuple[Array, Array]:
    """The values of all records behind each other, and how many each record has."""
    parts = [
        record[start:stop]
        for record, values in zip(records, found, strict=True)
        for start, stop in values.spans
    ]
    pieces = np.array([len(values.spans) for values in found], np.int64)
    if kind == wire.BYTES:
        texts = np.empty(len(parts), object)
        texts[:] = parts
        return texts, pieces
    sizes = np.array([len(part) for part in parts], np.int64)
    ends = np.cumsum(sizes, dtype=np.int64)
    ends = np.concatenate([[0], ends])[np.cumsum(pieces)]  # of each record among the bytes
    if kind == wire.FLOAT:
        return wire.floats(parts), np.diff(ends, prepend=0) // 4
    numbers, stops = wire.integers(parts)
    return numbers, np.diff(np.searchsorted(stops, ends, side="right"), prepend=0)


def _fixed(
    key: str,
    feature: FixedLenFeature,
    numbers: Array,
    counts: Array,
    present: Array,
    names: Sequence[str],
) -> Array:
    shape = _shape_of(feature.shape)
    size = int(np.prod(shape))
    default = _default(feature, shape)
    if default is None and not present.all():
        raise InvalidArgumentError(
            f"Feature {key!r} is missing in {names[int(present.argmin())]} and has no default_value. "
            f"Received: {feature}"
        )
    wrong = present & (counts != size)
    if wrong.any():
        which = int(wrong.argmax())
        raise InvalidArgumentError(
            f"Feature {key!r} of {names[which]} does not fill the shape {shape} of {size} values; use "
            f"VarLenFeature where the number varies. Received: {int(counts[which])} values"
        )
    if present.all():
        return numbers.reshape(len(names), *shape)
    out = np.empty((len(names), *shape), _DTYPES[_kind_of(feature.dtype)])
    out[present] = numbers.reshape(-1, *shape)
    out[~present] = default
    return out


def _sequence(
    key: str,
    feature: FixedLenSequenceFeature,
    numbers: Array,
    counts: Array,
    names: Sequence[str],
) -> Array:
    shape = _shape_of(feature.shape)
    size = int(np.prod(shape))
    wrong = counts % size != 0
    if wrong.any():
        which = int(wrong.argmax())
        raise InvalidArgumentError(
            f"Feature {key!r} of {names[which]} is no whole number of items of shape {shape}, which "
            f"have {size} values. Received: {int(counts[which])} values"
        )
    kind = _kind_of(feature.dtype)
    default = _default(feature, ())
    if default is None:
        default = np.array(b"" if kind == wire.BYTES else 0, _DTYPES[kind])
    longest = int(counts.max(initial=0))
    out = np.empty((len(names), longest), _DTYPES[kind])
    out[...] = default
    out[np.arange(longest) < counts[:, None]] = numbers
    return out.reshape(len(names), longest // size, *shape)


def decode_raw(
    input_bytes: Any, out_type: Any, little_endian: bool = True, fixed_length: int | None = None
) -> Array:
    """Read byte strings as the numbers whose bytes they are.

    Args:
        input_bytes: bytes, or an array or list of bytes that all have one length.
        out_type: the dtype of the numbers.
        little_endian: whether the least significant byte comes first.
        fixed_length: if given, strings are cut or filled up with zeros to this many bytes.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> px.io.decode_raw([bytes([1, 2]), bytes([3, 4])], np.uint8)
        array([[1, 2], [3, 4]], dtype=uint8)
    """
    dtype = np.dtype(out_type).newbyteorder("<" if little_endian else ">")
    strings = np.array(input_bytes, object)
    if not all(isinstance(s, bytes) for s in strings.flat):
        raise InvalidTypeError(f"decode_raw takes bytes. Received: {shown(input_bytes)}")
    texts = list(strings.flat)
    if fixed_length is not None:
        texts = [text[:fixed_length].ljust(fixed_length, b"\0") for text in texts]
    lengths = {len(text) for text in texts}
    if len(lengths) > 1 or any(n % dtype.itemsize for n in lengths):
        raise InvalidArgumentError(
            f"decode_raw needs strings of one length, a multiple of the {dtype.itemsize} bytes of "
            f"{np.dtype(out_type)}; or give fixed_length. Received: lengths {sorted(lengths)}"
        )
    numbers = np.frombuffer(b"".join(texts), dtype).astype(np.dtype(out_type), copy=False)
    return numbers.reshape(*strings.shape, lengths.pop() // dtype.itemsize if lengths else 0)
