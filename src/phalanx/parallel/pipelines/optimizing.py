"""Optimizers of pipelines: any transformation of optax, with each stage's part at the stage."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from phalanx.errors import InvalidTypeError, InvalidValueError
from phalanx.execution.throttle import THROTTLE, token
from phalanx.parallel.options import ParallelOptions
from phalanx.parallel.pipelines.hosts import LocalHosts, StageHosts
from phalanx.parallel.pipelines.placed_programs import PlacedProgram
from phalanx.parallel.pipelines.staged_updates import StagedUpdate, has_spec
from phalanx.parallel.pipelines.stages import StagePlace
from phalanx.parallel.placing import names_of
from phalanx.parallel.storing import is_named, stored
from phalanx.runtime import compat, program_parts
from phalanx.runtime.formatting import shown

__all__ = ["PipelineOptimizer"]

_SHARDED = (None, "states")


class PipelineOptimizer:
    """Updates the parameters of all stages with a transformation of optax.

    The transformation sees all parameters, so that global-norm clipping is that of the whole model.
    Each stage computes and holds its part; only single numbers go from one to another.

    Args:
        transform: an `optax.GradientTransformation`, or a `px.train.Optimizer`, whose one is taken.
        places: of the stages that are in this process.
        placement: the number of the place of each nest of parameters.
        shard: "states" if the devices of a stage divide the optimizer's state among them, as far
            as they hold the same; None if each holds all of it.
        hosts: who runs which stage; by default this process all of them.
        donate: whether new parameters and states may take the memory of the old ones, which cannot be
            used any more then.
    """

    def __init__(
        self,
        transform: Any,
        places: Mapping[int, StagePlace],
        placement: Sequence[int],
        shard: str | None = None,
        hosts: StageHosts | None = None,
        donate: bool = False,
    ) -> None:
        found = getattr(transform, "transform", transform)
        if not hasattr(found, "init") or not hasattr(found, "update"):
            raise InvalidTypeError(
                "An optimizer is an optax.GradientTransformation, such as optax.adam(1e-3). "
                f"Received: {shown(transform)}"
            )
        if getattr(transform, "loss_scale", None) is not None:
            raise InvalidValueError(
                "Losses are not scaled here; gradients of micro batches are summed in 32 bits. Give an "
                f"optimizer without loss_scale. Received: {shown(transform.loss_scale)}"
            )
        if shard not in _SHARDED:
            raise InvalidValueError(f"shard must be 'states' or None. Received: {shown(shard)}")
        self.transform: optax.GradientTransformation = found
        self._places, self._placement, self._shard = dict(places), tuple(placement), shard
        self._hosts: StageHosts = hosts or LocalHosts()
        self._updates = StagedUpdate(self._places, self._hosts, donate)

    # -- state -------------------------------------------------------------------------------------

    def init(self, params: Sequence[Any]) -> Any:
        """The state for parameters; each stage makes its part."""
        params = list(params)
        leaves = jax.tree.leaves(params)
        closed, shape = compat.jaxpr_and_result(self.transform.init, params)
        homes = self._state_homes(shape, params)
        shardings = self._state_shardings(shape, params, homes)
        found: list[Any] = [None] * len(homes)
        for i, leaf in enumerate(jax.tree.leaves(shape)):
            if not self._hosts.is_here(homes[i]):
                found[i] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for place in sorted({home for home in homes if self._hosts.is_here(home)}):
            mine = [i for i, at in enumerate(homes) if at == place]
            part, needed = program_parts.needed_for(closed, mine)

            def program(*args: Any, part: Any = part) -> Any:
                return compat.eval_jaxpr(part, args), token(False)

            moved = [self.moved(leaves[i], place) for i in needed]
            outs = [shardings[i] for i in mine]
            made = THROTTLE.dispatch(jax.jit(program, out_shardings=(outs, None)), *moved)
            for i, x in zip(mine, made, strict=True):
                found[i] = x
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    def _state_homes(self, shape: Any, params: list[Any]) -> list[int]:
        """The place of each leaf of a state: that of the parameter whose name it ends with."""
        known = [
            (name, x.shape, self._placement[i])
            for i, nest in enumerate(params)
            for name, x in zip(_names(nest, i), jax.tree.leaves(nest), strict=True)
        ]
        homes = []
        for name, leaf in zip(names_of(shape), jax.tree.leaves(shape), strict=True):
            fitting = [n for n in known if n[1] == leaf.shape and is_named(name, n[0])]
            fitting = fitting or [n for n in known if is_named(name, n[0])]
            homes.append(max(fitting, key=lambda n: len(n[0]))[2] if fitting else 0)
        return homes

    def _state_shardings(self, shape: Any, params: list[Any], homes: Sequence[int]) -> list[Any]:
        known = {
            name: x
            for i, nest in enumerate(params)
            for name, x in zip(_names(nest, i), jax.tree.leaves(nest), strict=True)
        }
        options = ParallelOptions(
            enable_parallel_optimizer=self._shard is not None, parallel_optimizer_threshold=0
        )
        found: list[NamedSharding | None] = []
        leaves = zip(names_of(shape), jax.tree.leaves(shape), homes, strict=True)
        for name, leaf, home in leaves:
            if not self._hosts.is_here(home):
                found.append(None)
                continue
            like = [x for n, x in known.items() if is_named(name, n) and x.shape == leaf.shape]
            spec = like[0].sharding.spec if like and has_spec(like[0]) else PartitionSpec()
            mesh = self._places[home].mesh
            found.append(NamedSharding(mesh, stored(spec, leaf, mesh, options)))
        return found

    # -- updates -----------------------------------------------------------------------------------

    def update(self, gradients: Sequence[Any], state: Any, params: Sequence[Any]) -> tuple[Any, Any]:
        """New parameters and a new state."""
        given = (list(gradients), state, list(params))
        new, after = self._updates(self._step, given, functools.partial(self._homes, given))
        return new, after

    def placed(self, given: tuple[Any, Any, Any]) -> PlacedProgram:
        """The update as programs of stages."""
        return self._updates.placed(self._step, given, self._homes(given))

    def _step(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, new = self.transform.update(gradients, state, params)
        return optax.apply_updates(params, updates), new

    def _homes(self, given: tuple[Any, Any, Any]) -> list[int]:
        own = [self._placement[i] for i, nest in enumerate(given[2]) for _ in jax.tree.leaves(nest)]
        state = self._state_homes(jax.eval_shape(self.transform.init, given[2]), given[2])
        return [*own, *state, *own]

    def moved(self, x: Any, place: int) -> Any:
        """A value at another stage, whole on each of its devices."""
        return self._updates.moved(x, place)


def _names(nest: Any, position: int) -> list[str]:
    return [f"{position}/{name}" if name else str(position) for name in names_of(nest)]
