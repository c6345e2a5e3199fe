"""Input that cannot work ends in a clear error, at once and without filling the memory."""

from __future__ import annotations

import gzip
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import phalanx as px
from phalanx.data.files.records import frame

D = px.data.Dataset
R = D.range(6)
HUGE = 10**5000
DIGITS = "9" * 5000


# -- bombs and pipes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files that hold 16 MB each: a record, a line, and a row with a quote that does not end."""
    folder = tmp_path_factory.mktemp("bombs")
    zeros = bytes(2**24)
    for name, data in (
        ("record", frame([b"small", zeros, b"small"])),
        ("line", b"small\n" + zeros),
        ("row", b'1,a\n2,"' + (bytes(4095) + b"\n") * 2**12),
    ):
        with gzip.open(folder / name, "wb", compresslevel=1) as file:
            file.write(data)
    return folder


OPEN: dict[str, Callable[..., Any]] = {
    "record": lambda path, **most: px.data.TFRecordDataset(path, "GZIP", **most),
    "line": lambda path, **most: px.data.TextLineDataset(path, "GZIP", **most),
    "row": lambda path, **most: px.data.CsvDataset(path, [np.int32, bytes], "GZIP", **most),
}


@pytest.mark.parametrize("kind", OPEN)
def test_bombs_do_not_go_off(kind: str, bombs: Path) -> None:
    path = str(bombs / kind)
    assert os.path.getsize(path) < 2**18
    tracemalloc.start()
    try:
        with iter(OPEN[kind](path, max_record_bytes=2**18)) as iterator:
            next(iterator)
            match = rf"{kind} has a {kind} of \d+ bytes.*max_record_bytes. Received: '.*{kind}'"
            for _ in range(2):
                with pytest.raises(px.errors.ResourceExhaustedError, match=match):
                    next(iterator)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_large_records_are_read_if_they_may_be(bombs: Path) -> None:
    lengths = [len(x) for x in OPEN["record"](str(bombs / "record"))]  # the default allows for more
    assert lengths == [5, 2**24, 5]
    for most in (5, 2**24):
        assert len(next(iter(OPEN["record"](str(bombs / "record"), max_record_bytes=most)))) == 5


def test_files_without_compression_may_have_long_records(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(frame([bytes(100)]))
    assert [len(x) for x in px.data.TFRecordDataset(str(path))] == [100]
    with pytest.raises(px.errors.ResourceExhaustedError, match="100 bytes or more"):
        list(px.data.TFRecordDataset(str(path), buffer_size=8, max_record_bytes=99))
    with pytest.raises(px.errors.InvalidValueError, match="max_record_bytes must be at least 1"):
        px.data.TFRecordDataset(str(path), max_record_bytes=0)


READERS: list[Callable[[str], Any]] = [
    px.data.TFRecordDataset,
    lambda p: px.data.TFRecordDataset(p, "GZIP"),
    px.data.TextLineDataset,
    lambda p: px.data.CsvDataset(p, [np.int32]),
    lambda p: px.data.FixedLengthRecordDataset(p, 4),
    px.data.ParquetDataset,
]


@pytest.mark.parametrize("reader", READERS)
def test_pipes_and_devices_are_refused(reader: Callable[[str], Any], tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    with pytest.raises(px.errors.InvalidValueError, match=r"not a pipe. Received: .*pipe"):
        reader(pipe)
    with pytest.raises(px.errors.InvalidValueError, match=r"a device. Received: '/dev/zero'"):
        reader("/dev/zero")
    with pytest.raises(px.errors.InvalidValueError, match="a directory"):
        reader(str(tmp_path))


def test_names_that_a_plan_yields_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    names = D.from_generator(lambda: iter([pipe]))
    with pytest.raises(px.errors.InvalidValueError, match="not a pipe"):
        list(px.data.TFRecordDataset(names))


def test_strings_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "strings.parquet"
    texts = [f"text {i}" for i in range(40)]
    table = pa.table({"s": texts})
    pa.parquet.write_table(table, path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"text 7", b"text\xff7"))
    with iter(px.data.ParquetDataset(str(path))) as iterator:
        for _ in range(2):
            with pytest.raises(px.errors.DataLossError, match=r"row 0: .*utf-8.*strings.parquet"):
                list(iterator)


# -- batches whose leaves do not fit together ------------------------------------------------------


def uneven() -> Iterator[Any]:
    yield {"x": np.zeros((4, 2)), "y": np.zeros(4)}
    yield {"x": np.zeros((4, 2)), "y": np.zeros(3)}


@pytest.mark.parametrize("policy", ["DATA", "OFF"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: D.from_generator(uneven),
        lambda: D.range(2).map(lambda i: {"x": np.zeros((4, 2)), "y": np.zeros(4 - i)}),
        lambda: list(uneven()),
        uneven,
    ],
)
def test_batches_with_uneven_leaves_are_refused(make: Any, policy: str) -> None:
    source = make()
    if isinstance(source, D):
        options = px.data.Options()
        options.experimental_distribute.auto_shard_policy = policy
        source = source.with_options(options)
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    with iter(strategy.experimental_distribute_dataset(source)) as iterator:
        next(iterator)
        match = r"x\['x'\] with 4, x\['y'\] with 3 rows"
        with pytest.raises(px.errors.InvalidArgumentError, match=match):
            next(iterator)


def test_batches_that_are_known_to_be_uneven_are_refused_at_once() -> None:
    strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = D.from_tensors((np.zeros(4), np.zeros(3)))
    with pytest.raises(px.errors.InvalidArgumentError, match=r"x\[0\] with 4, x\[1\] with 3 rows"):
        next(iter(strategy.experimental_distribute_dataset(dataset)))


# -- integers of thousands of digits ---------------------------------------------------------------


def csv_of(text: str, folder: Path) -> str:
    path = folder / "numbers.csv"
    path.write_text(text)
    return str(path)


ENDLESS: dict[str, Callable[[], Any]] = {
    "batch": lambda: R.batch(HUGE),
    "negative batch": lambda: R.batch(-HUGE),
    "padded_batch": lambda: R.padded_batch(2, HUGE),
    "padding value": lambda: list(R.padded_batch(2, None, HUGE)),
    "rebatch": lambda: R.batch(2).rebatch([HUGE]),
    "window": lambda: R.window(2, HUGE),
    "shuffle": lambda: R.shuffle(HUGE),
    "repeat": lambda: R.repeat(HUGE),
    "shard": lambda: R.shard(HUGE, 0),
    "enumerate": lambda: R.enumerate(HUGE),
    "prefetch": lambda: R.prefetch(HUGE),
    "map": lambda: R.map(lambda x: x, HUGE),
    "interleave": lambda: R.interleave(lambda x: R, 2**62),
    "range": lambda: D.range(0, 3, HUGE),
    "from_tensors": lambda: D.from_tensors(HUGE),
    "from_tensor_slices": lambda: D.from_tensor_slices([HUGE]),
    "from_generator": lambda: list(D.from_generator(lambda: [HUGE])),
    "result of map": lambda: list(R.map(lambda x: HUGE)),
    "result of filter": lambda: list(R.filter(lambda x: HUGE)),
    "weights": lambda: D.sample_from_datasets([R, R], weights=[HUGE, 1]),
    "length": lambda: len(R.repeat(2**62)),
    "state": lambda: R.iterator({"epoch": -HUGE, "index": 0, "seed": 0}),
    "policy": lambda: setattr(px.data.Options().experimental_distribute, "auto_shard_policy", HUGE),
    "buffer of replicas": lambda: px.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(
        R.batch(2), px.InputOptions(experimental_per_replica_buffer_size=-HUGE)
    ),
    "loader": lambda: list(px.OneDeviceStrategy("CPU:0").experimental_distribute_dataset([[HUGE]])),
    "context": lambda: px.InputContext(1, 0, 2).get_per_replica_batch_size(HUGE + 1),
    "feature": lambda: px.train.Int64List(value=[HUGE]),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_endless_integers_are_refused_by_name(what: str) -> None:
    with pytest.raises(px.PhalanxError, match="Received") as info:
        ENDLESS[what]()
    assert "Exceeds the limit" not in str(info.value)
    assert len(str(info.value)) < 1000


def test_endless_integers_in_files(tmp_path: Path) -> None:
    path = csv_of(f"1,2\n3,{DIGITS}\n", tmp_path)
    iterator = iter(px.data.CsvDataset(path, [np.int32, np.int64]))
    next(iterator)
    with pytest.raises(px.errors.InvalidArgumentError, match=r"row 1.*field 1 is not a valid int64"):
        next(iterator)
    with pytest.raises(px.PhalanxError, match="Received"):
        px.data.CsvDataset(path, [np.int32, HUGE])
    assert len(list(px.data.TextLineDataset(path))[1]) == 5002
