"""Optimizers whose work is divided over the replicas: each updates its slices, and keeps no more.

In a compiled step a replica sums gradients in slices, runs the transformation on them
(`phalanx.train.sliced_updates`), and joins the new parameters. The eager executor joins everything,
updates once, and divides again: the same numbers, without saving work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from phalanx.collectives import slices_in_programs
from phalanx.core import context as ctx
from phalanx.core.reduction import ReduceOp
from phalanx.core.slicing import Members, Slicing
from phalanx.core.spmd import SpmdPerReplica
from phalanx.core.strategy import Strategy
from phalanx.core.variables.distributed_variables import MirroredVariable
from phalanx.core.variables.sliced_variables import SlicedVariable, slice_variable
from phalanx.core.variables.variable import Variable
from phalanx.errors import InvalidValueError, UnsupportedError
from phalanx.execution.compiled import in_compiled_run
from phalanx.execution.program import end_programs
from phalanx.runtime.formatting import shown
from phalanx.runtime.placement import REPLICA_AXIS, device_of
from phalanx.train.gradient_communication import GradientCommunication, dense
from phalanx.train.sharding import OptimizerSharding
from phalanx.train.sliced_updates import Sliced, run_on_slices

__all__ = ["ShardedUpdates", "check_slices"]

Update = Callable[..., tuple[Any, ...]]
"""Takes gradients, state, parameters and more; gives new parameters, the new state and more."""


class _Step(NamedTuple):
    """What `ShardedUpdates.apply` is given."""

    strategy: Strategy
    op: ReduceOp | None
    given: dict[int, Any]
    update: Update
    more: Sequence[Variable]


class ShardedUpdates:
    """The updates of an optimizer whose work is divided over the replicas of a strategy.

    Args:
        sharding: what is divided.
        strategy: whose replicas they are.
        variables: what the optimizer updates.
        state: the transformation's state, whose leaves are variables.
        communication: how gradients and parameters travel.
    """

    def __init__(
        self,
        sharding: OptimizerSharding,
        strategy: Strategy,
        variables: list[Variable],
        state: Any,
        communication: GradientCommunication,
    ) -> None:
        _check(strategy, variables)
        replicas = strategy.num_replicas_in_sync
        self._level = sharding.number or 1
        self._members = Members(REPLICA_AXIS, replicas, sharding.parts_of(replicas))
        self._variables, self._state = variables, state
        self._communication = communication
        self._divided = [sharding.divides(v) for v in variables]
        self.gathered: list[str] = []
        parts = self._members.parts
        check_slices(variables, parts)
        for slot in jax.tree.leaves(state):
            if sharding.divides(slot) and not isinstance(slot, SlicedVariable):
                slice_variable(slot, parts)
        if self._level == 3:
            end_programs(variables)
            for variable, is_divided in zip(variables, self._divided, strict=True):
                if is_divided and not isinstance(variable, SlicedVariable):
                    slice_variable(variable, parts).regather = sharding.regather

    def apply(
        self,
        strategy: Strategy,
        op: ReduceOp | None,
        given: dict[int, Any],
        update: Update,
        more: Sequence[Variable],
    ) -> None:
        """Update the variables, in cross-replica context.

        Args:
            strategy: the strategy.
            op: how gradients are combined; None if they are already.
            given: the gradients, by the identity of their variable.
            update: what makes the new values.
            more: further variables that it takes and gives.
        """
        step = _Step(strategy, op, given, update, more)
        if in_compiled_run(strategy):
            with ctx.push(ctx.Mode(strategy, update_index=0)):
                self._apply_in_program(step)
        else:
            self._apply_whole(step)

    # -- pieces of a batch -----------------------------------------------------------------------

    def local_sums(self, op: ReduceOp, variables: list[Variable], gradients: list[Any]) -> list[Any]:
        """This replica's slices of summed gradients, where variables are divided; in a program."""
        chosen = self._chosen(variables)
        parts = self._communication.scattered(
            [gradients[i] for i in chosen], self._members, op is ReduceOp.MEAN
        )
        new = dict(zip(chosen, parts, strict=True))
        return [new.get(i, x) for i, x in enumerate(gradients)]

    def as_slices(self, variables: list[Variable], sums: list[Any]) -> list[Any]:
        """What `local_sums` gave, as gradients."""
        chosen = set(self._chosen(variables))
        return [
            Sliced(x, Slicing(tuple(v.shape), self._members.parts)) if i in chosen else x
            for i, (v, x) in enumerate(zip(variables, sums, strict=True))
        ]

    def _chosen(self, variables: list[Variable]) -> list[int]:
        divided = {id(v) for v, d in zip(self._variables, self._divided, strict=True) if d}
        return [i for i, v in enumerate(variables) if id(v) in divided]

    # -- in a program ----------------------------------------------------------------------------

    def _apply_in_program(self, step: _Step) -> None:
        params = [self._present(v, d) for v, d in zip(self._variables, self._divided, strict=True)]
        grads = self._gradients(step.strategy, step.op, step.given)
        state = jax.tree.map(lambda v: self._present(v, isinstance(v, SlicedVariable)), self._state)
        wanted = (
            self._divided,
            jax.tree.map(lambda v: isinstance(v, SlicedVariable), self._state),
            *([[False] * len(step.more)] if step.more else []),
        )
        extra = ([v.value() for v in step.more],) if step.more else ()
        (new_params, new_state, *rest), self.gathered = run_on_slices(
            step.update, (grads, state, params, *extra), wanted, self._members
        )
        self._write_params(step.given, new_params)
        is_sliced = lambda x: isinstance(x, Sliced)  # noqa: E731
        slots = jax.tree.leaves(self._state)
        self._write(slots, jax.tree.leaves(new_state, is_leaf=is_sliced))
        self._write(step.more, jax.tree.leaves(rest))

    def _present(self, variable: Variable, is_divided: bool) -> Any:
        """What a variable holds, in slices if it is divided."""
        if isinstance(variable, SlicedVariable):
            return Sliced(variable.local_slice, variable.slicing)
        return self._cut(variable.value()) if is_divided else variable.value()

    def _cut(self, whole: Any) -> Sliced:
        slicing = Slicing(tuple(jnp.shape(whole)), self._members.parts)
        return Sliced(slicing.cut(whole, self._members.index()), slicing)

    def _gradients(self, strategy: Strategy, op: ReduceOp | None, given: dict[int, Any]) -> list[Any]:
        """The combined gradients, in slices where variables are divided; zeros for those not given."""
        results: list[Any] = []
        scattered: list[int] = []
        reduced: list[int] = []
        for i, (variable, is_divided) in enumerate(zip(self._variables, self._divided, strict=True)):
            gradient = given.get(id(variable))
            results.append(gradient)
            if isinstance(gradient, Sliced):
                continue
            if gradient is None:
                results[i] = jnp.zeros(variable.shape, variable.dtype)
            elif (
                op is not None
                and self._level > 1
                and is_divided
                and isinstance(gradient, SpmdPerReplica)
            ):
                scattered.append(i)
            elif op is not None:
                reduced.append(i)
        communication = self._communication
        if reduced:
            pairs = [(results[i], self._variables[i]) for i in reduced]
            assert op is not None
            for i, x in zip(reduced, communication.combined(strategy, op, pairs), strict=True):
                results[i] = x
        if scattered:
            xs = [dense(results[i], self._variables[i]) for i in scattered]
            mean = op is ReduceOp.MEAN
            parts = communication.scattered(xs, self._members, mean)
            for i, x in zip(scattered, parts, strict=True):
                results[i] = Sliced(x, Slicing(tuple(self._variables[i].shape), self._members.parts))
        for i, (variable, is_divided) in enumerate(zip(self._variables, self._divided, strict=True)):
            if not isinstance(results[i], Sliced):
                whole = dense(results[i], variable)
                results[i] = self._cut(whole) if is_divided else whole
        return results

    def _write_params(self, given: dict[int, Any], new: list[Any]) -> None:
        chosen = [i for i, v in enumerate(self._variables) if id(v) in given]
        together = [
            i
            for i in chosen
            if isinstance(new[i], Sliced) and not isinstance(self._variables[i], SlicedVariable)
        ]
        wholes = slices_in_programs.all_gather(
            [new[i].local for i in together],
            [new[i].slicing for i in together],
            self._members,
            self._communication.all_gather,
        )
        values = {**{i: new[i] for i in chosen}, **dict(zip(together, wholes, strict=True))}
        self._write([self._variables[i] for i in chosen], [values[i] for i in chosen])

    @staticmethod
    def _write(variables: Sequence[Variable], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            if isinstance(value, Sliced):
                assert isinstance(variable, SlicedVariable)
                variable.set_local_slice(value.local)
            else:
                variable.assign(value)

    # -- eagerly ---------------------------------------------------------------------------------

    def _apply_whole(self, step: _Step) -> None:
        given, more = step.given, step.more
        variables = [v for v in self._variables if id(v) in given]
        gradients = [given[id(v)] for v in variables]
        if step.op is not None:
            pairs = list(zip(gradients, variables, strict=True))
            gradients = self._communication.combined(step.strategy, step.op, pairs)
        by_variable = dict(zip(map(id, variables), gradients, strict=True))
        slots = jax.tree.leaves(self._state)
        params = [v.value() for v in self._variables]
        with jax.default_device(device_of(params[0])):
            grads = [
                dense(by_variable[id(v)], p) if id(v) in given else jnp.zeros_like(p)
                for v, p in zip(self._variables, params, strict=True)
            ]
            state = jax.tree.map(lambda v: v.value(), self._state)
            extra = ([v.value() for v in more],) if more else ()
            new_params, new_state, *rest = step.update(grads, state, params, *extra)
        pairs = list(zip(self._variables, new_params, strict=True))
        pairs = [(v, x) for v, x in pairs if id(v) in given]
        pairs += zip([*slots, *more], jax.tree.leaves((new_state, rest)), strict=True)
        for variable, value in pairs:
            assert isinstance(variable, MirroredVariable)
            variable.replace(value)


def check_slices(variables: Sequence[Variable], parts: int | None) -> None:
    """Refuse variables that another optimizer keeps in other slices than this one would."""
    for variable in variables:
        if isinstance(variable, SlicedVariable) and variable.slicing.parts != parts:
            raise InvalidValueError(
                f"Variable {variable.name!r} is kept in {variable.slicing.parts} slices, because "
                "another optimizer has shard='parameters'. Give this one the same shard=…. "
                f"Received: {'no shard' if parts is None else f'{parts} slices'}"
            )


def _check(strategy: Strategy, variables: list[Variable]) -> None:
    if not all(isinstance(v, MirroredVariable) for v in variables):
        raise UnsupportedError(
            "A sharded optimizer divides what every replica has a copy of, as under "
            "MirroredStrategy and MultiWorkerMirroredStrategy. Leave out shard=… here. "
            f"Received: variables of {shown(strategy)}"
        )
