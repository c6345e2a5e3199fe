"""Distributed datasets: what strategies make of datasets, and their iterators."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.core import context as ctx
from phalanx.core import host_memory, phases
from phalanx.core.errors import AbortedError, InvalidValueError, OutOfRangeError
from phalanx.core.interrupts import uninterrupted
from phalanx.core.options import InputOptions
from phalanx.core.pulls import begins_loop, gives_elements
from phalanx.core.showing import shown
from phalanx.data.background import Ahead
from phalanx.data.delivery import Delivery
from phalanx.data.elements import leaves_of_spec, structure_of
from phalanx.data.feeding import Feed, Feeds, Shape, Step, shapes_on_all
from phalanx.data.handover import Elements
from phalanx.data.iterator import Epochs, check_state
from phalanx.data.node import INFINITE, Node, Run
from phalanx.data.optional import Optional
from phalanx.data.place import Place
from phalanx.data.rebatching import BEGINNING, Position, empty_leaf
from phalanx.data.sharding import Division, fixed_rows
from phalanx.data.specs import on_replicas

if TYPE_CHECKING:
    from types import TracebackType

State = Mapping[str, Any]
_FAILED = "failed"


class DistributedDataset:
    """A dataset whose elements are divided over the replicas of a strategy.

    Made by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`. Each iteration is one epoch. In every step each
    replica gets its part of each leaf; parts may be empty, but nothing is lost.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = px.data.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
        >>> for x in strategy.experimental_distribute_dataset(dataset):
        ...     print(x)
        PerReplica:{
          0: Array([5.], shape=(1,), dtype=float32),
          1: Array([6.], shape=(1,), dtype=float32)
        }
        PerReplica:{
          0: Array([7.], shape=(1,), dtype=float32),
          1: Array([8.], shape=(1,), dtype=float32)
        }
    """

    def __init__(
        self,
        place: Place,
        options: InputOptions,
        division: Division,
        nodes: Sequence[Node],
        reference: Node | None,
        plan: Callable[[Place], DistributedDataset],
        deterministic: bool = True,
    ) -> None:
        self._place, self._options, self._division = place, options, division
        self._nodes, self._reference, self._plan = list(nodes), reference, plan
        self._deterministic = deterministic
        self._epochs = Epochs()
        self._epochs.go_on_from({"epoch": -1, "seed": place.shared_seed()})

    # -- looking at it ---------------------------------------------------------------------------

    @property
    def element_spec(self) -> Any:
        """What is known of the elements: a `PerReplicaSpec` for each leaf, or a plain spec."""
        place = self._place
        return on_replicas(self._spec(), place.replicas, place.wraps, self._sizes_are_fixed())

    def _spec(self) -> Any:
        """The spec of one replica's part. It does not depend on which worker this is."""
        node = self._nodes[0] if self._reference is None else self._reference
        return self._division.pieces(node, BEGINNING, 0).element_spec

    def _sizes_are_fixed(self) -> bool:
        if self._place.workers > 1:
            return False
        if self._place.replicas == 1:
            return True
        if any(fixed_rows(node) is None for node in self._nodes):
            return False
        count = self.cardinality
        full = count == INFINITE or (count >= 0 and count % self._place.replicas == 0)
        return full or self._division.policy != "NONE"

    @property
    def cardinality(self) -> int:
        """The number of elements of the dataset that was given: global batches, not pieces.

        `px.data.INFINITE_CARDINALITY` (-1) if it never ends, `px.data.UNKNOWN_CARDINALITY` (-2) if
        nobody knows.
        """
        return self._nodes[0].cardinality if self._reference is None else self._reference.cardinality

    def describe(self) -> str:
        """How the dataset is divided, and which rows or files each worker and replica reads."""
        from phalanx.data.describing import describe

        return describe(self._division, self._place, self._nodes, self._reference)

    # -- iterating -------------------------------------------------------------------------------

    @begins_loop
    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self, self._epochs.start())

    def iterator(self, state: State | None = None) -> DistributedIterator:
        """An iterator, from the beginning or from a `state` of an earlier one."""
        iterator = DistributedIterator(self, self._epochs.start())
        if state is not None:
            iterator.restore(state)
        return iterator

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combine all elements: ``state = reduce_func(state, element)``."""
        state = initial_state
        for element in self:
            state = reduce_func(state, element)
        return state

    def _as_worker(self, worker: int) -> DistributedDataset:
        """The same dataset as another worker would have it, in this process."""
        if worker == self._place.worker:
            return self
        return self._plan(self._place.alone_as(worker))

    def _feed(self, run: Run, start: Position, steps: int) -> Feed | Feeds:
        """Open what this worker reads."""
        if len(self._nodes) > 1:
            runs = [run.in_branch(i) for i in range(len(self._nodes))]
            pairs = zip(self._nodes, runs, strict=True)
            return Feeds([Feed(node, 1, own, start.elements) for node, own in pairs])
        node = self._division.pieces(self._nodes[0], start, steps)
        return Feed(node, self._place.replicas, run, self._division.skipped(start, steps))

    def _delivery(self) -> Delivery:
        options = self._options
        to_device = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
        place = self._place
        return Delivery(place.devices(), place.wraps, to_device, place.span)

    def _without_rows(self) -> Step:
        """What this worker gets while others still have data."""
        spec = self._spec()
        rows = [[empty_leaf(leaf)] * self._place.replicas for leaf in leaves_of_spec(spec)]
        return Step(rows, structure_of(spec), BEGINNING)

    def __repr__(self) -> str:
        place = self._place
        return (
            f"<px.DistributedDataset: {place.workers} worker(s) of {place.replicas} replica(s), "
            f"policy {self._division.policy}>"
        )


class _Progress(NamedTuple):
    """Where an iterator is: the rows that this worker has delivered, and the steps of all workers."""

    position: Position
    steps: int


class _Production:
    """Reads steps and brings them to the devices; runs in a thread that must not keep its iterator."""

    def __init__(
        self,
        start: _Progress,
        open_feed: Callable[[], Feed | Feeds],
        delivery: Delivery,
        without_rows: Callable[[], Step],
        meet: Callable[[Any, threading.Event], list[Any]] | None,
        replicas: int,
    ) -> None:
        self._progress, self._replicas = start, replicas
        self._open_feed, self._delivery = open_feed, delivery
        self._without_rows, self._meet = without_rows, meet
        self._feed: Feed | Feeds | None = None
        self._given_up = threading.Event()

    def __call__(self) -> Iterator[tuple[Any, _Progress]]:
        with self._failing_together():
            feed = self._feed = self._open_feed()
        nothing: Step | None = None
        try:
            while not self._given_up.is_set():
                with self._failing_together():
                    step = feed.next()
                anybody, shapes = self._agree(step)
                if not anybody:
                    return
                if nothing is None and self._meet is not None:
                    nothing = self._without_rows() if step is None else step.without_rows()
                rows = step
                if rows is None:
                    assert nothing is not None
                    assert shapes is not None
                    rows = nothing.with_shapes([(0, *leaf[0][1:]) for leaf in shapes])
                position = self._progress.position if step is None else step.position
                self._progress = _Progress(position, self._progress.steps + 1)
                yield self._delivery.element(rows, shapes), self._progress
        finally:
            feed.close()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Let the other workers know of a failure: they wait for this one in every step."""
        try:
            yield
        except Exception as error:
            if self._meet is not None and not self._given_up.is_set():
                self._meet({_FAILED: f"{type(error).__name__}: {error}"}, self._given_up)
            raise

    def _agree(self, step: Step | None) -> tuple[bool, list[list[Shape]] | None]:
        """Whether any worker has rows, and the shapes of each leaf, if there are other workers.

        Workers that read different rows go on until all have ended.
        """
        if self._meet is None:
            return step is not None, None
        said = self._meet(self._replicas if step is None else step.shapes(), self._given_up)
        for worker, what in enumerate(said):
            if isinstance(what, dict):
                raise AbortedError(f"The input of worker {worker} failed: {what[_FAILED]}")
        shapes = shapes_on_all(said)
        return shapes is not None, shapes

    def cancel(self) -> None:
        with uninterrupted():
            self._given_up.set()
        if self._feed is not None:
            self._feed.cancel()


class _Reading:
    """One epoch, from some position on. Nothing is read before the first element is asked for."""

    def __init__(self, dataset: DistributedDataset, state: State) -> None:
        self._dataset = dataset
        self.epoch, self.seed = int(state["epoch"]), int(state["seed"])
        position = Position(int(state["index"]), int(state.get("rows", 0)))
        self._start = _Progress(position, int(state.get("step", 0)))
        self._lock = threading.RLock()
        self._ahead: Ahead[_Progress] | None = None
        self._ended = False

    @property
    def progress(self) -> _Progress:
        return self._start if self._ahead is None else self._ahead.elements.position

    @property
    def taken(self) -> int:
        return 0 if self._ahead is None else self._ahead.elements.taken

    def give_back(self, element: Any, before: _Progress, taken: int) -> None:
        assert self._ahead is not None
        self._ahead.elements.give_back(element, before, taken)

    def fill(self) -> Elements[_Progress] | None:
        """Elements of which one waits; None at the end."""
        ahead = self._ahead
        if ahead is None or not ahead.elements.waiting:
            with self._lock, phases.phase("input"):
                if self._ended:
                    return None
                ahead = self._ahead or self._open()
                if not ahead.wait():
                    self.close()
                    return None
        ahead.ask()
        return ahead.elements

    def _open(self) -> Ahead[_Progress]:
        host_memory.expect_input()
        dataset, start = self._dataset, self._start
        run = Run(self.seed, (self.epoch,), deterministic=dataset._deterministic)
        place = dataset._place
        name = f"input {place.serial}, epoch {self.epoch}, step {start.steps}"
        meet = None if place.workers == 1 else functools.partial(place.exchange, name)
        work = _Production(
            start,
            lambda: dataset._feed(run, start.position, start.steps),
            dataset._delivery(),
            dataset._without_rows,
            meet,
            place.replicas,
        )
        depth = dataset._options.experimental_per_replica_buffer_size
        with uninterrupted():
            ahead = Ahead(work, depth, Elements(start))
            weakref.finalize(self, ahead.stop, False)
            self._ahead = ahead
        return ahead

    def close(self) -> None:
        self._ended = True
        if self._ahead is not None:
            self._ahead.stop()


class DistributedIterator:
    """Yields the elements of a `DistributedDataset`, one per step, and knows where it is.

    The next elements are prepared and moved to the devices in a background thread, which ends with the
    iterator. `state` and `restore` save and continue an epoch in the middle.

    Several threads may use it; each element goes to one of them. After an interrupt, such as
    KeyboardInterrupt, it goes on with the element that was not delivered.

    Examples:
        >>> import phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> dataset = px.data.Dataset.range(100).shuffle(100).batch(4)
        >>> iterator = iter(strategy.experimental_distribute_dataset(dataset))
        >>> first = next(iterator)
        >>> state = iterator.state()
        >>> expected = strategy.gather(next(iterator), axis=0)
        >>> one_device = px.OneDeviceStrategy("CPU:0")
        >>> iterator = one_device.experimental_distribute_dataset(dataset).iterator(state)
        >>> bool((next(iterator) == expected).all())
        True
    """

    def __init__(self, dataset: DistributedDataset, state: State) -> None:
        self._dataset, self._place = dataset, dataset._place
        self._reading = _Reading(dataset, state)

    # -- elements --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<px.DistributedIterator over {self._dataset!r}>"

    gives_elements_to_functions = True

    @begins_loop
    def __iter__(self) -> DistributedIterator:
        return self

    @gives_elements
    def __next__(self) -> Any:
        self._check_caller()
        while True:
            elements = self._reading.fill()
            if elements is None:
                raise StopIteration
            try:
                return elements.take()
            except IndexError:  # another thread was faster
                pass

    @gives_elements
    def get_next(self, name: str | None = None) -> Any:
        """The next element; an `OutOfRangeError` at the end."""
        del name
        self._check_caller()
        while True:
            elements = self._reading.fill()
            if elements is None:
                raise OutOfRangeError("The end of the distributed dataset was reached.")
            try:
                return elements.take()
            except IndexError:  # another thread was faster
                pass

    @gives_elements
    def get_next_as_optional(self) -> Optional:
        """The next element as an `Optional`, which is empty at the end."""
        self._check_caller()
        found = Optional()  # made before: a call must not come between taking and returning
        while True:
            elements = self._reading.fill()
            if elements is None:
                return found
            try:
                found._value = elements.take()
                return found
            except IndexError:  # another thread was faster
                pass

    def _mark(self) -> Any:
        reading = self._reading
        return reading, reading.progress, reading.taken

    def _give_back(self, mark: Any, element: Any) -> None:
        reading, before, taken = mark
        if isinstance(element, Optional):
            if not element.has_value():
                return
            element = element.get_value()
        reading.give_back(element, before, taken)

    def _check_caller(self) -> None:
        ctx.require_same_strategy(self._place.strategy, "next(iterator)")
        if ctx.active_replica() is not None:
            raise InvalidValueError(
                "next(iterator) gives the parts of all replicas, so it must be called outside of the "
                "function that runs on replicas: strategy.run(fn, args=(next(iterator),))."
            )

    @property
    def element_spec(self) -> Any:
        """What is known of the elements; see `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    # -- position --------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """The position, as a small dictionary that can be written as JSON.

        `epoch` counts iterations of the dataset, `index` the global batches of this one that were
        delivered, and `seed` is where all shuffling comes from. It does not depend on how many replicas
        there are.
        """
        reading = self._reading
        position, steps = reading.progress
        state = {"epoch": reading.epoch, "index": position.elements, "seed": reading.seed}
        if position.rows:
            state["rows"] = position.rows
        if not self._dataset._division.is_shared:
            place = self._place
            state |= {"step": steps, "worker": place.worker, "workers": place.workers}
        return state

    def restore(self, state: State) -> None:
        """Continue from a position that `state` returned, of this or of another strategy's iterator.

        The next iteration of the dataset is then the one after that position's.
        """
        _check_state(state, self._place, self._dataset._division)
        before = self._reading
        self._dataset._epochs.go_on_from({"epoch": int(state["epoch"]), "seed": int(state["seed"])})
        self._reading = _Reading(self._dataset, state)
        before.close()

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """End the background thread, and give back files. The iterator has then ended."""
        self._reading.close()

    def __enter__(self) -> DistributedIterator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_state(state: Any, place: Place, division: Division) -> None:
    check_state(state)
    if state.get("rows") and (division.policy == "DATA" or division.batch is None):
        raise InvalidValueError(
            "The position is in the middle of a batch, because it comes from an input that is cut by "
            f"the nominal batch size; this one is not. Received: {shown(state)}"
        )
    where = (state.get("worker", 0), state.get("workers", 1))
    here = (0, 1) if division.is_shared else (place.worker, place.workers)
    if where != here:
        raise InvalidValueError(
            "With this auto-shard policy every worker reads rows of its own, so a position can only be "
            f"restored on the same worker of as many workers: {here[0]} of {here[1]}. "
            f"Received: a position of worker {shown(where[0])} of {shown(where[1])}"
        )
