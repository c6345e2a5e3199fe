"""CRC-32C, the checksum of TFRecord files, for many pieces of a buffer at once.

A CRC is the remainder of a polynomial division, and remainders add up: the CRC of a text is the sum
(exclusive or) of its words, each multiplied by a power of x for its distance from the end. Multiplying
a word by a fixed power is two look-ups in tables of 65536 entries, so a block of words is folded in
halves, all blocks of all texts in one vectorised step. Where the package ``google_crc32c`` is installed
with its C code, that is used instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_POLYNOMIAL = 0x82F63B78  # bit i of a word is the coefficient of x^(31 - i)
_ONES = np.uint32(0xFFFFFFFF)
_LOW = np.uint32(0xFFFF)
_HIGH = np.uint32(16)
_MASK_DELTA = np.uint32(0xA282EAD8)
_BLOCK_BYTES = 1 << 17  # folded at once; larger temporaries cost page faults
_WIDEST = 1 << 10  # words

Words = np.ndarray[Any, np.dtype[np.uint32]]


def mask(crcs: Words) -> Words:
    """The form in which TFRecord files store checksums, so that a CRC over CRCs keeps its strength."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + _MASK_DELTA


def crc32c_of_each(texts: Sequence[bytes]) -> Words:
    """The CRC-32C of each of many byte strings.

    Examples:
        >>> [hex(crc) for crc in crc32c_of_each([b"123456789", b""])]
        ['0xe3069283', '0x0']
    """
    native = accelerator()
    if native is None:
        return vectorised(texts)
    return np.fromiter(map(native, texts), np.uint32, len(texts))


@functools.cache
def accelerator() -> Callable[[bytes], int] | None:
    """The C function of ``google_crc32c``, if it is installed."""
    try:
        import google_crc32c
    except ImportError:
        return None
    return google_crc32c.value if google_crc32c.implementation == "c" else None


def crc32c_of_words(words: Words) -> Words:
    """The CRC-32C of each row of a matrix of little-endian words; the width is a power of two."""
    words = words.copy()
    words[:, 0] ^= _ONES
    return _times_power(_fold(words), 1) ^ _ONES


def vectorised(texts: Sequence[bytes]) -> Words:
    """`crc32c_of_each` with NumPy alone."""
    if not texts:
        return np.zeros(0, np.uint32)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts)) + 4  # with the initial value
    width = _width(float(lengths.mean()))
    size = 4 * width
    counts = -(-lengths // size)
    last = np.cumsum(counts)
    first = last - counts
    behind = np.repeat(last, counts) - 1 - np.arange(last[-1])  # blocks that follow in the same text
    before = bytes(size) + _initial()
    pieces: list[bytes] = [b""] * (2 * len(texts))
    pieces[0::2] = [before[i:] for i in (size + lengths - size * counts).tolist()]
    pieces[1::2] = texts
    words = np.frombuffer(b"".join(pieces), "<u4").reshape(-1, width)
    step = max(1, _BLOCK_BYTES // size)
    folded = [_fold(words[i : i + step]) for i in range(0, len(words), step)]
    remainders = folded[0] if len(folded) == 1 else np.concatenate(folded)
    total = np.bitwise_xor.reduceat(_times_powers(remainders, width, behind), first)
    return _times_power(total, 1) ^ _ONES


def _width(mean: float) -> int:
    """Words per block: about an eighth of a text, so that little of it is padding."""
    width = 4
    while width < _WIDEST and 4 * width * 8 < mean:
        width *= 2
    return width


def _fold(words: Words) -> Words:
    """Each row as one word: the sum of its words, each times x^32 for every word behind it."""
    while (width := words.shape[1] // 2) > 0:
        words = words[:, width:] ^ _times_power(words[:, :width], width)
    return words[:, 0]


def _times_power(words: Words, distance: int) -> Words:
    """Words times x^(32 * distance), for a distance that is a power of two."""
    low, high = _tables(distance)
    product = low.take(words & _LOW, mode="wrap")
    product ^= high.take(words >> _HIGH, mode="wrap")
    return product


def _times_powers(words: Words, unit: int, exponents: np.ndarray[Any, Any]) -> Words:
    """Each word times x^(32 * unit * exponent), bit by bit of the exponents."""
    words = words.copy()
    for bit in range(int(exponents.max()).bit_length()):
        chosen = np.flatnonzero(exponents >> bit & 1)
        words[chosen] = _times_power(words[chosen], unit << bit)
    return words


@functools.cache
def _tables(distance: int) -> tuple[Words, Words]:
    """Products of all low and all high half words with x^(32 * distance)."""
    units = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if distance == 1:
        images = units
        for _ in range(32):
            images = (images >> np.uint32(1)) ^ np.where(images & np.uint32(1), _POLYNOMIAL, 0).astype(
                "u4"
            )
    else:
        images = _times_power(_times_power(units, distance // 2), distance // 2)
    return _sums(images[:16]), _sums(images[16:])


def _sums(images: Words) -> Words:
    """The sums of all subsets, indexed by the bits of the subset."""
    table = np.zeros(1, np.uint32)
    for image in images:
        table = np.concatenate([table, table ^ image])
    return table


@functools.cache
def _initial() -> bytes:
    """The four bytes after which the remainder is all ones, the value at which a CRC starts."""
    value = 0xFFFFFFFF
    for _ in range(32):  # divide by x
        value = ((value ^ _POLYNOMIAL) << 1 | 1) if value & 0x80000000 else value << 1
        value &= 0xFFFFFFFF
    return value.to_bytes(4, "little")
