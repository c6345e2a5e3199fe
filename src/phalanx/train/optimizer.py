"""`Optimizer`: an optax transformation under a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from phalanx.core import context as ctx
from phalanx.core.reduction import ReduceOp
from phalanx.core.replica_context import MergePoint, ReplicaContext, is_compiled, meet
from phalanx.core.strategy import Strategy
from phalanx.core.variables import transactions
from phalanx.core.variables.variable import Variable
from phalanx.errors import (
    ContextError,
    InvalidTypeError,
    InvalidValueError,
    NoReplicaContextError,
    UnsupportedError,
)
from phalanx.execution.gradients import value_and_grad
from phalanx.runtime.formatting import shown
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.train.accumulate import accumulated
from phalanx.train.extra_arguments import Extra, ExtraArguments
from phalanx.train.gradient_communication import GradientCommunication, dense
from phalanx.train.line_search import ReplicaLoss
from phalanx.train.making_states import made_state
from phalanx.train.optimizer_arguments import (
    check_extra,
    check_known,
    check_place,
    checked_pairs,
    checked_variables,
    raise_missing,
)
from phalanx.train.optimizer_counting import CountingOptimizer
from phalanx.train.optimizer_state import asked_for, with_rate
from phalanx.train.optimizer_updates import Updates
from phalanx.train.precision import LossScale
from phalanx.train.server_updates import ServerUpdates
from phalanx.train.sharded_optimizer import ShardedUpdates, check_slices
from phalanx.train.sharding import OptimizerSharding, as_sharding

_AGGREGATIONS = {"sum": ReduceOp.SUM, "mean": ReduceOp.MEAN, None: None}


class Optimizer(CountingOptimizer):
    """Applies gradients to variables with an optax transformation.

    It combines the gradients of all replicas once, then makes one update, the same on every copy. The
    transformation sees all gradients together, so global-norm clipping and schedules work as in plain
    optax. Under `px.ParameterServerStrategy` it pushes gradients, and the servers apply the
    transformation to one variable after the other. A sparse gradient changes its rows only.

    Args:
        transform: an `optax.GradientTransformation`.
        aggregate: "sum" (divide losses by the global batch size), "mean" (divide by the local
            one), or None if gradients are already the same on all replicas.
        loss_scale: a `LossScale` if losses are multiplied by `scale_loss`, as float16 needs.
        shard: what is divided over the replicas: "states", "gradients" (and states), "parameters" (and
            both), or an `OptimizerSharding`. None: every replica keeps and does everything.
        communication: a `GradientCommunication`; None lets the strategy choose.

    Examples:
        >>> import jax.numpy as jnp, optax, phalanx as px
        >>> strategy = px.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     w = px.Variable(10.0)
        ...     optimizer = px.train.Optimizer(optax.sgd(1.0))
        >>> def step():
        ...     gradient = px.get_replica_context().replica_id_in_sync_group + 1.0
        ...     optimizer.apply_gradients([(gradient, w)])
        >>> strategy.run(step)
        >>> float(w), int(optimizer.iterations)
        (7.0, 1)
    """

    def __init__(
        self,
        transform: optax.GradientTransformation,
        aggregate: str | None = "sum",
        loss_scale: LossScale | None = None,
        shard: str | int | OptimizerSharding | None = None,
        communication: GradientCommunication | None = None,
    ) -> None:
        if not hasattr(transform, "init") or not hasattr(transform, "update"):
            raise InvalidTypeError(
                "Optimizer needs an optax.GradientTransformation, such as optax.adam(1e-3). "
                f"Received: {shown(transform)}"
            )
        if not (aggregate is None or (isinstance(aggregate, str) and aggregate in _AGGREGATIONS)):
            raise InvalidValueError(
                f"aggregate must be 'sum', 'mean' or None. Received: {shown(aggregate)}"
            )
        if loss_scale is not None and not isinstance(loss_scale, LossScale):
            raise InvalidTypeError(
                f"loss_scale must be a px.train.LossScale or None. Received: {shown(loss_scale)}"
            )
        if communication is not None and not isinstance(communication, GradientCommunication):
            raise InvalidTypeError(
                "communication must be a px.train.GradientCommunication or None. "
                f"Received: {shown(communication)}"
            )
        self.transform = transform
        self.loss_scale = loss_scale
        self.shard = as_sharding(shard)
        self.communication = communication or GradientCommunication()
        self._op = _AGGREGATIONS[aggregate]
        self._variables: list[Variable] = []
        self._updates = Updates(transform, loss_scale)
        self._slices: ShardedUpdates | None = None
        strategy = ctx.get_strategy()
        if isinstance(strategy, ParameterServerStrategy):
            self._build_on_servers(strategy)

    def __repr__(self) -> str:
        of = f"of {len(self._variables)} variables" if self._is_built else "without state"
        if self._servers is not None:
            of = "on parameter servers"
        return f"<px.train.Optimizer {of}>"

    # -- state -----------------------------------------------------------------------------------

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's own variables: the number of updates, then the transformation's state.

        Parameter servers keep that state themselves, beside the variables.
        """
        if not self._is_built:
            raise ContextError(
                "The optimizer has no state yet. It is made by the first apply_gradients, or by "
                "optimizer.build(variables)."
            )
        return [self.iterations, *(v for v in jax.tree.leaves(self._state) if isinstance(v, Variable))]

    @property
    def gathered(self) -> list[str]:
        """For which operations of the transformation the last program had to gather whole arrays.

        Empty without `shard`, and for transformations of single elements and norms, which need none.
        """
        return [] if self._slices is None else list(self._slices.gathered)

    def build(self, variables: Sequence[Variable]) -> None:
        """Make the state for a list of variables, under the strategy that made them."""
        listed = checked_variables(variables)
        if self._is_built:
            return
        strategy = listed[0].distribute_strategy or ctx.default_mode().strategy
        if isinstance(strategy, ParameterServerStrategy):
            self._build_on_servers(strategy)
            return
        mode = ctx.default_mode() if strategy is ctx.default_mode().strategy else ctx.Mode(strategy)
        with ctx.push(mode), jax.ensure_compile_time_eval():

            def init(values: Any) -> Any:
                return with_rate(self.transform.init(values), self._rate)

            self._state = made_state(init, listed, strategy, self.shard)
            self._count(strategy)
            if self.loss_scale is not None:
                self.loss_scale.build()
            if self.shard is None:
                check_slices(listed, None)
            elif strategy.num_replicas_in_sync > 1:
                self._slices = ShardedUpdates(
                    self.shard, strategy, listed, self._state, self.communication
                )
        self._variables = listed
        self._finish_building()

    def _build_on_servers(self, strategy: ParameterServerStrategy) -> None:
        if self.loss_scale is not None:
            raise UnsupportedError(
                "A loss scale changes with all gradients of a step, which parameter servers do not see "
                f"together. Use bfloat16, which needs none. Received: {shown(self.loss_scale)}"
            )
        if self.shard is not None:
            raise UnsupportedError(
                "Parameter servers keep the state of an optimizer themselves, each for its own "
                f"variables. Leave out shard=…. Received: {shown(self.shard)}"
            )
        self._servers = ServerUpdates(self.transform, strategy, self._rate)
        self._iterations = self._servers.iterations
        self._is_built = True

    @functools.cached_property
    def _asked_for(self) -> frozenset[str]:
        return asked_for(self.transform)

    # -- the usual way: variables --------------------------------------------------------------------

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        **extra_args: Any,
    ) -> None:
        """Combine gradients over replicas and update variables once.

        Call it in replica context, on every replica. Pairs whose gradient is None are skipped.

        Args:
            grads_and_vars: pairs of a gradient and its variable, as from ``zip``. Gradients may be
                `px.IndexedSlices`.
            name: accepted for ported code.
            experimental_aggregate_gradients: False if the gradients have been combined already, and
                are the same on all replicas. The older name ``skip_gradients_aggregation=True`` says
                the same.
            **extra_args: what else the transformation asks for, as ``value=loss`` for
                `optax.contrib.reduce_on_plateau`. Arrays are combined over replicas as gradients are.
        """
        combine = experimental_aggregate_gradients and not extra_args.pop(
            "skip_gradients_aggregation", False
        )
        op = self._op if combine else None
        pairs = [(g, v) for g, v in checked_pairs(grads_and_vars) if g is not None]
        if not pairs:
            raise InvalidValueError("There is no gradient: all of them are None. Received: no pairs")
        variables = checked_variables([v for _, v in pairs])
        context = ctx.get_replica_context()
        if context is None:
            raise NoReplicaContextError(
                "apply_gradients combines the gradients of replicas; call it in the function that is "
                "given to Strategy.run, not in the strategy's scope."
            )
        gradients = tuple(g for g, _ in pairs)
        if isinstance(variables[0].distribute_strategy, ParameterServerStrategy):
            if extra_args:
                raise UnsupportedError(
                    "Parameter servers apply a transformation to a variable with its gradient alone. "
                    f"Received: {', '.join(extra_args)}"
                )
            self._push(context, variables[0].distribute_strategy, variables, gradients, op)
            return
        self._prepare(context, variables)
        if self._asked_for and not extra_args:
            raise_missing(self.transform)
        check_extra(extra_args, context.num_replicas_in_sync)
        self._meet_to_apply(context, variables, gradients, op, extra_args)

    def _prepare(self, context: ReplicaContext, variables: list[Variable]) -> None:
        """Check variables, and make the state if there is none yet."""
        strategy = context.strategy
        check_place(strategy, variables)
        for v in variables:
            strategy.extended._require_own(v, "apply_gradients")
        if not self._is_built:
            meet(
                context,
                MergePoint("creation of optimizer state", lambda _: self.build(variables), (), {}),
            )
        check_known(self._variables, variables)

    def _meet_to_apply(
        self,
        context: ReplicaContext,
        variables: list[Variable],
        gradients: tuple[Any, ...],
        op: ReduceOp | None,
        extra: dict[str, Any],
    ) -> None:
        more = ExtraArguments(extra, is_compiled(context))
        count = len(gradients)

        def apply(strategy: Strategy, *given: Any) -> None:
            known = more.met(given[count:], op)
            transactions.atomically(self._apply, strategy, variables, given[:count], op, known)

        given = (*gradients, *more.sent)
        meet(context, MergePoint(_described(variables), apply, given, {}))

    def _push(
        self,
        context: ReplicaContext,
        strategy: ParameterServerStrategy,
        variables: list[Variable],
        gradients: Any,
        op: ReduceOp | None,
    ) -> None:
        """Send gradients to parameter servers, which apply them."""
        for v in variables:
            strategy.extended._require_own(v, "apply_gradients")
        if self._servers is None:
            self._build_on_servers(strategy)
        servers = self._servers
        assert servers is not None
        if servers.strategy is not strategy:
            raise InvalidValueError(
                "The optimizer belongs to the parameter servers of another strategy. Make one in the "
                f"scope of this one. Received: variables of {strategy!r}"
            )
        if context.strategy is not strategy or context.num_replicas_in_sync == 1:
            servers.apply(variables, gradients)
            return

        def apply(strategy: Strategy, *gradients: Any) -> None:
            device = strategy.extended.worker_devices[0]
            if op is not None:
                pairs = [(g, device) for g in gradients]
                gradients = tuple(strategy.extended.batch_reduce_to(op, pairs))
            servers.apply(variables, gradients)

        meet(context, MergePoint(_described(variables), apply, gradients, {}))

    def minimize(
        self, loss: Callable[[], Any], variables: Sequence[Variable] = (), var_list: Any = ()
    ) -> Any:
        """Differentiate `loss` with respect to variables and apply the gradients; returns the loss.

        Args:
            loss: computes the loss.
            variables: a list of variables.
            var_list: the same, as Keras calls it.
        """
        if not callable(loss):
            raise InvalidTypeError(
                "minimize needs a function that computes the loss, because a loss that is known "
                "already cannot be differentiated: optimizer.minimize(lambda: loss_of(x), variables). "
                f"Received: {shown(loss)}"
            )
        given = variables or var_list
        listed = [given] if isinstance(given, Variable) else list(given)
        value, gradients = value_and_grad(lambda: self.scale_loss(loss()), listed)()
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        extra: dict[str, Any] = {}
        if self._asked_for:
            extra = self._told_of(
                lambda: self.scale_loss(loss()) / scale, listed, value / scale, gradients
            )
        self.apply_gradients(zip(gradients, listed, strict=True), **extra)
        return value / scale

    def _told_of(
        self, loss: Callable[[], Any], variables: list[Variable], value: Any, gradients: Any
    ) -> dict[str, Any]:
        """What a transformation may ask for besides gradients."""
        context = ctx.get_replica_context()
        if context is None or "value_fn" not in self._asked_for:
            return {"value": value}
        value_fn = ReplicaLoss(loss, variables, context)
        return {"value": value, "grad": gradients, "value_fn": value_fn}

    def minimize_in_pieces(
        self,
        loss_fn: Callable[..., Any],
        variables: Sequence[Variable],
        batch: Any,
        micro_batches: int,
    ) -> Any:
        """As `minimize`, with gradients added up over pieces of a batch, which need less memory.

        Where the optimizer divides gradients over replicas, each piece's are summed over them at once,
        and a replica adds up its slices only; see `OptimizerSharding.accumulate`. Call it in the
        function given to `Strategy.run`.

        Args:
            loss_fn: as for `accumulate_gradients`: takes a piece of the batch.
            variables: a list of variables.
            batch: arrays with the examples of this replica along their leading dimension.
            micro_batches: how many pieces.

        Returns:
            The sum of the losses of all pieces.
        """
        context = ctx.get_replica_context()
        if context is None:
            raise NoReplicaContextError(
                "minimize_in_pieces combines the gradients of replicas; call it in the function that "
                "is given to Strategy.run, not in the strategy's scope."
            )
        listed = checked_variables(variables)
        scaled = value_and_grad(lambda *parts: self.scale_loss(loss_fn(*parts)), listed)
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        slices = None
        if self.shard is not None and self.shard.accumulates_slices and is_compiled(context):
            self._prepare(context, listed)
            slices = self._slices
        if slices is None or self._op is None:
            value, gradients = accumulated(scaled, batch, micro_batches)
            self.apply_gradients(zip(gradients, listed, strict=True))
        else:
            each = functools.partial(slices.local_sums, self._op, listed)
            value, gradients = accumulated(scaled, batch, micro_batches, each)
            given = tuple(slices.as_slices(listed, gradients))
            self._meet_to_apply(context, listed, given, self._op, {})
        return value / scale

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the loss scale; `apply_gradients` divides it out again."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def _apply(
        self,
        strategy: Strategy,
        variables: list[Variable],
        gradients: Sequence[Any],
        op: ReduceOp | None,
        extra: Extra,
    ) -> None:
        """The update, in cross-replica context."""
        self.communication.tell_norms(strategy, gradients, variables)
        if self._slices is not None:
            given = dict(zip(map(id, variables), gradients, strict=True))
            more = [] if self.loss_scale is None else self.loss_scale.variables
            updates, plain = self._updates, self.loss_scale is None
            update: Any = updates.whole if plain else updates.scaled
            if extra.arrays or extra.functions:
                known = extra.combined(strategy, op, variables[0]).keywords
                update = functools.partial(updates.values if plain else updates.scaled_values, **known)
            self._slices.apply(strategy, op, given, update, more)
        else:
            self._apply_whole(strategy, variables, gradients, op, extra)
        self.iterations.assign_add(1)
        if self.loss_scale is not None:
            self.loss_scale.watch()

    def _apply_whole(
        self,
        strategy: Strategy,
        variables: list[Variable],
        gradients: Sequence[Any],
        op: ReduceOp | None,
        extra: Extra,
    ) -> None:
        """Every replica makes the whole update."""
        lead = variables[0]
        if op is not None:
            pairs = list(zip(gradients, variables, strict=True))
            gradients = self.communication.combined(strategy, op, pairs)
        extra = extra.combined(strategy, op, lead)
        by_variable = dict(zip(map(id, variables), gradients, strict=True))

        def on_copy(_: Variable, *mine: Any) -> None:
            given = dict(zip(by_variable, mine, strict=False))
            self._update_copy(strategy, given, extra._replace(arrays=list(mine[len(given) :])))

        strategy.extended.update(lead, on_copy, args=(*by_variable.values(), *extra.arrays))

    def _update_copy(self, strategy: Strategy, given: dict[int, Any], extra: Extra) -> None:
        """Update the copies of one device."""
        params = [v.value() for v in self._variables]
        grads = [
            dense(given[id(v)], p) if id(v) in given else jnp.zeros_like(p)
            for v, p in zip(self._variables, params, strict=True)
        ]
        state = jax.tree.map(lambda v: v.value() if isinstance(v, Variable) else v, self._state)
        updating, updates = strategy.extended._updating, self._updates
        update: Any = updating(updates.values, updates.whole)
        scaled: Any = updating(updates.scaled_values, updates.scaled)
        more = extra.nest
        if extra.functions:  # which have arrays of this step in them, so no program can be kept
            update = functools.partial(updates.values, functions=extra.functions)
            scaled = functools.partial(updates.scaled_values, functions=extra.functions)
        if self.loss_scale is None:
            new_params, new_state = update(grads, state, params, more)
        else:
            scaling = [v.value() for v in self.loss_scale.variables]
            new_params, new_state, scaling = scaled(grads, state, params, scaling, more)
            for variable, x in zip(self.loss_scale.variables, scaling, strict=True):
                variable.assign(x)
        for v, p in zip(self._variables, new_params, strict=True):
            if id(v) in given:
                v.assign(p)
        slots, values = jax.tree.leaves(self._state), jax.tree.leaves(new_state)
        for slot, value in zip(slots, values, strict=True):
            slot.assign(value)

    # -- the pure way: pytrees -------------------------------------------------------------------------

    def init(self, params: Any) -> Any:
        """The transformation's state for a pytree of parameters."""
        return self.transform.init(params)

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Combine gradients over replicas and transform them; as optax, and without variables.

        In replica context it combines the gradients first; elsewhere it takes them as they are.

        Returns:
            The updates, for `optax.apply_updates`, and the new state.
        """
        context = ctx.active_replica()
        if context is not None and self._op is not None:
            grads = context.all_reduce(self._op, grads)
        return self.transform.update(grads, state, params)


def _described(variables: list[Variable]) -> str:
    names = ", ".join(v.name for v in variables[:3])
    return f"apply_gradients of {len(variables)} variables ({names})"
