"""Parquet files: types, row groups, damage."""

from __future__ import annotations

import datetime
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st

import phalanx as px
from phalanx.data.files.parquet import columns_of
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.opening import open_plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parquet")


def write(path: Path, columns: dict[str, Any], group: int = 3) -> None:
    pa.parquet.write_table(pa.table(columns), path, row_group_size=group)


def test_types(folder: Path) -> None:
    columns = {
        "float": pa.array([0.5, None, 2.0], pa.float32()),
        "int": pa.array([1, 2, 3], pa.int16()),
        "flag": [True, False, True],
        "text": ["a", "é", ""],
        "raw": [b"x", b"", b"\0"],
        "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
        "when": pa.array([datetime.datetime(2020, 1, n) for n in (1, 2, 3)], pa.timestamp("s")),
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6.0)), 2),
        "list": pa.array([[1, 2], [], [3]], pa.list_(pa.int64())),
        "words": [["a"], [], ["b", "c"]],
        "nested": [{"z": 1, "a": {"b": "x"}}, {"z": 2, "a": {"b": "y"}}, {"z": 3, "a": {"b": "z"}}],
    }
    write(folder / "types.parquet", columns)
    dataset = px.data.ParquetDataset(folder / "types.parquet")
    rows = list(dataset)
    assert [sorted(row) for row in rows] == [sorted(columns)] * 3
    assert np.isnan(rows[1]["float"])
    assert [row["int"].item() for row in rows] == [1, 2, 3]
    assert [bool(row["flag"]) for row in rows] == [True, False, True]
    assert [row["text"] for row in rows] == ["a", "é", ""]
    assert [row["raw"] for row in rows] == [b"x", b"", b"\0"]
    assert [row["kind"] for row in rows] == ["u", "v", "u"]
    assert rows[1]["when"] == np.datetime64("2020-01-02")
    assert [row["fixed"].tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    assert [row["list"].tolist() for row in rows] == [[1, 2], [], [3]]
    assert [row["words"].tolist() for row in rows] == [["a"], [], ["b", "c"]]
    assert [(int(row["nested"]["z"]), row["nested"]["a"]["b"]) for row in rows] == [
        (1, "x"),
        (2, "y"),
        (3, "z"),
    ]
    spec = dataset.element_spec
    assert spec["int"] == px.TensorSpec((), np.dtype(np.int16))
    assert spec["fixed"] == px.TensorSpec((2,), np.dtype(np.float64))
    assert spec["list"] == px.TensorSpec((None,), np.dtype(np.int64))
    assert spec["nested"] == {
        "z": px.TensorSpec((), np.dtype(np.int64)),
        "a": {"b": px.TensorSpec((), np.dtype(object))},
    }


def test_lists_in_a_part_of_an_array() -> None:
    array = pa.array([[1], [2, 3], [], [4]])
    (column,) = columns_of(array.slice(1, 2), "x")
    assert [row.tolist() for row in column] == [[2, 3], []]
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6)), 2).slice(1)
    assert next(iter(columns_of(fixed, "x"))).tolist() == [[2, 3], [4, 5]]  # type: ignore[union-attr]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(1, 7),
)
def test_rows_of_several_files(
    folder: Path, sizes: list[int], group: int, skip: int, limit: int
) -> None:
    names, start = [], 0
    for i, size in enumerate(sizes):
        names.append(folder / f"{i}.parquet")
        write(names[-1], {"x": np.arange(start, start + size), "y": np.zeros((size,))}, group)
        start += size
    dataset = px.data.ParquetDataset(names, columns=["x"])
    assert len(dataset) == start
    assert [int(row["x"]) for row in dataset] == list(range(start))
    cursor = open_plan(dataset._node, Run())
    first = cursor.read(limit)
    at = 0 if first is None else first.count
    assert cursor.skip(skip) == min(skip, start - at)
    rest = []
    while (chunk := cursor.read(limit)) is not None:
        assert chunk.count <= limit
        rest += chunk.columns[0].tolist()
    assert rest == list(range(start))[at + skip :]
    cursor.close()


def test_names_from_a_dataset(folder: Path) -> None:
    write(folder / "one.parquet", {"x": [1, 2]})
    names = px.data.Dataset.from_tensor_slices([str(folder / "one.parquet")]).repeat()
    rows = px.data.ParquetDataset(names).take(3)
    assert [int(row["x"]) for row in rows] == [1, 2, 1]
    with pytest.raises(px.errors.InvalidValueError, match="at least one file"):
        px.data.ParquetDataset(names.take(0))


def test_files_must_agree(folder: Path) -> None:
    write(folder / "one.parquet", {"x": [1, 2]})
    write(folder / "two.parquet", {"x": [1.5]})
    write(folder / "three.parquet", {"y": [1]})
    read: list[Any] = []
    with pytest.raises(
        px.errors.InvalidArgumentError, match=r"one.parquet' has 'x' of type int64.*type double"
    ):
        read.extend(px.data.ParquetDataset([folder / "one.parquet", folder / "two.parquet"]))
    assert [int(row["x"]) for row in read] == [1, 2]
    with pytest.raises(
        px.errors.InvalidArgumentError, match=r"three.parquet' with the columns \['y'\]"
    ):
        list(px.data.ParquetDataset([folder / "one.parquet", folder / "three.parquet"]))


def test_columns_must_exist_and_have_values(folder: Path) -> None:
    write(folder / "file.parquet", {"x": [1, None], "d": [datetime.time(1), None]})
    with pytest.raises(px.errors.InvalidValueError, match=r"which has 'x', 'd'. Received: \['z'\]"):
        px.data.ParquetDataset(folder / "file.parquet", columns=["z"])
    with pytest.raises(px.errors.InvalidValueError, match="at least one file"):
        px.data.ParquetDataset([])
    with pytest.raises(px.errors.InvalidTypeError, match="columns must be a list"):
        px.data.ParquetDataset(folder / "file.parquet", columns="x")
    with pytest.raises(px.errors.InvalidTypeError, match="Received: 'd' of type time64"):
        px.data.ParquetDataset(folder / "file.parquet")
    with pytest.raises(px.errors.InvalidArgumentError, match="Column 'x' has no value in some row"):
        list(px.data.ParquetDataset(folder / "file.parquet", columns=["x"]))


def test_damaged_files(folder: Path) -> None:
    path = folder / "damaged.parquet"
    rng = np.random.default_rng(0)
    write(path, {"x": rng.normal(size=3000)}, 1000)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(px.errors.DataLossError, match=r"A Parquet file is damaged.*damaged.parquet"):
        px.data.ParquetDataset(path)
    path.write_bytes(b"")
    with pytest.raises(px.errors.DataLossError, match="damaged"):
        px.data.ParquetDataset(path)
    with pytest.raises(px.errors.NotFoundError, match="nowhere"):
        px.data.ParquetDataset(folder / "nowhere")
    group = pa.parquet.ParquetFile(pa.BufferReader(whole)).metadata.row_group(1).column(0)
    start = group.dictionary_page_offset or group.data_page_offset
    path.write_bytes(whole[:start] + b"\xff" * 200 + whole[start + 200 :])
    read: list[Any] = []
    with pytest.raises(px.errors.DataLossError, match="row group 1, at or after row 1000"):
        read.extend(px.data.ParquetDataset(path))
    assert len(read) == 1000


def test_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder / "file.parquet", {"x": [1]})

    def fail(name: str, *args: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(px.errors.MissingPackageError, match=r"pip install 'phalanx\[parquet\]'"):
        px.data.ParquetDataset(folder / "file.parquet")


def test_importing_phalanx_does_not_import_pyarrow() -> None:
    import subprocess
    import sys

    code = "import sys, phalanx; assert not {'pyarrow', 'google_crc32c'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
