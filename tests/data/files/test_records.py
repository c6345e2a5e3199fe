"""TFRecord files: what is written is read, and damage is found, named and contained."""

from __future__ import annotations

import gzip
import random
import re
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tests.data.naive import check_reads_and_skips

import phalanx as px
from phalanx.data.files import crc32c
from phalanx.data.files.records import FOOTER, HEADER, RecordReader, frame, frame_bounds

PACK = {"": lambda data: data, "GZIP": gzip.compress, "ZLIB": zlib.compress}
COMPRESSIONS = st.sampled_from(list(PACK))
RECORDS = st.lists(st.binary(max_size=300), max_size=20)


@pytest.fixture(autouse=True, params=["C", "NumPy"], scope="module")
def _checksums(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds with and without the C function for checksums."""
    patch = pytest.MonkeyPatch()
    if request.param == "NumPy":
        patch.setattr(crc32c, "accelerator", lambda: None)
    yield
    patch.undo()


def read_all(path: Path, compression: str = "", buffer_size: int = 1000) -> list[bytes]:
    reader = RecordReader(str(path), compression, buffer_size)
    try:
        records = []
        while block := reader.read_block():
            records += block
        assert reader.read_block() == []
        return records
    finally:
        reader.close()


def read_until_damage(path: Path, compression: str = "") -> tuple[list[bytes], str | None]:
    """What comes before the damage, and what is said about it; it is said again and again."""
    reader = RecordReader(str(path), compression, 1000)
    records: list[bytes] = []
    try:
        while block := reader.read_block():
            records += block
    except px.errors.DataLossError as error:
        with pytest.raises(px.errors.DataLossError, match=re.escape(str(error))):
            reader.read_block()
        return records, str(error)
    finally:
        reader.close()
    return records, None


def write(path: Path, records: list[bytes], compression: str = "") -> None:
    with px.io.TFRecordWriter(path, compression) as writer:
        for record in records:
            writer.write(record)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@given(RECORDS, COMPRESSIONS, st.integers(1, 3000))
def test_what_is_written_is_read(
    folder: Path, records: list[bytes], compression: str, buffer_size: int
) -> None:
    write(folder / "file", records, compression)
    assert read_all(folder / "file", compression, buffer_size) == records


def test_large_records(folder: Path) -> None:
    rng = np.random.default_rng(0)
    records = [rng.bytes(n) for n in (0, 1, 1_000_000, 3, 2_500_000, 12)]
    for compression in PACK:
        write(folder / "file", records, compression)
        assert read_all(folder / "file", compression) == records


@given(RECORDS, COMPRESSIONS, st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=10))
def test_skipping_is_reading(
    folder: Path, records: list[bytes], compression: str, steps: list[tuple[bool, int]]
) -> None:
    write(folder / "file", records, compression)
    reader = RecordReader(str(folder / "file"), compression, 200)
    check_reads_and_skips(reader, records, steps)


def test_skipping_reads_little(folder: Path) -> None:
    write(folder / "file", [bytes(1_000_000)] * 30)
    reader = RecordReader(str(folder / "file"), "", 1000)
    tracemalloc.start()
    assert reader.skip(29) == 29
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert reader.read_block() == [bytes(1_000_000)]
    assert reader.skip(1) == 0
    reader.close()


# -- damage ------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize(
    ("where", "said"),
    [
        (0, "the checksum of its length is wrong"),
        (9, "the checksum of its length is wrong"),
        (HEADER, "its checksum is wrong"),
        (HEADER + 99, "its checksum is wrong"),
        (HEADER + 100 + FOOTER - 1, "its checksum is wrong"),
    ],
)
@pytest.mark.parametrize("number", [17, 20])  # at the end of a buffer, and in the middle of one
def test_a_flipped_bit(folder: Path, compression: str, where: int, said: str, number: int) -> None:
    records = [bytes([i]) * 100 for i in range(30)]
    data = bytearray(frame(records))
    start = number * (HEADER + 100 + FOOTER)
    data[start + where] ^= 0x10
    path = folder / "flipped.tfrecord"
    path.write_bytes(PACK[compression](bytes(data)))
    read, error = read_until_damage(path, compression)
    assert read == records[:number]
    assert error is not None
    assert (
        f"flipped.tfrecord is damaged at record {number}, which starts at byte {start}: {said}" in error
    )
    assert str(path) in error


@given(RECORDS.filter(len), COMPRESSIONS, st.data())
def test_a_truncated_file(
    folder: Path, records: list[bytes], compression: str, data: st.DataObject
) -> None:
    whole = frame(records)
    bounds = frame_bounds(whole, len(records))
    cut = data.draw(st.integers(0, len(whole) - 1))
    path = folder / "cut.tfrecord"
    path.write_bytes(PACK[compression](whole[:cut]))
    complete = sum(bound <= cut for bound in bounds) - 1
    read, error = read_until_damage(path, compression)
    assert read == records[:complete]
    if cut in bounds:
        assert error is None
    else:
        assert error is not None
        assert f"record {complete}, which starts at byte {bounds[complete]}" in error
        assert "the file ends in the middle of it" in error


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_batches_before_damage(folder: Path, size: int, drop_remainder: bool) -> None:
    records = [bytes([65 + i]) * (i + 1) for i in range(7)]
    path = folder / "cut.tfrecord"
    path.write_bytes(frame(records)[:-1])
    batches = px.data.TFRecordDataset(path).batch(size, drop_remainder)
    read: list[bytes] = []
    with pytest.raises(px.errors.DataLossError, match="record 6"):
        read.extend(record for batch in batches for record in batch)
    assert read == records[: 6 - 6 % size if drop_remainder else 6]


def header(length: int) -> bytes:
    words = np.array([length], "<u8").view("<u4")[None, :]
    return (
        struct.pack("<Q", length) + crc32c.mask(crc32c.crc32c_of_words(words)).astype("<u4").tobytes()
    )


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("length", [10_000, 2**31, 2**60, 2**64 - 1])
@pytest.mark.parametrize("right", [True, False])
def test_an_absurd_length_costs_nothing(
    folder: Path, compression: str, length: int, right: bool
) -> None:
    """Neither a length with a wrong checksum nor one with a right checksum is believed."""
    start = header(length) if right else struct.pack("<QI", length, 1234)
    path = folder / "absurd.tfrecord"
    path.write_bytes(PACK[compression](frame([b"good"]) + start + bytes(5000)))
    tracemalloc.start()
    read, error = read_until_damage(path, compression)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert read == [b"good"]
    assert error is not None
    assert "record 1, which starts at byte 20" in error
    assert ("ends in the middle" if right else "checksum of its length") in error
    reader = RecordReader(str(path), compression, 1000)
    with pytest.raises(px.errors.DataLossError, match="record 1"):
        reader.skip(2)
    reader.close()


@settings(max_examples=300)
@given(st.binary(max_size=400), COMPRESSIONS, st.booleans())
def test_random_bytes(folder: Path, data: bytes, compression: str, packed: bool) -> None:
    """Whatever a file holds, reading it ends, with records or with an error of ours."""
    path = folder / "random"
    path.write_bytes(PACK[compression](data) if packed else data)
    for count in (0, 3):
        reader = RecordReader(str(path), compression, 100)
        try:
            reader.skip(count)
            while reader.read_block():
                pass
        except px.errors.DataLossError:
            pass
        reader.close()


@settings(max_examples=300)
@given(RECORDS.filter(len), COMPRESSIONS, st.integers(0, 2**32))
def test_damaged_files_give_a_beginning_of_the_records(
    folder: Path, records: list[bytes], compression: str, seed: int
) -> None:
    """Flip, cut, repeat or insert bytes: records are never wrong, and those before the damage come.

    Repeating bytes of a compressed file may happen to repeat a whole record, which nobody can see.
    """
    rng = random.Random(seed)
    whole = frame(records)
    data = bytearray(PACK[compression](whole))
    where = rng.randrange(len(data))
    kind = rng.choice(["flip", "cut", "insert", *(["repeat"] if not compression else [])])
    if kind == "flip":
        data[where] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[where : where + rng.randrange(1, 20)]
    elif kind == "repeat":
        data[where:where] = data[where : where + rng.randrange(1, 20)]
    else:
        data[where:where] = rng.randbytes(rng.randrange(1, 20))
    path = folder / "damaged"
    path.write_bytes(data)
    read, error = read_until_damage(path, compression)
    if compression == "":
        bounds = frame_bounds(whole, len(records))
        untouched = sum(bound <= where for bound in bounds) - 1
        assert read[:untouched] == records[:untouched]
    if compression:  # damage may happen to repeat a whole record
        assert set(read) <= set(records)
    elif error is not None:
        assert read == records[: len(read)]


# -- writing -----------------------------------------------------------------------------


def test_flush_makes_records_readable(folder: Path) -> None:
    for compression in PACK:
        path = folder / "flushed"
        writer = px.io.TFRecordWriter(path, compression)
        writer.write(b"one")
        assert path.stat().st_size < 10
        writer.flush()
        reader = RecordReader(str(path), compression, 1000)
        assert reader.read_block() == [b"one"]
        reader.close()
        writer.write(b"two")
        writer.close()
        writer.close()
        assert read_all(path, compression) == [b"one", b"two"]
        with pytest.raises(px.errors.FailedPreconditionError, match="flushed"):
            writer.write(b"three")
        with pytest.raises(px.errors.FailedPreconditionError):
            writer.flush()


def test_a_writer_that_is_forgotten_closes_its_file(folder: Path) -> None:
    path = folder / "forgotten"
    writer = px.io.TFRecordWriter(path)
    writer.write(b"one")
    del writer
    assert read_all(path) == [b"one"]


def test_options(folder: Path) -> None:
    path = folder / "options"
    sizes = []
    for level in (0, 9):
        options = px.io.TFRecordOptions(
            "GZIP", compression_level=level, window_bits=9, mem_level=1, compression_strategy=0
        )
        with px.io.TFRecordWriter(path, options) as writer:
            writer.write(bytes(10_000))
        assert read_all(path, "GZIP") == [bytes(10_000)]
        sizes.append(path.stat().st_size)
    assert sizes[0] > 10_000 > 1000 > sizes[1]
    assert px.io.TFRecordOptions(px.io.TFRecordOptions("ZLIB")).compression_type == "ZLIB"
    with pytest.raises(
        px.errors.InvalidValueError, match="compression_level must be an integer from -1 to 9"
    ):
        px.io.TFRecordOptions("GZIP", compression_level=10)
    with pytest.raises(px.errors.InvalidValueError, match="compression_type"):
        px.io.TFRecordWriter(path, "LZ4")


def test_what_cannot_be_written(folder: Path) -> None:
    with px.io.TFRecordWriter(folder / "file") as writer:
        writer.write(bytearray(b"abc"))
        writer.write(memoryview(b"def"))
        with pytest.raises(px.errors.InvalidTypeError, match=r"'text'.*Received: 'abc' of type str"):
            writer.write("abc")  # type: ignore[arg-type]
    assert read_all(folder / "file") == [b"abc", b"def"]
    with pytest.raises(px.errors.NotFoundError, match="nowhere"):
        px.io.TFRecordWriter(folder / "nowhere" / "file")
