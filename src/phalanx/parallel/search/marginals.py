"""Min-marginals: the cost of the best assignment for each value of a variable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from phalanx.parallel.search.elimination import Bucket, Elimination, Factor, joined
from phalanx.parallel.search.problem import Table


def outside(found: Elimination) -> Iterator[tuple[int, Bucket, Table]]:
    """For each bucket, from the last to the first: the best cost of all that its message does not hold.

    Its number, the bucket, and a table over the scope of its message. The elimination must be exact.
    """
    home = {id(factor): i for i, bucket in enumerate(found.buckets) for factor in bucket.factors}
    tables: dict[int, Table] = {}
    children: list[list[int]] = [[] for _ in found.buckets]
    for i, bucket in enumerate(found.buckets):
        assert bucket.message is not None
        if bucket.message.scope:
            children[home[id(bucket.message)]].append(i)
        else:
            tables[i] = np.asarray(found.bound - float(bucket.message.table))
    for i in reversed(range(len(found.buckets))):
        bucket, table = found.buckets[i], tables.pop(i)
        if children[i]:
            whole = totals(bucket, table)
            scope = (*_scope(bucket), bucket.step.variable)
            for child in children[i]:
                message = found.buckets[child].message
                assert message is not None
                tables[child] = _without(whole, scope, message)
        yield i, bucket, table


def totals(bucket: Bucket, rest: Table) -> Table:
    """The best cost for each entry of a bucket: the values of its scope, then those of its variable."""
    return joined((*_scope(bucket), bucket.step.variable), bucket.factors) + rest[..., None]


def _scope(bucket: Bucket) -> tuple[int, ...]:
    assert bucket.message is not None
    return bucket.message.scope


def _without(whole: Table, scope: Sequence[int], message: Factor) -> Table:
    """The best cost of all but a message, for each entry of the message."""
    gone = tuple(i for i, v in enumerate(scope) if v not in message.scope)
    kept = [v for v in scope if v in message.scope]
    smallest = whole.min(axis=gone) if gone else whole
    return smallest.transpose([kept.index(v) for v in message.scope]) - message.table


def marginals(found: Elimination, wanted: frozenset[int]) -> dict[int, Table]:
    """For each wanted variable: the cost of the best assignment for each of its values."""
    return {
        bucket.step.variable: (whole := totals(bucket, rest)).min(axis=tuple(range(whole.ndim - 1)))
        for _, bucket, rest in outside(found)
        if bucket.step.variable in wanted
    }
