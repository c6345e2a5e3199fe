"""What can be made of a dataset: one method per node, with its arguments checked."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.data.ops.batching import Batch, PaddedBatch, RaggedBatch
from phalanx.data.ops.caching import Cache
from phalanx.data.ops.interleaving import MOST_DATASETS, Interleave
from phalanx.data.ops.mapping import Enumerate, Filter, Map
from phalanx.data.ops.merging import Concatenate
from phalanx.data.ops.prefetching import Prefetch
from phalanx.data.ops.selecting import SHARD_HINT, Repeat, ShardHint, Slice, WithOptions
from phalanx.data.ops.shuffling import Shuffle
from phalanx.data.ops.unbatching import Rebatch, Unbatch, Window
from phalanx.data.plan import argument_checks as checks
from phalanx.data.plan.dataset_options import Options
from phalanx.data.plan.functions import check_signature, function_error
from phalanx.data.plan.nodes import PlanNode
from phalanx.data.sequence_transformations import SequenceTransformations
from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import shown

if TYPE_CHECKING:
    from phalanx.data.dataset import Dataset

T = TypeVar("T")


class Transformations(SequenceTransformations):
    """The methods of `Dataset` that make something of it. `name` is accepted everywhere and ignored."""

    def _deterministic(self, value: bool | None) -> bool | None:
        return None if value is None else checks.boolean(value, "deterministic")

    # -- functions

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        vectorized: bool = False,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """The results of a function, called for each element.

        A tuple is unpacked into several arguments. The function may use NumPy, JAX or plain Python, and
        returns arrays, numbers, strings or nests of them.

        Args:
            map_func: the function.
            num_parallel_calls: how many calls to make at the same time, in threads; `AUTOTUNE` for one
                per processor.
            deterministic: whether parallel calls keep the order; None for what `Options` say.
            vectorized: the function is given many elements at once, as arrays with one more dimension
                in front, and returns as many. How many differs from call to call.
            output_signature: the `TensorSpec`s of the results. Without it they are found out with the
                first element, and `element_spec` has its shapes.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> [int(x) for x in px.data.Dataset.range(3).map(lambda x: x * x)]
            [0, 1, 4]
        """
        node = Map(
            (self._node,),
            checks.function(map_func, "map"),
            checks.parallelism(num_parallel_calls),
            self._deterministic(deterministic),
            checks.boolean(vectorized, "vectorized"),
            None if output_signature is None else check_signature(output_signature, "map"),
        )
        return self._with(node)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> Dataset:
        """The elements for which a function returns true.

        Examples:
            >>> import phalanx as px
            >>> [int(x) for x in px.data.Dataset.range(5).filter(lambda x: x % 2 == 1)]
            [1, 3]
        """
        return self._with(Filter((self._node,), checks.function(predicate, "filter")))

    def flat_map(self, map_func: Callable[..., Dataset], name: str | None = None) -> Dataset:
        """The elements of the datasets that a function makes, one dataset after the other.

        Examples:
            >>> import phalanx as px
            >>> numbers = px.data.Dataset.range(1, 4)
            >>> [int(x) for x in numbers.flat_map(lambda n: px.data.Dataset.range(n))]
            [0, 0, 1, 0, 1, 2]
        """
        return self._with(Interleave((self._node,), checks.function(map_func, "flat_map")))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements of the datasets that a function makes, taken from several in turn.

        Args:
            map_func: from an element to a dataset.
            cycle_length: how many datasets are open at the same time; None or `AUTOTUNE` for 16.
            block_length: how many elements are taken from one before the next has its turn; None for 1.
            num_parallel_calls: how many threads read the open datasets; None to read them here.
            deterministic: whether threads keep the order; None for what `Options` say.
            name: ignored.
        """
        cycle = (
            checks.AUTOTUNE if cycle_length is None else checks.integer(cycle_length, "cycle_length")
        )
        node = Interleave(
            (self._node,),
            checks.function(map_func, "interleave"),
            16 if cycle == checks.AUTOTUNE else checks.integer(cycle, "cycle_length", 1, MOST_DATASETS),
            checks.integer(1 if block_length is None else block_length, "block_length", 1),
            checks.parallelism(num_parallel_calls),
            self._deterministic(deterministic),
            "interleave",
        )
        return self._with(node)

    def reduce(
        self, initial_state: T, reduce_func: Callable[[T, Any], T], name: str | None = None
    ) -> T:
        """What a function makes of a state and each element in turn, beginning with `initial_state`.

        Examples:
            >>> import phalanx as px
            >>> int(px.data.Dataset.range(5).reduce(0, lambda total, x: total + x))
            10
        """
        checks.function(reduce_func, "reduce")
        state = initial_state
        with self.iterator() as elements:
            for index, element in enumerate(elements):
                try:
                    state = reduce_func(state, element)
                except Exception as error:
                    raise function_error("reduce", f"element {index}", error) from error
        return state

    @abstractmethod
    def iterator(self) -> Any:
        """An iterator."""

    # -- batches

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Consecutive elements stacked into one, along a new first dimension.

        Args:
            batch_size: how many elements make a batch.
            drop_remainder: whether to leave out a last batch that is smaller.
            num_parallel_calls: ignored; elements are stacked many at once anyway.
            deterministic: ignored.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> [x.tolist() for x in px.data.Dataset.range(5).batch(2)]
            [[0, 1], [2, 3], [4]]
        """
        size = checks.integer(batch_size, "batch_size", 1)
        return self._with(Batch((self._node,), size, checks.boolean(drop_remainder, "drop_remainder")))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Consecutive elements of different shapes, filled up to one shape and stacked.

        Args:
            batch_size: how many elements make a batch.
            padded_shapes: the shape to fill up to, for each leaf; None and -1 stand for the longest of
                the batch. By default that is so for all dimensions.
            padding_values: what to fill up with, one value or one for each leaf. By default zeros and
                empty strings.
            drop_remainder: whether to leave out a last batch that is smaller.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> words = px.data.Dataset.from_tensor_slices([[1], [2, 3]])
            >>> next(iter(words.padded_batch(2))).tolist()
            [[1, 0], [2, 3]]
        """
        node = PaddedBatch(
            (self._node,),
            checks.integer(batch_size, "batch_size", 1),
            checks.boolean(drop_remainder, "drop_remainder"),
            padded_shapes,
            padding_values,
        )
        return self._with(node)

    def ragged_batch(
        self, batch_size: int, drop_remainder: bool = False, name: str | None = None
    ) -> Dataset:
        """Consecutive elements of different shapes, put together as they are.

        Arrays become `Ragged` values; numbers and strings are stacked.

        Examples:
            >>> import phalanx as px
            >>> words = px.data.Dataset.from_tensor_slices([[1], [2, 3]])
            >>> next(iter(words.ragged_batch(2)))
            Ragged([[1], [2, 3]])
        """
        size = checks.integer(batch_size, "batch_size", 1)
        drop = checks.boolean(drop_remainder, "drop_remainder")
        return self._with(RaggedBatch((self._node,), size, drop))

    def unbatch(self, name: str | None = None) -> Dataset:
        """The rows of each element.

        Examples:
            >>> import phalanx as px
            >>> [int(x) for x in px.data.Dataset.range(5).batch(2).unbatch()]
            [0, 1, 2, 3, 4]
        """
        return self._with(Unbatch((self._node,)))

    def rebatch(
        self, batch_size: int | Sequence[int], drop_remainder: bool = False, name: str | None = None
    ) -> Dataset:
        """The rows of batches in batches of another size, or of several sizes in turn.

        Examples:
            >>> import phalanx as px
            >>> [x.tolist() for x in px.data.Dataset.range(7).batch(3).rebatch([2, 1])]
            [[0, 1], [2], [3, 4], [5], [6]]
        """
        if isinstance(batch_size, Sequence):
            sizes = tuple(checks.integer(size, "batch_size", 0) for size in batch_size)
            if not sum(sizes):
                raise InvalidValueError(
                    f"batch_size needs at least one size that is not 0. Received: {shown(batch_size)}"
                )
        else:
            sizes = (checks.integer(batch_size, "batch_size", 1),)
        return self._with(
            Rebatch((self._node,), sizes, checks.boolean(drop_remainder, "drop_remainder"))
        )

    def window(
        self,
        size: int,
        shift: int | None = None,
        stride: int = 1,
        drop_remainder: bool = False,
        name: str | None = None,
    ) -> Dataset:
        """Windows over the elements. Each is a dataset; if elements are nests, a nest of datasets.

        Args:
            size: how many elements a window has.
            shift: how many elements lie between the beginnings of two windows; None for `size`.
            stride: how many elements lie between two elements of a window.
            drop_remainder: whether to leave out windows at the end that have fewer elements.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> windows = px.data.Dataset.range(5).window(3, shift=1, drop_remainder=True)
            >>> [[int(x) for x in window] for window in windows]
            [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
        """
        length = checks.integer(size, "size", 1)
        node = Window(
            (self._node,),
            length,
            length if shift is None else checks.integer(shift, "shift", 1),
            checks.integer(stride, "stride", 1),
            checks.boolean(drop_remainder, "drop_remainder"),
            self._with,
        )
        return self._with(node)

    # -- order and number

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The elements in random order.

        Each is drawn from a buffer of the next `buffer_size` elements. A buffer at least as large as
        the dataset makes all orders equally likely; over arrays it costs nothing but the order itself.

        Args:
            buffer_size: how many elements to choose from; `UNKNOWN_CARDINALITY` or
                `INFINITE_CARDINALITY` for all of them.
            seed: the same seed gives the same orders. None for other ones each time the program runs.
            reshuffle_each_iteration: whether each iteration, and each pass of `repeat`, has an order of
                its own. True if not set.
            name: ignored.
        """
        given = checks.integer(buffer_size, "buffer_size")
        size = self._node.cardinality if given in (-1, -2) else given
        if size in (-1, -2):
            raise InvalidValueError(
                "buffer_size must be given, because the number of elements is unknown. "
                f"Received: {shown(buffer_size)}"
            )
        again = reshuffle_each_iteration is None or checks.boolean(
            reshuffle_each_iteration, "reshuffle_each_iteration"
        )
        size = max(1, size) if given in (-1, -2) else checks.integer(size, "buffer_size", 1)
        return self._with(Shuffle((self._node,), size, checks.seed(seed), again))

    def repeat(self, count: int | None = None, name: str | None = None) -> Dataset:
        """The elements `count` times over; without end if it is None or -1."""
        times = None if count is None else checks.integer(count, "count", -1)
        return self._with(Repeat((self._node,), None if times == -1 else times))

    def take(self, count: int, name: str | None = None) -> Dataset:
        """At most the first `count` elements; all if it is -1."""
        number = checks.integer(count, "count", -1)
        return self._with(Slice((self._node,), stop=None if number == -1 else number))

    def skip(self, count: int, name: str | None = None) -> Dataset:
        """All but the first `count` elements; none if it is -1."""
        number = checks.integer(count, "count", -1)
        return self._with(Slice((self._node,), max(number, 0), stop=0 if number == -1 else None))

    def shard(self, num_shards: int, index: int, name: str | None = None) -> Dataset:
        """Every `num_shards`-th element, beginning with number `index`.

        With ``px.data.experimental.SHARD_HINT`` for both, it marks the place where distribution with
        `AutoShardPolicy.HINT` shards; until then it yields all elements.
        """
        shards = checks.integer(num_shards, "num_shards")
        number = checks.integer(index, "index")
        if (shards == SHARD_HINT) != (number == SHARD_HINT):
            raise InvalidValueError(
                "SHARD_HINT must be given for num_shards and index, or for none of them. "
                f"Received: num_shards={shards}, index={number}"
            )
        if shards == SHARD_HINT:
            return self._with(ShardHint((self._node,)))
        if shards < 1 or not 0 <= number < shards:
            raise InvalidValueError(
                "num_shards must be positive, and index at least 0 and less than num_shards. "
                f"Received: num_shards={shards}, index={number}"
            )
        return self._with(Slice((self._node,), number, step=shards))

    def enumerate(self, start: int = 0, name: str | None = None) -> Dataset:
        """Pairs of a number, counted from `start`, and an element."""
        return self._with(Enumerate((self._node,), checks.integer(start, "start")))

    def concatenate(self, dataset: Dataset, name: str | None = None) -> Dataset:
        """The elements of this dataset, then those of another of the same structure and dtypes."""
        return self._with(Concatenate((self._node, checks.dataset(dataset, "concatenate")._node)))

    # -- how it is run

    def cache(self, filename: str | os.PathLike[str] = "", name: str | None = None) -> Dataset:
        """The same elements, which are read from this dataset only once.

        They are kept in memory or, if there is a `filename`, in a directory of that name with
        ``.cache`` behind it, where other programs find them too. Nothing is kept until all elements
        were read.
        """
        if not isinstance(filename, str | os.PathLike):
            raise InvalidTypeError(f"filename must be a path. Received: {shown(filename)}")
        return self._with(Cache((self._node,), os.fspath(filename)))

    def prefetch(self, buffer_size: int, name: str | None = None) -> Dataset:
        """The same elements, of which up to `buffer_size` are read ahead in a thread.

        `AUTOTUNE` begins with two, and reads further ahead whenever a reader has to wait.
        """
        return self._with(Prefetch((self._node,), checks.integer(buffer_size, "buffer_size", -1)))

    def with_options(self, options: Options, name: str | None = None) -> Dataset:
        """The same elements, with options; what was set before and is not set again remains."""
        if not isinstance(options, Options):
            raise InvalidTypeError(f"with_options needs px.data.Options. Received: {shown(options)}")
        return self._with(WithOptions((self._node,), Options().merge(options)))

    def options(self) -> Options:
        """The options that were set."""
        return options_of(self._node)

    def apply(self, transformation_func: Callable[[Any], T], name: str | None = None) -> T:
        """What a function makes of this dataset."""
        return checks.function(transformation_func, "apply")(self)


def options_of(node: PlanNode) -> Options:
    """The options that are set in a plan."""
    merged = Options()
    for below in node.inputs:
        merged = merged.merge(options_of(below))
    return merged.merge(node.options) if isinstance(node, WithOptions) else merged
