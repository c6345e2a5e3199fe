"""Where elements come from: arrays, generators and lists of files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.plan.columns import Builder, Chunk, Column, read_only
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import Ragged, flatten, spec_of
from phalanx.data.plan.functions import Form, function_error
from phalanx.data.plan.nodes import UNKNOWN, PlanNode, Rows
from phalanx.data.plan.opening import GatherCursor, first_element, row_numbers
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown


@dataclass(frozen=True, eq=False)
class Slices(PlanNode):
    """The rows of columns."""

    columns: tuple[Column, ...]
    count: int
    slice_spec: Any

    def spec(self, *inputs: Any) -> Any:
        """The spec of one row."""
        return self.slice_spec

    def size(self, *inputs: int) -> int:
        """The number of rows."""
        return self.count

    def rows(self) -> Rows:
        """The columns themselves."""
        return Rows(self.columns, self.count)

    def open(self, run: Run) -> Cursor:
        """Read row by row."""
        return GatherCursor(row_numbers(self.count).open(run), self.columns)


def slices(tensors: Any, what: str = "from_tensor_slices") -> Slices:
    """The rows of a nest of arrays."""
    leaves, structure = flatten(tensors)
    if not leaves:
        raise InvalidValueError(f"{what} needs at least one array. Received: {shown(tensors)}")
    counts = []
    for leaf in leaves:
        if not isinstance(leaf, Ragged) and np.ndim(leaf) == 0:
            raise InvalidValueError(
                f"{what} cuts arrays along their first dimension, so each needs one; use from_tensors "
                f"for a single element. Received: {shown(leaf)}"
            )
        counts.append(len(leaf))
    if len(set(counts)) > 1:
        raise InvalidValueError(
            f"{what} needs arrays with equal first dimensions. Received: first dimensions {counts}"
        )
    specs = [TensorSpec(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
    columns = tuple(read_only(list(x) if isinstance(x, Ragged) else x) for x in leaves)
    return Slices((), columns, counts[0], tree_util.tree_unflatten(structure, specs))


def single(tensors: Any) -> Slices:
    """One element."""
    leaves, structure = flatten(tensors)
    if not leaves:
        raise InvalidValueError(f"from_tensors needs at least one array. Received: {shown(tensors)}")
    specs = [spec_of(leaf) for leaf in leaves]
    columns = Chunk.of_elements([leaves]).columns
    return Slices(
        (), tuple(read_only(c) for c in columns), 1, tree_util.tree_unflatten(structure, specs)
    )


@dataclass(frozen=True, eq=False)
class Generator(PlanNode):
    """What a generator function yields; it is called anew for each pass."""

    make: Callable[[], Iterable[Any]]
    signature: Any = None
    form: Form = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "form", Form("from_generator", self.signature))

    def known_spec(self) -> Any | None:
        """What the user gave, or what was seen."""
        return self.form.spec

    def has_sure_shapes(self) -> bool:
        """Only if the user said so."""
        return self.signature is not None

    @property
    def element_spec(self) -> Any:
        """Found out with the first element."""
        if self.form.spec is None:
            first_element(self)
        return self.form.spec

    def size(self, *inputs: int) -> int:
        """Unknown."""
        return UNKNOWN

    def open(self, run: Run) -> Cursor:
        """Start the generator when first asked."""
        return _GeneratorCursor(self)


class _GeneratorCursor(Cursor):
    def __init__(self, node: Generator) -> None:
        self._node = node
        self._source: Iterator[Any] | None = None
        self._index = 0
        self._failure: Exception | None = None
        self._ended = False

    def read(self, limit: int) -> Chunk | None:
        elements = Builder(limit, expected=False)
        while self._failure is None and not self._ended and not elements.full:
            found, leaves = self._next()
            if found:
                elements.add(leaves)
        chunk = elements.chunk()
        if chunk is None and self._failure is not None:
            raise self._failure
        return chunk

    def _next(self) -> tuple[bool, list[Any]]:
        """The next element; False at the end, or if there is a failure to be raised later."""
        where = f"element {self._index}"
        try:
            if self._source is None:
                self._source = iter(self._node.make())
            value = next(self._source)
        except StopIteration:
            self._ended = True
            return False, []
        except Exception as error:  # noqa: BLE001 - raised after what came before
            self._failure = function_error("from_generator", where, error)
            return False, []
        self._index += 1
        try:
            return True, self._node.form.leaves_of(value, where)
        except Exception as error:  # noqa: BLE001 - raised after what came before
            self._failure = error
            return False, []

    def skip(self, count: int) -> int:
        skipped = 0
        while skipped < count and not self._ended and self._failure is None:
            skipped += self._next()[0]
        return skipped

    def close(self) -> None:
        self._ended = True
        close = getattr(self._source, "close", None)
        self._source = None
        if close is not None:
            close()


def signature_of(dtypes: Any, shapes: Any) -> Any:
    """An `output_signature` from a nest of dtypes and one of shapes."""
    structure: Any
    leaves, structure = tree_util.tree_flatten(dtypes)
    try:
        given = structure.flatten_up_to(shapes)
        specs = [
            TensorSpec(tuple(shape), np.dtype(dtype))
            for dtype, shape in zip(leaves, given, strict=True)
        ]
    except (TypeError, ValueError, KeyError) as error:
        raise InvalidTypeError(
            "output_types must be a nest of dtypes, and output_shapes the same nest of shapes. "
            f"Received: output_types={shown(dtypes)}, output_shapes={shown(shapes)}"
        ) from error
    return tree_util.tree_unflatten(structure, specs)


def converting(make: Callable[[], Iterable[Any]], dtypes: Any) -> Callable[[], Iterable[Any]]:
    """A generator function whose values are converted to a nest of dtypes."""

    def convert(dtype: Any, value: Any) -> Any:
        return np.asarray(value, dtype)

    def generate() -> Iterable[Any]:
        for value in make():
            yield tree_util.tree_map(convert, dtypes, value)

    return generate


@dataclass(frozen=True, eq=False)
class FileNames(Slices):
    """The names of files, one per element."""

    names: tuple[str, ...] = ()

    @property
    def is_file_source(self) -> bool:
        """Always."""
        return True

    @property
    def files(self) -> tuple[str, ...]:
        """The names."""
        return self.names

    def with_files(self, files: Sequence[str]) -> PlanNode:
        """Other names."""
        return file_names(files)


def file_names(names: Sequence[str]) -> FileNames:
    """A source of file names."""
    column = np.empty(len(names), object)
    column[:] = list(names)
    spec = TensorSpec((), np.dtype(object))
    return FileNames((), (read_only(column),), len(names), spec, tuple(names))
