"""A step must mean the same under every strategy and both executors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.core.options import VariableAggregation, VariableSynchronization
from phalanx.core.strategy import Strategy
from phalanx.core.structure import map_nest
from phalanx.core.values import DistributedValues
from phalanx.core.variables.variable import Variable
from phalanx.errors import ContextError, InvalidTypeError, InvalidValueError
from phalanx.execution.function import function
from phalanx.runtime import compat
from phalanx.runtime.formatting import shown

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
    last one. Scalars that the step returns are summed over replicas, so a loss must be the replica's
    contribution; arrays are gathered along their first dimension.

    The step must not depend on how a batch is split. Losses and gradients must be scaled by the
    global batch size, and random numbers must not come from `px.random.replica_key`, which gives each
    replica its own stream: leave them out, or derive them from a number in the batch that says which
    example it is. Initial values must be the same whenever `setup` is called.

    Args:
        step: the function for replicas. It is called as ``step(state, *batch)`` and returns a nest.
        strategies: the strategies; the first is the reference.
        setup: is given the strategy, inside its scope, and returns the state: a nest of variables and
            of objects that list theirs in an attribute `variables`, such as optimizers and metrics. All
            these variables are compared, unless they are synchronized on read without an aggregation.
        batches: one nest of NumPy arrays for each step; a tuple holds several arguments. Arrays are
            split along their first dimension by `numpy.array_split`, and scalars are passed on.
            Replicas may get parts of different sizes.
        rtol: the relative tolerance.
        atol: the absolute tolerance. Integers and booleans must agree exactly.

    Raises:
        AssertionError: names the strategy, the executor, the step and the largest difference.

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
        AssertionError: strategies[1] (MirroredStrategy, 2 replicas), eager, step 0: the result
        differs from strategies[0] (OneDeviceStrategy, 1 replica), eager. The largest difference is
        1.5: 3.0 instead of 1.5.
    """
    listed = _checked(step, strategies, setup, batches)
    tolerance = _Tolerance(rtol, atol)
    reference: _Record | None = None
    for i, strategy in enumerate(listed):
        for executor in ("eager", "compiled"):
            name = f"strategies[{i}] ({_describe(strategy)}), {executor}"
            record = _run(name, strategy, executor == "compiled", step, setup, batches)
            if reference is None:
                reference = record
            else:
                record.compare(reference, tolerance)


def _checked(step: Any, strategies: Any, setup: Any, batches: Any) -> list[Strategy]:
    if not callable(step) or not callable(setup):
        raise InvalidTypeError(
            f"step and setup must be callable. Received: step {shown(step)} and setup {shown(setup)}"
        )
    listed = list(strategies)
    if not listed or not all(isinstance(s, Strategy) for s in listed):
        raise InvalidTypeError(
            f"strategies must be a list of strategies. Received: {shown(strategies)}"
        )
    if not len(batches):
        raise InvalidValueError("There must be at least one batch. Received: none")
    return listed


def _describe(strategy: Strategy) -> str:
    n = strategy.num_replicas_in_sync
    return f"{type(strategy).__name__}, {n} replica{'s' * (n > 1)}"


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
    record = _Record(name, results, _values_of(state))
    if not record.variables and not any(results):
        raise InvalidValueError(
            "There is nothing to compare: the step returned nothing and the state has no variables. "
            f"Received: a state of {shown(state)}"
        )
    return record


def _split(strategy: Strategy, batch: tuple[Any, ...]) -> Any:
    """The batch with distributed values in place of arrays."""
    count = strategy.num_replicas_in_sync

    def split(x: Any) -> Any:
        if not _is_array(x) or np.ndim(x) == 0:
            return x
        parts = np.array_split(np.asarray(x), count)
        return strategy.experimental_distribute_values_from_function(
            lambda context: jnp.asarray(parts[context.replica_id_in_sync_group])
        )

    return map_nest(split, batch)


def _combined(strategy: Strategy, result: Any) -> Any:
    """What a step returned, with the results of all replicas made one."""
    count = strategy.num_replicas_in_sync

    def combine(x: Any) -> Any:
        if isinstance(x, Variable):
            return _host(x.read_value())
        first = x.values[0] if isinstance(x, DistributedValues) else x
        if not _is_array(first):
            if isinstance(x, DistributedValues):
                raise InvalidTypeError(
                    "Results can be compared if they are arrays, or the same on all replicas. "
                    f"Received: {shown(x)}"
                )
            return x
        if first.ndim == 0:
            return _host(strategy.reduce("sum", x, axis=None))
        if isinstance(x, DistributedValues):
            return _host(strategy.gather(x, axis=0))
        return np.concatenate([_host(x)] * count)  # every replica returned this one

    return map_nest(combine, result)


def _values_of(state: Any) -> dict[str, Array]:
    return {
        path: _host(variable.state())
        for path, variable in _variables(state, "")
        if variable.synchronization is not VariableSynchronization.ON_READ
        or variable.aggregation is not VariableAggregation.NONE
    }


def _variables(x: Any, path: str) -> Iterator[tuple[str, Variable]]:
    """The variables in a nest and in the objects there that list theirs."""
    if isinstance(x, Variable):
        yield path, x
        return
    listed = _listed(x)
    if listed is not None:
        yield from _variables(listed, f"{path}.variables")
        return
    children = jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda y: y is not x)
    for keys, child in children:
        if child is not x:
            yield from _variables(child, path + jax.tree_util.keystr(keys))


def _listed(x: Any) -> Any:
    try:
        return getattr(x, "variables", None)
    except ContextError:  # an optimizer that was never used has none yet
        return []


def _host(x: Any) -> Array:
    return np.asarray(jax.random.key_data(x) if compat.is_key_array(x) else x)


# -- comparing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tolerance:
    relative: float
    absolute: float

    def difference(self, mine: Any, theirs: Any) -> tuple[float, str] | None:
        """How large the difference is, and a sentence about it; None if there is none."""
        if not isinstance(mine, np.ndarray) or not isinstance(theirs, np.ndarray):
            same = type(mine) is type(theirs) and mine == theirs
            return None if same else (math.inf, f"It is {mine!r} instead of {theirs!r}.")
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            kinds = [f"{x.dtype}{list(x.shape)}" for x in (mine, theirs)]
            return math.inf, f"It is {kinds[0]} instead of {kinds[1]}."
        exact = jnp.issubdtype(mine.dtype, np.integer) or mine.dtype == np.bool_
        rtol, atol = (0.0, 0.0) if exact else (self.relative, self.absolute)
        wide = complex if jnp.issubdtype(mine.dtype, np.complexfloating) else float
        a, b = mine.astype(wide), theirs.astype(wide)
        wrong = ~np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
        if not wrong.any():
            return None
        with np.errstate(invalid="ignore"):
            size = np.where(wrong, np.nan_to_num(np.abs(a - b), nan=np.inf), 0.0)
        where = np.unravel_index(np.argmax(size), size.shape)
        place = f" at {[int(i) for i in where]}" if where else ""
        return float(size[where]), (
            f"The largest difference is {size[where]:.6g}{place}: {mine[where]} instead of "
            f"{theirs[where]}."
        )


@dataclass(frozen=True)
class _Record:
    """What one run gave."""

    name: str
    results: list[dict[str, Any]]  # of each step, by path
    variables: dict[str, Array]

    def compare(self, reference: _Record, tolerance: _Tolerance) -> None:
        """Fail at the first step whose results differ, or at the variables."""
        steps = zip(self.results, reference.results, strict=True)
        for i, (mine, theirs) in enumerate(steps):
            self._compare(f"step {i}: the result", mine, theirs, reference, tolerance)
        last = f"after step {len(self.results) - 1}: the variable"
        self._compare(last, self.variables, reference.variables, reference, tolerance)

    def _compare(
        self,
        what: str,
        mine: Mapping[str, Any],
        theirs: Mapping[str, Any],
        reference: _Record,
        tolerance: _Tolerance,
    ) -> None:
        if mine.keys() != theirs.keys():
            raise AssertionError(
                f"{self.name}, {what} has the parts {sorted(mine)} instead of {sorted(theirs)} of "
                f"{reference.name}."
            )
        found = [(tolerance.difference(mine[path], theirs[path]), path) for path in mine]
        worst = max(((d, path) for d, path in found if d is not None), default=None)
        if worst is not None:
            (_, sentence), path = worst
            raise AssertionError(f"{self.name}, {what}{path} differs from {reference.name}. {sentence}")


def _named(nest: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(nest)
    return {jax.tree_util.keystr(path): x for path, x in flat}


def _is_array(x: Any) -> bool:
    """Whether `x` is an array in JAX's sense: a `jax.Array`, a tracer or a NumPy array."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)
