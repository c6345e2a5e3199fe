"""TensorBoard's event files without TensorFlow: what the `TensorBoard` callback of Keras needs.

An event file holds records, as TFRecord files do, of protobuf messages: when, at which step, and the
values by their tags.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.data.files.record_writer import TFRecordWriter
from phalanx.runtime.protobuf_wire import I32, I64, bytes_field, int_field, varint

_BUCKETS = 30


class EventFileWriter:
    """Writes one event file.

    Args:
        folder: where; made if it is missing.
    """

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
        self._file = TFRecordWriter(str(Path(folder) / name))
        self._file.write(_double(1, time.time()) + bytes_field(3, b"brain.Event:2"))
        self._summary: EventSummary | None = None

    def write(self, step: int, value: bytes) -> None:
        """Write one value of a summary."""
        event = _double(1, time.time()) + int_field(2, step) + bytes_field(5, bytes_field(1, value))
        self._file.write(event)

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[EventFileWriter]:
        """Let values go to this file, for a while."""
        assert self._summary is not None
        self._summary.opened.append((self, step))
        try:
            yield self
        finally:
            self._summary.opened.pop()

    def flush(self) -> None:
        """Write what has been kept back."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventSummary:
    """The functions of `tf.summary` that the callback calls."""

    def __init__(self) -> None:
        self.opened: list[tuple[EventFileWriter, Any]] = []
        self._conditions: list[Callable[[], bool] | bool] = []

    def create_file_writer(self, folder: str) -> EventFileWriter:
        """A writer of event files in a folder."""
        writer = EventFileWriter(folder)
        writer._summary = self
        return writer

    @contextlib.contextmanager
    def record_if(self, condition: Callable[[], bool] | bool) -> Iterator[None]:
        """Write only where a condition holds."""
        self._conditions.append(condition)
        try:
            yield
        finally:
            self._conditions.pop()

    def scalar(self, name: str, data: Any, step: Any = None) -> None:
        """Write a number."""
        value = struct.pack("<f", float(np.asarray(data)))
        self._write(name, step, varint(2 << 3 | I32) + value)

    def histogram(self, name: str, data: Any, step: Any = None) -> None:
        """Write how numbers are distributed."""
        self._write(name, step, bytes_field(5, _histogram(np.asarray(data, np.float64).ravel())))

    def image(self, name: str, data: Any, step: Any = None) -> None:
        """Leave out an image, which would need a writer of PNG."""

    def trace_on(self, **kwargs: Any) -> None:
        """Do nothing: there is no graph of TensorFlow."""

    def trace_export(self, **kwargs: Any) -> None:
        """Do nothing: there is no graph of TensorFlow."""

    def _write(self, name: str, step: Any, value: bytes) -> None:
        wanted = all(c() if callable(c) else c for c in self._conditions[-1:])
        if self.opened and wanted:
            writer, at = self.opened[-1]
            number = int(np.asarray(at if step is None else step))
            writer.write(number, bytes_field(1, name.encode()) + value)


def _histogram(numbers: Any) -> bytes:
    """A HistogramProto: extremes, sums, and how many numbers are below each limit."""
    counts, edges = np.histogram(numbers, bins=_BUCKETS) if numbers.size else (np.zeros(1), np.zeros(2))
    limits = np.asarray(edges[1:], "<f8").tobytes()
    heights = np.asarray(counts, "<f8").tobytes()
    low, high = (numbers.min(), numbers.max()) if numbers.size else (0.0, 0.0)
    return (
        _double(1, low)
        + _double(2, high)
        + _double(3, numbers.size)
        + _double(4, numbers.sum())
        + _double(5, np.square(numbers).sum())
        + bytes_field(6, limits)
        + bytes_field(7, heights)
    )


def _double(number: int, value: float) -> bytes:
    return varint(number << 3 | I64) + struct.pack("<d", float(value))
