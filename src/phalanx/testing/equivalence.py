"""A step must mean the same under every strategy and both executors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.core import compat
from phalanx.core.errors import InvalidTypeError, InvalidValueError
from phalanx.core.strategy import Strategy
from phalanx.core.structure import leaves, map_nest
from phalanx.core.synchronization import VariableAggregation, VariableSynchronization
from phalanx.core.values import DistributedValues
from phalanx.core.variables import Variable
from phalanx.execution.function import function

Array = np.ndarray[Any, Any]


def assert_equivalent(
    step: Callable[..., Any],
    strategies: Sequence[Strategy],
    *,
    setup: Callable[[Strategy], Any],
    batches: Sequence[Any],
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Run a step under several strategies and with both executors, and require the same results.

    For each strategy, once eagerly and once inside `px.function`: `setup` makes new state, each batch
    is split over the replicas, and the step runs on them. Everything is compared with the eager run of
    the first strategy: the results of each step, combined over replicas, and the variables after the
    last one.

    The step must not depend on how a batch is split. Losses and gradients must be scaled by the
    global batch size, and random numbers must not come from `px.random.replica_key`, which gives each
    replica its own stream: leave them out, or derive them from a number in the batch that says which
    example it is. Initial values must be the same whenever `setup` is called.

    Args:
        step: the function for replicas. It is called as ``step(state, *batch)`` and returns a nest.
        strategies: the strategies; the first is the reference.
        setup: is given the strategy, inside its scope, and returns the state: a nest of variables and of
            objects that list theirs in an attribute `variables`, such as optimizers and metrics. All
            these variables are compared, unless they are synchronized on read without an aggregation.
        batches: one nest of NumPy arrays for each step; a tuple holds several arguments. Arrays are
            split along their first dimension by `numpy.array_split`. If that gives replicas different
            sizes, `px.function` runs the step eagerly too.
        rtol: the relative tolerance.
        atol: the absolute tolerance. Integers and booleans must agree exactly.

    Raises:
        AssertionError: names the strategy, the executor, the step and the largest difference. Scalars
            that the step returns are summed over replicas, so each replica must return its
            contribution; arrays are gathered along their first dimension.

    Examples:
        >>> import jax.numpy as jnp, numpy as np, optax, phalanx as px
        >>> def setup(strategy):
        ...     return {"w": px.Variable([0.0]), "optimizer": px.train.Optimizer(optax.sgd(0.1))}
        >>> def step(state, x, y):
        ...     def loss():
        ...         return px.nn.compute_average_loss((x * state["w"] - y) ** 2, global_batch_size=4)
        ...     return state["optimizer"].minimize(loss, [state["w"]])
        >>> x = np.arange(4, dtype=np.float32)
        >>> px.testing.assert_equivalent(
        ...     step,
        ...     [px.OneDeviceStrategy("CPU:0"), px.MirroredStrategy(["CPU:0", "CPU:1"])],
        ...     setup=setup,
        ...     batches=[(x, 2 * x)] * 3,
        ... )
        >>> def depends_on_replicas(state, x, y):
        ...     return jnp.mean(x)
        >>> px.testing.assert_equivalent(
        ...     depends_on_replicas,
        ...     [px.OneDeviceStrategy("CPU:0"), px.MirroredStrategy(["CPU:0", "CPU:1"])],
        ...     setup=setup,
        ...     batches=[(x, 2 * x)],
        ... )
        Traceback (most recent call last):
        AssertionError: MirroredStrategy with 2 replicas (number 1), eager, step 0: the result differs
        from OneDeviceStrategy with 1 replica (number 0), eager. The largest difference is 1.5: 3.0
        instead of 1.5.
    """
    listed = _checked(step, strategies, setup, batches)
    tolerance = _Tolerance(rtol, atol)
    reference: _Record | None = None
    for i, strategy in enumerate(listed):
        for executor in ("eager", "compiled"):
            name = f"{_describe(strategy)} (number {i}), {executor}"
            record = _run(name, strategy, executor == "compiled", step, setup, batches)
            if reference is None:
                reference = record
            else:
                record.compare(reference, tolerance)


def _checked(step: Any, strategies: Any, setup: Any, batches: Any) -> list[Strategy]:
    if not callable(step) or not callable(setup):
        raise InvalidTypeError(
            f"step and setup must be callable. Received: step {step!r} and setup {setup!r}"
        )
    listed = list(strategies)
    if not listed or not all(isinstance(s, Strategy) for s in listed):
        raise InvalidTypeError(f"strategies must be a list of strategies. Received: {strategies!r}")
    if not len(batches):
        raise InvalidValueError("There must be at least one batch. Received: none")
    return listed


def _describe(strategy: Strategy) -> str:
    n = strategy.num_replicas_in_sync
    return f"{type(strategy).__name__} with {n} replica{'s' * (n > 1)}"


# -- running -------------------------------------------------------------------------------------


def _run(
    name: str,
    strategy: Strategy,
    compiled: bool,
    step: Callable[..., Any],
    setup: Callable[[Strategy], Any],
    batches: Sequence[Any],
) -> _Record:
    with strategy.scope():
        state = setup(strategy)

    def on_replicas(*batch: Any) -> Any:
        return strategy.run(lambda *mine: step(state, *mine), args=batch)

    run = function(on_replicas) if compiled else on_replicas
    results = []
    for batch in batches:
        arguments = batch if isinstance(batch, tuple) else (batch,)
        results.append(_named(_combined(strategy, run(*_split(strategy, arguments)))))
    return _Record(name, results, dict(_values_of(state)))


def _split(strategy: Strategy, batch: tuple[Any, ...]) -> Any:
    count = strategy.num_replicas_in_sync
    parts = map_nest(lambda x: np.array_split(np.asarray(x), count), batch)

    def make(nest: Any, shards: Any, i: int) -> Any:
        remaining = iter(_lists(nest, shards))
        return map_nest(lambda _: next(remaining)[i], nest)

    return strategy.experimental_distribute_values_from_function(
        lambda context: make(batch, parts, context.replica_id_in_sync_group)
    )
