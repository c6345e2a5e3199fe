"""Protobuf's wire format: what is written is read again, and what is broken is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from phalanx.runtime import protobuf_wire as wire

numbers = st.integers(1, 2**29 - 1)
written = st.one_of(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=300))


def write(number: int, value: int | bytes) -> bytes:
    return (wire.int_field if isinstance(value, int) else wire.bytes_field)(number, value)  # type: ignore[arg-type]


@given(st.lists(st.tuples(numbers, written)))
def test_what_is_written_is_read_again(message: list[tuple[int, int | bytes]]) -> None:
    data = b"".join(write(number, value) for number, value in message)
    expected = [(n, v % 2**64 if isinstance(v, int) else v) for n, v in message]
    assert wire.values(data) == expected


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = wire.fields(data)
    except wire.Malformed:
        return
    assert [start for _, _, start, _ in found] == sorted(start for _, _, start, _ in found)
    assert all(0 < start <= stop <= len(data) for _, _, start, stop in found)
    assert len(found) == len(wire.values(data))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x0a\x05ab", "middle of a field"),
        (b"\x0a", "middle of a field"),
        (b"\x08\x80", "middle of a field"),
        (b"\x0d\x00\x00", "middle of a field"),
        (b"\x09\x00\x00", "middle of a field"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "more than 10 bytes"),
        (b"\x0b", "no wire type 3"),
        (b"\x02\x00", "no field number 0"),
    ],
)
def test_broken_messages_say_why(data: bytes, reason: str) -> None:
    with pytest.raises(wire.Malformed, match=reason):
        wire.fields(data)


def test_a_message_in_a_message_ends_where_it_ends() -> None:
    inner = wire.bytes_field(1, b"abc")
    data = wire.bytes_field(2, inner) + wire.int_field(3, 7)
    ((number, _, start, stop), last) = wire.fields(data)
    assert (number, last[0]) == (2, 3)
    assert [data[a:b] for _, _, a, b in wire.fields(data, start, stop)] == [b"abc"]
    with pytest.raises(wire.Malformed, match="middle of a field"):
        wire.fields(data, start, stop - 1)
