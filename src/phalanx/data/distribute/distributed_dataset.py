"""Distributed datasets: what strategies make of datasets, and their iterators."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax import tree_util

from phalanx.core import context as ctx
from phalanx.core.input_requests import begins_loop, gives_elements
from phalanx.core.options import InputOptions
from phalanx.data.distribute.description import describe
from phalanx.data.distribute.device_transfer import DeviceTransfer
from phalanx.data.distribute.input_topology import InputTopology
from phalanx.data.distribute.optional import Optional
from phalanx.data.distribute.per_replica_spec import on_replicas
from phalanx.data.distribute.rebatching import BEGINNING, Position, empty_leaf
from phalanx.data.distribute.sharding import Division, fixed_rows
from phalanx.data.distribute.step_producer import StepProducer, StepProgress
from phalanx.data.distribute.steps import PerReplicaStepReader, Step, StepReader
from phalanx.data.plan.cursors import Run
from phalanx.data.plan.nodes import INFINITE, UNKNOWN, PlanNode
from phalanx.data.run.element_queue import ElementQueue
from phalanx.data.run.iterator import ElementIterator, Epochs, check_state
from phalanx.data.run.read_ahead import ReadAhead
from phalanx.errors import InvalidValueError
from phalanx.runtime import activity, host_memory, laboratory
from phalanx.runtime.formatting import html_table, shown
from phalanx.runtime.interrupts import uninterrupted

State = Mapping[str, Any]


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
        topology: InputTopology,
        options: InputOptions,
        division: Division,
        nodes: Sequence[PlanNode],
        reference: PlanNode | None,
        plan: Callable[[InputTopology], DistributedDataset],
        deterministic: bool = True,
    ) -> None:
        self._topology, self._options, self._division = topology, options, division
        self._nodes, self._reference, self._plan = list(nodes), reference, plan
        self._deterministic = deterministic
        self._epochs = Epochs()
        self._epochs.go_on_from({"epoch": -1, "seed": topology.shared_seed()})

    # -- looking at it ---------------------------------------------------------------------------

    @property
    def element_spec(self) -> Any:
        """What is known of the elements: a `PerReplicaSpec` for each leaf, or a plain spec."""
        topology = self._topology
        return on_replicas(self._spec(), topology.replicas, topology.wraps, self._sizes_are_fixed())

    def _spec(self) -> Any:
        """The spec of one replica's part. It does not depend on which worker this is."""
        node = self._nodes[0] if self._reference is None else self._reference
        return self._division.pieces(node, BEGINNING, 0).element_spec

    def _sizes_are_fixed(self) -> bool:
        if self._topology.workers > 1:
            return False
        if self._topology.replicas == 1:
            return True
        if any(fixed_rows(node) is None for node in self._nodes):
            return False
        count = self.cardinality
        full = count == INFINITE or (count >= 0 and count % self._topology.replicas == 0)
        return full or self._division.policy != "NONE"

    @property
    def cardinality(self) -> int:
        """The number of elements of the dataset that was given: global batches, not pieces.

        `px.data.INFINITE_CARDINALITY` (-1) if it never ends, `px.data.UNKNOWN_CARDINALITY` (-2) if
        it is unknown.
        """
        return self._nodes[0].cardinality if self._reference is None else self._reference.cardinality

    @property
    def steps(self) -> int:
        """How many steps an iteration has, on all workers.

        `px.data.INFINITE_CARDINALITY` (-1) if it never ends, `px.data.UNKNOWN_CARDINALITY` (-2) if
        it is unknown: also where every worker reads rows of its own.
        """
        if self._topology.workers > 1 and not self._division.is_shared:
            return UNKNOWN
        if self._reference is not None:
            return self._reference.cardinality
        counts = [node.cardinality for node in self._nodes]
        if min(counts) < 0:
            return max(c for c in counts if c < 0)
        return max(counts) if len(counts) > 1 else -(-counts[0] // self._topology.replicas)

    def describe(self) -> str:
        """How the dataset is divided, and which rows or files each worker and replica reads."""
        return describe(self._division, self._topology, self._nodes, self._reference)

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
        if worker == self._topology.worker:
            return self
        return self._plan(self._topology.alone_as(worker))

    def _open_reader(self, run: Run, start: Position, steps: int) -> StepReader | PerReplicaStepReader:
        """Open what this worker reads."""
        if len(self._nodes) > 1:
            runs = [run.in_branch(i) for i in range(len(self._nodes))]
            pairs = zip(self._nodes, runs, strict=True)
            return PerReplicaStepReader(
                [StepReader(node, 1, own, start.elements) for node, own in pairs]
            )
        node = self._division.pieces(self._nodes[0], start, steps)
        return StepReader(node, self._topology.replicas, run, self._division.skipped(start, steps))

    def _transfer(self) -> DeviceTransfer:
        options = self._options
        to_device = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
        topology = self._topology
        return DeviceTransfer(
            topology.devices(), topology.wraps, to_device, topology.span, topology.place
        )

    def _without_rows(self) -> Step:
        """What this worker gets while others still have data."""
        spec = self._spec()
        rows = [[empty_leaf(leaf)] * self._topology.replicas for leaf in tree_util.tree_leaves(spec)]
        return Step(rows, tree_util.tree_structure(spec), BEGINNING)

    def __repr__(self) -> str:
        topology = self._topology
        return (
            f"<px.DistributedDataset: {topology.workers} worker(s) of {topology.replicas} replica(s), "
            f"policy {self._division.policy}>"
        )

    def _repr_html_(self) -> str:
        topology = self._topology
        rows = [
            ("workers", str(topology.workers)),
            ("replicas of a worker", str(topology.replicas)),
            ("policy", str(self._division.policy)),
        ]
        return html_table((), rows, "DistributedDataset")


class _DistributedIteration:
    """One epoch, from some position on. Nothing is read before the first element is asked for."""

    def __init__(self, dataset: DistributedDataset, state: State) -> None:
        self._dataset = dataset
        self.epoch, self.seed = int(state["epoch"]), int(state["seed"])
        position = Position(int(state["index"]), int(state.get("rows", 0)))
        self.queue = ElementQueue(StepProgress(position, int(state.get("step", 0))))
        self._lock = threading.RLock()
        self._ahead: ReadAhead[StepProgress] | None = None
        self._ended = False

    def fill(self) -> ElementQueue[StepProgress] | None:
        """Elements of which one waits; None at the end."""
        laboratory.reach("input")
        ahead = self._ahead
        if ahead is None or not self.queue.waiting:
            with self._lock, activity.phase("input"):
                if self._ended:
                    return None
                ahead = self._ahead or self._open()
                if not ahead.wait():
                    self.close()
                    return None
        ahead.ask()
        return self.queue

    def _open(self) -> ReadAhead[StepProgress]:
        host_memory.expect_input()
        dataset, start = self._dataset, self.queue.position
        run = Run(self.seed, (self.epoch,), deterministic=dataset._deterministic)
        topology = dataset._topology
        name = f"input {topology.serial}, epoch {self.epoch}, step {start.steps}"
        meet = None if topology.workers == 1 else functools.partial(topology.exchange, name)
        producer = StepProducer(
            start,
            lambda: dataset._open_reader(run, start.position, start.steps),
            dataset._transfer(),
            dataset._without_rows,
            meet,
            topology.replicas,
        )
        depth = dataset._options.experimental_per_replica_buffer_size
        with uninterrupted():
            ahead = ReadAhead(producer, depth, self.queue)
            weakref.finalize(self, ahead.stop, False)
            self._ahead = ahead
        return ahead

    def close(self) -> None:
        self._ended = True
        if self._ahead is not None:
            self._ahead.stop()


class DistributedIterator(ElementIterator):
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

    _end_message = "The end of the distributed dataset was reached."

    def __init__(self, dataset: DistributedDataset, state: State) -> None:
        self._dataset, self._topology = dataset, dataset._topology
        self._iteration = _DistributedIteration(dataset, state)

    # -- elements --------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<px.DistributedIterator over {self._dataset!r}>"

    def _queue(self) -> ElementQueue[StepProgress] | None:
        self._check_caller()
        return self._iteration.fill()

    @gives_elements
    def get_next(self, name: str | None = None) -> Any:
        """The next element; an `OutOfRangeError` at the end."""
        del name
        return self._get_next()

    @gives_elements
    def get_next_as_optional(self) -> Optional:
        """The next element as an `Optional`, which is empty at the end."""
        found = Optional()  # made before: a call must not come between taking and returning
        try:
            found._value = self._take()
            return found
        except StopIteration:
            return found

    def _give_back(self, mark: Any, element: Any) -> None:
        if not isinstance(element, Optional):
            super()._give_back(mark, element)
        elif element.has_value():
            super()._give_back(mark, element.get_value())

    def _check_caller(self) -> None:
        ctx.require_same_strategy(self._topology.strategy, "next(iterator)")
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

    def initialize(self) -> None:
        """Start again with the next iteration of the dataset, as the iterators of TensorFlow 1 do."""
        before = self._iteration
        self._iteration = _DistributedIteration(self._dataset, self._dataset._epochs.start())
        before.close()

    def state(self) -> dict[str, int]:
        """The position, as a small dictionary that can be written as JSON.

        `epoch` counts iterations of the dataset, `index` the global batches of this one that were
        delivered, and `seed` is where all shuffling comes from. It does not depend on how many replicas
        there are.
        """
        iteration = self._iteration
        position, steps = iteration.queue.position
        state = {"epoch": iteration.epoch, "index": position.elements, "seed": iteration.seed}
        if position.rows:
            state["rows"] = position.rows
        if not self._dataset._division.is_shared:
            topology = self._topology
            state |= {"step": steps, "worker": topology.worker, "workers": topology.workers}
        return state

    def restore(self, state: State) -> None:
        """Continue from a position that `state` returned, of this or of another strategy's iterator.

        The next iteration of the dataset is then the one after that position's.
        """
        _check_state(state, self._topology, self._dataset._division)
        count = self._dataset.cardinality if self._dataset._division.is_shared else UNKNOWN
        if 0 <= count < int(state["index"]):
            raise InvalidValueError(
                f"The position is one after {state['index']} batches, and this dataset has {count}: it "
                f"comes from another dataset, or from smaller batches. Received: {shown(state)}"
            )
        before = self._iteration
        self._dataset._epochs.go_on_from({"epoch": int(state["epoch"]), "seed": int(state["seed"])})
        self._iteration = _DistributedIteration(self._dataset, state)
        before.close()


def _check_state(state: Any, topology: InputTopology, division: Division) -> None:
    check_state(state)
    if state.get("rows") and (division.policy == "DATA" or division.batch is None):
        raise InvalidValueError(
            "The position is in the middle of a batch, because it comes from an input that is cut by "
            f"the nominal batch size; this one is not. Received: {shown(state)}"
        )
    where = (state.get("worker", 0), state.get("workers", 1))
    here = (0, 1) if division.is_shared else (topology.worker, topology.workers)
    if where != here:
        raise InvalidValueError(
            "With this auto-shard policy every worker reads rows of its own, so a position can only be "
            f"restored on the same worker of as many workers: {here[0]} of {here[1]}. "
            f"Received: a position of worker {shown(where[0])} of {shown(where[1])}"
        )
