"""Datasets made of elements: flat_map reads them one after the other, interleave in turns."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import LeafBase, merge_specs
from phalanx.data.plan.functions import Function, caller, function_error
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, ParallelNode, PlanNode
from phalanx.data.plan.opening import first_element, open_plan
from phalanx.data.run.round_robin import Opened, RoundRobinCursor
from phalanx.data.run.thread_pool import threads_for
from phalanx.errors import DatasetFunctionError, InvalidTypeError
from phalanx.runtime.formatting import shown

MOST_DATASETS = 2**20
"""How many datasets may be open at the same time."""


class _Inner:
    """The first dataset that the function made; all others must be like it."""

    node: PlanNode | None = None


@dataclass(frozen=True, eq=False)
class Interleave(ParallelNode):
    """The elements of the datasets that a function makes of the elements of the input.

    `cycle_length` of them are open at the same time, and `block_length` elements are taken from each in
    turn. With a cycle of one they come one after the other, whatever the length of a block.
    """

    fn: Function
    cycle_length: int = 1
    block_length: int | None = None
    parallel_calls: int | None = None
    deterministic: bool | None = None
    what: str = "flat_map"
    inner: _Inner = field(init=False, default_factory=_Inner)

    def known_spec(self) -> Any | None:
        """The spec of a dataset that the function made."""
        return None if self.inner.node is None else self.inner.node.known_spec()

    def has_sure_shapes(self) -> bool:
        """The next dataset may have others."""
        return False

    @property
    def element_spec(self) -> Any:
        """Found out by calling the function for the first element."""
        if self.inner.node is None:
            self.inner.node = self.maker()(first_element(self.inputs[0]).element(0), 0)
        return self.inner.node.element_spec

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return 0 if inputs[0] == 0 else INFINITE if inputs[0] == INFINITE else UNKNOWN

    def maker(self) -> Callable[[Sequence[Any], int], PlanNode]:
        """The function from the leaves of an element and its number to the plan of a dataset."""
        call: Callable[[Sequence[Any]], Any] | None = None

        def make(leaves: Sequence[Any], index: int) -> PlanNode:
            nonlocal call
            if call is None:
                call = caller(self.fn, self.inputs[0].structure)
            try:
                dataset = call(leaves)
            except Exception as error:
                raise function_error(self.what, f"element {index}", error) from error
            if not isinstance(dataset, LeafBase):
                raise InvalidTypeError(
                    f"The function given to {self.what} must return a dataset. "
                    f"Received: {shown(dataset)} for element {index}"
                )
            return dataset._node

        return make

    def check(self, node: PlanNode) -> None:
        """Compare the elements of another dataset with those of the first; called once one was read."""
        if self.inner.node is None or self.inner.node is node:
            self.inner.node = node
            return
        first, other = self.inner.node.known_spec(), node.known_spec()
        if first is not None and other is not None:
            merge_specs(first, other, self.what)

    def open(self, run: Run) -> Cursor:
        """Open datasets as they are needed."""
        input_ = open_plan(self.inputs[0], run.in_branch(-1))
        make, numbers = self.maker(), itertools.count()

        def open_next() -> Opened | None:
            while (chunk := input_.read(1)) is not None:
                number = next(numbers)
                try:
                    node = make(chunk.element(0), number)
                    break
                except DatasetFunctionError as error:
                    if run.on_failure is None:
                        raise
                    run.on_failure(error)
            else:
                return None
            return open_plan(node, run.in_branch(number)), functools.partial(self.check, node)

        return RoundRobinCursor(
            open_next,
            (input_,),
            self.cycle_length,
            self.block_length,
            None if self.parallel_calls is None else threads_for(self.parallel_calls),
            self.is_ordered(run.deterministic),
        )
