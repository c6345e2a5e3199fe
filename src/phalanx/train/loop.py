"""Many steps per call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import jax

from phalanx.core import input_requests
from phalanx.core.variables import traced_variables
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.execution.function import Function
from phalanx.execution.iterator_inputs import Taken, give_back
from phalanx.execution.loops import traced_steps
from phalanx.runtime.formatting import shown


@jax.tree_util.register_pytree_node_class
class LoopResults(Sequence[Any]):
    """What each step of a loop returned; results are cut out when they are asked for.

    Args:
        count: how many steps there were.
        parts: what they returned, or the arrays in that, each with the steps as its first dimension.
        rebuild: makes what a step returned of its arrays; None if `parts` has it.
    """

    def __init__(
        self, count: int, parts: Sequence[Any], rebuild: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self._count, self._parts, self._rebuild = count, parts, rebuild

    def _result(self, step: int) -> Any:
        if self._rebuild is None:
            return self._parts[step]
        return self._rebuild([x[step] for x in self._parts])

    def tree_flatten(self) -> tuple[Sequence[Any], Any]:
        """What is in it, and how it is read."""
        return tuple(self._parts), (self._count, self._rebuild)

    @classmethod
    def tree_unflatten(cls, form: Any, parts: Sequence[Any]) -> LoopResults:
        """The same with other arrays."""
        return cls(form[0], parts, form[1])

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
    if traced_variables.in_program():
        if input_requests.is_input(iterator) and steps > 1:
            return LoopResults(steps, *traced_steps(lambda: step(*_arguments(next(iterator))), steps))
        results = [step(*_arguments(x)) for x in itertools.islice(iterator, steps)]
        return LoopResults(len(results), results)
    taken = _Elements(iterator)
    try:
        return _run(step, taken, steps)
    except BaseException as error:
        # A step that fails has had its element. Those that were not begun are given once more.
        taken.give_back(begun=isinstance(error, Exception))
        raise


def _run(step: Function, taken: _Elements, steps: int) -> LoopResults:
    elements = [_arguments(x) for x in taken.take(steps)]
    if not elements:
        return LoopResults(0, [])
    stacked = step.run_steps(elements, taken.use_all)
    if stacked is None:
        results = [step.call_then(taken.use_one, element, {}) for element in elements]
        return LoopResults(len(elements), results)
    return LoopResults(len(elements), *stacked)


def _arguments(element: Any) -> tuple[Any, ...]:
    return element if isinstance(element, tuple) else (element,)


class _Elements:
    """Elements that a loop takes before its steps; those that no step has used can be given back."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._taken: list[Taken] = []
        self._used = 0

    def take(self, count: int) -> list[Any]:
        if not input_requests.is_input(self._iterator):
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
