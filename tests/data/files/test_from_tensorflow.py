"""Files that TensorFlow wrote are read as TensorFlow reads them (see make_files.py)."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx as px

HERE = Path(__file__).parent / "from_tensorflow"
EXPECTED = json.loads((HERE / "expected.json").read_text())


def value(x: Any) -> Any:
    if isinstance(x, dict):
        return base64.b64decode(x["bytes"])
    return [value(v) for v in x] if isinstance(x, list) else x


RECORDS = value(EXPECTED["records"])
FILES = {"plain": "", "gzip": "GZIP", "zlib": "ZLIB"}


@pytest.mark.parametrize("name", FILES)
def test_records(name: str) -> None:
    assert list(px.data.TFRecordDataset(HERE / f"{name}.tfrecord", FILES[name])) == RECORDS


def test_plain_files_are_the_same_byte_for_byte(tmp_path: Path) -> None:
    with px.io.TFRecordWriter(tmp_path / "file") as writer:
        for record in RECORDS:
            writer.write(record)
    assert (tmp_path / "file").read_bytes() == (HERE / "plain.tfrecord").read_bytes()


def test_messages_are_the_same_byte_for_byte() -> None:
    for record in RECORDS:
        assert px.train.Example.FromString(record).SerializeToString() == record
    feature = px.train.Example.FromString(RECORDS[10]).features.feature
    assert feature["name"].bytes_list.value == ["näme 10".encode()]
    assert feature["signed"].int64_list.value == [-10, 10_000, -(2**63) + 10, 2**63 - 11]
    assert feature["unset"].WhichOneof("kind") is None
    assert "sometimes" not in feature


def test_parsed_features() -> None:
    features = {
        "id": px.io.FixedLenFeature([], np.int64),
        "signed": px.io.FixedLenFeature([2, 2], np.int64),
        "pixels": px.io.FixedLenFeature([2, 3], np.float32),
        "name": px.io.FixedLenFeature([], "string"),
        "words": px.io.VarLenFeature("string"),
        "sequence": px.io.FixedLenSequenceFeature(
            [2], np.float32, allow_missing=True, default_value=-1.0
        ),
        "sometimes": px.io.FixedLenFeature([], np.int64, default_value=-7),
        "unset": px.io.FixedLenFeature([], "string", default_value=b"nothing"),
    }
    dataset = px.data.TFRecordDataset(HERE / "gzip.tfrecord", "GZIP").batch(len(RECORDS))
    (parsed,) = (px.io.parse_example(batch, features) for batch in dataset)
    assert sorted(parsed) == sorted(EXPECTED["parsed"])
    for key, want in EXPECTED["parsed"].items():
        have = parsed[key]
        if isinstance(have, px.data.Ragged):
            assert have.to_list() == value(want)
        elif have.dtype == np.float32:
            assert have.view(np.int32).tolist() == want
        else:
            assert have.tolist() == value(want)


def test_lines() -> None:
    assert list(px.data.TextLineDataset(HERE / "lines.txt")) == value(EXPECTED["lines"])


def test_fixed_records() -> None:
    dataset = px.data.FixedLengthRecordDataset(HERE / "fixed.bin", 8, 6, 3)
    assert list(dataset) == value(EXPECTED["fixed"])


def test_rows() -> None:
    dataset = px.data.experimental.CsvDataset(
        HERE / "table.csv",
        [np.int32, "nobody", np.array([9.25], np.float32), np.array([-1], np.int64)],
        header=True,
        na_value="NA",
    )
    rows = []
    for number, name, score, big in dataset:
        rows.append([number.item(), name, score.view(np.int32).item(), big.item()])
    assert rows == value(EXPECTED["rows"])


@pytest.mark.parametrize("case", EXPECTED["orders"], ids=lambda c: f"{c['sizes']}-{c['reads']}")
def test_the_order_of_several_files(tmp_path: Path, case: dict[str, Any]) -> None:
    names = []
    for number, size in enumerate(case["sizes"]):
        names.append(tmp_path / f"{number}.tfrecord")
        with px.io.TFRecordWriter(names[-1]) as writer:
            for i in range(size):
                writer.write(f"{number}.{i}".encode())
    dataset = px.data.TFRecordDataset(names, num_parallel_reads=case["reads"])
    assert [record.decode() for record in dataset] == case["order"]
