"""Many steps per call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from phalanx.core import pulls
from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.core.showing import shown
from phalanx.execution.function import Function
from phalanx.execution.taking import Taken, give_back


class LoopResults(Sequence[Any]):
    """What each step of a loop returned; results are cut out when they are asked for."""

    def __init__(self, count: int, result: Callable[[int], Any]) -> None:
        self._count, self._result = count, result

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<px.train.LoopResults of {self._count} steps>"

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._result(i) for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"The loop ran {self._count} steps. Received: index {index}")
        return self._result(index % self._count)


def loop(step: Function, iterator: Iterator[Any], steps: int) -> LoopResults:
    """Run a compiled step on the next elements of an iterator, as one program if they fit together.

    Elements of one shape become a single `lax.scan`, which saves the cost of dispatching each step.
    Otherwise, as with a partial last batch, the compiled steps run one after the other; the results
    are the same.

    Args:
        step: a `px.function`. It is called with the element, or with its parts if it is a tuple.
        iterator: gives the elements; if it ends early, there are fewer steps.
        steps: how many elements to take.

    Returns:
        A sequence of what each step returned.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> total = px.Variable(0.0)
        >>> step = px.function(lambda x: total.assign_add(x) + 0.0)
        >>> results = px.train.loop(step, iter([jnp.float32(i) for i in range(10)]), steps=4)
        >>> [float(x) for x in results], float(total)
        ([0.0, 1.0, 3.0, 6.0], 6.0)
    """
    if not isinstance(step, Function):
        raise InvalidTypeError(
            f"loop needs a compiled step: decorate it with @px.function. Received: {shown(step)}"
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps < 2**31:
        raise InvalidValueError(f"steps must be a positive integer. Received: {shown(steps)}")
    if not isinstance(iterator, Iterable):
        raise InvalidTypeError(
            f"loop takes elements from an iterator, such as iter(dataset). Received: {shown(iterator)}"
        )
    taken = _Elements(iterator)
    try:
        return _run(step, taken, steps)
    except BaseException as error:
        # A step that fails has had its element. Those that were not begun are given once more.
        taken.give_back(begun=isinstance(error, Exception))
        raise


def _run(step: Function, taken: _Elements, steps: int) -> LoopResults:
    elements = [x if isinstance(x, tuple) else (x,) for x in taken.take(steps)]
    if not elements:
        return LoopResults(0, lambda _: None)
    result = step.run_steps(elements, taken.use_all)
    if result is None:
        results = [step.call_then(taken.use_one, element, {}) for element in elements]
        result = results.__getitem__
    return LoopResults(len(elements), result)


class _Elements:
    """Elements that a loop takes before its steps; those that no step has used can be given back."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._taken: list[Taken] = []
        self._used = 0

    def take(self, count: int) -> list[Any]:
        if not pulls.is_input(self._iterator):
            return list(itertools.islice(self._iterator, count))
        for _ in range(count):
            self._taken.append(Taken())
            try:
                self._taken[-1].take_one(self._iterator)
            except StopIteration:
                self._taken.pop()
                break
        return [taken.elements[0] for taken in self._taken]

    def use_one(self) -> None:
        self._used += 1

    def use_all(self) -> None:
        self._used = len(self._taken)

    def give_back(self, begun: bool) -> None:
        give_back(self._taken[self._used + begun :])
