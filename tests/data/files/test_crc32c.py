"""Checksums: known values, the definition bit by bit, and both implementations."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, strategies as st

from phalanx.data.files import crc32c

KNOWN = {
    b"": 0x00000000,
    b"a": 0xC1D04330,
    b"123456789": 0xE3069283,
    b"The quick brown fox jumps over the lazy dog": 0x22620404,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}


def by_definition(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_known_values() -> None:
    assert crc32c.vectorised(list(KNOWN)).tolist() == list(KNOWN.values())
    assert crc32c.crc32c_of_each(list(KNOWN)).tolist() == list(KNOWN.values())


@given(st.lists(st.binary(max_size=70), max_size=12))
def test_texts_of_any_sizes(texts: list[bytes]) -> None:
    assert crc32c.vectorised(texts).tolist() == [by_definition(text) for text in texts]


@pytest.mark.parametrize("sizes", [[3000] * 5, [1, 100_000, 0, 17, 4096], [2_500_000], [5] * 5000])
def test_large_texts(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.bytes(size) for size in sizes]
    assert crc32c.vectorised(texts).tolist() == [google_crc32c.value(text) for text in texts]


@given(st.integers(0, 4), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_rows_of_words(log_width: int, rows: int, seed: int) -> None:
    words = np.random.default_rng(seed).integers(0, 2**32, (rows, 2**log_width), np.uint32)
    before = words.copy()
    expected = [by_definition(row.astype("<u4").tobytes()) for row in words]
    assert crc32c.crc32c_of_words(words).tolist() == expected
    assert (words == before).all()


def test_the_c_function_is_used_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert crc32c.accelerator() is google_crc32c.value
    monkeypatch.setattr(crc32c, "accelerator", lambda: len)
    assert crc32c.crc32c_of_each([b"ab", b""]).tolist() == [2, 0]


@given(st.integers(0, 2**32 - 1))
def test_masks(crc: int) -> None:
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32
    assert crc32c.mask(np.array([crc], np.uint32)).tolist() == [masked]
