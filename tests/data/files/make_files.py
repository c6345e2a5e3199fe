"""Makes the files under ``from_tensorflow``, and what TensorFlow reads from them. Needs TensorFlow.

Without arguments it makes them again. With names of TFRecord files that Phalanx wrote, each followed by
its compression ("" for none), it checks that TensorFlow reads the records of ``plain.tfrecord`` there.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

tf: Any = None  # imported when this is run, since tests need only the files
HERE = Path(__file__).parent / "from_tensorflow"
COUNT = 12


def feature(**lists: Any) -> Any:
    ((kind, value),) = lists.items()
    message = {"bytes_list": tf.train.BytesList, "float_list": tf.train.FloatList}
    return tf.train.Feature(**{kind: message.get(kind, tf.train.Int64List)(value=value)})


def example(i: int) -> Any:
    features = {
        "id": feature(int64_list=[i]),
        "signed": feature(int64_list=[-i, i * 1000, -(2**63) + i, 2**63 - 1 - i]),
        "pixels": feature(float_list=[i / 8, -1.5, 3e38, 1e-45, 0.1, 7.0]),
        "name": feature(bytes_list=[f"näme {i}".encode()]),
        "words": feature(bytes_list=[b"w" * n for n in range(i % 4)]),
        "sequence": feature(float_list=[float(n) for n in range(2 * (i % 3))]),
    }
    if i % 3 == 0:
        features["sometimes"] = feature(int64_list=[i + 100])
    if i % 5 == 0:
        features["unset"] = tf.train.Feature()
    return tf.train.Example(features=tf.train.Features(feature=features))


def specs() -> dict[str, Any]:
    return {
        "id": tf.io.FixedLenFeature([], tf.int64),
        "signed": tf.io.FixedLenFeature([2, 2], tf.int64),
        "pixels": tf.io.FixedLenFeature([2, 3], tf.float32),
        "name": tf.io.FixedLenFeature([], tf.string),
        "words": tf.io.VarLenFeature(tf.string),
        "sequence": tf.io.FixedLenSequenceFeature(
            [2], tf.float32, allow_missing=True, default_value=-1.0
        ),
        "sometimes": tf.io.FixedLenFeature([], tf.int64, default_value=-7),
        "unset": tf.io.FixedLenFeature([], tf.string, default_value="nothing"),
    }


def plain(value: Any) -> Any:
    """Arrays and bytes as JSON can hold them; floats as their bits."""
    if isinstance(value, tf.SparseTensor):
        dense = tf.RaggedTensor.from_sparse(value)
        return [[plain(v) for v in row] for row in dense.numpy()]
    value = value.numpy() if hasattr(value, "numpy") else value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if getattr(value, "dtype", None) == "float32":
        return value.view("int32").tolist()
    return (
        [plain(v) for v in value]
        if getattr(value, "ndim", 0)
        else getattr(value, "item", lambda: value)()
    )


def write(path: Path, records: list[bytes], compression: str = "") -> None:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)


def orders() -> list[dict[str, Any]]:
    """In which order records of several files come."""
    found = []
    folder = Path(tempfile.mkdtemp())
    for sizes in ([3, 1, 2, 4, 2], [0, 3, 0, 2], [2, 5, 1], [4, 4, 4], [1, 1, 1, 1, 1]):
        names = []
        for number, size in enumerate(sizes):
            path = folder / f"{number}.tfrecord"
            write(path, [f"{number}.{i}".encode() for i in range(size)])
            names.append(str(path))
        for reads in (None, 1, 2, 3, 8):
            dataset = tf.data.TFRecordDataset(names, num_parallel_reads=reads)
            order = [record.decode() for record in dataset.as_numpy_iterator()]
            found.append({"sizes": sizes, "reads": reads, "order": order})
    return found


def make() -> None:
    HERE.mkdir(exist_ok=True)
    records = [example(i).SerializeToString(deterministic=True) for i in range(COUNT)]
    write(HERE / "plain.tfrecord", records)
    write(HERE / "gzip.tfrecord", records, "GZIP")
    write(HERE / "zlib.tfrecord", records, "ZLIB")

    text = b"first\r\n\r\n  third \xc3\xa9\n\nlast without an end"
    (HERE / "lines.txt").write_bytes(text)
    lines = tf.data.TextLineDataset(str(HERE / "lines.txt"))

    (HERE / "fixed.bin").write_bytes(b"HEADER" + bytes(range(40)) + b"END")
    fixed = tf.data.FixedLengthRecordDataset(str(HERE / "fixed.bin"), 8, 6, 3)

    table = (
        b'id,name,score,big\r\n1,"Ann, ""B""",0.5,-9000000000\r\n2,,,7\r\n3,"two\nlines",1e-3,NA\r\n'
    )
    (HERE / "table.csv").write_bytes(table)
    rows = tf.data.experimental.CsvDataset(
        str(HERE / "table.csv"),
        [tf.int32, "nobody", tf.constant([9.25], tf.float32), tf.constant([-1], tf.int64)],
        header=True,
        na_value="NA",
    )

    parsed = tf.io.parse_example(records, specs())
    expected = {
        "version": tf.__version__,
        "records": [plain(r) for r in records],
        "parsed": {key: plain(value) for key, value in sorted(parsed.items())},
        "lines": [plain(x) for x in lines.as_numpy_iterator()],
        "fixed": [plain(x) for x in fixed.as_numpy_iterator()],
        "rows": [[plain(x) for x in row] for row in rows.as_numpy_iterator()],
        "orders": orders(),
    }
    (HERE / "expected.json").write_text(json.dumps(expected, sort_keys=True) + "\n")


def check(path: str, compression: str) -> None:
    want = list(tf.data.TFRecordDataset(str(HERE / "plain.tfrecord")).as_numpy_iterator())
    have = list(tf.data.TFRecordDataset(path, compression).as_numpy_iterator())
    assert have == want, f"{path}: {len(have)} records, {len(want)} expected"
    print(f"{path} {compression or 'plain'}: {len(have)} records, as expected")


if __name__ == "__main__":
    tf = importlib.import_module("tensorflow")
    if len(sys.argv) == 1:
        make()
    for path, compression in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        check(path, compression)
