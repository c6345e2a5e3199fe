"""`Strategy`: the face of a strategy. What it does is in its `StrategyExtended`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from phalanx.core import context as ctx, run_hooks
from phalanx.core.options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    RunOptions,
    ValueContext,
)
from phalanx.core.reduction import ReduceOp, as_axes, as_reduce_op
from phalanx.core.regrouping import local_results
from phalanx.core.structure import check_call, map_nest
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.runtime import compat
from phalanx.runtime.devices import short_name
from phalanx.runtime.formatting import html_table, shown
from phalanx.runtime.pickling import StaysHere

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from phalanx.core.extended import StrategyExtended


class Strategy(StaysHere):
    """A policy for where state lives and where computation runs.

    Use one of its subclasses. Create variables inside `scope`, run steps with `run`, and combine
    results with `reduce` or `gather`; the same code then works under every strategy.

    Examples:
        >>> import jax.numpy as jnp, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     total = px.Variable(0.0, aggregation=px.VariableAggregation.SUM)
        >>> inputs = strategy.experimental_distribute_values_from_function(
        ...     lambda context: jnp.arange(2.0) + 2 * context.replica_id_in_sync_group)
        >>> def step(x):
        ...     total.assign_add(x.sum())
        ...     return x.sum()
        >>> per_replica = strategy.run(step, args=(inputs,))
        >>> float(strategy.reduce(px.ReduceOp.SUM, per_replica, axis=None)), float(total)
        (6.0, 6.0)
    """

    instead = "Make a strategy in each process, from the same arguments."

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

    def __repr__(self) -> str:
        devices, count = self._extended._replica_devices, self.num_replicas_in_sync
        noun = "replica" if count == 1 else "replicas"
        here = f", {len(devices)} of them here" if len(devices) != count else ""
        where = ", ".join(short_name(d) for d in devices if d is not None)
        on = f", on {where}" if where else ""
        return f"<{type(self).__name__}: {count} {noun}{here}{on}>"

    def _repr_html_(self) -> str:
        devices = self._extended._replica_devices
        first = self._extended._first_replica
        rows = [
            (str(first + i), "" if device is None else short_name(device))
            for i, device in enumerate(devices)
        ]
        count = self.num_replicas_in_sync
        return html_table(("replica", "device"), rows, f"{type(self).__name__}, {count} in sync")

    # -- properties -----------------------------------------------------------------------------

    @property
    def extended(self) -> StrategyExtended:
        """The strategy's `StrategyExtended`, for code that must know about distribution."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas compute together, over all workers."""
        return self._extended._num_replicas_in_sync

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver of a strategy over several processes; None for others."""
        return None

    # -- scopes and running ---------------------------------------------------------------------

    def scope(self) -> ctx.Scope:
        """A context manager that makes this strategy current and enters cross-replica context.

        Variables that are created inside belong to the strategy. Scopes of one strategy may be
        nested; a scope inside another strategy's scope is an error.
        """
        return self._extended._scope()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn` once per replica, each on its own device, in replica context.

        Args:
            fn: the step. It may use `px.get_replica_context()`.
            args: positional arguments, a list or tuple. Each replica gets its component of `PerReplica`
                and `Mirrored` values, at any depth; variables are passed whole.
            kwargs: keyword arguments, treated alike.
            options: `RunOptions`; checked, and without effect.

        Returns:
            The structure of `fn`'s result, with a `PerReplica` value at each leaf. A leaf for which
            every replica returned the very same object, and every leaf if there is one replica
            only, stays plain.
        """
        check_call(fn, args, kwargs)
        if options is not None and not isinstance(options, RunOptions):
            raise InvalidTypeError(f"options must be px.RunOptions or None. Received: {shown(options)}")
        ctx.require_cross_replica_or_default(self, "Strategy.run")
        if not compat.in_transformation():
            compiled = getattr(fn, "run_on_replicas", None)
            if compiled is not None:
                return compiled(self, args, kwargs)
            run = run_hooks.current()
            if run is not None:
                return run(self, fn, args, kwargs)
        run_hooks.count_run(fn)
        with ctx.entered(self, "Strategy.run"):
            return self._extended.call_for_each_replica(fn, args=args, kwargs=kwargs)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """Combine a nest of per-replica values into plain arrays.

        Args:
            reduce_op: `px.ReduceOp.SUM`, `px.ReduceOp.MEAN`, or the name.
            value: what `run` returned, or a nest of such values.
            axis: None combines the replicas element by element, which needs equal shapes. A
                dimension, or several, is also reduced within each replica; replicas may then hold
                different numbers of examples, also none. MEAN divides by the true total.

        Returns:
            The nest with a plain array for each distributed value. Integers average to floats.

        Examples:
            >>> import jax.numpy as jnp, phalanx as px
            >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> batch = [jnp.array([0.0, 1.0, 2.0, 3.0]), jnp.array([4.0, 5.0])]
            >>> value = strategy.experimental_distribute_values_from_function(
            ...     lambda context: batch[context.replica_id_in_sync_group])
            >>> float(strategy.reduce("mean", value, axis=0))
            2.5
        """
        op, axes = as_reduce_op(reduce_op), as_axes(axis)
        ctx.require_cross_replica_or_default(self, "Strategy.reduce")
        with ctx.entered(self, "Strategy.reduce"):
            return map_nest(lambda x: self._extended._reduce(op, x, axes), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Join per-replica values along a dimension, in replica order.

        Sizes along `axis` may differ, all others must agree. Plain arrays are returned as they are;
        a mirrored variable is repeated once per replica.

        Examples:
            >>> import jax.numpy as jnp, phalanx as px
            >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> value = strategy.experimental_distribute_values_from_function(
            ...     lambda _: jnp.array([[1], [2]]))
            >>> strategy.gather(value, axis=0).tolist()
            [[1], [2], [1], [2]]
        """
        if ctx.active_replica() is not None:
            ctx.require_same_strategy(self, "Strategy.gather")
            raise ContextError(
                "Strategy.gather needs the cross-replica context, but this code runs on a replica. "
                "Use px.get_replica_context().all_gather() here."
            )
        with ctx.entered(self, "Strategy.gather"):
            return map_nest(lambda x: self._extended._gather(x, axis), value)

    # -- input ----------------------------------------------------------------------------------

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Divide a dataset of global batches among all workers and replicas.

        The strategy cuts each batch into one piece per replica. The last pieces of a small batch may
        be empty, but no row is lost and none comes twice. With several workers, each gets its own
        files or its own part of every batch, as the dataset's `auto_shard_policy` says.

        Args:
            dataset: a `px.data.Dataset` that was batched by the global batch size, or any other
                iterable of batches: a list, a generator, a Grain dataset, a torch DataLoader.
            options: how far to read ahead, and whether to move elements to the devices.

        Returns:
            A `px.DistributedDataset`. Iterating gives a `PerReplica` value for each leaf of an element,
            or plain values if there is one replica only.

        Examples:
            >>> import phalanx as px
            >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> dataset = px.data.Dataset.range(6).batch(4)
            >>> for batch in strategy.experimental_distribute_dataset(dataset):
            ...     print([x.tolist() for x in batch.values])
            [[0, 1], [2, 3]]
            [[4], [5]]
        """
        return self._extended._distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Make a distributed dataset from a function that builds the dataset of one worker.

        The strategy uses the datasets as they are: in each step every replica of the worker takes the
        next element, so batch by the size of one replica.

        Args:
            dataset_fn: takes an `InputContext` and returns a `px.data.Dataset`, or any other iterable.
                It is called once per worker, or once per replica with
                `InputReplicationMode.PER_REPLICA`.
            options: how far to read ahead, where to put elements, and how often to call the function.

        Returns:
            A `px.DistributedDataset`.

        Examples:
            >>> import phalanx as px
            >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
            >>> def dataset_fn(context):
            ...     size = context.get_per_replica_batch_size(4)
            ...     dataset = px.data.Dataset.range(8).batch(size)
            ...     return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
            >>> for batch in strategy.distribute_datasets_from_function(dataset_fn):
            ...     print([x.tolist() for x in batch.values])
            [[0, 1], [2, 3]]
            [[4, 5], [6, 7]]
        """
        if not callable(dataset_fn):
            raise InvalidTypeError(f"dataset_fn must be callable. Received: {shown(dataset_fn)}")
        return self._extended._distribute_datasets_from_function(dataset_fn, options)

    # -- making and looking at values -----------------------------------------------------------

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Make a distributed value by calling `value_fn` once per replica.

        On a replica it is called once per replica too, so each of them has all values.

        Args:
            value_fn: takes a `ValueContext` and returns a nest. Arrays, also NumPy's, move to the
                replica's device; everything else stays as it is. A variable stays itself.
        """
        if not callable(value_fn):
            raise InvalidTypeError(f"value_fn must be callable. Received: {shown(value_fn)}")
        name = "experimental_distribute_values_from_function"
        if ctx.active_replica() is not None:
            ctx.require_same_strategy(self, name)
            return self._extended._values_from(value_fn)
        ctx.require_cross_replica_or_default(self, name)
        with ctx.entered(self, name):
            return self._extended._values_from(value_fn)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a distributed value that belong to this process.

        A nest gives one nest per replica; a value that is not distributed gives ``(value,)``.
        """
        return local_results(value)

    # -- other spellings ------------------------------------------------------------------------

    def experimental_run_v2(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The name of `run` in TensorFlow 2.0."""
        return self.run(fn, args=args, kwargs=kwargs)

    def experimental_run(self, fn: Callable[..., Any], input_iterator: Any = None) -> Any:
        """`run` on the next element of an iterator, or without arguments; an older form."""
        args = () if input_iterator is None else (_next_element(input_iterator),)
        return self.run(fn, args=args)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """The name of `distribute_datasets_from_function` before TensorFlow 2.4."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Any) -> Any:
        """A dataset of the slices of NumPy arrays along their first dimension; a list is stacked.

        The name in TensorFlow 2.0; `px.data.Dataset.from_tensor_slices` is the usual way.
        """
        return self._extended.experimental_make_numpy_dataset(numpy_input)

    def make_dataset_iterator(self, dataset: Any) -> Any:
        """An iterator over `experimental_distribute_dataset`; an older form."""
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> Any:
        """An iterator over `distribute_datasets_from_function`; an older form."""
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise InvalidValueError(
                "make_input_fn_iterator calls its function once per worker. Use "
                "distribute_datasets_from_function with px.InputOptions to call it once per replica. "
                f"Received: replication_mode={shown(replication_mode)}"
            )
        return iter(self.distribute_datasets_from_function(input_fn))

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """The older name of `experimental_local_results`."""
        return self.experimental_local_results(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Wait until all components of a value have been computed."""
        del name
        jax.block_until_ready([local_results(value)])

    def colocate_vars_with(self, colocate_with_variable: Any) -> AbstractContextManager[None]:
        """The older place of `StrategyExtended.colocate_vars_with`."""
        return self._extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Accepted for ported code; there are no sessions to configure."""
        del session_config, cluster_spec, task_type, task_id

    def update_config_proto(self, config_proto: Any) -> Any:
        """Accepted for ported code; returns its argument."""
        return config_proto

    # -- copying --------------------------------------------------------------------------------

    def __copy__(self) -> Strategy:
        raise ContextError(
            "A strategy cannot be copied shallowly, because two strategies would share one "
            f"StrategyExtended. Use copy.deepcopy. Received: {shown(self)}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        return type(self)._from_extended(self._extended._copy_for_new_strategy(), type(self))

    @staticmethod
    def _from_extended(extended: StrategyExtended, cls: type[Strategy]) -> Strategy:
        strategy = cls.__new__(cls)
        Strategy.__init__(strategy, extended)
        extended._strategy = strategy
        return strategy


def _next_element(iterator: Any) -> Any:
    return iterator.get_next() if hasattr(iterator, "get_next") else next(iterator)
