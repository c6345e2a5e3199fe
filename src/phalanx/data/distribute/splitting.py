"""Which rows go where: the rules by which input is divided over workers and replicas.

Everything here is arithmetic on sizes. There are two ways to divide batches, and both are TensorFlow's:

* by actual size: each batch, whatever its size, is cut into one piece per replica. Pieces are as large
  as the first one, and the last ones may be empty. Used where every worker sees all batches and keeps
  its own pieces.
* by nominal size: the rows of all batches, one after the other, are cut by a table of sizes that add up
  to the nominal batch size and differ by at most one. Used where every worker has rows of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from phalanx.errors import InvalidValueError

T = TypeVar("T")


def cut(rows: int, pieces: int) -> tuple[slice, ...]:
    """Cut a batch by its actual size: `pieces` slices of ``ceil(rows / pieces)`` rows or less.

    Examples:
        >>> [(s.start, s.stop) for s in cut(4, 3)]
        [(0, 2), (2, 4), (4, 4)]
    """
    size = -(-rows // pieces)
    ends = [min(i * size, rows) for i in range(pieces + 1)]
    return tuple(slice(a, b) for a, b in itertools.pairwise(ends))


def cut_for_worker(rows: int, workers: int, replicas: int, worker: int) -> tuple[slice, ...]:
    """The slices of a batch that the replicas of one worker get.

    The batch is cut into one piece per replica of all workers, and the pieces are dealt to the workers
    in turn, like cards.

    Examples:
        >>> [(s.start, s.stop) for s in cut_for_worker(7, workers=2, replicas=2, worker=0)]
        [(0, 2), (4, 6)]
    """
    return tuple(deal(cut(rows, workers * replicas), workers, worker))


def batch_sizes_for_worker(
    global_batch_size: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> tuple[int, ...]:
    """The table of sizes by which one worker cuts its rows, over and over again.

    It has one entry per replica of all workers: in each step the worker's replicas take the next
    entries. In every step the sizes of all workers add up to the global batch size.

    Examples:
        >>> batch_sizes_for_worker(7, 2, 2, 0), batch_sizes_for_worker(7, 2, 2, 1)
        ((2, 2, 2, 1), (2, 1, 2, 2))
    """
    pieces = num_workers * num_replicas_per_worker
    floor, larger = divmod(global_batch_size, pieces)
    sizes = [floor + 1] * larger + [floor] * (pieces - larger)
    start = worker_index * num_replicas_per_worker
    return tuple(sizes[start:] + sizes[:start])


def sizes_per_step(
    global_batch_size: int, workers: int, replicas: int, worker: int
) -> tuple[tuple[int, ...], ...]:
    """The table of `batch_sizes_for_worker`, one entry per step; the steps repeat.

    Examples:
        >>> sizes_per_step(7, workers=2, replicas=2, worker=1)
        ((2, 1), (2, 2))
    """
    table = batch_sizes_for_worker(global_batch_size, workers, replicas, worker)
    steps = [table[i : i + replicas] for i in range(0, len(table), replicas)]
    return (steps[0],) if len(set(steps)) == 1 else tuple(steps)


def fill(rows: int, sizes: Sequence[int]) -> tuple[slice, ...]:
    """Give `rows` to replicas that want `sizes`, in order; the last ones go short.

    Examples:
        >>> [(s.start, s.stop) for s in fill(3, (2, 2, 2))]
        [(0, 2), (2, 3), (3, 3)]
    """
    ends = [min(end, rows) for end in itertools.accumulate(sizes, initial=0)]
    return tuple(slice(a, b) for a, b in itertools.pairwise(ends))


def deal(items: Sequence[T], workers: int, worker: int) -> Sequence[T]:
    """Every `workers`-th item, beginning with that of `worker`: how files and pieces are dealt.

    Examples:
        >>> deal(["a", "b", "c"], workers=2, worker=0)
        ['a', 'c']
    """
    check_worker(workers, worker)
    return items[worker::workers]


def check_worker(workers: int, worker: int) -> None:
    """Refuse a worker that does not exist."""
    if not 0 <= worker < workers:
        raise InvalidValueError(
            f"The worker must be one of 0 to {workers - 1}. Received: worker={worker}"
        )
