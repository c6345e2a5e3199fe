"""Arrays in one file: small ones together, large ones in pieces."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from hypothesis import given, strategies as st

from phalanx.train.checkpoints import packing
from phalanx.train.checkpoints.packing import Packer


class Disk(io.BytesIO):
    """Takes part of what is given to it, as files may, and counts how often it is asked."""

    asked = 0

    def write(self, piece) -> int:
        self.asked += 1
        return super().write(piece[: max(1, len(piece) * 2 // 3)])


@given(st.lists(st.integers(0, 300), max_size=40))
def test_all_bytes_are_where_they_are_said_to_be(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_SMALL", 100)
        patch.setattr(packing, "PIECE", 256)
        file, told = Disk(), []
        packer = Packer(file, told.append)
        arrays = [np.full(size, i, np.uint8) for i, size in enumerate(sizes)]
        places = [packer.put(array) for array in arrays]
        packer.flush()
    found = file.getvalue()
    ends = [offset + size for (offset, _), size in zip(places, sizes, strict=True)]
    assert len(found) == max(ends, default=0)
    for array, (offset, checksum) in zip(arrays, places, strict=True):
        assert found[offset : offset + len(array)] == array.tobytes()
        assert checksum == zlib.crc32(array)
        assert offset % 64 == 0
    assert all(end <= offset for end, (offset, _) in zip(ends, places[1:], strict=False))
    assert sum(told) == sum(sizes)


def test_many_small_arrays_take_few_writes() -> None:
    file = Disk()
    packer = Packer(file)
    for _ in range(1000):
        packer.put(np.ones(100, np.uint8))
    assert file.asked == 0
    packer.flush()
    assert 0 < file.asked < 20
