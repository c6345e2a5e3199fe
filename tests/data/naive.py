"""What plans mean, element by element: the model that the vectorised cursors are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

import phalanx as px
from phalanx.data.distribute.splitting import fill
from phalanx.data.ops.batching import Batch
from phalanx.data.ops.grouping import KeyedWindows, Unique
from phalanx.data.ops.ignoring import IgnoreErrors
from phalanx.data.ops.interleaving import Interleave
from phalanx.data.ops.mapping import Enumerate, Filter, Map
from phalanx.data.ops.merging import Concatenate, Zip
from phalanx.data.ops.prefetching import Prefetch
from phalanx.data.ops.selecting import Repeat, Slice
from phalanx.data.ops.shuffling import Shuffle, shuffles_in
from phalanx.data.ops.unbatching import Rebatch, Unbatch
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import RangeSource
from phalanx.data.plan.sources import Slices

Elements = Iterator[Any]
T = TypeVar("T")


def naive(node: PlanNode, run: Run) -> Elements:
    """The elements of a plan whose elements are single arrays."""
    if isinstance(node, RangeSource):
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
            dataset = node.fn(*x) if isinstance(node.inputs[0], KeyedWindows) else node.fn(x)
            yield from naive(dataset._node, run.in_branch(i))
    elif isinstance(node, IgnoreErrors):
        yield from _that_do_not_fail(node.input, naive(node.input.inputs[0], run))
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


def _one_input(node: PlanNode, elements: Elements, run: Run) -> Elements:
    if isinstance(node, Slice):
        yield from itertools.islice(elements, node.start, node.stop, node.step)
    elif isinstance(node, Shuffle):
        yield from _shuffle(node, elements, run)
    elif isinstance(node, Map):
        yield from (node.fn(x[None])[0] if node.vectorized else node.fn(x) for x in elements)
    elif isinstance(node, Filter):
        yield from (x for x in elements if node.predicate(x))
    elif isinstance(node, Unique):
        yield from _unique(elements)
    elif isinstance(node, KeyedWindows):
        yield from _windows(node, elements)
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


def _unique(elements: Elements) -> Elements:
    seen: list[Any] = []
    for x in elements:
        if not any(np.array_equal(x, y) for y in seen):
            seen.append(x)
            yield x


def _windows(node: KeyedWindows, elements: Elements) -> Elements:
    waiting: dict[int, list[Any]] = {}
    for x in elements:
        key = int(node.key(x))
        waiting.setdefault(key, []).append(x)
        if len(waiting[key]) == node.size_of(key):
            yield key, px.data.Dataset.from_tensor_slices(waiting.pop(key))
    for key in sorted(waiting):
        yield key, px.data.Dataset.from_tensor_slices(waiting[key])


def _that_do_not_fail(node: PlanNode, elements: Elements) -> Elements:
    assert isinstance(node, Map)
    for x in elements:
        try:
            yield node.fn(x[None])[0] if node.vectorized else node.fn(x)
        except ZeroDivisionError:
            continue


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


def in_turns(parts: Sequence[Sequence[T]], cycle: int, block: int | None = 1) -> list[T]:
    """TensorFlow's order: one that ends gives up its turn, and its place is filled at the next."""
    waiting = [list(part) for part in parts]
    places: list[list[T] | None] = [None] * cycle
    found: list[T] = []
    while waiting or any(place is not None for place in places):
        for i in range(cycle):
            if places[i] is None and waiting:
                places[i] = waiting.pop(0)
            place = places[i]
            if place is not None:
                found += place[:block]
                places[i] = None if block is None or len(place) < block else place[block:]
    return found


def check_reads_and_skips(cursor: Cursor, expected: list[Any], steps: list[tuple[bool, int]]) -> int:
    """Skip or read so many elements in each step, and compare; returns how many there were."""
    at = 0
    for skips, count in steps:
        if skips:
            assert cursor.skip(count) == min(count, len(expected) - at)
            at = min(at + count, len(expected))
        else:
            chunk = cursor.read(max(count, 1))
            found = [] if chunk is None else list(chunk.columns[0])
            assert len(found) <= max(count, 1)
            assert found == expected[at : at + len(found)]
            assert found or at == len(expected)
            at += len(found)
    cursor.close()
    return at


def nominal_steps(rows: int, steps: Sequence[Sequence[int]]) -> Iterator[tuple[slice, ...]]:
    """Cut `rows` by a table from `sizes_per_step`: for each step, a slice of the rows per replica."""
    done = 0
    for sizes in itertools.cycle(steps):
        if done >= rows:
            return
        yield tuple(slice(s.start + done, s.stop + done) for s in fill(rows - done, sizes))
        done += sum(sizes)
