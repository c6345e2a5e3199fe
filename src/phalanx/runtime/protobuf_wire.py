"""Protobuf's wire format: the fields of messages as bytes.

A message is a row of fields. Each is a tag, made of its number and the wire type of its value, and the
value: a varint (a whole number, seven bits per byte), four or eight bytes, or bytes after their length.
What the fields mean is up to those who read them.
"""

from __future__ import annotations

VARINT, I64, LEN, I32 = 0, 1, 2, 5
"""Wire types, by the names that protobuf's documentation gives them."""

CONTINUES = 0x80
"""The bit of a byte that says that a varint goes on."""

LONGEST = 10
"""How many bytes a varint has at most: 64 bits, seven at a time."""

Field = tuple[int, int, int, int]
"""The number of a field, its wire type, and where its value starts and ends."""

_ENDS = "it ends in the middle of a field"
_SHORT = tuple(bytes([value]) for value in range(CONTINUES))


class Malformed(Exception):
    """Bytes are not a message of the expected kind; the message says why."""

    record = 0
    """Which of many records it is."""


def fields(data: bytes, at: int = 0, end: int | None = None) -> list[Field]:
    """Find the fields of a message, which is all of `data` or a part of it.

    >>> fields(bytes_field(1, b"ps") + int_field(3, 300))
    [(1, 2, 2, 4), (3, 0, 5, 7)]
    """
    found = []
    end = len(data) if end is None else end
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag >= CONTINUES:
                tag, at = read_varint(data, at - 1)
            wire = tag & 7
            start = at
            if wire == LEN:
                size = data[at]
                start = at + 1
                if size >= CONTINUES:
                    size, start = read_varint(data, at)
                at = start + size
            elif wire == VARINT:
                _, at = read_varint(data, at)
            elif wire == I32:
                at += 4
            elif wire == I64:
                at += 8
            else:
                raise Malformed(f"there is no wire type {wire}")
            if tag < 8:
                raise Malformed("there is no field number 0")
            if at > end:
                raise Malformed(_ENDS)
            found.append((tag >> 3, wire, start, at))
    except IndexError:
        raise Malformed(_ENDS) from None
    return found


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint, and where it ends; an IndexError if the data ends before."""
    value = 0
    for shift in range(0, 7 * LONGEST, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < CONTINUES:
            return value, at
    raise Malformed(f"an integer has more than {LONGEST} bytes")


def values(data: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a message by number: varints as they are, all others as bytes.

    >>> values(bytes_field(1, b"ps") + int_field(3, 300))
    [(1, b'ps'), (3, 300)]
    """
    return [
        (number, read_varint(data, start)[0] if wire == VARINT else data[start:stop])
        for number, wire, start, stop in fields(data)
    ]


def int32(value: int) -> int:
    """The signed 32-bit number that a varint stands for.

    >>> int32(2**64 - 5)
    -5
    """
    return (value + 2**31) % 2**32 - 2**31


def int_field(number: int, value: int) -> bytes:
    r"""A field that holds a whole number.

    >>> int_field(3, 300)
    b'\x18\xac\x02'
    """
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    r"""A field that holds bytes: a text, or another message.

    >>> bytes_field(1, b"ps")
    b'\n\x02ps'
    """
    return varint(number << 3 | LEN) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """A whole number, seven bits per byte. Negative ones travel as 64 bits."""
    if 0 <= value < CONTINUES:
        return _SHORT[value]
    value %= 2**64
    groups = bytearray()
    while value >= CONTINUES:
        groups.append(value & 0x7F | CONTINUES)
        value >>= 7
    groups.append(value)
    return bytes(groups)
