"""Nodes that choose and group by what elements are: unique, group_by_window and rejection_resample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.ops.cache_files import encode
from phalanx.data.ops.shuffling import shuffles_in
from phalanx.data.plan.columns import Chunk, read_only
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import DatasetSpec, LeafBase
from phalanx.data.plan.functions import Function, caller, function_error
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode, SameElements
from phalanx.data.plan.opening import open_plan
from phalanx.data.plan.sources import Slices
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

_SMOOTHING = 10
"""How many elements of each class count as seen before the first, as in TensorFlow."""

_APART = 2**32
"""Keeps the random numbers of resampling apart from those of shuffles."""


# -- elements that were not there before ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Unique(SameElements):
    """Each element once, where it comes first."""

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return 0 if inputs[0] == 0 else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Remember what has come."""
        return _UniqueCursor(open_plan(self.input, run))


class _UniqueCursor(Cursor):
    def __init__(self, input_: Cursor) -> None:
        self.inputs = (input_,)
        self._seen: set[bytes] = set()

    def read(self, limit: int) -> Chunk | None:
        while (chunk := self.inputs[0].read(limit)) is not None:
            fresh = []
            for i, leaves in enumerate(zip(*chunk.columns, strict=True)):
                known = len(self._seen)
                self._seen.add(identity(leaves))
                if len(self._seen) > known:
                    fresh.append(i)
            if fresh:
                return chunk.take(np.array(fresh))
        return None


def identity(leaves: Sequence[Any]) -> bytes:
    """Bytes that two elements have in common only if they are equal.

    Examples:
        >>> identity([np.int64(1), "a"]) == identity([np.int64(1), "a"]) != identity([np.int64(1), "b"])
        True
        >>> identity([np.float32(0.0)]) == identity([np.float32(-0.0)])
        True
    """
    if any(isinstance(leaf, LeafBase) for leaf in leaves):
        raise InvalidTypeError("unique cannot compare datasets. Received: elements that hold datasets")
    codes = [encode(_without_sign_of_zero(leaf)) for leaf in leaves]
    return b"".join(len(code).to_bytes(8) + code for code in codes)


def _without_sign_of_zero(leaf: Any) -> Any:
    floating = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "fc"
    return leaf + leaf.dtype.type(0) if floating else leaf


# -- windows of elements with the same key --------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KeyedWindows(PlanNode):
    """Pairs of a key and a dataset of elements that have it, each as soon as it is full.

    What is left at the end comes in the order of the keys.
    """

    key: Function
    size_of: Callable[[int], int]
    make: Callable[[PlanNode], Any]

    def spec(self, *inputs: Any) -> Any:
        """A number and a dataset."""
        return TensorSpec((), np.dtype(np.int64)), DatasetSpec(inputs[0])

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return inputs[0] if inputs[0] in (0, INFINITE) else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Collect elements by their keys."""
        return _WindowsCursor(self, open_plan(self.inputs[0], run))


class _WindowsCursor(Cursor):
    def __init__(self, node: KeyedWindows, input_: Cursor) -> None:
        self.inputs = (input_,)
        self._node = node
        self._waiting: dict[int, list[Sequence[Any]]] = {}
        self._sizes: dict[int, int] = {}  # of windows, asked for once for each key
        self._call: Callable[[Sequence[Any]], Any] | None = None
        self._index = 0

    def read(self, limit: int) -> Chunk | None:
        while (chunk := self.inputs[0].read(1)) is not None:
            leaves = chunk.element(0)
            key = self._key_of(leaves)
            window = self._waiting.setdefault(key, [])
            window.append(leaves)
            if len(window) >= self._size_of(key):
                return self._window(key)
        return self._window(min(self._waiting)) if self._waiting else None

    def _size_of(self, key: int) -> int:
        if key not in self._sizes:
            self._sizes[key] = self._node.size_of(key)
        return self._sizes[key]

    def _key_of(self, leaves: Sequence[Any]) -> int:
        if self._call is None:
            self._call = caller(self._node.key, self._node.inputs[0].structure)
        key = class_of(self._call, leaves, "group_by_window", self._index)
        self._index += 1
        return key

    def _window(self, key: int) -> Chunk:
        elements = Chunk.of_elements(self._waiting.pop(key))
        below = self._node.inputs[0]
        known = below.known_spec()
        columns = tuple(read_only(column) for column in elements.columns)
        spec = below.element_spec if known is None else known
        dataset = self._node.make(Slices((), columns, elements.count, spec))
        return Chunk((np.array([key], np.int64), [dataset]), 1)


def class_of(call: Callable[[Sequence[Any]], Any], leaves: Sequence[Any], what: str, index: int) -> int:
    """The integer that a function of the user gives for an element."""
    try:
        answer = np.asarray(call(leaves))
    except Exception as error:
        raise function_error(what, f"element {index}", error) from error
    if answer.shape != () or answer.dtype.kind not in "iub":
        raise InvalidTypeError(
            f"The function given to {what} must return an integer. "
            f"Received: {shown(answer)} for element {index}"
        )
    return int(answer)


# -- another distribution of classes --------------------------------------------------------------


def acceptance(target: NDArray[np.float64], initial: NDArray[np.float64], number: int) -> float:
    """With which probability an element of a class stays, so that classes come as often as wanted.

    Args:
        target: how often each class is wanted.
        initial: how often each class comes.
        number: the class.

    Examples:
        >>> acceptance(np.array([0.5, 0.5]), np.array([0.8, 0.2]), 0)
        0.25
        >>> acceptance(np.array([0.5, 0.5]), np.array([0.8, 0.2]), 1)
        1.0
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(initial > 0, target / initial, 0.0)
    most = float(ratios.max())
    return float(ratios[number]) / most if most > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Resample(PlanNode):
    """Pairs of a class and an element; some are left out so that classes come as often as wanted."""

    classify: Function
    target: tuple[float, ...]
    initial: tuple[float, ...] | None = None
    seed: int | None = None

    def spec(self, *inputs: Any) -> Any:
        """A number and an element."""
        return TensorSpec((), np.dtype(np.int64)), inputs[0]

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return 0 if inputs[0] == 0 else UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Draw a number for each element."""
        below = self.inputs[0]
        depth = _APART * (1 + _resamples_in(below)) + shuffles_in(below)
        return _ResampleCursor(self, open_plan(below, run), run.generator(self.seed, depth))


def _resamples_in(node: PlanNode) -> int:
    count = 0
    while node.inputs:
        count += isinstance(node, Resample)
        node = node.inputs[0]
    return count


class _ResampleCursor(Cursor):
    def __init__(self, node: Resample, input_: Cursor, rng: np.random.Generator) -> None:
        self.inputs = (input_,)
        self._node, self._rng = node, rng
        self._target = np.array(node.target)
        self._learns = node.initial is None
        self._counts = np.array(node.initial or [float(_SMOOTHING)] * len(node.target))
        self._call: Callable[[Sequence[Any]], Any] | None = None
        self._index = 0
        self._failure: Exception | None = None

    def read(self, limit: int) -> Chunk | None:
        while self._failure is None and (chunk := self.inputs[0].read(limit)) is not None:
            if self._call is None:
                self._call = caller(self._node.classify, self._node.inputs[0].structure)
            kept: list[int] = []
            classes: list[int] = []
            for i, leaves in enumerate(zip(*chunk.columns, strict=True)):
                try:
                    number = self._class_of(leaves)
                except Exception as error:  # noqa: BLE001 - raised after what came before
                    self._failure = error
                    break
                if self._rng.random() < acceptance(self._target, self._distribution(number), number):
                    kept.append(i)
                    classes.append(number)
            if kept:
                rows = chunk.take(np.array(kept))
                return Chunk((np.array(classes, np.int64), *rows.columns), rows.count)
        if self._failure is not None:
            raise self._failure
        return None

    def _class_of(self, leaves: Sequence[Any]) -> int:
        assert self._call is not None
        number = class_of(self._call, leaves, "rejection_resample", self._index)
        if not 0 <= number < len(self._target):
            raise InvalidValueError(
                f"The function given to rejection_resample must return a class from 0 to "
                f"{len(self._target) - 1}. Received: {number} for element {self._index}"
            )
        self._index += 1
        return number

    def _distribution(self, number: int) -> NDArray[np.float64]:
        """How often each class comes, as far as is known when an element of one has come."""
        if self._learns:
            self._counts[number] += 1
        return self._counts / self._counts.sum()
