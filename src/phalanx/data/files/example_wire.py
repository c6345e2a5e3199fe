"""`Example` messages on the wire.

* ``Example`` has ``Features features = 1``
* ``Features`` has ``map<string, Feature> feature = 1``
* ``Feature`` has one of ``BytesList bytes_list = 1``, ``FloatList float_list = 2`` and
  ``Int64List int64_list = 3``
* each list has ``repeated value = 1``, of bytes, floats or integers; numbers are packed

Unknown fields are left out. Of many records that differ in their values only, one is scanned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from phalanx.errors import InvalidArgumentError
from phalanx.runtime.protobuf_wire import (
    CONTINUES,
    I32,
    LEN,
    LONGEST,
    VARINT,
    Malformed,
    bytes_field,
    fields,
)

UNSET, BYTES, FLOAT, INT64 = 0, 1, 2, 3
KINDS = {BYTES: "bytes_list", FLOAT: "float_list", INT64: "int64_list"}

_WORTH_COMPARING = 4  # records

Numbers = np.ndarray[Any, np.dtype[Any]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Values(NamedTuple):
    """Where the values of a feature are: byte strings, or packed numbers in pieces."""

    kind: int
    spans: list[tuple[int, int]]
    is_packed: bool = True

    def parts(self, data: bytes) -> list[bytes]:
        """The values as they travel."""
        return [data[start:stop] for start, stop in self.spans]


Layout = dict[bytes, Values]
"""The features of a message by name, and where in it they are."""

# -- reading ------------------------------------------------------------------------------


def scan(data: bytes) -> Layout:
    """Find the features of a serialized `Example`."""
    found: Layout = {}
    for number, wire, start, stop in fields(data):
        if number == 1 and wire == LEN:
            for inner, inner_wire, a, b in fields(data, start, stop):
                if inner == 1 and inner_wire == LEN:
                    _scan_entry(data, a, b, found)
    return found


def _scan_entry(data: bytes, at: int, end: int, found: Layout) -> None:
    key, messages = b"", []
    for number, wire, start, stop in fields(data, at, end):
        if wire == LEN:
            if number == 1:
                key = data[start:stop]
            elif number == 2:
                messages.append((start, stop))
    found[key] = _scan_feature(data, messages)


def _scan_feature(data: bytes, messages: Iterable[tuple[int, int]]) -> Values:
    values = Values(UNSET, [])
    for start, stop in messages:
        for kind, wire, a, b in fields(data, start, stop):
            if wire == LEN and kind in KINDS:
                before = values.spans if values.kind == kind else []  # the last kind counts
                spans, is_packed = _scan_list(data, a, b, kind)
                values = Values(kind, before + spans, is_packed and (values.is_packed or not before))
    return values


def _scan_list(data: bytes, at: int, end: int, kind: int) -> tuple[list[tuple[int, int]], bool]:
    spans, is_packed = [], True
    for number, wire, start, stop in fields(data, at, end):
        if number != 1:
            continue
        if wire == LEN:
            if kind == FLOAT and (stop - start) % 4:
                raise Malformed(f"{stop - start} bytes are no whole number of floats")
            if kind == INT64 and stop > start and data[stop - 1] >= CONTINUES:
                raise Malformed("a list of integers ends in the middle of one")
        elif (kind, wire) in ((FLOAT, I32), (INT64, VARINT)):
            is_packed = False
        else:
            raise Malformed(f"a value of {KINDS[kind]} has the wire type {wire}")
        spans.append((start, stop))
    return spans, is_packed


class Alike(NamedTuple):
    """Records of one layout, whose bytes are the rows of a matrix."""

    layout: Layout
    matrix: Bytes


def scan_alike(records: Sequence[bytes]) -> Alike | None:
    """`scan` for records that all differ in their values only; None if they do not."""
    if len(records) < _WORTH_COMPARING or len({len(record) for record in records}) > 1:
        return None
    layout, matrix = _scan_one(records, 0), _matrix(records)
    return Alike(layout, matrix) if _fits(layout, matrix).all() else None


def scan_all(records: Sequence[bytes]) -> list[Layout]:
    """`scan` for many records; of those that differ in their values only, one is scanned."""
    layouts: list[Layout] = [{}] * len(records)
    by_length: dict[int, list[int]] = {}
    for i, record in enumerate(records):
        by_length.setdefault(len(record), []).append(i)
    for alike in by_length.values():
        left = alike
        while len(left) >= _WORTH_COMPARING:
            layout = _scan_one(records, left[0])
            same = _fits(layout, _matrix([records[i] for i in left]))
            for i in itertools.compress(left, same):
                layouts[i] = layout
            left = list(itertools.compress(left, ~same))
            if same.sum() < _WORTH_COMPARING:
                break
        for i in left:
            layouts[i] = _scan_one(records, i)
    return layouts


def _scan_one(records: Sequence[bytes], i: int) -> Layout:
    try:
        return scan(records[i])
    except Malformed as error:
        error.record = i
        raise


def _matrix(records: Sequence[bytes]) -> Bytes:
    """Records of one length as rows of bytes."""
    return np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)


def _fits(layout: Layout, matrix: Bytes) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which records of one length have a layout that the first of them is known to have."""
    must_agree = np.ones(matrix.shape[1], bool)
    ends = []
    for values in layout.values():
        if values.kind == INT64:
            if not values.is_packed:
                continue
            ends += [stop - 1 for start, stop in values.spans if stop > start]
        for start, stop in values.spans:
            must_agree[start:stop] = False
    structure = matrix[:, np.flatnonzero(must_agree)]
    same = (structure == structure[0]).all(axis=1) & (matrix[:, ends] < CONTINUES).all(axis=1)
    same[0] = True
    return same


def floats(parts: Sequence[bytes]) -> Numbers:
    """The numbers of a FloatList."""
    return np.frombuffer(bytearray().join(parts), "<f4")  # writable, as a bytearray is


def integers(parts: Sequence[bytes]) -> tuple[Numbers, Numbers]:
    """The numbers of one or more Int64Lists, and where each of them ends among the bytes."""
    data = np.frombuffer(b"".join(parts), np.uint8)
    last = np.flatnonzero(data < CONTINUES)
    if len(last) == len(data):  # all below 128
        return data.astype(np.int64), last + 1
    first = np.empty_like(last)
    first[:1], first[1:] = 0, last[:-1] + 1
    extra = last - first
    longest = int(extra.max())
    if longest >= LONGEST:
        raise Malformed(f"an integer has more than {LONGEST} bytes")
    values = (data[first] & np.uint8(0x7F)).astype(np.uint64)
    for i in range(1, longest + 1):
        chosen = np.flatnonzero(extra >= i)
        byte = (data[first[chosen] + i] & np.uint8(0x7F)).astype(np.uint64)
        values[chosen] |= byte << np.uint64(7 * i)
    return values.view(np.int64), last + 1


# -- writing ------------------------------------------------------------------------------


def write_example(features: Mapping[str, tuple[int, list[bytes]]]) -> bytes:
    """A serialized `Example`, with features in the order of their names.

    Args:
        features: the kind of each feature and its values: byte strings, or packed numbers.
    """
    entries = []
    for key in sorted(features, key=str.encode):
        kind, parts = features[key]
        feature = bytes_field(kind, _write_list(kind, parts)) if kind else b""
        entries.append(bytes_field(1, bytes_field(1, key.encode()) + bytes_field(2, feature)))
    return bytes_field(1, b"".join(entries))


def _write_list(kind: int, parts: Sequence[bytes]) -> bytes:
    if kind == BYTES:
        return b"".join(bytes_field(1, part) for part in parts)
    packed = b"".join(parts)
    return bytes_field(1, packed) if packed else b""


def pack_floats(values: Sequence[float]) -> bytes:
    """Numbers as a FloatList holds them."""
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype("<f4").tobytes()


def pack_integers(values: Sequence[int]) -> bytes:
    """Numbers as an Int64List holds them."""
    left = np.asarray(values, np.int64).view(np.uint64)
    columns = np.empty((len(left), LONGEST), np.uint8)
    used = np.zeros((len(left), LONGEST), bool)
    for i in range(LONGEST):
        used[:, i] = (left > 0) if i else True
        if not used[:, i].any():
            break
        columns[:, i] = left & np.uint64(0x7F)
        left = left >> np.uint64(7)
        columns[:, i] |= np.where(left > 0, np.uint8(CONTINUES), np.uint8(0))
    return columns[used].tobytes()


def malformed(what: str, reason: Malformed, data: bytes) -> InvalidArgumentError:
    """The error for bytes that are no `Example`."""
    shown = data[:24].hex(" ") + (" …" if len(data) > 24 else "")
    return InvalidArgumentError(
        f"{what} is not a serialized Example: {reason}. Received: {len(data)} bytes, {shown or 'empty'}"
    )
