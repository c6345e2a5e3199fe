"""Writing TFRecord files."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from typing import Any, Self

from phalanx.data.files.formats import as_name
from phalanx.data.files.records import FOOTER, HEADER, frame
from phalanx.data.files.streams import BUFFER_BYTES, check_compression, named_error, open_file
from phalanx.data.plan import argument_checks as checks
from phalanx.errors import FailedPreconditionError, InvalidTypeError
from phalanx.runtime.formatting import shown


class TFRecordOptions:
    """How a TFRecord file is compressed.

    Args:
        compression_type: ``"GZIP"``, ``"ZLIB"``, or None or ``""`` for none.
        flush_mode: what `TFRecordWriter.flush` asks of zlib; ``zlib.Z_SYNC_FLUSH`` if not given.
        input_buffer_size: accepted as in TensorFlow; records are compressed in blocks of a size
            that Phalanx chooses.
        output_buffer_size: accepted as in TensorFlow.
        window_bits: of zlib, 9 to 15.
        compression_level: of zlib, 0 to 9; -1 for the usual one.
        compression_method: of zlib; there is only ``zlib.DEFLATED``.
        mem_level: of zlib, 1 to 9.
        compression_strategy: of zlib, for example ``zlib.Z_DEFAULT_STRATEGY``.

    Examples:
        >>> import phalanx as px
        >>> px.io.TFRecordOptions("GZIP", compression_level=9).compression_type
        'GZIP'
    """

    def __init__(
        self,
        compression_type: str | TFRecordOptions | None = None,
        flush_mode: int | None = None,
        input_buffer_size: int | None = None,
        output_buffer_size: int | None = None,
        window_bits: int | None = None,
        compression_level: int | None = None,
        compression_method: int | None = None,
        mem_level: int | None = None,
        compression_strategy: int | None = None,
    ) -> None:
        chosen = compression_type
        if isinstance(chosen, TFRecordOptions):
            chosen = chosen.compression_type
        self.compression_type: str = check_compression(chosen)
        self.flush_mode = _within("flush_mode", flush_mode, zlib.Z_SYNC_FLUSH, 0, 4)
        self.input_buffer_size = input_buffer_size
        self.output_buffer_size = output_buffer_size
        self.window_bits = _within("window_bits", window_bits, zlib.MAX_WBITS, 9, 15)
        self.compression_level = _within("compression_level", compression_level, -1, -1, 9)
        self.compression_method = _within("compression_method", compression_method, 8, 8, 8)
        self.mem_level = _within("mem_level", mem_level, zlib.DEF_MEM_LEVEL, 1, 9)
        self.compression_strategy = _within("compression_strategy", compression_strategy, 0, 0, 4)

    def _deflater(self) -> Any:
        return zlib.compressobj(
            self.compression_level,
            self.compression_method,
            self.window_bits + (16 if self.compression_type == "GZIP" else 0),
            self.mem_level,
            self.compression_strategy,
        )

    def __repr__(self) -> str:
        return f"TFRecordOptions(compression_type={self.compression_type!r})"


def _within(name: str, value: int | None, usual: int, low: int, high: int) -> int:
    return usual if value is None else checks.integer(value, name, low, high)


class TFRecordWriter:
    """Writes byte strings to a TFRecord file, as TensorFlow does.

    Records are gathered, checksummed and written in blocks; `flush` and `close` write what is left.

    Args:
        path: the file; one that exists is replaced.
        options: a `TFRecordOptions`, or the name of a compression, ``"GZIP"`` or ``"ZLIB"``.

    Examples:
        >>> import phalanx as px, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "two.tfrecord")
        >>> with px.io.TFRecordWriter(path) as writer:
        ...     writer.write(b"one")
        ...     writer.write(b"two")
        >>> list(px.data.TFRecordDataset(path))
        [b'one', b'two']
    """

    def __init__(
        self, path: str | os.PathLike[str], options: TFRecordOptions | str | None = None
    ) -> None:
        chosen = options if isinstance(options, TFRecordOptions) else TFRecordOptions(options)
        self._path = as_name(path)
        self._flush_mode = chosen.flush_mode
        self._deflater = chosen._deflater() if chosen.compression_type else None
        self._pending: list[bytes] = []
        self._size = 0
        self._file = open_file(self._path, "wb")

    def write(self, record: bytes | bytearray | memoryview) -> None:
        """Append a record."""
        if not isinstance(record, bytes | bytearray | memoryview):
            raise InvalidTypeError(
                "A record is bytes; encode strings, as in 'text'.encode(). "
                f"Received: {shown(record)} of type {type(record).__name__}"
            )
        self._check_open()
        self._pending.append(bytes(record))
        self._size += len(record) + HEADER + FOOTER
        if self._size >= BUFFER_BYTES:
            self._drain()

    def flush(self) -> None:
        """Write everything to the file that was given to `write` so far."""
        self._check_open()
        self._drain()
        if self._deflater is not None:
            self._put(self._deflater.flush(self._flush_mode))
        with self._naming_errors():
            self._file.flush()

    def close(self) -> None:
        """Write everything and close the file. Safe to call twice."""
        if self._file.closed:
            return
        try:
            self._drain()
            if self._deflater is not None:
                self._put(self._deflater.flush(zlib.Z_FINISH))
        finally:
            with self._naming_errors():
                self._file.close()

    def _check_open(self) -> None:
        if self._file.closed:
            raise FailedPreconditionError(
                f"This TFRecordWriter was closed; make another one. Received: {shown(self._path)}"
            )

    def _drain(self) -> None:
        if self._pending:
            records, self._pending, self._size = self._pending, [], 0
            data = frame(records)
            self._put(data if self._deflater is None else self._deflater.compress(data))

    def _put(self, data: bytes) -> None:
        with self._naming_errors():
            self._file.write(data)

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise named_error(self._path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()
