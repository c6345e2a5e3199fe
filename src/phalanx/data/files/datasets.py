"""The datasets that read files, as users see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from phalanx.data.dataset import Dataset
from phalanx.data.files import source as files
from phalanx.data.files.csv import CsvFormat, as_column
from phalanx.data.files.formats import BytesCursor, BytesFormat
from phalanx.data.files.parquet import parquet_format
from phalanx.data.files.readers import FixedReader, TextReader
from phalanx.data.files.records import RecordReader
from phalanx.data.files.streams import BUFFER_BYTES, MOST_BYTES, check_compression
from phalanx.data.plan import argument_checks as checks
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


def _buffer(buffer_size: Any) -> int:
    if buffer_size is None:
        return BUFFER_BYTES
    return checks.integer(buffer_size, "buffer_size", 0) or BUFFER_BYTES


def _most(max_record_bytes: Any, compression: str) -> int | None:
    """How many bytes a record may have; a file that is not compressed limits them by itself."""
    if max_record_bytes is None:
        return MOST_BYTES if compression else None
    return checks.integer(max_record_bytes, "max_record_bytes", 1)


class _BytesDataset(Dataset):
    """The byte strings of files, as a subclass says how to read them."""

    _cursor: ClassVar[type[BytesCursor]]

    def __init__(
        self,
        filenames: Any,
        compression_type: str | None = None,
        buffer_size: int | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
        max_record_bytes: int | None = None,
    ) -> None:
        compression = check_compression(compression_type)
        most = _most(max_record_bytes, compression)
        chosen = BytesFormat(self._cursor, (compression, _buffer(buffer_size), most))
        super().__init__(files.source(filenames, chosen, num_parallel_reads))


class TFRecordDataset(_BytesDataset):
    """The records of TFRecord files, as bytes.

    Every record is checked against its checksum. `px.io.parse_example` parses records that hold
    `px.train.Example` messages.

    Args:
        filenames: a name, a path, a list of them, or a dataset of names. Files must exist.
        compression_type: ``"GZIP"``, ``"ZLIB"``, or None or ``""`` for none.
        buffer_size: how many bytes to read at once.
        num_parallel_reads: how many files to read at a time, each in a thread; their records then come
            in turn. None reads one file after the other.
        name: ignored.
        max_record_bytes: how long a record may be. A longer one is an error, because a small file that
            is compressed can hold a record that fills the memory. 256 MB if not set, and no limit in
            files that are not compressed.

    Examples:
        >>> import phalanx as px, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "data.tfrecord.gz")
        >>> with px.io.TFRecordWriter(path, "GZIP") as writer:
        ...     for i in range(3):
        ...         writer.write(b"record %d" % i)
        >>> list(px.data.TFRecordDataset(path, "GZIP").skip(1))
        [b'record 1', b'record 2']
    """

    _cursor = RecordReader


class TextLineDataset(_BytesDataset):
    r"""The lines of text files, as bytes without ``\n`` or ``\r\n`` at their ends.

    Args:
        filenames: a name, a path, a list of them, or a dataset of names. Files must exist.
        compression_type: ``"GZIP"``, ``"ZLIB"``, or None or ``""`` for none.
        buffer_size: how many bytes to read at once.
        num_parallel_reads: how many files to read at a time, each in a thread; their lines then come
            in turn. None reads one file after the other.
        name: ignored.
        max_record_bytes: how long a line may be; see `TFRecordDataset`.

    Examples:
        >>> import phalanx as px, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "poem.txt")
        >>> with open(path, "w") as file:
        ...     _ = file.write("one\ntwo\n")
        >>> list(px.data.TextLineDataset(path))
        [b'one', b'two']
    """

    _cursor = TextReader


class FixedLengthRecordDataset(Dataset):
    """Records of one length from binary files, as bytes.

    Args:
        filenames: a name, a path, a list of them, or a dataset of names. Files must exist.
        record_bytes: the length of a record.
        header_bytes: how many bytes to leave out at the beginning of each file.
        footer_bytes: how many bytes to leave out at the end of each file.
        buffer_size: how many bytes to read at once.
        compression_type: ``"GZIP"``, ``"ZLIB"``, or None or ``""`` for none.
        num_parallel_reads: how many files to read at a time, each in a thread; their records then come
            in turn. None reads one file after the other.

    Examples:
        >>> import phalanx as px, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "data.bin")
        >>> with open(path, "wb") as file:
        ...     _ = file.write(b"HEAD" + b"abcdef")
        >>> list(px.data.FixedLengthRecordDataset(path, record_bytes=3, header_bytes=4))
        [b'abc', b'def']
    """

    def __init__(
        self,
        filenames: Any,
        record_bytes: int,
        header_bytes: int | None = None,
        footer_bytes: int | None = None,
        buffer_size: int | None = None,
        compression_type: str | None = None,
        num_parallel_reads: int | None = None,
        name: str | None = None,
    ) -> None:
        sizes = (
            checks.integer(record_bytes, "record_bytes", 1),
            checks.integer(header_bytes or 0, "header_bytes", 0),
            checks.integer(footer_bytes or 0, "footer_bytes", 0),
        )
        arguments = (check_compression(compression_type), _buffer(buffer_size), sizes)
        chosen = BytesFormat(FixedReader, arguments)
        super().__init__(files.source(filenames, chosen, num_parallel_reads))


class CsvDataset(Dataset):
    r"""The rows of CSV files, as tuples with one entry per column.

    Args:
        filenames: a name, a path, a list of them, or a dataset of names. Files must exist.
        record_defaults: one entry per column: a dtype if the field is required (float32, float64,
            int32, int64 or ``bytes``), or the value that stands for an empty field.
        compression_type: ``"GZIP"``, ``"ZLIB"``, or None or ``""`` for none.
        buffer_size: how many bytes to read at once.
        header: whether to leave out the first row of each file.
        field_delim: what separates fields.
        use_quote_delim: whether fields may be quoted, as RFC 4180 describes it.
        na_value: besides nothing at all, what stands for an empty field.
        select_cols: the positions of the columns to read, in ascending order; the others are left out.
        exclude_cols: instead, the positions of the columns to leave out.
        max_record_bytes: how long a row may be; see `TFRecordDataset`.

    Examples:
        >>> import numpy as np, phalanx as px, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "data.csv")
        >>> with open(path, "w") as file:
        ...     _ = file.write('id,name,score\n1,"Ann, B",0.5\n2,Cid,\n')
        >>> rows = px.data.CsvDataset(path, [np.int32, bytes, 9.0], header=True)
        >>> [(int(i), name, float(score)) for i, name, score in rows]
        [(1, b'Ann, B', 0.5), (2, b'Cid', 9.0)]
    """

    def __init__(
        self,
        filenames: Any,
        record_defaults: Sequence[Any],
        compression_type: str | None = None,
        buffer_size: int | None = None,
        header: bool = False,
        field_delim: str = ",",
        use_quote_delim: bool = True,
        na_value: str = "",
        select_cols: Sequence[int] | None = None,
        exclude_cols: Sequence[int] | None = None,
        max_record_bytes: int | None = None,
    ) -> None:
        if isinstance(record_defaults, str | bytes) or not len(record_defaults):
            raise InvalidValueError(
                "record_defaults must be a list with one entry per column. "
                f"Received: {shown(record_defaults)}"
            )
        columns = tuple(as_column(default) for default in record_defaults)
        delimiter = field_delim.encode() if isinstance(field_delim, str) else b""
        if len(delimiter) != 1 or delimiter in (b'"', b"\n", b"\r"):
            raise InvalidValueError(
                "field_delim must be one character, no quote and no end of line. "
                f"Received: {shown(field_delim)}"
            )
        selected, width = _selection(len(columns), select_cols, exclude_cols)
        compression = check_compression(compression_type)
        chosen = CsvFormat(
            columns,
            selected,
            width,
            header,
            delimiter,
            use_quote_delim,
            na_value.encode(),
            compression,
            _buffer(buffer_size),
            _most(max_record_bytes, compression),
        )
        super().__init__(files.source(filenames, chosen))


def _selection(
    count: int, select: Sequence[int] | None, exclude: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, int | None]:
    """The positions of the columns to read, and how many fields a row has."""
    if select is not None and exclude is not None:
        raise InvalidValueError(
            "Give select_cols or exclude_cols, not both. "
            f"Received: {shown(select)} and {shown(exclude)}"
        )
    given = select if select is not None else exclude
    if given is None:
        return None, count
    name = "select_cols" if select is not None else "exclude_cols"
    chosen = tuple(checks.integer(i, name, 0) for i in given)
    if list(chosen) != sorted(set(chosen)):
        raise InvalidValueError(f"{name} must ascend. Received: {shown(given)}")
    if exclude is not None:
        width = count + len(chosen)
        if chosen and chosen[-1] >= width:
            raise InvalidValueError(
                f"exclude_cols must be below the number of columns, {width}. Received: {shown(given)}"
            )
        return tuple(i for i in range(width) if i not in chosen), width
    if len(chosen) != count:
        raise InvalidValueError(
            f"select_cols must have one entry per entry of record_defaults, which has {count}. "
            f"Received: {shown(given)}"
        )
    return chosen, None


class ParquetDataset(Dataset):
    """The rows of Parquet files, as dictionaries with one entry per column.

    Needs pyarrow, which ``pip install 'phalanx[parquet]'`` brings along. Row groups are read as
    columns, so a batch of rows costs little more than a slice.

    Args:
        filenames: a name, a path or a list of them. Files must exist and have the same columns.
        columns: which columns to read; all if not given.
        num_parallel_reads: how many files to read at a time, each in a thread; their rows then come in
            turn. None reads one file after the other.

    Examples:
        >>> import phalanx as px, pyarrow as pa, pyarrow.parquet, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "data.parquet")
        >>> pa.parquet.write_table(pa.table({"x": [1.0, 2.0], "name": ["a", "b"]}), path)
        >>> [(row["name"], float(row["x"])) for row in px.data.ParquetDataset(path)]
        [('a', 1.0), ('b', 2.0)]
    """

    def __init__(
        self,
        filenames: Any,
        columns: Sequence[str] | None = None,
        num_parallel_reads: int | None = None,
    ) -> None:
        names, inputs = files.named_files(filenames)
        if isinstance(columns, str):
            raise InvalidTypeError(f"columns must be a list of names. Received: {shown(columns)}")
        first = next(files.names_in(inputs[0]) if inputs else iter(names or ()), None)
        if first is None:
            raise InvalidValueError("ParquetDataset needs at least one file. Received: no names")
        chosen = parquet_format(first, columns)
        parallel = files.check_parallel(num_parallel_reads)
        super().__init__(files.FileSource(inputs, chosen, names, parallel))
