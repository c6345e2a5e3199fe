"""Byte streams: compression of all kinds, and what is saved of damaged files."""

from __future__ import annotations

import gzip
import random
import re
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import phalanx as px
from phalanx.data.files.streams import (
    InflatedStream,
    PlainStream,
    StreamFault,
    check_compression,
    open_stream,
)

TEXT = b"".join(b"line %d of a text\n" % i for i in range(20_000))
PACK = {"": lambda data: data, "GZIP": gzip.compress, "ZLIB": zlib.compress}


def read_all(stream: PlainStream | InflatedStream, size: int = 10_000) -> tuple[bytes, str | None]:
    """Everything, and the fault at the end, if any; a fault is met again and again."""
    pieces = []
    try:
        while piece := stream.read(size):
            assert len(piece) <= max(size, 70_000_000)
            pieces.append(piece)
        assert stream.read(size) == b""
    except StreamFault as fault:
        with pytest.raises(StreamFault, match=re.escape(str(fault))):
            stream.read(size)
        return b"".join(pieces), str(fault)
    finally:
        stream.close()
    return b"".join(pieces), None


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.parametrize("size", [1_000, 1_000_000])
def test_all_that_was_written(tmp_path: Path, compression: str, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(PACK[compression](TEXT))
    assert read_all(open_stream(str(path), compression), size) == (TEXT, None)


@pytest.mark.parametrize("compression", PACK)
def test_skipping(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(PACK[compression](TEXT))
    stream = open_stream(str(path), compression)
    assert stream.skip(100_003) == 100_003
    assert stream.read(50) == TEXT[100_003:100_053]
    assert stream.skip(10**9) == len(TEXT) - 100_053
    assert stream.read(1) == b""
    stream.close()


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_several_streams_and_padding(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(PACK[compression](b"one ") + PACK[compression](b"two") + bytes(100))
    assert read_all(open_stream(str(path), compression)) == (b"one two", None)
    path.write_bytes(b"")
    assert read_all(open_stream(str(path), compression)) == (b"", None)


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("rest", [b"x", b"something else"])
def test_something_behind_the_end(tmp_path: Path, compression: str, rest: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(PACK[compression](b"text") + rest)
    data, fault = read_all(open_stream(str(path), compression))
    assert data == b"text"
    assert fault


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut(
    tmp_path_factory: pytest.TempPathFactory, compression: str, keep: float
) -> None:
    packed = PACK[compression](TEXT)
    cut = packed[: int(len(packed) * keep)]
    path = tmp_path_factory.mktemp("cut") / "file"
    path.write_bytes(cut)
    data, fault = read_all(open_stream(str(path), compression))
    assert TEXT.startswith(data)
    assert fault == (None if not cut else "the compressed data ends too early")


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@given(seed=st.integers(0, 2**32))
def test_flipped_bits_lose_nothing_before_them(
    tmp_path_factory: pytest.TempPathFactory, compression: str, seed: int
) -> None:
    rng = random.Random(seed)
    packed = bytearray(PACK[compression](TEXT))
    where = rng.randrange(len(packed))
    packed[where] ^= 1 << rng.randrange(8)
    # What the bytes before the flipped one give, at least.
    inflater = zlib.decompressobj(31 if compression == "GZIP" else 15)
    before = inflater.decompress(bytes(packed[:where]))
    path = tmp_path_factory.mktemp("flip") / "file"
    path.write_bytes(packed)
    data, fault = read_all(open_stream(str(path), compression))
    assert data.startswith(before)
    assert fault or data == TEXT  # a header has bits that mean nothing


def test_a_file_that_promises_much_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(zlib.compress(bytes(200_000_000)))
    stream = open_stream(str(path), "ZLIB")
    tracemalloc.start()
    assert len(stream.read(1000)) == 1000
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    stream.close()


def test_names_of_compressions() -> None:
    assert [check_compression(name) for name in (None, "", "GZIP", "ZLIB")] == ["", "", "GZIP", "ZLIB"]
    with pytest.raises(px.errors.InvalidValueError, match=r"Received: 'gzip'"):
        check_compression("gzip")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(px.errors.NotFoundError, match="nowhere"):
        open_stream(str(tmp_path / "nowhere"), "")
    with pytest.raises(px.errors.InvalidValueError, match="not a directory"):
        open_stream(str(tmp_path), "")


def test_a_file_that_fails_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    stream = PlainStream(str(path))
    stream._file.close()
    stream._file = Failing()  # type: ignore[assignment]
    with pytest.raises(StreamFault, match="it cannot be read"):
        stream.read(3)


class Failing:
    def read(self, size: int) -> bytes:
        raise OSError(5, "Input/output error")

    def close(self) -> None:
        pass
