"""Files damaged at random: errors of ours, no hang, and no more memory than the file can need."""

from __future__ import annotations

import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import phalanx as px

D = px.data.Dataset
ROWS = 60
MOST_BYTES = 48 * 2**20


def example(i: int) -> bytes:
    feature = {
        "n": px.train.Feature(int64_list=px.train.Int64List(value=[i, i + 1])),
        "x": px.train.Feature(float_list=px.train.FloatList(value=[i / 2])),
        "s": px.train.Feature(bytes_list=px.train.BytesList(value=[b"text %d" % i])),
    }
    return px.train.Example(features=px.train.Features(feature=feature)).SerializeToString()


def write_records(path: Path) -> None:
    with px.io.TFRecordWriter(str(path)) as writer:
        for i in range(ROWS):
            writer.write(example(i))


def write_csv(path: Path) -> None:
    path.write_text("".join(f'{i},"name, {i}",{i / 4}\n' for i in range(ROWS)))


def write_parquet(path: Path) -> None:
    table = pa.table(
        {
            "n": list(range(ROWS)),
            "s": [f"text {i}" for i in range(ROWS)],
            "l": [[float(j) for j in range(i % 4)] for i in range(ROWS)],
        }
    )
    pa.parquet.write_table(table, path, row_group_size=20, compression="none")


def compressed(write: Callable[[Path], None], kind: str) -> Callable[[Path], None]:
    def write_compressed(path: Path) -> None:
        write(path)
        data = path.read_bytes()
        path.write_bytes(gzip.compress(data) if kind == "GZIP" else zlib.compress(data))

    return write_compressed


SPEC = {
    "n": px.io.FixedLenFeature([2], np.int64),
    "x": px.io.VarLenFeature(np.float32),
    "s": px.io.FixedLenFeature([], bytes, default_value=b""),
}
CSV = [np.int64, bytes, np.float32]

FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[str], Any]]] = {
    "records": (write_records, px.data.TFRecordDataset),
    "gzip records": (
        compressed(write_records, "GZIP"),
        lambda p: px.data.TFRecordDataset(p, "GZIP", max_record_bytes=2**20),
    ),
    "zlib lines": (
        compressed(write_csv, "ZLIB"),
        lambda p: px.data.TextLineDataset(p, "ZLIB", max_record_bytes=2**20),
    ),
    "csv": (write_csv, lambda p: px.data.CsvDataset(p, CSV)),
    "parquet": (write_parquet, px.data.ParquetDataset),
}


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some changes: flipped, cut off, cut out, doubled, filled, or grown at their end."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(out) + 1)
        span = rng.choice((1, 2, 4, 8, 64))
        match rng.randrange(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                del out[at:]
            case 2:
                del out[at : at + span]
            case 3:
                out[at:at] = out[at : at + span]
            case 4:
                out[at : at + span] = rng.choice((b"\0", b"\xff", b"9", b'"')) * span
            case 5:
                out[at : at + span] = rng.randbytes(span)
            case _:
                out += rng.randbytes(span)
    return bytes(out)


def read(dataset: Callable[[], Any], most: int = 4 * ROWS) -> str:
    """Read everything; the name of the error that ends it, if there is one."""
    try:
        with iter(dataset().take(most)) as iterator:
            for _ in iterator:
                pass
    except px.PhalanxError as error:
        return "digits" if "Exceeds the limit" in str(error) else type(error).__name__
    return ""


def fuzz(name: str, times: int, seed: int, folder: Path) -> set[str]:
    write, open_dataset = FORMATS[name]
    path = folder / "file"
    write(path)
    whole, rng = path.read_bytes(), random.Random(seed)
    assert read(lambda: open_dataset(str(path))) == ""
    seen = set()
    tracemalloc.start()
    try:
        for _ in range(times):
            path.write_bytes(damaged(whole, rng))
            seen.add(read(lambda: open_dataset(str(path))))
        assert "digits" not in seen
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    return seen


@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_end_in_errors_of_ours(name: str, tmp_path: Path) -> None:
    seen = fuzz(name, 60, seed=1, folder=tmp_path)
    assert seen - {""}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_end_in_errors_of_ours_for_long(name: str, seed: int, tmp_path: Path) -> None:
    fuzz(name, 600, seed + 10, tmp_path)


@pytest.mark.parametrize("times", [300, pytest.param(20000, marks=pytest.mark.soak)])
def test_damaged_examples_end_in_errors_of_ours(times: int) -> None:
    rng = random.Random(2)
    seen = set()
    for i in range(times):
        data = damaged(example(i), rng)
        for parse in (
            lambda: px.io.parse_single_example(data, SPEC),
            lambda: px.io.parse_example([example(1), data], SPEC),
            lambda: px.train.Example.FromString(data),
        ):
            try:
                parse()
            except px.PhalanxError as error:
                seen.add(type(error).__name__)
    assert seen


@pytest.mark.parametrize("times", [60, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["numbers", "texts"])
def test_damaged_caches_end_in_errors_of_ours(times: int, kind: str, tmp_path: Path) -> None:
    def dataset() -> Any:
        plain = D.range(ROWS)
        texts = plain.map(lambda i: {"s": f"text {i}", "x": np.arange(i % 3)})
        return (plain if kind == "numbers" else texts).cache(str(tmp_path / "kept"))

    assert read(dataset) == ""
    files = {path: path.read_bytes() for path in (tmp_path / "kept.cache").iterdir()}
    rng, seen = random.Random(3), set()
    for _ in range(times):
        path = rng.choice(sorted(files))
        path.write_bytes(damaged(files[path], rng))
        seen.add(read(dataset))
        path.write_bytes(files[path])
    assert "DataLossError" in seen
    assert read(dataset) == ""
