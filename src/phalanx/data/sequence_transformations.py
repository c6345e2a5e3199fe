"""What can be made of a dataset with memory: states, ends, buckets, classes and files."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import tree_util

from phalanx.data.ops import saved
from phalanx.data.ops.caching import Cache
from phalanx.data.ops.grouping import KeyedWindows, Resample, Unique
from phalanx.data.ops.ignoring import IgnoreErrors
from phalanx.data.ops.interleaving import Interleave
from phalanx.data.ops.sequences import Buckets, Scan, TakeWhile
from phalanx.data.plan import argument_checks as checks
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.elements import LeafBase
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import open_plan
from phalanx.data.plan.sources import single
from phalanx.errors import InvalidArgumentError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.data.dataset import Dataset


class SequenceTransformations(LeafBase):
    """The methods of `Dataset` that remember elements, or end with them."""

    _node: PlanNode

    @abstractmethod
    def _with(self, node: PlanNode) -> Dataset:
        """A dataset with another plan."""

    def scan(
        self,
        initial_state: Any,
        scan_func: Callable[[Any, Any], tuple[Any, Any]],
        name: str | None = None,
    ) -> Dataset:
        """What a function makes of a state and each element, while it changes the state.

        Args:
            initial_state: the first state.
            scan_func: from a state and an element to the next state and a new element.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> sums = px.data.Dataset.range(5).scan(0, lambda total, x: (total + x, total + x))
            >>> [int(x) for x in sums]
            [0, 1, 3, 6, 10]
        """
        return self._with(Scan((self._node,), initial_state, checks.function(scan_func, "scan")))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements before the first one for which a function returns false.

        Examples:
            >>> import phalanx as px
            >>> [int(x) for x in px.data.Dataset.range(9).take_while(lambda x: x < 3)]
            [0, 1, 2]
        """
        return self._with(TakeWhile((self._node,), checks.function(predicate, "take_while")))

    def bucket_by_sequence_length(
        self,
        element_length_func: Callable[..., Any],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        padded_shapes: Any = None,
        padding_values: Any = None,
        pad_to_bucket_boundary: bool = False,
        no_padding: bool = False,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Batches of elements of similar length, filled up to one shape.

        Args:
            element_length_func: from an element to its length.
            bucket_boundaries: the lengths at which a next bucket begins, in rising order.
            bucket_batch_sizes: how many elements a batch of each bucket has; one more than boundaries.
            padded_shapes: see `padded_batch`.
            padding_values: see `padded_batch`.
            pad_to_bucket_boundary: whether unknown dimensions are filled up to the boundary less one,
                so that all batches of a bucket have one shape.
            no_padding: whether elements of a bucket have one shape anyway.
            drop_remainder: whether to leave out smaller batches at the end.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> words = px.data.Dataset.from_tensor_slices([[1], [1, 2, 3], [4], [5, 6]])
            >>> for batch in words.bucket_by_sequence_length(len, [2], [2, 2]):
            ...     print(batch.tolist())
            [[1], [4]]
            [[1, 2, 3], [5, 6, 0]]
        """
        limits = tuple(checks.integer(x, "A bucket boundary", 0) for x in bucket_boundaries)
        sizes = tuple(checks.integer(x, "A bucket batch size", 1) for x in bucket_batch_sizes)
        if list(limits) != sorted(set(limits)) or len(sizes) != len(limits) + 1:
            raise InvalidValueError(
                "Boundaries must rise, and there must be one batch size more than boundaries. "
                f"Received: bucket_boundaries={shown(limits)}, bucket_batch_sizes={shown(sizes)}"
            )
        node = Buckets(
            (self._node,),
            checks.function(element_length_func, "bucket_by_sequence_length"),
            limits,
            sizes,
            padded_shapes,
            padding_values,
            checks.boolean(pad_to_bucket_boundary, "pad_to_bucket_boundary"),
            checks.boolean(no_padding, "no_padding"),
            checks.boolean(drop_remainder, "drop_remainder"),
        )
        return self._with(node)

    def unique(self, name: str | None = None) -> Dataset:
        """Each element once, where it comes first.

        All elements that were seen are remembered. Elements may be nests, and arrays of any dtype; they
        are compared by their shapes, dtypes and values.

        Examples:
            >>> import phalanx as px
            >>> [int(x) for x in px.data.Dataset.from_tensor_slices([3, 1, 3, 2, 1]).unique()]
            [3, 1, 2]
        """
        return self._with(Unique((self._node,)))

    def group_by_window(
        self,
        key_func: Callable[..., Any],
        reduce_func: Callable[[Any, Dataset], Dataset],
        window_size: int | None = None,
        window_size_func: Callable[[int], int] | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements of datasets that a function makes of elements with the same key.

        Args:
            key_func: from an element to an integer.
            reduce_func: from a key and a dataset of elements that have it to a dataset. It is called
                when there are as many as a window has, and at the end, in the order of the keys.
            window_size: how many elements a window has.
            window_size_func: from a key to the size of its windows; instead of `window_size`.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> numbers = px.data.Dataset.range(7)
            >>> odd_and_even = numbers.group_by_window(lambda x: x % 2, lambda key, w: w.batch(2), 2)
            >>> [batch.tolist() for batch in odd_and_even]
            [[0, 2], [1, 3], [4, 6], [5]]
        """
        if (window_size is None) == (window_size_func is None):
            raise InvalidValueError(
                "group_by_window needs either window_size or window_size_func. "
                f"Received: window_size={window_size}, window_size_func={window_size_func}"
            )
        what = "group_by_window"
        size_of: Callable[[int], int]
        if window_size_func is None:
            size = checks.integer(window_size, "window_size", 1)
            size_of = lambda key: size  # noqa: E731 - a value like the function of the user
        else:
            asked = checks.function(window_size_func, what)
            size_of = lambda key: checks.integer(asked(key), "The size of a window", 1)  # noqa: E731
        windows = KeyedWindows((self._node,), checks.function(key_func, what), size_of, self._with)
        return self._with(Interleave((windows,), checks.function(reduce_func, what), what=what))

    def rejection_resample(
        self,
        class_func: Callable[..., Any],
        target_dist: Sequence[float],
        initial_dist: Sequence[float] | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Pairs of a class and an element, of which some are left out so that classes come as wanted.

        Each element is used at most once, and the order stays.

        Args:
            class_func: from an element to its class, an integer from 0.
            target_dist: how often each class is to come.
            initial_dist: how often each class comes now; None to count while reading.
            seed: the same seed leaves out the same elements. None for others each time.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> few_ones = px.data.Dataset.range(1000).map(lambda x: int(x % 5 == 0))
            >>> pairs = few_ones.rejection_resample(lambda x: x, [0.5, 0.5], [0.8, 0.2], seed=1)
            >>> classes = [int(number) for number, _ in pairs]
            >>> sum(classes), 0.4 < sum(classes) / len(classes) < 0.6
            (200, True)
        """
        target = _distribution(target_dist, "target_dist")
        initial = None if initial_dist is None else _distribution(initial_dist, "initial_dist")
        if initial is not None and len(initial) != len(target):
            raise InvalidValueError(
                "target_dist and initial_dist need the same number of classes. "
                f"Received: {len(target)} and {len(initial)}"
            )
        classify = checks.function(class_func, "rejection_resample")
        return self._with(Resample((self._node,), classify, target, initial, checks.seed(seed)))

    def ignore_errors(self, log_warning: bool = False, name: str | None = None) -> Dataset:
        """The elements for which no function fails.

        Left out are elements for which the function of a `map`, `filter`, `flat_map` or `interleave`
        below raises, and what follows the first damage in a file. Other errors are raised, and so
        are those below a `cache`, which must not keep less than there is.

        Args:
            log_warning: whether to log each error.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> quotients = px.data.Dataset.range(4).map(lambda x: 6 // (int(x) - 1)).ignore_errors()
            >>> [int(x) for x in quotients]
            [-6, 6, 3]
        """
        return self._with(IgnoreErrors((self._node,), checks.boolean(log_warning, "log_warning")))

    def snapshot(
        self,
        path: str | os.PathLike[str],
        compression: str | None = "AUTO",
        reader_func: Callable[[Dataset], Dataset] | None = None,
        shard_func: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """The same elements, which are written to a directory once and read from there afterwards.

        Other programs find them, too. They are there when all elements were read once. If the dataset
        has changed since, remove the directory.

        Args:
            path: the directory.
            compression: accepted as in TensorFlow; files are mapped into memory and not compressed.
            reader_func: from a dataset of datasets, here of one, to the dataset of the elements.
            shard_func: accepted as in TensorFlow.
            name: ignored.

        Examples:
            >>> import phalanx as px, tempfile
            >>> numbers = px.data.Dataset.range(3).snapshot(tempfile.mkdtemp())
            >>> [int(x) for x in numbers], [int(x) for x in numbers]
            ([0, 1, 2], [0, 1, 2])
        """
        if not isinstance(path, str | os.PathLike):
            raise InvalidTypeError(f"path must be a path. Received: {shown(path)}")
        kept = self._with(Cache((self._node,), os.path.join(os.fspath(path), "snapshot")))
        if reader_func is None:
            return kept
        read = checks.function(reader_func, "snapshot")(self._with(single(kept)))
        made: Dataset = checks.dataset(read, "What the function given to snapshot returns")
        return made

    def get_single_element(self, name: str | None = None) -> Any:
        """The one element of the dataset; an error if there is none, or another.

        Examples:
            >>> import phalanx as px
            >>> px.data.Dataset.range(3).batch(3).get_single_element().tolist()
            [0, 1, 2]
        """
        cursor = open_plan(self._node, Run())
        try:
            first = cursor.read(1)
            more = None if first is None else cursor.read(1)
        finally:
            cursor.close()
        if first is None or more is not None:
            raise InvalidArgumentError(
                "get_single_element needs a dataset of one element. "
                f"Received: {'none' if first is None else 'more than one'}"
            )
        return tree_util.tree_unflatten(self._node.structure, first.element(0))

    def save(
        self,
        path: str | os.PathLike[str],
        compression: str | None = None,
        shard_func: Any = None,
        checkpoint_args: Any = None,
    ) -> None:
        """Write all elements to a directory, from which `Dataset.load` reads them.

        A dataset that was saved there before is replaced when all elements are written.

        Args:
            path: the directory.
            compression: accepted as in TensorFlow; files are mapped into memory and not compressed.
            shard_func: accepted as in TensorFlow.
            checkpoint_args: accepted as in TensorFlow.

        Examples:
            >>> import phalanx as px, tempfile
            >>> folder = tempfile.mkdtemp()
            >>> px.data.Dataset.range(3).save(folder)
            >>> [int(x) for x in px.data.Dataset.load(folder)]
            [0, 1, 2]
        """
        if not isinstance(path, str | os.PathLike):
            raise InvalidTypeError(f"path must be a path. Received: {shown(path)}")
        saved.save(self._node, path)


def _distribution(given: Any, name: str) -> tuple[float, ...]:
    """How often each class comes, as shares."""
    try:
        shares = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        shares = np.empty(())
    if shares.ndim != 1 or not (shares >= 0).all() or not 0 < shares.sum() < math.inf:
        raise InvalidValueError(
            f"{name} needs a number for each class, none below 0. Received: {shown(given)}"
        )
    return tuple((shares / shares.sum()).tolist())
