"""Steps of which each device keeps a part of the state, as optimizers of `px.train` do.

A step is traced as if it had the whole state, and its program runs on slices
(`phalanx.train.sliced_updates`). A loss in it is a request: it is computed with whole parameters, which
are gathered for it, and its gradients come back in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.collectives import slices_in_programs
from phalanx.core.reduction import ReduceOp, divide
from phalanx.core.slicing import Members, Slicing
from phalanx.execution.regathering import keeps_no_gathers
from phalanx.parallel.communication import Share, combination, communication_of, sharding_of
from phalanx.parallel.local_norms import tell_norms
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.wide_sums import is_narrow
from phalanx.runtime import compat, program_parts
from phalanx.train.accumulate import accumulated
from phalanx.train.sharding import OptimizerSharding
from phalanx.train.sliced_updates import Sliced, run_on_slices

__all__ = ["SlicedStep"]


@dataclass(frozen=True, eq=False)
class _Loss:
    """A loss that a step differentiates.

    Programs with requests refer to it, because `jax.jit` keeps them longer than one run of a step.

    Args:
        closed: its program for one piece of a batch; the first result is its value.
        trained: the numbers of its arrays that are parameters.
        names: of these.
        pieces: into how many pieces its batch is cut.
    """

    closed: Any
    trained: tuple[int, ...]
    names: tuple[str, ...]
    pieces: int


@dataclass
class SlicedStep:
    """One device's run of a step whose state is in slices.

    Args:
        options: that are in force.
        members: the devices.
        share: this device's part of the batch, if devices have unequal ones.
    """

    options: ParallelOptions
    members: Members
    share: Share | None = None
    _latest: tuple[_Loss, Sequence[Any], list[Any]] | None = None

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], wanted: Any) -> Any:
        """The results of a step, `Sliced` where that is wanted; of arguments, those that are sliced.

        While it is traced, `value_and_grad` must call `request`.
        """
        return run_on_slices(step, args, wanted, self.members, self._fetch)[0]

    def request(
        self,
        loss: Callable[..., Any],
        args: Sequence[Any],
        numbers: Sequence[int],
        names: Sequence[str],
        pieces: int,
    ) -> tuple[Any, list[Any]]:
        """Stand-ins for the result of a loss, and for the gradients of its parameters.

        Args:
            loss: returns a number, or a pair of a number and other results.
            args: its arguments, with whole parameters.
            numbers: which of them are parameters.
            names: of the parameters.
            pieces: into how many pieces the other arguments are cut.
        """
        leaves, structure = jax.tree.flatten(tuple(args))
        owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        trained = tuple(i for i, number in enumerate(owner) if number in numbers)
        given = [
            x if i in trained or pieces == 1 else x[: x.shape[0] // pieces]
            for i, x in enumerate(leaves)
        ]

        def flat(*xs: Any) -> Any:
            return loss(*jax.tree.unflatten(structure, xs))

        closed, results = compat.jaxpr_and_result(flat, *given)
        found = _Loss(closed, trained, tuple(names), pieces)
        operands = [*leaves, *closed.consts]
        shapes = [*closed.out_avals, *(leaves[i] for i in trained)]
        outs = [
            program_parts.requested(operands, (found, out), shape.shape, shape.dtype)
            for out, shape in enumerate(shapes)
        ]
        count = len(closed.out_avals)
        return jax.tree.unflatten(jax.tree.structure(results), outs[:count]), outs[count:]

    def _fetch(self, place: tuple[_Loss, int], operands: Sequence[Any]) -> Any:
        """One result of a loss; the others are asked for next, with the same operands."""
        loss, out = place
        latest = self._latest
        is_same = latest is not None and latest[0] is loss
        if (
            latest is None
            or not is_same
            or any(a is not b for a, b in zip(operands, latest[1], strict=True))
        ):
            found = _Differentiation(self.options, self.members, loss, self.share).run(operands)
            latest = self._latest = loss, operands, found
        return latest[2][out]


class _Differentiation:
    """A loss and its gradients, for parameters of which some are in slices."""

    def __init__(
        self, options: ParallelOptions, members: Members, loss: _Loss, share: Share | None
    ) -> None:
        sharding = sharding_of(options)
        assert sharding is not None
        self._sharding: OptimizerSharding = sharding
        self._options, self._members, self._loss, self._share = options, members, loss, share
        self._communication, self._op = communication_of(options), combination(options)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """The results of the loss, and its gradients."""
        loss, count = self._loss, len(self._loss.closed.jaxpr.invars)
        constants = [self._whole(x) for x in operands[count:]]
        others = {i: self._whole(x) for i, x in enumerate(operands[:count]) if i not in loss.trained}
        given = [operands[i] for i in loss.trained]
        slicings = [x.slicing if isinstance(x, Sliced) else None for x in given]
        again = self._sharding.regather
        values = [x.local if isinstance(x, Sliced) else x for x in given]
        if not again:
            values = self._gathered(values, slicings)

        def of_values(values: Sequence[Any], *rest: Any) -> Any:
            whole = self._joined(values, slicings) if again else values
            known = dict(zip(loss.trained, whole, strict=True)) | dict(zip(others, rest, strict=True))
            value, *more = jax.core.eval_jaxpr(
                loss.closed.jaxpr, constants, *(known[i] for i in range(count))
            )
            if self._share is not None:
                value = self._share.weighted(self._op, value)
            return value, more

        if again:
            of_values = jax.checkpoint(of_values, policy=keeps_no_gathers)
        differentiated = jax.value_and_grad(of_values, has_aux=True)

        def piece(*rest: Any) -> Any:
            (value, more), gradients = differentiated(values, *rest)
            return (value, more), gradients

        def sums(gradients: Sequence[Any]) -> list[Any]:
            return self._into_slices(gradients, slicings)

        if loss.pieces == 1:
            (value, more), gradients = piece(*others.values())
        else:
            early = self._sharding.accumulates_slices and not again

            def alone(*rest: Any) -> Any:
                (value, _), gradients = piece(*rest)
                return value, gradients

            each = sums if early else list
            value, gradients = accumulated(alone, tuple(others.values()), loss.pieces, each)
            if self._op is ReduceOp.MEAN:
                value, *gradients = (divide(x, loss.pieces) for x in (value, *gradients))
            more = []
        if not again and not (loss.pieces > 1 and self._sharding.accumulates_slices):
            gradients = sums(gradients)
        return [*self._finished(value, gradients, slicings, more)]

    def _finished(
        self, value: Any, gradients: Sequence[Any], slicings: Sequence[Slicing | None], more: list[Any]
    ) -> list[Any]:
        """What is not in slices, combined over the devices."""
        shared = [i for i, slicing in enumerate(slicings) if slicing is None]
        tell_norms(self._options, [(self._loss.names[i], gradients[i]) for i in shared])
        wide = value.astype(jnp.float32) if is_narrow(value) else value
        *sums, total = self._communication.summed(self._op, [*(gradients[i] for i in shared), wide])
        found = [
            x if slicing is None else Sliced(x, slicing)
            for x, slicing in zip(gradients, slicings, strict=True)
        ]
        for i, x in zip(shared, sums, strict=True):
            found[i] = x
        return [total.astype(value.dtype), *more, *found]

    # -- between slices and whole arrays -------------------------------------------------------------

    def _whole(self, x: Any) -> Any:
        if isinstance(x, Sliced):
            return x.slicing.join(self._members.gather(x.local).reshape(-1))
        return x

    def _gathered(self, values: Sequence[Any], slicings: Sequence[Slicing | None]) -> list[Any]:
        """Whole parameters, in as few messages as the options say."""
        found = list(values)
        cut = {i: s for i, s in enumerate(slicings) if s is not None}
        wholes = slices_in_programs.all_gather(
            [values[i] for i in cut], list(cut.values()), self._members, self._communication.all_gather
        )
        for i, x in zip(cut, wholes, strict=True):
            found[i] = x
        return found

    def _into_slices(self, gradients: Sequence[Any], slicings: Sequence[Slicing | None]) -> list[Any]:
        """This device's slices of combined gradients; what is not in slices stays as it is."""
        found = list(gradients)
        cut = {i: s for i, s in enumerate(slicings) if s is not None}
        xs = [gradients[i] for i in cut]
        tell_norms(self._options, [(self._loss.names[i], gradients[i]) for i in cut])
        if (self._sharding.number or 1) > 1:
            parts = self._communication.scattered(xs, self._members, self._op is ReduceOp.MEAN)
        else:
            sums = self._communication.summed(self._op, xs)
            here = self._members.index()
            parts = [s.cut(x, here) for s, x in zip(cut.values(), sums, strict=True)]
        for i, x in zip(cut, parts, strict=True):
            found[i] = x
        return found

    def _joined(self, values: Sequence[Any], slicings: Sequence[Slicing | None]) -> list[Any]:
        """Whole parameters, whose gradients come back as combined slices."""

        @jax.custom_vjp
        def joined(values: list[Any]) -> list[Any]:
            return self._gathered(values, slicings)

        joined.defvjp(
            lambda values: (self._gathered(values, slicings), None),
            lambda _, gradients: (self._into_slices(gradients, slicings),),
        )
        whole: list[Any] = joined(list(values))
        return whole
