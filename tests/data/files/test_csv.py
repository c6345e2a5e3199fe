"""CSV files: fields, types, defaults, and where they are wrong."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("csv")


def rows_of(folder: Path, text: bytes, defaults: list[Any], **options: Any) -> list[tuple[Any, ...]]:
    (folder / "table.csv").write_bytes(text)
    dataset = px.data.CsvDataset(folder / "table.csv", defaults, **options)
    return [tuple(v if isinstance(v, bytes) else v.item() for v in row) for row in dataset]


TABLES = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.text('ab",;\n ', max_size=6), min_size=width, max_size=width),
        min_size=1,
        max_size=8,
    )
)


@settings(max_examples=200)
@given(TABLES, st.sampled_from(",;"), st.integers(1, 50), st.booleans())
def test_what_python_writes_is_read(
    folder: Path, table: list[list[str]], delimiter: str, buffer_size: int, windows: bool
) -> None:
    text = io.StringIO()
    end = "\r\n" if windows else "\n"
    csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL).writerows(table)
    (folder / "table.csv").write_bytes(text.getvalue().encode())
    dataset = px.data.CsvDataset(
        folder / "table.csv", [""] * len(table[0]), field_delim=delimiter, buffer_size=buffer_size
    )
    assert [[field.decode() for field in row] for row in dataset] == table
    assert len(list(dataset.skip(2))) == max(0, len(table) - 2)


NUMBERS = st.lists(
    st.tuples(
        st.floats(width=32, allow_nan=False),
        st.floats(allow_nan=False),
        st.integers(-(2**31), 2**31 - 1),
        st.integers(-(2**63), 2**63 - 1),
    ),
    max_size=8,
)


@given(NUMBERS)
def test_numbers(folder: Path, rows: list[tuple[Any, ...]]) -> None:
    text = "".join(",".join(map(repr, row)) + "\n" for row in rows)
    dtypes = [np.float32, np.float64, np.int32, np.int64]
    assert rows_of(folder, text.encode(), dtypes) == rows
    dataset = px.data.CsvDataset(folder / "table.csv", dtypes)
    assert [spec.dtype for spec in dataset.element_spec] == [np.dtype(d) for d in dtypes]
    if rows:
        (batch,) = dataset.batch(10)
        assert [column.dtype for column in batch] == [np.dtype(d) for d in dtypes]


def test_kinds_of_defaults(folder: Path) -> None:
    defaults = [1, 2.5, "text", b"bytes", [3], np.float64(4), np.array([5]), jnp.float32(6.5)]
    assert rows_of(folder, b",,,,,,,\n", defaults) == [(1, 2.5, b"text", b"bytes", 3, 4.0, 5, 6.5)]
    spec = px.data.CsvDataset(folder / "table.csv", defaults).element_spec
    names = ["int32", "float32", "object", "object", "int32", "float64", "int64", "float32"]
    assert [str(s.dtype) for s in spec] == names
    required = [int, float, str, bytes, "string", np.float64, np.dtype(np.int64), jnp.int32]
    assert rows_of(folder, b"1,2.5,a,b,c,3,4,5\n", required) == [(1, 2.5, b"a", b"b", b"c", 3.0, 4, 5)]
    with pytest.raises(px.errors.InvalidArgumentError, match="field 7 is required, and empty"):
        rows_of(folder, b"1,2.5,a,b,c,3,4,\n", required)


def test_selected_columns(folder: Path) -> None:
    text = b"1,x,3\n4,y,6\n"
    assert rows_of(folder, text, [0, 0], select_cols=[0, 2]) == [(1, 3), (4, 6)]
    assert rows_of(folder, text, [0, 0], exclude_cols=[1]) == [(1, 3), (4, 6)]
    with pytest.raises(px.errors.InvalidArgumentError, match="field 3 is expected, and there are 3"):
        rows_of(folder, text, [0, 0], select_cols=[0, 3])
    with pytest.raises(px.errors.InvalidArgumentError, match="4 fields are expected, and there are 3"):
        rows_of(folder, text, [0, 0], exclude_cols=[1, 3])


def test_empty_lines_headers_and_words_for_nothing(folder: Path) -> None:
    assert rows_of(folder, b"1\n\n2", [7]) == [(1,), (7,), (2,)]
    assert rows_of(folder, b'"a\nb",c\n1,NA\n', [7, 8], header=True, na_value="NA") == [(1, 8)]
    assert rows_of(folder, b"a\n", [7], header=True) == []
    assert rows_of(folder, b'a"b,"c\n', ["", ""], use_quote_delim=False) == [(b'a"b', b'"c')]


def test_compressed_tables(folder: Path) -> None:
    (folder / "t.csv.gz").write_bytes(gzip.compress(b"1,2\n3,4\n"))
    dataset = px.data.CsvDataset(folder / "t.csv.gz", [0, 0], "GZIP")
    assert [[int(x) for x in row] for row in dataset] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b"5", "2 fields are expected, and there are 1"),
        (b"5,6,7", "2 fields are expected, and there are 3"),
        (b"x,6", "field 0 is not a valid int32: b'x'"),
        (b"1_000,6", "field 0 is not a valid int32: b'1_000'"),
        (b"2147483648,6", "field 0 is not a valid int32: b'2147483648'"),
        (b"99999999999999999999,6", "field 0 is not a valid int32"),
        (b"1.5,6", "field 0 is not a valid int32: b'1.5'"),
        (b"1,1_0", "field 1 is not a valid float32: b'1_0'"),
        (b",6", "field 0 is required, and empty"),
        (b'1,"2"3', "there is a quote in the middle of field 1"),
        (b'1,2"3"', "there is a quote in the middle of field 1"),
        (b'1,"2', "a quoted field does not end"),
    ],
)
def test_bad_rows(folder: Path, bad: bytes, said: str) -> None:
    """The rows before a bad one come first, and the place is named."""
    (folder / "bad.csv").write_bytes(b"a,b\n1,2\n3,4\n" + bad + b"\n7,8\n")
    dataset = px.data.CsvDataset(folder / "bad.csv", [np.int32, 0.5], header=True)
    read: list[float] = []
    with pytest.raises(px.errors.InvalidArgumentError) as error:
        read.extend(float(x) for row in dataset for x in row)
    assert read == [1, 2, 3, 4]
    assert f"bad.csv cannot be read at row 2, which starts at byte 12: {said}" in str(error.value)
    with pytest.raises(px.errors.InvalidArgumentError, match="row 2"):
        list(dataset.skip(4))


@settings(max_examples=300)
@given(st.binary(max_size=60), st.booleans())
def test_random_bytes(folder: Path, data: bytes, quotes: bool) -> None:
    (folder / "random").write_bytes(data)
    dataset = px.data.CsvDataset(folder / "random", [0, b""], use_quote_delim=quotes, buffer_size=20)
    with contextlib.suppress(px.errors.InvalidArgumentError):
        list(dataset)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"record_defaults": []}, "one entry per column"),
        ({"record_defaults": "string"}, "one entry per column"),
        ({"record_defaults": [np.float16]}, "CSV columns are float32"),
        ({"record_defaults": [[1, 2]]}, "one value"),
        ({"record_defaults": [None]}, "number or a string"),
        ({"record_defaults": [0], "field_delim": ",,"}, "one character"),
        ({"record_defaults": [0], "field_delim": '"'}, "one character"),
        ({"record_defaults": [0], "select_cols": [0, 1]}, "one entry per entry"),
        ({"record_defaults": [0, 0], "select_cols": [1, 0]}, "must ascend"),
        ({"record_defaults": [0], "select_cols": [0], "exclude_cols": [0]}, "not both"),
        ({"record_defaults": [0], "exclude_cols": [2]}, "below the number of columns, 2"),
    ],
)
def test_mistakes(folder: Path, options: dict[str, Any], said: str) -> None:
    (folder / "table.csv").write_bytes(b"1\n")
    with pytest.raises(px.errors.InvalidValueError, match=said):
        px.data.CsvDataset(folder / "table.csv", **options)
