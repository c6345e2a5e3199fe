"""What plans mean, element by element: the model that the vectorised cursors are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.data.batching import Batch
from phalanx.data.combining import Concatenate, Zip
from phalanx.data.interleaving import Interleave
from phalanx.data.mapping import Enumerate, Filter, Map
from phalanx.data.node import Node, Run
from phalanx.data.prefetch import Prefetch
from phalanx.data.reorder import Repeat, Shard, Skip, Take
from phalanx.data.shuffling import Shuffle, shuffles_in
from phalanx.data.sources import Range, Slices
from phalanx.data.unbatching import Rebatch, Unbatch

Elements = Iterator[Any]


def naive(node: Node, run: Run) -> Elements:
    """The elements of a plan whose elements are single arrays."""
    if isinstance(node, Range):
        yield from np.array(node.numbers, np.int64)
    elif isinstance(node, Slices):
        yield from node.columns[0]
    elif isinstance(node, Concatenate):
        for i, part in enumerate(node.inputs):
            yield from naive(part, run.in_branch(i))
    elif isinstance(node, Zip):
        yield from zip(*(naive(n, run.in_branch(i)) for i, n in enumerate(node.inputs)), strict=False)
    elif isinstance(node, Repeat):
        yield from _repeat(node, run)
    elif isinstance(node, Interleave):
        for i, x in enumerate(naive(node.inputs[0], run.in_branch(-1))):
            yield from naive(node.fn(x)._node, run.in_branch(i))
    else:
        yield from _one_input(node, naive(node.inputs[0], run), run)


def _repeat(node: Repeat, run: Run) -> Elements:
    number = 0
    while node.count is None or number < node.count:
        empty = True
        for x in naive(node.inputs[0], run.in_pass(number)):
            empty = False
            yield x
        if empty:
            return
        number += 1


def _one_input(node: Node, elements: Elements, run: Run) -> Elements:
    if isinstance(node, Take):
        for i, x in enumerate(elements):
            if node.count >= 0 and i >= node.count:
                return
            yield x
    elif isinstance(node, Skip):
        yield from (x for i, x in enumerate(elements) if 0 <= node.count <= i)
    elif isinstance(node, Shard):
        yield from (x for i, x in enumerate(elements) if i % node.num_shards == node.index)
    elif isinstance(node, Shuffle):
        yield from _shuffle(node, elements, run)
    elif isinstance(node, Map):
        yield from (node.fn(x[None])[0] if node.vectorized else node.fn(x) for x in elements)
    elif isinstance(node, Filter):
        yield from (x for x in elements if node.predicate(x))
    elif isinstance(node, Enumerate):
        yield from enumerate(elements, node.start)
    elif isinstance(node, Prefetch):
        yield from elements
    elif isinstance(node, Batch):
        yield from _batch(elements, [node.batch_size], node.drop_remainder)
    elif isinstance(node, Unbatch):
        yield from (row for x in elements for row in x)
    elif isinstance(node, Rebatch):
        rows = (row for x in elements for row in x)
        yield from _batch(rows, list(node.sizes), node.drop_remainder)
    else:
        raise AssertionError(f"no model of {node}")


def _batch(rows: Elements, sizes: list[int], drop_remainder: bool) -> Elements:
    batch: list[Any] = []
    number = 0
    for row in rows:
        batch.append(row)
        if len(batch) == sizes[number % len(sizes)]:
            yield np.stack(batch)
            batch = []
            number += 1
    if batch and not drop_remainder:
        yield np.stack(batch)


def _shuffle(node: Shuffle, elements: Elements, run: Run) -> Elements:
    rng = run.generator(node.seed, shuffles_in(node.inputs[0]), node.reshuffle_each_iteration)
    buffer: list[Any] = []
    for x in elements:
        if len(buffer) < node.buffer_size:
            buffer.append(x)
        else:
            slot = int(rng.random() * node.buffer_size)
            yield buffer[slot]
            buffer[slot] = x
    for slot in rng.permutation(len(buffer)):
        yield buffer[slot]
