"""The programs of one chunk: forward, backward, and the two halves of a backward program.

A forward program returns what its gradient needs. Of that, what are arguments (parameters, inputs) is
not copied: the backward program gets the arguments again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.execution.throttle import token
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.pipelines.halves import in_halves
from phalanx.parallel.pipelines.stages import StagePlace
from phalanx.parallel.placing import names_of
from phalanx.parallel.running import ParallelRun, in_run
from phalanx.runtime import compat

__all__ = ["ChunkPrograms", "Differentiated", "ModelChunk", "is_inexact"]

Dispatch = Callable[..., Any]


def is_inexact(x: Any) -> bool:
    """Whether an array has a gradient."""
    return _has_gradient(x.dtype if isinstance(x, jax.Array) else jnp.result_type(x))


@functools.lru_cache(maxsize=256)
def _has_gradient(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


@dataclass(frozen=True)
class ModelChunk:
    """A chunk of a model.

    Args:
        position: in the model.
        function: of parameters, the input (None at position 0), what is carried (None if nothing is),
            and arguments of the batch; returns the output, what is carried on, and metrics. The
            output of the last position is the loss.
        place: where it runs.
        is_last: whether its output is the loss.
        splits: whether the gradient of its weights is a program of its own.
    """

    position: int
    function: Callable[[Any, Any, Any, tuple[Any, ...]], tuple[Any, Any, Any]]
    place: StagePlace
    is_last: bool
    splits: bool


@dataclass(frozen=True)
class Differentiated:
    """The arguments of a forward program: those with gradients, and the others.

    Args:
        weights: the parameters.
        inputs: the leaves of the input and of what is carried that have gradients.
        fixed: their other leaves, and the arguments of the batch.
    """

    weights: Any
    inputs: tuple[Any, ...]
    fixed: Any


@dataclass
class ChunkPrograms:
    """The programs of a chunk for arguments of certain shapes. They are compiled when they are needed.

    All of them return a pair, of which the second is ready when the program has ended.
    """

    chunk: ModelChunk
    unflatten: Callable[[Differentiated], tuple[Any, Any, Any]]
    """The input, what is carried, and the arguments of the batch, from the parts."""
    recipe: Any = None
    sources: tuple[int | None, ...] = ()
    outputs: Any = None
    halves: Any = field(default=None)

    # -- forward -----------------------------------------------------------------------------------

    @functools.cached_property
    def forward(self) -> Dispatch:
        """Arguments → the output, what is carried on, metrics, what is kept."""
        return jax.jit(self._forward)

    @functools.cached_property
    def evaluate(self) -> Dispatch:
        """Arguments → the output, what is carried on, metrics."""

        def evaluate(weights: Any, inputs: Any, fixed: Any) -> Any:
            return self._results(Differentiated(weights, inputs, fixed)), token(False)

        return jax.jit(evaluate)

    def _results(self, given: Differentiated) -> tuple[Any, Any, Any]:
        x, carry, batch = self.unflatten(given)
        place = self.chunk.place
        with in_run(ParallelRun(place.mesh, ParallelOptions())):
            output, carried, metrics = self.chunk.function(given.weights, x, carry, batch)
        is_last = self.chunk.is_last
        output = _checked_loss(output) if is_last else jax.tree.map(self._as_rows, output)
        return output, jax.tree.map(self._as_rows, carried), metrics

    def _as_rows(self, x: Any) -> Any:
        x = jnp.asarray(x)
        return jax.lax.with_sharding_constraint(x, self.chunk.place.rows(x)) if x.ndim else x

    def _forward(self, weights: Any, inputs: Any, fixed: Any) -> Any:
        _check_weights(weights, self.chunk.position)

        def differentiable(weights: Any, inputs: Any) -> Any:
            output, carried, metrics = self._results(Differentiated(weights, inputs, fixed))
            leaves, structure = jax.tree.flatten((output, carried))
            exact = [x for x in leaves if not is_inexact(x)]
            self.outputs = structure, [is_inexact(x) for x in leaves]
            return [x for x in leaves if is_inexact(x)], (exact, metrics)

        results, gradient, (exact, metrics) = jax.vjp(differentiable, weights, inputs, has_aux=True)
        leaves, self.recipe = jax.tree.flatten(gradient)
        known = jax.tree.leaves((weights, inputs, fixed))
        numbers = [next((i for i, x in enumerate(known) if x is leaf), None) for leaf in leaves]
        self.sources = tuple(numbers)
        kept = [leaf for leaf, number in zip(leaves, numbers, strict=True) if number is None]
        output, carried = self.joined(results, exact)
        return (output, carried, metrics, kept), token(False)

    def joined(self, inexact: Sequence[Any], exact: Sequence[Any]) -> Any:
        """The output and what is carried on, from leaves with gradients and others."""
        structure, kinds = self.outputs
        ones, others = iter(inexact), iter(exact)
        return jax.tree.unflatten(structure, [next(ones) if kind else next(others) for kind in kinds])

    # -- backward ----------------------------------------------------------------------------------

    def _gradients(self, given: Differentiated, kept: Sequence[Any], above: Sequence[Any]) -> Any:
        """The gradients of the weights and of the inputs."""
        known = jax.tree.leaves((given.weights, given.inputs, given.fixed))
        rest = iter(kept)
        leaves = [next(rest) if number is None else known[number] for number in self.sources]
        gradient = jax.tree.unflatten(self.recipe, leaves)
        weights, inputs = gradient(list(above))
        place = self.chunk.place
        rows = [jax.lax.with_sharding_constraint(g, place.rows(g)) if g.ndim else g for g in inputs]
        return weights, rows

    @functools.cached_property
    def backward(self) -> Dispatch:
        """Arguments, what was kept, gradients of the results, sums → gradients of the inputs, sums."""

        def backward(
            weights: Any, inputs: Any, fixed: Any, kept: Any, above: Any, sums: Any, weight: Any
        ) -> Any:
            given = Differentiated(weights, inputs, fixed)
            found, rows = self._gradients(given, kept, above)
            return (rows, _added(sums, found, weight, shardings)), token(False)

        shardings: list[Any] = []
        jitted = jax.jit(backward, donate_argnums=5)

        def call(weights: Any, *others: Any) -> Any:
            if not shardings:
                shardings.extend(x.sharding for x in jax.tree.leaves(weights))
            return jitted(weights, *others)

        return call

    @functools.cached_property
    def backward_input(self) -> Dispatch:
        """Arguments, what was kept, gradients of the results → gradients of the inputs, and what the
        other half needs.
        """  # noqa: D205

        def program(weights: Any, inputs: Any, fixed: Any, kept: Any, above: Any) -> Any:
            first, _, _ = self._split(Differentiated(weights, inputs, fixed), kept, above)
            flat = jax.tree.leaves((weights, inputs, fixed, kept, above))
            found = compat.eval_jaxpr(first, flat)
            count = len(inputs)
            return (found[:count], found[count:]), token(False)

        return jax.jit(program)

    def backward_weight(self, given: Differentiated, kept: Any, above: Any) -> tuple[Any, Dispatch]:
        """The arguments of the other half, and its program: those, what the first left, sums → sums."""
        _, _, needed = self.halves
        flat = jax.tree.leaves((given.weights, given.inputs, given.fixed, kept, above))
        if "second" not in self.__dict__:
            shardings = [x.sharding for x in jax.tree.leaves(given.weights)]
            second, structure = self.halves[1], jax.tree.structure(given.weights)

            def program(chosen: Any, left: Any, sums: Any, weight: Any) -> Any:
                found = jax.tree.unflatten(structure, compat.eval_jaxpr(second, [*chosen, *left]))
                return _added(sums, found, weight, shardings), token(False)

            self.__dict__["second"] = jax.jit(program, donate_argnums=2)
        return [flat[i] for i in needed], self.__dict__["second"]

    def _split(self, given: Differentiated, kept: Any, above: Any) -> Any:
        """The two halves of the backward program, and which of its arguments the second needs."""
        if self.halves is None:
            args, structure = jax.tree.flatten(
                ((given.weights, given.inputs, given.fixed), kept, above)
            )
            shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in args]

            def flat(*leaves: Any) -> list[Any]:
                arguments, kept, above = jax.tree.unflatten(structure, leaves)
                weights, rows = self._gradients(Differentiated(*arguments), kept, above)
                return [*rows, *jax.tree.leaves(weights)]

            self.halves = in_halves(flat, shapes, len(given.inputs))
        return self.halves


def _added(sums: Any, gradients: Any, weight: Any, shardings: Sequence[Any]) -> Any:
    """Sums with gradients of a micro batch added, laid out as the weights are."""
    leaves, structure = jax.tree.flatten(sums)
    found = []
    for total, new, sharding in zip(leaves, jax.tree.leaves(gradients), shardings, strict=True):
        x = total + new.astype(total.dtype) * weight.astype(total.dtype)
        if isinstance(sharding, NamedSharding):
            x = jax.lax.with_sharding_constraint(x, sharding)
        found.append(x)
    return jax.tree.unflatten(structure, found)


def _checked_loss(loss: Any) -> Any:
    loss = jnp.asarray(loss)
    if loss.ndim or not is_inexact(loss):
        raise InvalidValueError(
            "The last stage, or the loss, must return one real number: the mean or the sum of "
            f"the losses of a micro batch. Received: {loss.dtype}{list(loss.shape)}"
        )
    return loss


def _check_weights(weights: Any, position: int) -> None:
    for name, x in zip(names_of(weights), jax.tree.leaves(weights), strict=True):
        if not is_inexact(x):
            raise InvalidTypeError(
                "Parameters must be real or complex numbers, because gradients are computed for them. "
                f"Received: {jnp.result_type(x)} for {name!r} of the parameters at position {position}"
            )
