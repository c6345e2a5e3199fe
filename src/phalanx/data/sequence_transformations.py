"""What can be made of a dataset with memory: states, ends, buckets and files."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jax import tree_util

from phalanx.data.ops import saved
from phalanx.data.ops.sequences import Buckets, Scan, TakeWhile
from phalanx.data.plan import argument_checks as checks
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.elements import LeafBase
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.plan.opening import open_plan
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
