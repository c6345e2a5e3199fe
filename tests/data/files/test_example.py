"""Example messages: building, serializing and reading them back."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx.data.files import example_wire as wire
from phalanx.runtime.protobuf_wire import Malformed

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)
FEATURES = st.one_of(
    st.lists(st.binary(max_size=20), max_size=5).map(
        lambda v: px.train.Feature(bytes_list=px.train.BytesList(value=v))
    ),
    st.lists(FLOAT32, max_size=5).map(
        lambda v: px.train.Feature(float_list=px.train.FloatList(value=v))
    ),
    st.lists(INT64, max_size=5).map(lambda v: px.train.Feature(int64_list=px.train.Int64List(value=v))),
    st.just(None).map(lambda _: px.train.Feature()),
)
EXAMPLES = st.dictionaries(st.text(max_size=5), FEATURES, max_size=5).map(
    lambda features: px.train.Example(features=px.train.Features(feature=features))
)


@given(EXAMPLES)
def test_what_is_serialized_is_read(example: px.train.Example) -> None:
    data = example.SerializeToString()
    again = px.train.Example.FromString(data)
    assert again == example
    assert again.SerializeToString() == data
    kinds = {key: f.WhichOneof("kind") for key, f in example.features.feature.items()}
    assert {key: f.WhichOneof("kind") for key, f in again.features.feature.items()} == kinds


def test_bytes_by_hand() -> None:
    example = px.train.Example()
    example.features.feature["b"].int64_list.value.extend([1, 300, -1])
    example.features.feature["a"].bytes_list.value.append(b"xyz")
    example.features.feature["c"].float_list.value.append(1.0)
    assert example.SerializeToString().hex(" ") == (
        "0a 35 "  # features
        "0a 0c 0a 01 61 12 07 0a 05 0a 03 78 79 7a "  # a
        "0a 16 0a 01 62 12 11 1a 0f 0a 0d 01 ac 02 ff ff ff ff ff ff ff ff ff 01 "  # b
        "0a 0d 0a 01 63 12 08 12 06 0a 04 00 00 80 3f"  # c
    )
    assert px.train.Example().SerializeToString() == b""
    assert px.train.Example(features=px.train.Features()).SerializeToString() == b"\x0a\x00"


def test_numbers_that_are_not_packed() -> None:
    """Repeated numbers may also stand one by one; old writers did that."""

    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    floats = field(2, b"\x0d" + struct.pack("<f", 1.5) + field(1, struct.pack("<f", 2.5)))
    integers = field(3, b"\x08\x05" + field(1, b"\x06\x07") + b"\x08\xac\x02")
    entries = [
        field(1, field(1, b"f") + field(2, floats)),
        field(1, field(1, b"i") + field(2, integers)),
    ]
    example = px.train.Example.FromString(field(1, b"".join(entries)))
    assert example.features.feature["f"].float_list.value == [1.5, 2.5]
    assert example.features.feature["i"].int64_list.value == [5, 6, 7, 300]


def test_unknown_fields_and_repeated_parts() -> None:
    one = px.train.Example()
    one.features.feature["a"].int64_list.value.append(1)
    two = px.train.Example()
    two.features.feature["a"].float_list.value.append(2.0)
    two.features.feature["b"].int64_list.value.append(3)
    unknown = b"\x78\x05" + b"\x7a\x02hi" + b"\x7d1234" + b"\x7912345678" + b"\xf2\x06\x00"
    both = px.train.Example.FromString(one.SerializeToString() + unknown + two.SerializeToString())
    assert both == two  # the last feature of a name counts


def test_the_first_list_that_is_filled_decides() -> None:
    feature = px.train.Feature()
    assert feature.WhichOneof("kind") is None
    assert feature.bytes_list.value == []
    feature.int64_list.value.append(1)
    assert feature.WhichOneof() == "int64_list"
    feature.float_list.value.append(2.0)
    assert feature.float_list.value == []
    assert feature == px.train.Feature(int64_list=px.train.Int64List(value=[1]))
    assert px.train.Feature(int64_list=px.train.Int64List()).WhichOneof() == "int64_list"


def test_values_are_those_of_the_message() -> None:
    assert px.train.FloatList(value=np.array([0.1], np.float64)).value == [float(np.float32(0.1))]
    assert px.train.FloatList(value=[1, True, 1e300]).value == [1.0, 1.0, float("inf")]
    assert px.train.Int64List(value=np.array([1, 2], np.uint8)).value == [1, 2]
    assert px.train.Int64List(value=(x for x in [True, np.int32(4)])).value == [1, 4]
    assert px.train.BytesList(value=[bytearray(b"a"), np.bytes_(b"b")]).value == [b"a", b"b"]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: px.train.BytesList(value=["text"]), px.errors.InvalidTypeError, "'text'.encode"),
        (lambda: px.train.BytesList(value=b"text"), px.errors.InvalidTypeError, "must be a list"),
        (lambda: px.train.FloatList(value=[[1.0]]), px.errors.InvalidTypeError, "flat list of numbers"),
        (lambda: px.train.FloatList(value=["1"]), px.errors.InvalidTypeError, "flat list of numbers"),
        (lambda: px.train.FloatList(value=1.0), px.errors.InvalidTypeError, "must be a list"),
        (lambda: px.train.Int64List(value=[1.5]), px.errors.InvalidTypeError, "flat list of integers"),
        (lambda: px.train.Int64List(value=[2**63]), px.errors.InvalidValueError, "64-bit"),
        (lambda: px.train.Int64List(value=[2**100]), px.errors.InvalidValueError, "64-bit"),
        (lambda: px.train.Int64List(value=[[1], [1, 2]]), px.errors.InvalidTypeError, "flat list"),
        (
            lambda: px.train.Feature(int64_list=px.train.Int64List(), float_list=px.train.FloatList()),
            px.errors.InvalidValueError,
            "float_list and int64_list",
        ),
        (
            lambda: px.train.Feature(int64_list=px.train.FloatList()),  # type: ignore[arg-type]
            px.errors.InvalidTypeError,
            "must be a Int64List",
        ),
        (lambda: px.train.Features(feature={"a": 1}), px.errors.InvalidTypeError, "'a': 1 of type int"),  # type: ignore[dict-item]
        (lambda: px.train.Example(features={}), px.errors.InvalidTypeError, "px.train.Features"),  # type: ignore[arg-type]
        (lambda: px.train.Feature().WhichOneof("sort"), px.errors.InvalidValueError, "'kind'"),
        (lambda: px.train.Example.FromString("text"), px.errors.InvalidTypeError, "is bytes"),  # type: ignore[arg-type]
    ],
)
def test_mistakes(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_mistakes_that_are_made_later() -> None:
    example = px.train.Example()
    example.features.feature["a"].bytes_list.value.append("text")
    with pytest.raises(px.errors.InvalidTypeError, match="encode strings"):
        example.SerializeToString()


@settings(max_examples=500)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_read(data: bytes) -> None:
    try:
        example = px.train.Example.FromString(data)
    except px.errors.InvalidArgumentError:
        return
    assert px.train.Example.FromString(example.SerializeToString()) == example


@settings(max_examples=500)
@given(EXAMPLES, st.data())
def test_damaged_messages_are_refused_or_read(example: px.train.Example, data: st.DataObject) -> None:
    message = bytearray(example.SerializeToString())
    where = data.draw(st.integers(0, len(message) - 1))
    if data.draw(st.booleans()):
        message[where] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del message[where:]
    try:
        read = px.train.Example.FromString(bytes(message))
    except px.errors.InvalidArgumentError:
        pass
    else:
        assert px.train.Example.FromString(read.SerializeToString()) == read


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x0a", "ends in the middle of a field"),
        (b"\x0a\x05abc", "ends in the middle of a field"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "ends in the middle of a field"),
        (b"\x0a" + b"\xff" * 11, "an integer has more than 10 bytes"),
        (b"\x02\x00", "there is no field number 0"),
        (b"\x0b", "there is no wire type 3"),
        (b"\x0a\x0b\x0a\x09\x12\x07\x12\x05\x0a\x03abc", "3 bytes are no whole number of floats"),
        (b"\x0a\x09\x0a\x07\x12\x05\x1a\x03\x0a\x01\x80", "ends in the middle of one"),
        (b"\x0a\x0c\x0a\x0a\x12\x08\x1a\x06\x0d1234", "ends in the middle"),
        (b"\x0a\x0b\x0a\x09\x12\x07\x1a\x05\x0d1234", "a value of int64_list has the wire type 5"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, said: str) -> None:
    with pytest.raises(px.errors.InvalidArgumentError, match=f"not a serialized Example: .*{said}"):
        px.train.Example.FromString(data)


def test_names_that_are_no_text() -> None:
    with pytest.raises(px.errors.InvalidArgumentError, match="not UTF-8"):
        px.train.Example.FromString(b"\x0a\x05\x0a\x03\x0a\x01\xff")


@given(st.lists(INT64, max_size=30))
def test_integers(values: list[int]) -> None:
    packed = wire.pack_integers(values)
    numbers, ends = wire.integers([packed])
    assert numbers.tolist() == values
    assert ends.tolist() == np.cumsum([len(wire.pack_integers([v])) for v in values]).tolist()


@st.composite
def similar_messages(draw: st.DrawFn) -> list[bytes]:
    """Messages of few layouts with different values, some of them damaged."""
    messages = []
    for _ in range(draw(st.integers(0, 12))):
        example = px.train.Example()
        example.features.feature["f"].float_list.value.extend(
            draw(st.lists(FLOAT32, min_size=2, max_size=2))
        )
        example.features.feature["i"].int64_list.value.extend(
            draw(st.lists(st.integers(0, 300), min_size=2, max_size=2))
        )
        example.features.feature["b"].bytes_list.value.append(draw(st.binary(min_size=2, max_size=3)))
        message = bytearray(example.SerializeToString())
        if draw(st.integers(0, 9)) == 0:
            message[draw(st.integers(0, len(message) - 1))] ^= 1 << draw(st.integers(0, 7))
        messages.append(bytes(message))
    return messages


def scanned(message: bytes) -> Any:
    try:
        return wire.scan(message)
    except Malformed:
        return None


@settings(max_examples=300)
@given(similar_messages())
def test_messages_of_one_layout_are_scanned_once(messages: list[bytes]) -> None:
    expected = [scanned(message) for message in messages]
    if None in expected:
        with pytest.raises(Malformed) as error:
            wire.scan_all(messages)
        assert expected[error.value.record] is None
    else:
        assert wire.scan_all(messages) == expected


def test_numbers_that_are_not_packed_are_compared() -> None:
    def message(value: bytes) -> bytes:
        feature = b"\x1a" + bytes([len(value)]) + value
        entry = b"\x0a\x01i\x12" + bytes([len(feature)]) + feature
        entries = b"\x0a" + bytes([len(entry)]) + entry
        return b"\x0a" + bytes([len(entries)]) + entries

    # Two numbers of two bytes, or three of one byte: the same structure, as far as the first can tell.
    messages = [message(b"\x08\x81\x01\x08\x88\x01")] * 4 + [message(b"\x08\x01\x08\x08\x08\x01")]
    assert wire.scan_all(messages) == [wire.scan(m) for m in messages]
    assert len({str(layout) for layout in wire.scan_all(messages)}) == 2


def test_a_number_without_an_end_is_found_among_similar_messages() -> None:
    example = px.train.Example()
    example.features.feature["i"].int64_list.value.extend([1, 2])
    good = example.SerializeToString()
    assert good[-1] == 2
    with pytest.raises(Malformed, match="ends in the middle of one") as error:
        wire.scan_all([good] * 6 + [good[:-1] + b"\x82"])
    assert error.value.record == 6
