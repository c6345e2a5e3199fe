"""`Dataset`: the friendly face of plans."""

from __future__ import annotations

import builtins
import glob
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import tree_util

from phalanx.core.input_requests import begins_loop
from phalanx.core.tensor_spec import TensorSpec
from phalanx.data.ops import saved
from phalanx.data.ops.merging import Choose, Sample, Zip
from phalanx.data.ops.sequences import RandomNumbers
from phalanx.data.plan import argument_checks as checks, sources
from phalanx.data.plan.elements import DatasetSpec, as_leaf
from phalanx.data.plan.functions import check_signature
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode
from phalanx.data.plan.opening import RangeSource
from phalanx.data.run.iterator import Epochs, Iterator
from phalanx.data.transformations import Transformations
from phalanx.errors import InvalidArgumentError, InvalidTypeError, InvalidValueError
from phalanx.runtime.formatting import html_table, shown


class Dataset(Transformations):
    """A sequence of elements, as a plan that runs when it is iterated.

    An element is a nest of NumPy arrays: tuples, dictionaries or single arrays. Nothing is read before
    it is iterated, and each iteration begins anew. Plans over arrays run on whole batches at once.

    Examples:
        >>> import numpy as np, phalanx as px
        >>> dataset = px.data.Dataset.from_tensor_slices({"x": np.arange(6), "y": np.arange(6) % 2})
        >>> for batch in dataset.filter(lambda e: e["y"] == 1).batch(2):
        ...     print(batch["x"])
        [1 3]
        [5]
    """

    def __init__(self, node: PlanNode) -> None:
        if not isinstance(node, PlanNode):
            raise InvalidTypeError(
                "Datasets are made by Dataset.from_tensor_slices, Dataset.range and the like. "
                f"Received: {shown(node)}"
            )
        node.known_spec()  # a plan that cannot work fails here
        self._node = node
        self._epochs = Epochs()

    def _with(self, node: PlanNode) -> Dataset:
        return Dataset(node)

    def _leaf_spec(self) -> Any:
        return DatasetSpec(self.element_spec)

    def __reduce__(self) -> Any:
        return Dataset, (self._node,)

    def __repr__(self) -> str:
        known = self._node.known_spec()
        return f"<Dataset element_spec={'unknown until it is read' if known is None else known}>"

    def _repr_html_(self) -> str:
        known, count = self._node.known_spec(), self.cardinality()
        parts = tree_util.tree_flatten_with_path(known)[0] if known is not None else []
        rows = [(tree_util.keystr(path) or "element", str(spec)) for path, spec in parts]
        elements = {INFINITE: "without end", UNKNOWN: "of unknown length"}.get(
            count, f"{count} elements"
        )
        return html_table(("part", "spec"), rows, f"Dataset, {elements}")

    # -- what it is

    @property
    def element_spec(self) -> Any:
        """What is known of the elements: a nest of `TensorSpec`.

        If a function makes the elements, it is called for the first one to find out; the shapes of that
        one then stand for all.
        """
        return self._node.element_spec

    def cardinality(self) -> int:
        """The number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return self._node.cardinality

    def __len__(self) -> int:
        size = self.cardinality()
        if size < 0:
            what = "infinite" if size == INFINITE else "unknown"
            raise InvalidTypeError(f"The length of the dataset is {what}. Received: {shown(self)}")
        if size > sys.maxsize:
            raise InvalidValueError(
                "A length must fit into 64 bits; call cardinality() instead. "
                f"Received: a dataset of {shown(size)} elements"
            )
        return size

    def __bool__(self) -> bool:
        return True

    # -- iteration

    @begins_loop
    def __iter__(self) -> Iterator:
        return self.iterator()

    def iterator(self, state: Mapping[str, int] | None = None) -> Iterator:
        """An iterator, from the beginning or from the `state` of another one.

        Args:
            state: what `Iterator.state` returned, in this program or an earlier one. Later iterations
                of this dataset then follow that one.
        """
        return Iterator(self._node, self._epochs, self.options().deterministic, state)

    def as_numpy_iterator(self) -> Iterator:
        """The same as `iter`: elements are NumPy arrays anyway."""
        return self.iterator()

    # -- sources

    @staticmethod
    def from_tensor_slices(tensors: Any, name: str | None = None) -> Dataset:
        """The slices of arrays along their first dimension.

        NumPy arrays are not copied, so do not change them afterwards. What is yielded are read-only
        views of them wherever possible.

        Args:
            tensors: an array, or a nest of arrays with equal first dimensions. Lists become arrays; if
                their rows differ in length, so do the elements.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> px.data.Dataset.from_tensor_slices(([1, 2, 3], ["a", "b", "c"])).batch(2).element_spec
            (TensorSpec(shape=(None,), dtype=dtype('int32'), name=None),
             TensorSpec(shape=(None,), dtype=dtype('O'), name=None))
        """
        return Dataset(sources.slices(tensors))

    @staticmethod
    def from_tensors(tensors: Any, name: str | None = None) -> Dataset:
        """A single element."""
        return Dataset(sources.single(tensors))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]],
        output_types: Any = None,
        output_shapes: Any = None,
        args: Sequence[Any] | None = None,
        output_signature: Any = None,
        name: str | None = None,
    ) -> Dataset:
        """What a generator function yields; it is called anew for each iteration.

        Args:
            generator: a function that returns something to iterate over.
            output_types: dtypes to convert to; an older way to say what elements are.
            output_shapes: the shapes that belong to `output_types`.
            args: arguments for the generator function.
            output_signature: a nest of `TensorSpec`. Without it the first element decides.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> def count():
            ...     yield from range(3)
            >>> [int(x) for x in px.data.Dataset.from_generator(count)]
            [0, 1, 2]
        """
        checks.function(generator, "from_generator")
        given = tuple(as_leaf(x) for x in args or ())

        def make() -> Iterable[Any]:
            return generator(*given)

        if output_types is not None and output_signature is not None:
            raise InvalidValueError(
                "Give from_generator either output_signature or output_types. Received: both"
            )
        if output_types is not None and output_shapes is not None:
            output_signature = sources.signature_of(output_types, output_shapes)
        elif output_types is not None:
            output_types = tree_util.tree_map(lambda x: checks.dtype(x, "output_types"), output_types)
            return Dataset(sources.Generator((), sources.converting(make, output_types)))
        if output_signature is not None:
            output_signature = check_signature(output_signature, "from_generator")
        return Dataset(sources.Generator((), make, output_signature))

    @staticmethod
    def range(*args: int, output_type: Any = np.int64, name: str | None = None) -> Dataset:
        """The numbers of Python's `range`, as int64 unless another `output_type` is given.

        Examples:
            >>> import phalanx as px
            >>> [int(x) for x in px.data.Dataset.range(1, 10, 4)]
            [1, 5, 9]
        """
        numbers = [checks.integer(x, "The arguments of range") for x in args]
        if not 1 <= len(numbers) <= 3 or (len(numbers) == 3 and numbers[2] == 0):
            raise InvalidValueError(
                "range needs a stop, or a start and a stop, and a step other than 0. "
                f"Received: {shown(args)}"
            )
        dtype = checks.dtype(output_type, "output_type")
        if dtype.kind not in "iuf":
            raise InvalidTypeError(
                f"output_type must be a numeric dtype. Received: {shown(output_type)}"
            )
        return Dataset(RangeSource((), builtins.range(*numbers), dtype))

    @staticmethod
    def random(
        seed: int | None = None,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Random numbers from 0 to 2**32 - 1, without end.

        Args:
            seed: the same seed gives the same numbers.
            rerandomize_each_iteration: whether each iteration has numbers of its own.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> numbers = px.data.Dataset.random(seed=4).take(3)
            >>> list(numbers) == list(numbers)
            True
        """
        again = False if rerandomize_each_iteration is None else rerandomize_each_iteration
        again = checks.boolean(again, "rerandomize_each_iteration")
        return Dataset(RandomNumbers((), checks.seed(seed), again))

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        element_spec: Any = None,
        compression: str | None = None,
        reader_func: Callable[[Dataset], Dataset] | None = None,
    ) -> Dataset:
        """The elements that `save` wrote to a directory.

        Args:
            path: the directory.
            element_spec: what the elements must be; it need not be given.
            compression: accepted as in TensorFlow.
            reader_func: accepted as in TensorFlow.
        """
        node = saved.load(path)
        if element_spec is not None and not saved.same_spec(element_spec, node.saved_spec):
            raise InvalidValueError(
                f"The saved elements are others: {node.saved_spec}. Received: {shown(element_spec)}"
            )
        return Dataset(node)

    @staticmethod
    def list_files(
        file_pattern: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        shuffle: bool | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> Dataset:
        """The names of the files that match one or more patterns such as ``"data/*.tfrecord"``.

        Args:
            file_pattern: a pattern, or several.
            shuffle: whether to put them in random order, another one in each iteration. True if not
                set; else they are sorted.
            seed: see `shuffle`.
            name: ignored.
        """
        several = isinstance(file_pattern, Sequence | np.ndarray) and not isinstance(file_pattern, str)
        patterns: list[Any] = list(file_pattern) if several else [file_pattern]  # type: ignore[arg-type]
        if not all(isinstance(pattern, str | os.PathLike) for pattern in patterns):
            raise InvalidTypeError(
                f"list_files needs patterns that are strings or paths. Received: {shown(file_pattern)}"
            )
        found = {
            path
            for pattern in patterns
            for path in glob.glob(os.fspath(pattern), recursive=True)
            if not os.path.isdir(path)
        }
        if not found:
            raise InvalidArgumentError(f"list_files found no files. Received: {shown(file_pattern)}")
        names = Dataset(sources.file_names(sorted(found)))
        if shuffle is None or checks.boolean(shuffle, "shuffle"):
            return names.shuffle(len(found), seed)
        checks.seed(seed)
        return names

    # -- several datasets

    @staticmethod
    def zip(*args: Any, datasets: Any = None, name: str | None = None) -> Dataset:
        """Elements made of one element of each dataset; as many as the shortest has.

        Args:
            *args: datasets, or one nest of datasets.
            datasets: the nest of datasets, if there are no other arguments.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> numbers = px.data.Dataset.range(3)
            >>> pairs = px.data.Dataset.zip(numbers, numbers.skip(1))
            >>> [(int(a), int(b)) for a, b in pairs]
            [(0, 1), (1, 2)]
        """
        if (datasets is None) == (not args):
            raise InvalidTypeError(
                f"zip needs datasets as arguments, or as `datasets`. Received: {args}, {datasets}"
            )
        nest = datasets if datasets is not None else args[0] if len(args) == 1 else args
        nest = tuple(nest) if isinstance(nest, list) else nest
        leaves, structure = tree_util.tree_flatten(nest)
        if not leaves:
            raise InvalidValueError(f"zip needs at least one dataset. Received: {shown(nest)}")
        nodes = tuple(checks.dataset(leaf, "zip")._node for leaf in leaves)
        return Dataset(Zip(nodes, structure))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset],
        weights: Sequence[float] | None = None,
        seed: int | None = None,
        stop_on_empty_dataset: bool = False,
        rerandomize_each_iteration: bool | None = None,
        name: str | None = None,
    ) -> Dataset:
        """Elements of several datasets; from which one the next comes is drawn at random.

        Args:
            datasets: datasets of one structure.
            weights: how often each is drawn, relative to the others; equally often if not given.
            seed: the same seed gives the same draws.
            stop_on_empty_dataset: whether to end with the first dataset that has ended. Else the others
                go on.
            rerandomize_each_iteration: whether each iteration has draws of its own. True if not set.
            name: ignored.
        """
        nodes = _several(datasets, "sample_from_datasets")
        try:
            share = np.ones(len(nodes)) if weights is None else np.asarray(weights, np.float64)
        except (TypeError, ValueError, OverflowError):
            share = np.empty(0)
        if share.shape != (len(nodes),) or not np.isfinite(share).all() or (share < 0).any():
            raise InvalidValueError(
                f"weights must be {len(nodes)} numbers, one per dataset, none of them negative. "
                f"Received: {shown(weights)}"
            )
        if not share.sum() > 0:
            raise InvalidValueError(f"One of the weights must be positive. Received: {shown(weights)}")
        again = rerandomize_each_iteration is None or checks.boolean(
            rerandomize_each_iteration, "rerandomize_each_iteration"
        )
        stop = checks.boolean(stop_on_empty_dataset, "stop_on_empty_dataset")
        return Dataset(Sample(nodes, tuple(share.tolist()), checks.seed(seed), stop, again))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset],
        choice_dataset: Dataset,
        stop_on_empty_dataset: bool = True,
        name: str | None = None,
    ) -> Dataset:
        """Elements of several datasets; another dataset says from which one the next comes.

        Args:
            datasets: datasets of one structure.
            choice_dataset: a dataset of numbers of datasets, counted from 0.
            stop_on_empty_dataset: whether to end with the first dataset that has ended. Else choices of
                it are passed over.
            name: ignored.

        Examples:
            >>> import phalanx as px
            >>> D = px.data.Dataset
            >>> chosen = D.choose_from_datasets(
            ...     [D.range(3), D.range(10, 13)], D.from_tensor_slices([0, 1, 1, 0])
            ... )
            >>> [int(x) for x in chosen]
            [0, 10, 11, 1]
        """
        nodes = _several(datasets, "choose_from_datasets")
        choices = checks.dataset(choice_dataset, "choose_from_datasets")._node
        spec = choices.known_spec()
        if spec is not None and not (
            isinstance(spec, TensorSpec) and spec.shape == () and np.dtype(spec.dtype).kind in "iu"
        ):
            raise InvalidTypeError(
                f"choice_dataset must be a dataset of single integers. Received: elements of {spec}"
            )
        stop = checks.boolean(stop_on_empty_dataset, "stop_on_empty_dataset")
        return Dataset(Choose((*nodes, choices), stop))


def _several(datasets: Sequence[Dataset], what: str) -> tuple[PlanNode, ...]:
    if not isinstance(datasets, Iterable) or isinstance(datasets, Dataset):
        raise InvalidTypeError(
            f"{what} needs a list of datasets. "
            f"Received: {shown(datasets)} of type {type(datasets).__name__}"
        )
    nodes = tuple(checks.dataset(dataset, what)._node for dataset in datasets)
    if not nodes:
        raise InvalidValueError(f"{what} needs at least one dataset. Received: {shown(datasets)}")
    return nodes
