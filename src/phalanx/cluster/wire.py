"""The part of protobuf's wire format that descriptions of clusters need.

A message is a sequence of fields. Each field is a key, made of its number and the kind of its value,
and the value: a whole number in groups of seven bits, or bytes after their length.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.core.errors import InvalidValueError
from phalanx.core.showing import shown

__all__ = ["bytes_field", "fields", "int32", "int_field"]

_NUMBER, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_FIXED_SIZES = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
_LONGEST_NUMBER = 10  # bytes: 64 bits, seven at a time


def int_field(number: int, value: int) -> bytes:
    r"""A field that holds a whole number.

    >>> int_field(3, 300)
    b'\x18\xac\x02'
    """
    return _varint(number << 3 | _NUMBER) + _varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    r"""A field that holds bytes: a text, or another message.

    >>> bytes_field(1, b"ps")
    b'\n\x02ps'
    """
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, as their numbers and values.

    >>> list(fields(bytes_field(1, b"ps") + int_field(3, 300)))
    [(1, b'ps'), (3, 300)]
    """
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise _broken(data)
        if kind == _NUMBER:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in _FIXED_SIZES:
            size = _FIXED_SIZES[kind]
        else:
            raise _broken(data)
        if at + size > len(data):
            raise _broken(data)
        yield number, data[at : at + size]
        at += size


def int32(value: int) -> int:
    """The signed 32-bit number that a number read from a field stands for.

    >>> int32(2**64 - 5)
    -5
    """
    return (value + 2**31) % 2**32 - 2**31


def _varint(value: int) -> bytes:
    value %= 2**64  # negative numbers travel as 64 bits
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for position, group in enumerate(data[at : at + _LONGEST_NUMBER]):
        value |= (group & 0x7F) << 7 * position
        if group < 0x80:
            return value, at + position + 1
    raise _broken(data)


def _broken(data: bytes) -> InvalidValueError:
    return InvalidValueError(
        "The bytes are not a serialized message. Use what `SerializeToString` returned. "
        f"Received: {len(data)} bytes, {shown(data[:40])}"
    )
