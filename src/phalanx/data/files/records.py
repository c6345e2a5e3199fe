"""TFRecord files: framed, checksummed byte strings.

A frame is the length (8 bytes), its checksum (4), the record, and the checksum of the record (4).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from phalanx.data.files.crc32c import Words, crc32c_of_each, crc32c_of_words, mask
from phalanx.data.files.formats import BytesCursor
from phalanx.data.files.streams import too_large
from phalanx.errors import DataLossError

HEADER, FOOTER = 12, 4
_length_at = struct.Struct("<Q").unpack_from


def frame(records: Sequence[bytes]) -> bytes:
    """Records as a TFRecord file holds them.

    Examples:
        >>> frame([b"abc"]).hex(" ", -4)
        '03000000 00000000 b099490e 6162636e 57f121'
    """
    lengths = np.fromiter(map(len, records), "<u8", len(records))
    headers = np.empty((len(records), 3), "<u4")
    headers[:, :2] = lengths.view("<u4").reshape(-1, 2)
    headers[:, 2] = mask(crc32c_of_words(headers[:, :2]))
    footers = mask(crc32c_of_each(records)).astype("<u4")
    parts: list[Any] = [None] * (3 * len(records))
    parts[0::3] = _rows(headers)
    parts[1::3] = records
    parts[2::3] = _rows(footers)
    return b"".join(parts)


def _rows(array: np.ndarray[Any, Any]) -> list[bytes]:
    return [row.tobytes() for row in array]


def frame_bounds(buffer: bytes, limit: int) -> list[int]:
    """Where up to `limit` complete frames start in a buffer, and where the last of them ends."""
    bounds, at, end = [0], 0, len(buffer)
    while at + HEADER <= end and len(bounds) <= limit:
        at += _length_at(buffer, at)[0] + HEADER + FOOTER
        if at > end:
            break
        bounds.append(at)
    return bounds


def lengths_are_right(buffer: bytes, starts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether the length of each frame fits its checksum."""
    headers = _words_at(buffer, starts, 3)
    return mask(crc32c_of_words(headers[:, :2])) == headers[:, 2]


def records_are_right(
    buffer: bytes, stops: Sequence[int], records: Sequence[bytes]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each record fits the checksum at the end of its frame."""
    footers = _words_at(buffer, np.asarray(stops) - FOOTER, 1)
    return mask(crc32c_of_each(records)) == footers[:, 0]


def _words_at(buffer: bytes, starts: Any, count: int) -> Words:
    rows = np.asarray(starts, np.intp)[:, None] + np.arange(4 * count)
    return np.frombuffer(buffer, np.uint8)[rows].view("<u4")


def _first_false(right: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    return len(right) if right.all() else int(right.argmin())


class RecordReader(BytesCursor):
    """Reads the records of one file, a buffer at a time.

    A fault is raised by the call that meets it first, and by further calls again.
    """

    _buffer = b""  # which begins with the next record

    def read_block(self) -> list[bytes]:
        """The next records, at least one; none at the end."""
        bounds = self._frames(self._buffer_size)
        records = [self._buffer[a + HEADER : b - FOOTER] for a, b in itertools.pairwise(bounds)]
        if records:
            good = _first_false(records_are_right(self._buffer, bounds[1:], records))
            if not good:
                raise self._fault("its checksum is wrong")
            records = records[:good]
            self._advance(good, bounds[good])
        return records

    def skip_ahead(self, count: int) -> int:
        """Skip up to `count` records without looking into them; how many there were."""
        skipped = 0
        while skipped < count:
            bounds = self._at_hand(count - skipped)
            done, size = len(bounds) - 1, bounds[-1]
            if not done and len(self._buffer) >= HEADER:
                done, size = 1, self._frame_size()
                missing = size - len(self._buffer)
                if self._skip_bytes(missing) < missing:
                    raise self._truncated()
            elif not done and not self._fill(self._buffer_size):
                if self._buffer:
                    raise self._truncated()
                break
            self._advance(done, size)
            skipped += done
        return skipped

    def _frames(self, limit: int) -> list[int]:
        """The bounds of the next frames, at least one; only ``[0]`` at the end of the file."""
        while len(bounds := self._at_hand(limit)) == 1:
            size = self._frame_size()
            if self._most is not None and size > self._most + HEADER + FOOTER:
                size -= HEADER + FOOTER
                raise too_large(self._path, "record", self._number, size, self._most)
            missing = size - len(self._buffer)
            if not self._fill(max(missing, self._buffer_size)):
                if self._buffer:
                    raise self._truncated()
                break
        return bounds

    def _at_hand(self, limit: int) -> list[int]:
        """The bounds of the frames that are in the buffer."""
        bounds = frame_bounds(self._buffer, limit)
        if len(bounds) > 1:
            good = _first_false(lengths_are_right(self._buffer, bounds[:-1]))
            if not good:
                raise self._fault("the checksum of its length is wrong")
            bounds = bounds[: good + 1]
        return bounds

    def _frame_size(self) -> int:
        """How many bytes of the file the next frame takes, as far as is known."""
        if len(self._buffer) < HEADER:
            return HEADER
        if not lengths_are_right(self._buffer, [0])[0]:
            raise self._fault("the checksum of its length is wrong")
        size = int(_length_at(self._buffer, 0)[0]) + HEADER + FOOTER
        if self._stream.size is not None and self._offset + size > self._stream.size:
            raise self._truncated()
        return size

    def _fill(self, size: int) -> bool:
        data = self._read_bytes(size)
        self._buffer += data
        return bool(data)

    def _advance(self, count: int, size: int) -> None:
        self._buffer = self._buffer[size:]
        self._number += count
        self._offset += size

    def _truncated(self) -> DataLossError:
        return self._fault("the file ends in the middle of it")
