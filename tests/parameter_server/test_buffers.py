"""Memory that is used again."""

from __future__ import annotations

import jax
import numpy as np

from phalanx.parameter_server.buffers import BufferPool

BYTES = np.dtype(np.uint8)


def test_memory_in_use_is_never_given_again() -> None:
    pool = BufferPool()
    held = [pool.array((1 << 17,), BYTES) for _ in range(20)]
    for i, array in enumerate(held):
        array[:] = i
    views = [array[5:9].view(np.uint16) for array in held]
    del held, array
    for _ in range(50):
        pool.array((1 << 17,), BYTES)[:] = 255
    assert [int(v[0]) for v in views] == [i * 257 for i in range(20)]


def test_memory_that_jax_uses_is_in_use() -> None:
    pool = BufferPool()
    array = pool.array((1 << 15,), np.dtype(np.float32))
    array[:] = 1
    on_device = jax.device_put(array, jax.devices("cpu")[0])
    del array
    for _ in range(10):
        pool.array((1 << 15,), np.dtype(np.float32))[:] = 7
    assert (np.asarray(on_device) == 1).all()


def test_memory_is_aligned_and_used_again() -> None:
    pool = BufferPool()
    places = set()
    for _ in range(100):
        array = pool.array((1 << 13, 5), np.dtype("bfloat16"))
        assert array.ctypes.data % 64 == 0
        assert array.shape == (1 << 13, 5)
        places.add(array.ctypes.data)
    assert len(places) <= 2


def test_a_pool_is_bounded() -> None:
    pool = BufferPool(most=10 << 20)
    for size in range(1, 60):
        pool.take(size * 100_000)
    assert pool._size <= 10 << 20
    assert pool._size == sum(len(kept) * size for size, kept in pool._kept.items())
    assert len(pool.take(20 << 20)) == 20 << 20
