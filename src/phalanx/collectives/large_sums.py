"""Large reductions between CPU devices, done by the host.

XLA's all-reduce between CPU devices allocates a fresh result for every device, and pays for each
page of it. Above about a megabyte it is cheaper to sum the devices' buffers, which the host can see
without copying, into one new buffer that all devices then share.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from phalanx.collectives.reductions import reduce_into
from phalanx.core.reduction import ReduceOp, mean_dtype
from phalanx.runtime import compat
from phalanx.runtime.host_memory import aligned_empty, expect_buffer

LARGE_TENSOR_BYTES = 1 << 20
_PIECES = 2


def is_worthwhile(column: Sequence[jax.Array], devices: Sequence[jax.Device]) -> bool:
    """Whether one column of an all-reduce should be summed by the host."""
    first = column[0]
    return (
        first.nbytes >= LARGE_TENSOR_BYTES
        and all(d.platform == "cpu" for d in devices)
        and first.dtype in (np.float32, np.float64, np.int32, np.int64)
    )


def reduce_on_host(
    op: ReduceOp, column: Sequence[jax.Array], devices: Sequence[jax.Device]
) -> list[jax.Array]:
    """The sum or mean of one array per device, on every device; the copies share their memory."""
    expect_buffer(column[0].nbytes)
    views = [np.asarray(x) for x in column]
    dtype = np.dtype(mean_dtype(views[0].dtype)) if op is ReduceOp.MEAN else views[0].dtype
    total = aligned_empty(views[0].shape, dtype)
    flat, sources = total.reshape(-1), [v.reshape(-1) for v in views]
    bounds = np.linspace(0, flat.size, _PIECES + 1).astype(int)

    def reduce_piece(piece: int) -> None:
        part = slice(bounds[piece], bounds[piece + 1])
        # The mean of integers is no integer here, unlike in px.comm.
        rows = [source[part].astype(dtype, copy=False) for source in sources]
        reduce_into(op, rows, flat[part])

    with ThreadPoolExecutor(_PIECES) as pool:  # NumPy releases the interpreter lock
        list(pool.map(reduce_piece, range(_PIECES)))
    return [compat.uncommitted(jax.device_put(total, device)) for device in devices]
