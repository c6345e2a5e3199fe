"""Collectives between the devices of workers, as programs of XLA; nothing goes through the host.

The members first compare their notices, as `host.OnHost` does, over connections that carry nothing
else. A group of one needs neither, and may be given traced arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.comm import programs
from phalanx.comm import ragged as rg
from phalanx.comm.groups import Group
from phalanx.comm.reductions import Reduction


class OnDevices:
    """How one operation of a group moves its data.

    Args:
        group: the members.
        me: the place of this worker among them.
        meet: meets the other members; returns the value of each.
    """

    def __init__(self, group: Group, me: int, meet: Callable[[], list[Any]]) -> None:
        self._group, self._me, self._meet = group, me, meet
        self._values: list[Any] | None = None

    def agree(self) -> list[Any]:
        """Meet the others; returns the value of each member."""
        if self._values is None:
            self._values = self._meet()
        return self._values

    def reduce(self, x: Any, op: Reduction, place: int | None = None, out: Any = None) -> Any:
        """See `OnHost.reduce`."""
        result = self._run("reduce", x, op)
        return _like(x, result if place in (None, self._me) else x)

    def reduce_scatter(self, xs: Any, op: Reduction, out: Any = None) -> Any:
        """See `OnHost.reduce_scatter`."""
        if not isinstance(xs, Sequence):
            return _like(xs, self._run("reduce_scatter", self._rows(xs), op))
        part = self._run("reduce_scatter", rg.padded_rows(xs), op)
        return _like(xs[0], rg.cut(part, [xs[self._me].shape])[0])

    def from_one(self, x: Any, place: int, out: Any = None) -> Any:
        """See `OnHost.from_one`."""
        return _like(x, self._run("from_one", x, place))

    def gather(self, x: Any, place: int | None = None, outs: Sequence[Any] | None = None) -> Any:
        """See `OnHost.gather`."""
        shapes = [tuple(shape) for shape in self.agree()]
        parts = rg.gather(self._run, x, shapes)
        return [_like(x, p) for p in parts] if place in (None, self._me) else None

    def gather_rows(self, x: Any, place: int | None = None, out: Any = None) -> Any:
        """See `OnHost.gather_rows`."""
        rows = _joined(self._run("gather", x))
        return _like(x, rows) if place in (None, self._me) else None

    def scatter(self, xs: Sequence[Any] | None, place: int, out: Any = None) -> Any:
        """See `OnHost.scatter`."""
        dtype, shapes = self.agree()[place]
        part = rg.scatter(self._run, xs, dtype, [tuple(s) for s in shapes], self._me, place)
        return part if xs is None else _like(xs[0], part)

    def scatter_rows(self, x: Any, place: int, out: Any = None) -> Any:
        """See `OnHost.scatter_rows`."""
        return _like(x, self._run("exchange", self._rows(x))[place])

    def exchange(self, xs: Sequence[Any], outs: Sequence[Any] | None = None) -> list[Any]:
        """See `OnHost.exchange`."""
        parts = rg.exchange(self._run, xs, self.agree(), self._me)
        return [_like(xs[0], p) for p in parts]

    def exchange_rows(
        self, x: Any, inputs: Sequence[int], check: Callable[[list[Any]], None], out: Any = None
    ) -> Any:
        """See `OnHost.exchange_rows`."""
        values, rest = self.agree(), list(x.shape[1:])
        check(values)
        ends = np.cumsum(inputs)
        blocks = [x[e - n : e] for e, n in zip(ends, inputs, strict=True)]
        shapes = [[[n, *rest] for n in sent] for sent, _ in values]
        return _like(x, rg.rejoined(rg.exchange(self._run, blocks, shapes, self._me), rest))

    def _rows(self, x: Any) -> Any:
        count = len(self._group)
        return x.reshape((count, x.shape[0] // count, *x.shape[1:]))

    def _run(self, kind: str, x: Any, *parameters: Any) -> Any:
        self.agree()
        return programs.run(kind, self._group.devices, x, *parameters)


def _joined(rows: Any) -> Any:
    """Rows joined along the first dimension."""
    return rows.reshape((rows.shape[0] * rows.shape[1], *rows.shape[2:]))


def _like(x: Any, result: Any) -> Any:
    """The result as NumPy's array if `x` is one."""
    return np.array(result) if isinstance(x, np.ndarray) else result
