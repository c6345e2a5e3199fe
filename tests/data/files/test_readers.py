"""Lines of text and records of one length."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.data.files.readers import FixedReader, TextReader
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.opening import open_plan

PACK = {"": lambda data: data, "GZIP": gzip.compress, "ZLIB": zlib.compress}
COMPRESSIONS = st.sampled_from(list(PACK))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


def lines_of(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line[:-1] if line.endswith(b"\r") else line for line in lines]


@given(st.text("ab\r\n", max_size=60).map(str.encode), COMPRESSIONS, st.integers(1, 70))
def test_lines(folder: Path, data: bytes, compression: str, buffer_size: int) -> None:
    (folder / "text").write_bytes(PACK[compression](data))
    dataset = px.data.TextLineDataset(folder / "text", compression, buffer_size)
    assert list(dataset) == lines_of(data)
    assert list(dataset.skip(3)) == lines_of(data)[3:]


def test_a_long_line_is_read_in_linear_time(folder: Path) -> None:
    line = b"x" * 5_000_000
    (folder / "text").write_bytes(line + b"\nend")
    reader = TextReader(str(folder / "text"), "", 1000)
    assert reader.read_block() == [line]
    assert reader.read_block() == [b"end"]
    assert reader.read_block() == []
    reader.close()


def test_lines_before_damage(folder: Path) -> None:
    text = b"".join(b"line %d\n" % i for i in range(3000))
    (folder / "cut.txt.gz").write_bytes(gzip.compress(text)[:-4000])
    read: list[bytes] = []
    with pytest.raises(
        px.errors.DataLossError,
        match=r"cut.txt.gz is damaged at line \d+, which starts at byte \d+: .*ends too early",
    ) as error:
        read.extend(px.data.TextLineDataset(folder / "cut.txt.gz", "GZIP", 1000))
    assert 0 < len(read) < 3000
    assert read == text.split(b"\n")[: len(read)]
    assert f"at line {len(read)}, which starts at byte {sum(map(len, read)) + len(read)}:" in str(
        error.value
    )


@given(
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 12),
    COMPRESSIONS,
    st.integers(1, 100),
    st.integers(0, 14),
)
def test_fixed_records(
    folder: Path,
    size: int,
    header: int,
    footer: int,
    count: int,
    compression: str,
    buffer_size: int,
    skip: int,
) -> None:
    records = [bytes([i + 1]) * size for i in range(count)]
    data = b"h" * header + b"".join(records) + b"f" * footer
    (folder / "fixed").write_bytes(PACK[compression](data))
    dataset = px.data.FixedLengthRecordDataset(
        folder / "fixed", size, header, footer, buffer_size, compression
    )
    assert list(dataset) == records
    assert list(dataset.skip(skip)) == records[skip:]
    cursor = open_plan(dataset._node, Run())
    if count > 2:
        cursor.read(1)
        assert cursor.skip(skip) == min(skip, count - 1)
        rest = cursor.read(100)
        assert (rest.columns[0].tolist() if rest else []) == records[1 + skip :][
            : rest.count if rest else 0
        ]
    cursor.close()


@pytest.mark.parametrize("compression", PACK)
def test_bytes_that_are_left(folder: Path, compression: str) -> None:
    (folder / "left.bin").write_bytes(PACK[compression](b"HH" + b"abcabcab" + b"FF"))
    dataset = px.data.FixedLengthRecordDataset(
        folder / "left.bin", 3, 2, 2, compression_type=compression
    )
    read: list[bytes] = []
    with pytest.raises(
        px.errors.DataLossError,
        match=r"left.bin is damaged at record 2, which starts at byte 8: 4 bytes",
    ):
        read.extend(dataset)
    assert read == [b"abc", b"abc"]
    with pytest.raises(px.errors.DataLossError, match="record 2"):
        list(dataset.skip(3))


@pytest.mark.parametrize("compression", PACK)
def test_a_header_that_is_not_there(folder: Path, compression: str) -> None:
    (folder / "short.bin").write_bytes(PACK[compression](b"H"))
    reader = FixedReader(str(folder / "short.bin"), compression, 100, (3, 2, 0))
    with pytest.raises(px.errors.DataLossError, match="header should have 2 bytes, not 1"):
        reader.read_block()
    reader.close()


def test_sizes_must_make_sense(folder: Path) -> None:
    (folder / "empty").write_bytes(b"")
    with pytest.raises(px.errors.InvalidValueError, match="record_bytes must be at least 1"):
        px.data.FixedLengthRecordDataset(folder / "empty", 0)
    with pytest.raises(px.errors.InvalidValueError, match="header_bytes must be at least 0"):
        px.data.FixedLengthRecordDataset(folder / "empty", 1, header_bytes=-1)
    with pytest.raises(px.errors.InvalidValueError, match="buffer_size"):
        px.data.TextLineDataset(folder / "empty", buffer_size=-1)
