"""Any iterable of batches as a source: lists, generators, Grain, torch DataLoaders, tf.data."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import tree_util

from phalanx.data.plan.columns import Chunk
from phalanx.data.plan.cursors import Cursor, Run
from phalanx.data.plan.elements import as_leaf, spec_of, with_rows
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode
from phalanx.errors import AbortedError, InvalidOperandError, InvalidValueError, StructureMismatchError
from phalanx.runtime.formatting import shown


@dataclass
class _LoaderState:
    """What is remembered between readings of one iterable."""

    started: bool = False
    peeked: list[Any] = field(default_factory=list)
    broken: bool = False  # whether the first element was asked for, and something was raised instead
    lock: Any = field(default_factory=threading.RLock)


@dataclass(frozen=True, eq=False)
class Loader(PlanNode):
    """The elements of an iterable, each as it comes.

    An iterable is read anew in each epoch. An iterator, such as a generator, can be read once.
    """

    source: Any = ()
    _state: _LoaderState = field(default_factory=_LoaderState)

    @property
    def is_one_shot(self) -> bool:
        """Whether it can be read only once."""
        return isinstance(self.source, Iterator)

    def known_spec(self) -> Any | None:
        """Only elements can tell."""
        return None

    @property
    def element_spec(self) -> Any:
        """Found out by the first element. An iterator keeps it until it is read."""
        with self._state.lock:
            return self._described(self._state.peeked)

    def _described(self, elements: list[Any]) -> Any:
        if not elements:
            if self.is_one_shot and self._state.started:
                raise InvalidValueError(
                    "The elements of a generator are described by the first one, which has been read. "
                    f"Received: {shown(self.source)}"
                )
            self._state.broken = True
            elements.extend(itertools.islice(iter(self.source), 1))  # in one step
            self._state.broken = False
            if not elements:
                raise InvalidValueError(
                    f"There is no element to describe. Received: an empty {type(self.source).__name__}"
                )
        leaves, structure = flatten(elements[0])
        # Batches of a loader may differ in size, and the last one usually does.
        specs = [spec_of(leaf) for leaf in leaves]
        specs = [with_rows(spec, None) if spec.shape else spec for spec in specs]
        return tree_util.tree_unflatten(structure, specs)

    @property
    def cardinality(self) -> int:
        """The length, if the iterable has one; tf.data and Grain also tell endless ones."""
        try:
            length = len(self.source)
        except TypeError:
            cardinality = getattr(self.source, "cardinality", None)
            endless = callable(cardinality) and int(cardinality()) == INFINITE
            return INFINITE if endless else UNKNOWN
        return INFINITE if length >= sys.maxsize else length

    def open(self, run: Run) -> Cursor:
        """Begin to iterate."""
        state = self._state
        if not self.is_one_shot:
            _set_epoch(self.source, run.passes[0])
            return _LoaderCursor(self.source, [])
        with state.lock:
            if state.broken and not state.peeked and isinstance(self.source, Generator):
                raise AbortedError(
                    "The generator was interrupted when its first element was looked at, which ended "
                    "it. Make another one, or give px.data.Dataset.from_generator(function, …). "
                    f"Received: {shown(self.source)}"
                )
            if state.started:
                raise InvalidValueError(
                    "A generator can be read once, and this one has been. Give an iterable that begins "
                    "anew, such as px.data.Dataset.from_generator(function, …). "
                    f"Received: {shown(self.source)}"
                )
            state.started = True
            return _LoaderCursor(self.source, state.peeked)


def _set_epoch(source: Any, epoch: int) -> None:
    """Tell a loader that shuffles by epoch which one begins."""
    for knows in (source, getattr(source, "sampler", None), getattr(source, "dataset", None)):
        set_epoch = getattr(knows, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
            return


class _LoaderCursor(Cursor):
    def __init__(self, source: Iterable[Any], peeked: list[Any]) -> None:
        self._source, self._peeked = source, peeked
        self._iterator: Iterator[Any] | None = None
        self._skipped = 0
        self.structure: Any = None

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            if isinstance(self._source, list | tuple):
                self._iterator = iter(self._source[self._skipped :])
            else:
                self._iterator = iter(self._source)
        return self._iterator

    def _next(self) -> Any:
        return self._peeked.pop() if self._peeked else next(self._open())

    def read(self, limit: int) -> Chunk | None:
        """One element at a time: they are usually batches."""
        try:
            element = self._next()
        except StopIteration:
            return None
        leaves, structure = flatten(element)
        if self.structure is None:
            self.structure = structure
        elif structure != self.structure:
            raise StructureMismatchError(
                f"All elements must have one structure. Received: {structure} after {self.structure}"
            )
        return Chunk([[leaf] for leaf in leaves], 1)

    def skip(self, count: int) -> int:
        """Leave out elements; a list is not even looked at."""
        if self._iterator is None and isinstance(self._source, list | tuple):
            left = len(self._source) - self._skipped
            self._skipped += min(count, left)
            return min(count, left)
        for done in range(count):
            try:
                self._next()
            except StopIteration:
                return done
        return count

    def close(self) -> None:
        """Let go of the iterator."""
        close = getattr(self._iterator, "close", None)
        if close is not None:
            close()
        self._source, self._iterator = (), iter(())


def as_loader(source: Any) -> Loader:
    """A source from what a user gave instead of a dataset."""
    usable = isinstance(source, Iterable) or hasattr(source, "__getitem__")
    if not usable or isinstance(source, str | bytes | Mapping | np.ndarray | jax.Array):
        raise InvalidOperandError(
            "A px.data.Dataset or another iterable of batches is needed. For arrays use "
            "px.data.Dataset.from_tensor_slices(arrays).batch(size). "
            f"Received: {shown(source)} of type {type(source).__name__}"
        )
    return Loader((), source)


# -- elements of other libraries -------------------------------------------------------------------


def flatten(element: Any) -> tuple[list[Any], Any]:
    """The leaves of an element of any library, as NumPy arrays, and the structure around them."""
    found, structure = tree_util.tree_flatten(_plain(element), is_leaf=_is_array)
    return [as_leaf(_to_numpy(x)) for x in found], structure


def _plain(nest: Any) -> Any:
    """Containers as JAX knows them; a list of numbers or strings stays a list, which is an array."""
    if isinstance(nest, Mapping) and not isinstance(nest, dict):
        return {key: _plain(value) for key, value in nest.items()}
    if isinstance(nest, dict):
        return type(nest)((k, _plain(v)) for k, v in nest.items()) if type(nest) is dict else nest
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*map(_plain, nest))
    if isinstance(nest, tuple) or (isinstance(nest, list) and not _is_array(nest)):
        return type(nest)(map(_plain, nest))
    return nest


def _is_array(x: Any) -> bool:
    """Whether a list is an array that was written out, rather than a structure of arrays."""
    if not isinstance(x, list):
        return False
    return all(
        isinstance(item, bool | int | float | complex | str | bytes) or _is_array(item) for item in x
    )


def _to_numpy(x: Any) -> Any:
    if isinstance(x, np.ndarray | np.generic | jax.Array | Sequence):
        return x
    if hasattr(x, "detach"):  # torch
        x = x.detach().cpu()
    numpy = getattr(x, "numpy", None)  # torch, TensorFlow
    if callable(numpy):
        try:
            return numpy()
        except TypeError:  # torch.bfloat16, which NumPy does not know by itself
            return np.asarray(jax.dlpack.from_dlpack(x))
    return x
