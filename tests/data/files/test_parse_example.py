"""Parsing batches of Example messages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px

Fixed, Sequence, VarLen = (
    px.io.FixedLenFeature,
    px.io.FixedLenSequenceFeature,
    px.io.VarLenFeature,
)


def record(**values: Any) -> bytes:
    example = px.train.Example()
    for key, value in values.items():
        kind = type(value[0]) if value else float
        name = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[kind]
        getattr(example.features.feature[key], name).value.extend(value)
    return example.SerializeToString()


RECORDS = st.lists(
    st.tuples(
        st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4),
        st.integers(-(2**63), 2**63 - 1),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
        st.lists(st.binary(max_size=5), max_size=3),
    ),
    max_size=8,
)


@given(RECORDS)
def test_a_batch_is_its_records(rows: list[Any]) -> None:
    batch = [
        px.train.Example(
            px.train.Features(
                {
                    "floats": px.train.Feature(float_list=px.train.FloatList(floats)),
                    "number": px.train.Feature(int64_list=px.train.Int64List([number])),
                    "numbers": px.train.Feature(int64_list=px.train.Int64List(numbers)),
                    "texts": px.train.Feature(bytes_list=px.train.BytesList(texts)),
                }
            )
        ).SerializeToString()
        for floats, number, numbers, texts in rows
    ]
    features = {
        "floats": Fixed([2, 2], np.float32),
        "number": Fixed([], np.int64),
        "numbers": VarLen(np.int64),
        "texts": VarLen(bytes),
        "padded": Sequence([], np.int64, allow_missing=True),
    }
    parsed = px.io.parse_example(batch, features)
    assert parsed["floats"].shape == (len(rows), 2, 2)
    assert parsed["floats"].dtype == np.float32
    assert parsed["floats"].reshape(-1, 4).tolist() == [list(row[0]) for row in rows]
    assert parsed["number"].tolist() == [row[1] for row in rows]
    assert parsed["number"].dtype == np.int64
    assert parsed["numbers"].to_list() == [list(row[2]) for row in rows]
    assert parsed["texts"].to_list() == [list(row[3]) for row in rows]
    assert parsed["padded"].shape == (len(rows), 0)
    for i, one in enumerate(batch):
        single = px.io.parse_single_example(one, features)
        for key, value in single.items():
            assert np.array_equal(value, parsed[key][i])


def test_features_that_are_missing() -> None:
    batch = [record(x=[1.0, 2.0], s=[b"a"]), record(), record(x=[3.0, 4.0]), record(n=[5])]
    parsed = px.io.parse_example(
        np.array(batch, object),
        {
            "x": Fixed([2], np.float32, default_value=[-1, -2]),
            "n": Fixed([], "int64", default_value=7),
            "s": Fixed([1, 1], "string", default_value=b"none"),
            "scalar": Fixed([2, 2], jnp.float32, default_value=0.5),
            "v": VarLen(np.float32),
        },
    )
    assert parsed["x"].tolist() == [[1, 2], [-1, -2], [3, 4], [-1, -2]]
    assert parsed["n"].tolist() == [7, 7, 7, 5]
    assert parsed["s"].tolist() == [[[b"a"]], [[b"none"]], [[b"none"]], [[b"none"]]]
    assert parsed["scalar"].tolist() == [[[0.5, 0.5]] * 2] * 4
    assert parsed["v"].to_list() == [[]] * 4
    with pytest.raises(
        px.errors.InvalidArgumentError, match=r"Feature 'x' is missing in record 1 and has no default"
    ):
        px.io.parse_example(batch, {"x": Fixed([2], np.float32)})
    with pytest.raises(px.errors.InvalidArgumentError, match=r"'x' is missing in record 'second'"):
        px.io.parse_example(batch[:2], {"x": Fixed([2], np.float32)}, ["first", "second"])
    with pytest.raises(px.errors.InvalidArgumentError, match=r"'x' is missing in the record"):
        px.io.parse_single_example(batch[1], {"x": Fixed([2], np.float32)})


def test_sequences_are_filled_up() -> None:
    batch = [record(x=[1.0, 2.0, 3.0, 4.0], s=[b"a"]), record(), record(x=[5.0, 6.0])]
    features = {
        "x": Sequence([2], np.float32, allow_missing=True, default_value=-1),
        "s": Sequence([], bytes, allow_missing=True),
    }
    parsed = px.io.parse_example(batch, features)
    assert parsed["x"].tolist() == [[[1, 2], [3, 4]], [[-1, -1]] * 2, [[5, 6], [-1, -1]]]
    assert parsed["s"].tolist() == [[b"a"], [b""], [b""]]
    with pytest.raises(
        px.errors.InvalidArgumentError, match=r"'x' of record 1 is no whole number of items.*3 values"
    ):
        px.io.parse_example([batch[0], record(x=[1.0, 2.0, 3.0])], features)


@pytest.mark.parametrize("feature", [Fixed([1], np.int64), VarLen(np.int64), Fixed([1], np.int64, 3)])
def test_wrong_types_name_both(feature: Any) -> None:
    with pytest.raises(
        px.errors.InvalidArgumentError,
        match=r"'x' of record 1 .* float32 in the record, dtype int64 in features",
    ):
        px.io.parse_example([record(x=[1]), record(x=[1.0])], {"x": feature})


def test_wrong_numbers_of_values() -> None:
    with pytest.raises(
        px.errors.InvalidArgumentError,
        match=r"'x' of record 1 does not fill the shape \(3,\) of 3 values.*Received: 2 values",
    ):
        px.io.parse_example([record(x=[1, 2, 3]), record(x=[1, 2])], {"x": Fixed(3, np.int64)})


def test_bytes_that_are_no_example() -> None:
    with pytest.raises(px.errors.InvalidArgumentError, match="Record 1 is not a serialized Example"):
        px.io.parse_example([record(), b"\x0a\x05"], {"x": VarLen(bytes)})


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_parsed(data: bytes) -> None:
    features = {"": VarLen(np.int64), "a": Sequence([], np.float32, True), "b": Fixed([], bytes, b"")}
    try:
        parsed = px.io.parse_example([record(a=[1.0]), data], features)
    except px.errors.InvalidArgumentError:
        pass
    else:
        assert all(len(value) == 2 for value in parsed.values())


def test_results_can_be_changed() -> None:
    parsed = px.io.parse_example([record(x=[1.0])], {"x": Fixed([1], np.float32)})
    parsed["x"] /= 2
    assert parsed["x"].tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: Fixed([], np.float64), px.errors.InvalidTypeError, "float32, int64 or string"),
        (lambda: VarLen("number"), px.errors.InvalidTypeError, "Received: dtype='number'"),
        (lambda: Fixed([None], np.int64), px.errors.InvalidValueError, "VarLenFeature"),
        (lambda: Fixed([2], np.int64, [1, 2, 3]), px.errors.InvalidValueError, r"shape \(2,\)"),
        (lambda: Fixed([], np.int64, 1.5), px.errors.InvalidValueError, "must be a int64"),
        (lambda: Fixed([], bytes, "text"), px.errors.InvalidValueError, "must be a string"),
        (lambda: Sequence([], np.int64), px.errors.InvalidValueError, "allow_missing=True"),
        (lambda: Sequence([0], np.int64, True), px.errors.InvalidValueError, "must have values"),
        (lambda: px.io.parse_example(b"", {}), px.errors.InvalidTypeError, "parse_single_example"),
        (lambda: px.io.parse_example([], {}), px.errors.InvalidValueError, "dictionary"),
        (lambda: px.io.parse_example([], {"a": 1}), px.errors.InvalidTypeError, "'a': 1"),  # type: ignore[dict-item]
        (lambda: px.io.parse_example(["a"], {"a": VarLen(bytes)}), px.errors.InvalidTypeError, "str"),
        (
            lambda: px.io.parse_example(np.full((1, 1), b""), {"a": VarLen(bytes)}),
            px.errors.InvalidValueError,
            "one dimension",
        ),
        (
            lambda: px.io.parse_example([], {"a": VarLen(bytes)}, ["x"]),
            px.errors.InvalidValueError,
            "1 names for 0 records",
        ),
        (
            lambda: px.io.parse_single_example([b""], {"a": VarLen(bytes)}),
            px.errors.InvalidTypeError,
            "one record",
        ),
    ],
)
def test_mistakes(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_raw_bytes() -> None:
    numbers = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert np.array_equal(px.io.decode_raw([row.tobytes() for row in numbers], np.int16), numbers)
    assert px.io.decode_raw(b"\x01\x00", np.int16).tolist() == [1]
    assert px.io.decode_raw(b"\x00\x01", np.int16, little_endian=False).tolist() == [1]
    assert px.io.decode_raw([b"abc", b"d"], np.uint8, fixed_length=2).tolist() == [[97, 98], [100, 0]]
    assert px.io.decode_raw([], np.uint8).shape == (0, 0)
    with pytest.raises(px.errors.InvalidArgumentError, match=r"Received: lengths \[1, 3\]"):
        px.io.decode_raw([b"abc", b"d"], np.uint8)
    with pytest.raises(px.errors.InvalidTypeError, match="takes bytes"):
        px.io.decode_raw("abc", np.uint8)
