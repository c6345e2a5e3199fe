"""TensorBoard's event files, written without TensorFlow: events as bytes, and the file they go to.

An event file is a TFRecord file of protobuf messages. Each has a time, a step, and values: a tag, a
tensor, and the name of the plugin that shows it.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.files.record_writer import TFRecordWriter
from phalanx.errors import FailedPreconditionError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown
from phalanx.runtime.protobuf_wire import I32, I64, bytes_field, int_field, varint

__all__ = ["EventFile", "histogram_value", "image_value", "scalar_value", "text_value"]

VERSION = b"brain.Event:2"
"""What the first event of a file says."""

_FLOAT, _DOUBLE, _STRING = 1, 2, 7  # DataType of TensorFlow
_SCALAR, _TENSOR, _BLOBS = 1, 2, 3  # DataClass of TensorBoard
_numbers = itertools.count()


def _double_field(number: int, value: float) -> bytes:
    return varint(number << 3 | I64) + struct.pack("<d", value)


def _float_field(number: int, value: float) -> bytes:
    return varint(number << 3 | I32) + struct.pack("<f", value)


def event(step: int, *values: bytes, at: float | None = None, version: bytes = b"") -> bytes:
    """An event: a step with values, or the first one of a file with its version."""
    head = _double_field(1, time.time() if at is None else at)
    if version:
        return head + bytes_field(3, version)
    return head + int_field(2, step) + bytes_field(5, b"".join(bytes_field(1, v) for v in values))


def _value(tag: str, tensor: bytes, plugin: str, kind: int, description: str | None) -> bytes:
    metadata = bytes_field(1, bytes_field(1, plugin.encode()))
    if description:
        metadata += bytes_field(3, description.encode())
    metadata += int_field(4, kind)
    return bytes_field(1, tag.encode()) + bytes_field(8, tensor) + bytes_field(9, metadata)


def _tensor(dtype: int, shape: Sequence[int], content: bytes) -> bytes:
    dims = b"".join(bytes_field(2, int_field(1, size)) for size in shape)
    return int_field(1, dtype) + bytes_field(2, dims) + content


def _strings(values: Sequence[bytes], shape: Sequence[int]) -> bytes:
    return _tensor(_STRING, shape, b"".join(bytes_field(8, value) for value in values))


def scalar_value(tag: str, data: Any, description: str | None = None) -> bytes:
    """One number."""
    array = np.asarray(data)
    if array.shape != () or array.dtype.kind not in "fiubV":
        raise InvalidValueError(f"A scalar must be one number. Received: {shown(data)}")
    tensor = _tensor(_FLOAT, (), _float_field(5, float(array.astype(np.float64))))
    return _value(tag, tensor, "scalars", _SCALAR, description)


def text_value(tag: str, data: Any, description: str | None = None) -> bytes:
    """A text, or an array of texts."""
    array = np.asarray(data, object)
    if not all(isinstance(x, str | bytes) for x in array.flat):
        raise InvalidTypeError(f"Text must be a string, or strings. Received: {shown(data)}")
    encoded = [x if isinstance(x, bytes) else x.encode() for x in array.flat]
    return _value(tag, _strings(encoded, array.shape), "text", _TENSOR, description)


def histogram_value(
    tag: str, data: Any, buckets: int | None = None, description: str | None = None
) -> bytes:
    """How many numbers lie in each of some intervals of one width."""
    numbers = np.asarray(data, np.float64).ravel()
    count = 30 if buckets is None else buckets
    if numbers.size == 0 or count == 0:
        table = np.zeros((count, 3))
    elif numbers.min() == numbers.max():
        table = np.zeros((count, 3))
        table[:, :2] = numbers[0]
        table[-1] = numbers[0] - 0.5, numbers[0] + 0.5, numbers.size
    else:
        counts, edges = np.histogram(numbers, bins=count)
        table = np.stack([edges[:-1], edges[1:], counts], axis=1)
    tensor = _tensor(_DOUBLE, table.shape, bytes_field(4, table.astype("<f8").tobytes()))
    return _value(tag, tensor, "histograms", _TENSOR, description)


def image_value(tag: str, data: Any, max_outputs: int = 3, description: str | None = None) -> bytes:
    """Images: a batch of arrays of height, width and one, two, three or four channels."""
    array = np.asarray(data)
    if array.ndim != 4 or array.shape[-1] not in (1, 2, 3, 4):
        raise InvalidValueError(
            "Images must have the shape [batch, height, width, channels], with one to four channels. "
            f"Received: an array of shape {array.shape}"
        )
    if array.dtype != np.uint8:
        array = (np.clip(array.astype(np.float64), 0.0, 1.0) * 255.0 + 0.5).astype(np.uint8)
    height, width = array.shape[1:3]
    parts = [str(width).encode(), str(height).encode(), *map(png, array[:max_outputs])]
    return _value(tag, _strings(parts, (len(parts),)), "images", _BLOBS, description)


def png(image: np.ndarray[Any, Any]) -> bytes:
    r"""An image of height, width and channels, each a byte, as a PNG file.

    >>> png(np.zeros((1, 1, 3), np.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    height, width, channels = image.shape
    color = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    packed = zlib.compress(rows.tobytes())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


class EventFile:
    """A file of events in a directory, made with the first of them; any thread may write.

    Args:
        logdir: the directory; TensorBoard shows each as a run.
        suffix: what the name of the file ends with.
        max_queue: how many events are kept before they go to the file.
    """

    def __init__(self, logdir: str | os.PathLike[str], suffix: str = "", max_queue: int = 10) -> None:
        self.logdir = os.fspath(logdir)
        self._suffix, self._most, self._waiting = suffix, max_queue, 0
        self._lock = threading.Lock()
        self._writer: TFRecordWriter | None = None
        self._closed = False

    @property
    def path(self) -> str | None:
        """The file, once there is one."""
        return None if self._writer is None else self._path

    def add(self, step: int, *values: bytes) -> None:
        """Write an event."""
        with self._lock:
            if self._closed:
                raise FailedPreconditionError(
                    f"This summary writer was closed; make another one. Received: {shown(self.logdir)}"
                )
            self._open().write(event(step, *values))
            self._waiting += 1
            if self._waiting >= self._most:
                self._flush()

    def _open(self) -> TFRecordWriter:
        if self._writer is None:
            Path(self.logdir).mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}"
            self._path = os.path.join(
                self.logdir, f"{name}.{os.getpid()}.{next(_numbers)}{self._suffix}"
            )
            self._writer = TFRecordWriter(self._path)
            self._writer.write(event(0, version=VERSION))
            self._writer.flush()
        return self._writer

    def _flush(self) -> None:
        self._waiting = 0
        if self._writer is not None:
            self._writer.flush()

    def flush(self) -> None:
        """Have all events in the file."""
        with self._lock:
            if not self._closed:
                self._flush()

    def close(self) -> None:
        """Have all events in the file, and close it. Safe to call twice."""
        with self._lock:
            self._closed = True
            if self._writer is not None:
                self._writer.close()
